"""vLLM's connector with pages on a real device: other tensor-parallel sizes, KV groups, traffic.

The engine is a toy, its pages are on the device. Run where there is one:
PYTHONPATH=src python -m pytest -q tests/gpu
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.toy_engine import ALL, PROMPT, REST, Split, Toys, answer_at_random, ask

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip(
        "no CUDA device; where there is one: PYTHONPATH=src python -m pytest tests/gpu",
        allow_module_level=True,
    )

KINDS = [("full",), ("full", "window"), ("full", "window", "state")]


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toys]:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = Toys(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize(("saved", "read"), [(2, 1), (1, 2), (4, 2), (2, 2)])
def test_blocks_of_one_size_are_read_at_another_after_a_restart(
    toys: Toys, saved: int, read: int, layout: str
) -> None:
    toys.saved(split=Split(saved, heads=4, layout=layout, device="cuda")).close()
    reader = toys.engine(split=Split(read, heads=4, layout=layout, device="cuda"))
    assert ask(reader, "warm", PROMPT) == REST


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_all_groups_are_restored(toys: Toys, kinds: tuple[str, ...]) -> None:
    engine = toys.saved(kinds=kinds, split=Split(device="cuda"))
    assert ask(engine, "from memory", PROMPT) == REST
    engine.close()
    again = toys.engine(kinds=kinds, split=Split(device="cuda"))
    assert ask(again, "from disk", PROMPT) == REST


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_random_traffic_is_answered_rightly(toys: Toys, seed: int, kinds: tuple[str, ...]) -> None:
    chance = random.Random(seed)
    split = Split(chance.choice([1, 2]), device="cuda")
    engine = toys.engine(kinds=kinds, split=split, pages=30 * len(kinds))
    answer_at_random(engine, chance, 24, forgets=0.3)
    assert ask(engine, "at last", [1, *PROMPT]) <= ALL + 1
