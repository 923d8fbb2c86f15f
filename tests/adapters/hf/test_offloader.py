"""Offloading in the background: bounded, never in the way, and no error is lost."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from tests.support.tiny_transformers import SERVED, build, llama, tokens

import kvdepot
from kvdepot.adapters.hf import DepotModel, attach
from kvdepot.adapters.hf.offloader import JOBS_MAX
from kvdepot.store.store import Store

BLOCK = 16
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 2}


@pytest.fixture
def model(memory: Store) -> Iterator[DepotModel]:
    with attach(build(llama()), memory, block_tokens=BLOCK) as depot_model:
        yield depot_model


def test_too_much_to_do_is_dropped_not_waited_for(
    model: DepotModel, memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, go = memory.reserve, threading.Event()

    def reserve_late(*args: Any, **kwargs: Any) -> Any:
        assert go.wait(60)
        return reserve(*args, **kwargs)

    monkeypatch.setattr(memory, "reserve", reserve_late)
    for seed in range(JOBS_MAX + 1):
        model.generate(tokens(40, seed=seed), **GREEDY)
    assert not model.flush(timeout_s=0.01)
    assert model.counters.offload_skipped == 2, "a call whose prompt was skipped tries at its end"
    go.set()
    assert model.flush()
    assert model.counters.offload_stored == 2 * JOBS_MAX


def test_an_error_is_counted_and_kept(
    model: DepotModel, memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken")

    ids = tokens(40)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "reserve", broken)
        answer = model.generate(ids, **GREEDY)
        assert model.flush()
    assert torch.equal(answer, model.wrapped.generate(ids, **GREEDY))
    assert model.counters.offload_failed == 1
    assert str(model.last_error) == "broken"
    model.generate(ids, **GREEDY)
    assert model.flush()
    assert model.counters.offload_stored == 2, "it goes on"


def test_a_depot_without_room_throttles() -> None:
    wide = llama(num_hidden_layers=4, hidden_size=256, num_key_value_heads=4)
    with (
        kvdepot.open(
            dram={"capacity": "2MiB", "huge_pages": "never"}, writeback={"put_timeout": "1ms"}
        ) as store,
        attach(build(wide), store, block_tokens=128) as model,
    ):
        model.generate(tokens(130), **GREEDY)
        assert model.flush()
        with store.lease(model._parts.binding.groups[0].keys(tokens(130)[0].numpy())) as lease:
            assert len(lease) == 1
            ids = tokens(130, seed=9)
            answer = model.generate(ids, **GREEDY)
            assert torch.equal(answer, model.wrapped.generate(ids, **GREEDY))
            assert model.flush()
        assert model.counters.offload_throttled


def test_the_caches_own_tensors_may_be_dropped(memory: Store) -> None:
    for kind in ("llama", "gemma3"):
        with attach(build(SERVED[kind]()), memory, block_tokens=BLOCK) as model:
            ids = tokens(100)
            for _ in range(3):
                output = model.generate(ids, **GREEDY, return_dict_in_generate=True)
                for layer in output.past_key_values.layers:
                    assert not getattr(layer, "kept", None), "no more than transformers keeps"
                del output
                assert model.flush()
            assert model.last.rows[0].fetched_tokens == 96


def test_counters_as_plain_values(model: DepotModel) -> None:
    model.generate(tokens(40), **GREEDY)
    assert model.flush()
    model.generate(tokens(40), **GREEDY)
    assert model.counters.as_dict() == {
        "calls": 2,
        "prompt_tokens": 80,
        "fetched_tokens": {"dram": 32},
        "computed_tokens": 48,
        "passed": {},
        "onboard_failed": {},
        "offload_stored": 2,
        "offload_skipped": 0,
        "offload_throttled": 0,
        "offload_failed": 0,
    }
    last = model.last.as_dict()
    assert last["rows"] == [
        {
            "prompt_tokens": 40,
            "fetched": {"dram": 32},
            "unneeded_tokens": 0,
            "computed_tokens": 8,
        }
    ]
    assert last["lookup_s"] > 0 and last["onboard_s"] > 0


def test_blocks_are_stored_with_their_token_ids(model: DepotModel, memory: Store) -> None:
    ids = tokens(40)
    model.generate(ids, **GREEDY)
    assert model.flush()
    told = ids[0].tolist()
    with memory.inspect().state.lock:
        catalog = memory.inspect().catalog
        keys = [catalog.table.key(row) for row in catalog.live_rows().tolist()]
    assert sorted(memory.routing.token_ids(keys)) == sorted([told[:BLOCK], told[BLOCK : 2 * BLOCK]])
