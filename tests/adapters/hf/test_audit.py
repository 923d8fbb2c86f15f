"""The audit in transformers finds wrong blocks, and raises no false alarm."""

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from tests.support import tiny_transformers, wrong_producers

from kvdepot.adapters.hf import DepotModel, attach
from kvdepot.config.settings import AuditConfig
from kvdepot.store.store import Store

BLOCK = 16
PROMPT = 6 * BLOCK + 3
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4}
AUDIT = AuditConfig(share=0.02)
HITS_MAX = 50


def attached(model: Any, store: Store, audit: AuditConfig = AUDIT) -> DepotModel:
    return attach(model, store, name="m", revision="1", block_tokens=BLOCK, audit=audit)


def space_of(model: DepotModel) -> Any:
    return model._parts.binding.groups[0].space


def ask(model: DepotModel, ids: torch.Tensor) -> torch.Tensor:
    """The answer, after its blocks were stored or compared."""
    answer: torch.Tensor = model.generate(ids, **GREEDY)
    model.flush()
    return answer


def assert_no_alarm(store: Store, compared: int) -> None:
    known = store.audits.list()
    assert known["compared"] >= compared
    assert known["mismatched"] == 0


@pytest.mark.parametrize("fault", wrong_producers.FAULTS)
def test_finds_each_fault(fault: str, memory: Store) -> None:
    model = tiny_transformers.build(tiny_transformers.llama())
    ids = tiny_transformers.tokens(PROMPT)
    with attached(model, memory) as served:
        wrong_producers.put(
            memory, space_of(served), ids, wrong_producers.FAULTS[fault](model, ids)
        )
        expected = model.generate(ids, **GREEDY)
        for _ in range(HITS_MAX):
            ask(served, ids)
            if memory.audits.list()["mismatched"]:
                break
        assert memory.audits.list()["mismatched"] == 1
        (found,) = memory.audits.list()["quarantined"]
        assert found["error"] > found["tolerance"]
        assert "transformers" in found["found_by"]
        # From now on the model answers for itself.
        answer = served.generate(ids, **GREEDY)
        assert served.last.rows[0].fetched == {}
        assert torch.equal(answer, expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        ("llama", torch.bfloat16),
        ("gemma3", torch.float32),
        ("mistral", torch.float32),
        ("deepseek", torch.float32),
    ],
)
def test_no_alarm_for_correct_blocks(name: str, dtype: torch.dtype, memory: Store) -> None:
    model = tiny_transformers.build(tiny_transformers.SERVED[name](), dtype=dtype)
    with attached(model, memory, AuditConfig(share=1)) as served:
        for seed in range(2):
            ids = tiny_transformers.tokens(PROMPT, seed=seed)
            expected = ask(served, ids)
            for _ in range(2):
                answer = ask(served, ids)
                assert dtype is torch.bfloat16 or torch.equal(answer, expected)
        assert_no_alarm(memory, 4)


def test_an_audited_hit_computes_one_block_more(memory: Store) -> None:
    model = tiny_transformers.build(tiny_transformers.llama())
    ids = tiny_transformers.tokens(PROMPT)
    with attached(model, memory) as served:
        ask(served, ids)
        computed = []
        for _ in range(3):
            ask(served, ids)
            computed.append(served.last.rows[0].computed_tokens)
        assert computed == [3 + BLOCK, 3, 3]
        assert memory.audits.list()["compared"] == 1


def test_a_batch(memory: Store) -> None:
    model = tiny_transformers.build(tiny_transformers.llama())
    batch = tiny_transformers.padded(
        [tiny_transformers.tokens(PROMPT, seed=1), tiny_transformers.tokens(40, seed=2)]
    )
    with attached(model, memory, AuditConfig(share=1)) as served:
        expected = model.generate(**batch, **GREEDY, pad_token_id=0)
        for _ in range(3):
            assert torch.equal(served.generate(**batch, **GREEDY, pad_token_id=0), expected)
            served.flush()
        assert_no_alarm(memory, 4)


def test_blocks_name_their_producer(memory: Store) -> None:
    model = tiny_transformers.build(tiny_transformers.llama())
    ids = tiny_transformers.tokens(PROMPT)
    with attached(model, memory) as served:
        ask(served, ids)
        key = space_of(served).keys(ids[0].numpy())[0]
        (made,) = memory.audits.list()["producers"]
        assert memory.audits.producer_of(key) == made["text"]
        assert "attention" in made["text"]
