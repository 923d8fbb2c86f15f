"""What the tests of the vLLM adapter share. They need torch, not vLLM."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.toy_engine import OpenEngine, OpenStore, ToyEngine

from kvdepot.adapters.vllm.config import ConnectorConfig
from kvdepot.config.settings import load
from kvdepot.io.files import Files
from kvdepot.store.open import assemble
from kvdepot.store.store import Store


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test has learnt is none of another's."""
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    """Opens a depot in the test's folder; it is closed by the engine that uses it, or here."""
    opened: list[Store] = []

    def open_it(files: Files | None = None, dram: Any = 8 << 20, **ssd: Any) -> Store:
        parts = {
            "dram": {"capacity": dram, "huge_pages": "never", "prefault": False},
            "writeback": {"staging": 4 << 20},
            "ssd": {"path": str(tmp_path / "kv"), "capacity": "64MiB", "segment": "1MiB", **ssd},
        }
        opened.append(assemble(load(overrides=parts), files=files))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


@pytest.fixture
def open_engine() -> Iterator[OpenEngine]:
    """Makes toy engines over a store."""
    opened: list[ToyEngine] = []

    def open_it(store: Store, *, settings: Any = None, **facts: Any) -> ToyEngine:
        config = ConnectorConfig(**{"load_timeout": 20.0, "decide": False, **(settings or {})})
        opened.append(ToyEngine(store, config, **facts))
        return opened[-1]

    yield open_it
    for engine in opened:
        engine.close()
