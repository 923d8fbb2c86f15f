"""Blocks of one tensor-parallel size read at another, into pages on a real device.

The engine is a toy, its pages are on the device. Run where there is one:
PYTHONPATH=src python -m pytest -q tests/gpu
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.toy_engine import PAGE_TOKENS, PROMPT, Split, ToyEngine, ask

from kvdepot.adapters.vllm.config import ConnectorConfig
from kvdepot.config.settings import load
from kvdepot.store.open import assemble

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip(
        "no CUDA device; where there is one: PYTHONPATH=src python -m pytest tests/gpu",
        allow_module_level=True,
    )


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize(("saved", "read"), [(2, 1), (1, 2), (4, 2), (2, 2)])
def test_what_one_size_has_saved_another_reads_after_a_restart(
    tmp_path: Path, saved: int, read: int, layout: str
) -> None:
    parts = {"dram": "64MiB", "ssd": {"path": str(tmp_path / "kv"), "capacity": "256MiB"}}
    settings = ConnectorConfig(decide=False, load_timeout=20.0, speeds=tmp_path / "speeds")
    for number, shards in enumerate((saved, read)):
        store = assemble(load(overrides=parts))
        split = Split(shards, heads=4, layout=layout, device="cuda")
        engine = ToyEngine(store, settings, split=split)
        computed = ask(engine, f"request {number}", PROMPT)
        rest = len(PROMPT) if not number else len(PROMPT) % PAGE_TOKENS
        assert computed == rest + 2
        engine.close()
