"""Weights that SGLang updates in place: nothing of the depot is served or saved after that. With
stand-ins for SGLang's classes."""

import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.small_store import settings

import kvdepot
from kvdepot.adapters.sglang import loaded_weights, pages
from kvdepot.adapters.sglang.config import read
from kvdepot.adapters.sglang.identity import PageIdentity
from kvdepot.adapters.sglang.loaded_weights import WeightsWatch
from kvdepot.adapters.sglang.pages import PoolPages

RUNNER = "sglang.srt.model_executor.model_runner"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
IDENTITY = PageIdentity("m", "config", "2026-11-18", None, (0, 1), ())


class Pages(PoolPages):
    """Pages of 64 bytes."""

    page_bytes = 64

    def identity(self) -> dict[str, str]:
        return {}

    def numbers(self) -> None:
        return None


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> WeightsWatch:
    made = WeightsWatch()
    monkeypatch.setattr(pages, "WEIGHTS", made)
    return made


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, name: str, **methods: Any) -> Any:
    made = ModuleType(module)
    owner = type(name, (), methods)
    setattr(made, name, owner)
    monkeypatch.setitem(sys.modules, module, made)
    return owner


@pytest.mark.parametrize("source", ["disk", "distributed", "tensor", "ipc"])
def test_after_an_update_nothing_is_served_or_saved(
    source: str, watch: WeightsWatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = f"update_weights_from_{source}"

    def update(_: Any, request: str) -> tuple[bool, str]:
        return True, request

    update.__name__ = name
    owner = stand_in(monkeypatch, UPDATER, "WeightUpdater", **{name: update})
    runner = owner()
    watch.begin()
    watch.begin()
    with kvdepot.open(**settings(tmp_path / "depot")) as depot:
        pool = Pages(depot, 4)
        assert pool.ready(IDENTITY, read({}), "kv")
        assert getattr(runner, name)("new") == (True, "new")
        assert not pool.ready(IDENTITY, read({}), "kv")
        assert not Pages(depot, 4).ready(IDENTITY, read({}), "kv")
    assert watch.changed_by == name


def test_an_sglang_that_shows_no_updates_is_logged(
    watch: WeightsWatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch, RUNNER, "ModelRunner")
    with caplog.at_level(logging.WARNING, loaded_weights.LOG.name):
        watch.begin()
    assert "does not show when it updates weights" in caplog.text
