"""The same on a GPU. Run where there is one: PYTHONPATH=src python -m pytest -m gpu"""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from tests.support.tiny_transformers import SERVED, build, padded, tokens

import kvdepot
from kvdepot.adapters.hf import DepotModel, attach
from kvdepot.store.store import Store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device; where there is one: PYTHONPATH=src python -m pytest -m gpu",
    ),
]

BLOCK = 16
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture(params=SERVED)
def pair(request: pytest.FixtureRequest, memory: Store) -> Iterator[tuple[Any, DepotModel]]:
    model = build(SERVED[request.param]()).to("cuda")
    with attach(model, memory, block_tokens=BLOCK) as depot_model:
        yield model, depot_model
        assert depot_model.last_error is None
        assert memory.stats()["leased"] == 0


def on_gpu(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.to("cuda") for name, tensor in batch.items()}


def test_turns(pair: tuple[Any, DepotModel]) -> None:
    model, depot_model = pair
    history = tokens(100).to("cuda")
    for turn in range(3):
        expected = model.generate(history, **GREEDY)
        for _ in range(2):
            assert torch.equal(depot_model.generate(history, **GREEDY), expected)
            assert depot_model.flush()
        assert depot_model.last.rows[0].computed_tokens <= BLOCK
        history = torch.cat([expected, tokens(11, seed=turn).to("cuda")], dim=1)


def test_batch(pair: tuple[Any, DepotModel]) -> None:
    model, depot_model = pair
    known = tokens(80, seed=3).to("cuda")
    depot_model.generate(known, **GREEDY)
    assert depot_model.flush()
    rows = [tokens(90, seed=4), torch.cat([known.cpu(), tokens(9)], dim=1), tokens(61, seed=6)]
    batch = on_gpu(padded(rows))
    for settings in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        call = {**GREEDY, **settings, "pad_token_id": 0, "disable_compile": True}
        expected = model.generate(**batch, **call)
        for _ in range(2):
            assert torch.equal(depot_model.generate(**batch, **call), expected), settings
            assert depot_model.flush()
        assert all(row.fetched for row in depot_model.last.rows)


def test_plain_forward(pair: tuple[Any, DepotModel]) -> None:
    model, depot_model = pair
    ids = tokens(90).to("cuda")
    with torch.no_grad():
        expected = model(ids).logits
        for _ in range(3):
            found = depot_model(ids).logits
            assert depot_model.flush()
            last = expected[:, -found.shape[1] :]
            torch.testing.assert_close(found, last, rtol=1e-3, atol=1e-3)
    assert found.shape[1] == 10


def test_from_disk(tmp_path: Any) -> None:
    model = build(SERVED["gemma3"](), dtype=torch.bfloat16).to("cuda")
    ids = tokens(200).to("cuda")
    settings: dict[str, Any] = {
        "dram": {"capacity": "8MiB", "huge_pages": "never"},
        "ssd": {"path": str(tmp_path / "kv"), "capacity": "64MiB", "segment": "1MiB"},
    }
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        for tiers in ({}, {"ssd": 192}):
            with kvdepot.open(**settings) as store:
                with attach(model, store, block_tokens=BLOCK) as depot_model:
                    found = depot_model(ids).logits[:, -1]
                    assert depot_model.flush()
                    assert depot_model.last.rows[0].fetched == tiers
                torch.testing.assert_close(found, expected, rtol=0.1, atol=0.3)


def test_the_model_starts_before_everything_has_arrived(memory: Store) -> None:
    """Copies are ordered layer by layer; what uses a layer waits for it, on the device alone."""
    model = build(SERVED["llama"](num_hidden_layers=8, hidden_size=256)).to("cuda")
    ids = tokens(900).to("cuda")
    with attach(model, memory, block_tokens=64) as depot_model, torch.no_grad():
        expected = model(ids).logits[:, -1]
        for _ in range(20):
            found = depot_model(ids).logits[:, -1]
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
            assert depot_model.flush()
        assert depot_model.last.rows[0].fetched_tokens == 896


def test_moving_the_model_to_the_cpu(memory: Store) -> None:
    model = build(SERVED["llama"]()).to("cuda")
    ids = tokens(90)
    with attach(model, memory, block_tokens=BLOCK) as depot_model:
        expected = depot_model.generate(ids.to("cuda"), **GREEDY)
        assert depot_model.flush()
        depot_model.cpu()
        assert torch.equal(depot_model.generate(ids, **GREEDY), expected.cpu())
        assert depot_model.last.rows[0].fetched_tokens == 80
