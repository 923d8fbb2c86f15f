"""Weights that SGLang updates in place have pages of their own. With stand-ins for its classes;
`tests/e2e/sglang_engine.py` updates those of a real SGLang."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.support.small_store import settings

import kvdepot
from kvdepot.adapters.sglang import loaded_weights, pages
from kvdepot.adapters.sglang.config import read
from kvdepot.adapters.sglang.identity import PageIdentity
from kvdepot.adapters.sglang.loaded_weights import LoadedWeights
from kvdepot.adapters.sglang.pages import PoolPages

COMPONENTS = "sglang.srt.model_executor.model_runner_components"
IDENTITY = PageIdentity("m", "config", "2026-11-18", None, (0, 1), ())
HASHES = ["0a", "0b"]
WHOLE_UPDATES = (
    *(f"update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")),
    "load_weights_from_distributed",
)


class Pages(PoolPages):
    """Pages of 64 bytes."""

    page_bytes = 64

    def identity(self) -> dict[str, str]:
        return {}

    def numbers(self) -> None:
        return None


class WeightUpdater:
    """As SGLang's."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(4, 4)

    def get_model(self) -> torch.nn.Module:
        return self.model

    def _write(self, value: float) -> bool:
        with torch.no_grad():
            self.model.weight.fill_(value)
        return True

    update_weights_from_disk = update_weights_from_distributed = _write
    update_weights_from_tensor = update_weights_from_ipc = _write
    load_weights_from_distributed = _write

    def begin_weight_update(self) -> None:
        self._write(-1.0)

    def end_weight_update(self) -> None:
        """The weights are as the parts of the update left them."""


class UnifiedRadixCache:
    """As SGLang's own cache."""

    def reset(self) -> None:
        """A flush."""

    def match_prefix(self) -> None:
        """A request is scheduled."""


class Engine:
    """A scheduler of SGLang: its weights, its own cache, and its pages in a depot."""

    def __init__(self, depot: kvdepot.Depot, updater: Any, tree: Any) -> None:
        self.depot, self.updater, self.tree = depot, updater, tree
        self.pool = Pages(depot, 4)

    def ready(self) -> bool:
        return self.pool.ready(IDENTITY, read({}), "kv")

    def update(self, value: float) -> None:
        assert self.updater.update_weights_from_disk(value)

    def ask(self, content: int) -> int:
        """Returns how many pages of the prompt were hit; computes and saves them otherwise."""
        self.tree.match_prefix()
        if not self.ready():
            return -1
        keys = self.pool.keys(HASHES)
        blocks = [bytearray(64) for _ in keys]
        found = self.depot.get_many(keys, blocks)
        if all(found):
            assert blocks == [bytearray([content] * 64)] * 2, "pages of other weights"
            return 2
        self.depot.put_many(keys, [bytes([content] * 64)] * 2)
        return sum(map(bool, found))


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> LoadedWeights:
    made = LoadedWeights()
    monkeypatch.setattr(pages, "WEIGHTS", made)
    return made


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, kind: type) -> Any:
    made = ModuleType(module)
    owner = type(kind.__name__, (), dict(vars(kind)))
    setattr(made, kind.__name__, owner)
    monkeypatch.setitem(sys.modules, module, made)
    return owner


@pytest.fixture
def engine(
    weights: LoadedWeights, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Engine]:
    updater = stand_in(monkeypatch, f"{COMPONENTS}.weight_updater", WeightUpdater)()
    tree = stand_in(monkeypatch, "sglang.srt.mem_cache.unified_radix_cache", UnifiedRadixCache)()
    weights.begin()
    weights.begin()
    updater._write(1.0)
    with kvdepot.open(**settings(tmp_path / "depot")) as depot:
        yield Engine(depot, updater, tree)


@pytest.mark.parametrize("method", WHOLE_UPDATES)
def test_other_weights_hit_their_own_pages_and_the_first_ones_come_back(
    method: str, engine: Engine
) -> None:
    assert engine.ask(1) == 0
    for value, hits in ((2.0, 0), (1.0, 2), (2.0, 2), (3.0, 0), (1.0, 2)):
        assert getattr(engine.updater, method)(value)
        engine.tree.reset()
        assert engine.ask(int(value)) == hits


def test_nothing_is_served_or_saved_between_the_parts_of_an_update(engine: Engine) -> None:
    assert engine.ask(1) == 0
    engine.tree.reset()
    engine.updater.begin_weight_update()
    assert not engine.ready()
    engine.updater.update_weights_from_tensor(2.0)
    assert not engine.ready()
    engine.updater.end_weight_update()
    assert engine.ready(), "nothing was computed since the flush before the update"
    assert engine.ask(2) == 0
    assert engine.ask(2) == 2


def test_sglangs_own_cache_of_other_weights_must_go_first(engine: Engine) -> None:
    assert engine.ask(1) == 0
    engine.update(2.0)
    assert engine.ask(2) == -1
    engine.tree.reset()
    assert engine.ask(2) == 0
    engine.tree.reset()
    engine.updater.begin_weight_update()
    engine.tree.match_prefix()
    engine.updater.update_weights_from_tensor(3.0)
    engine.updater.end_weight_update()
    assert not engine.ready(), "a request was computed between the parts"
    engine.tree.reset()
    assert engine.ask(3) == 0


def test_a_failed_update_is_followed_too(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, weights: LoadedWeights
) -> None:
    owner = type(engine.updater)
    write = engine.updater._write

    def half(this: Any, value: float) -> bool:
        write(value)
        raise RuntimeError("the rest did not come")

    monkeypatch.setattr(owner, "update_weights_from_ipc", half)
    weights.begin()
    assert engine.ask(1) == 0
    with pytest.raises(RuntimeError):
        engine.updater.update_weights_from_ipc(2.0)
    engine.tree.reset()
    assert engine.ask(2) == 0
    engine.update(1.0)
    engine.tree.reset()
    assert engine.ask(1) == 2


def test_with_a_draft_model_each_change_has_a_name_of_its_own(engine: Engine) -> None:
    draft = type(engine.updater)()
    assert engine.ask(1) == 0
    for updater, value in ((engine.updater, 2.0), (draft, 3.0), (engine.updater, 1.0)):
        updater.update_weights_from_disk(value)
        engine.tree.reset()
        assert engine.ask(int(value)) == 0


def test_an_sglang_that_shows_no_updates_is_logged(
    weights: LoadedWeights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class ModelRunner:
        """Without these methods."""

    stand_in(monkeypatch, "sglang.srt.model_executor.model_runner", ModelRunner)
    with caplog.at_level(logging.WARNING, loaded_weights.LOG.name):
        weights.begin()
    assert "does not show when it updates weights" in caplog.text
