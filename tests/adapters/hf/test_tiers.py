"""From memory, from disk, after a restart; and when the disk fails, damages or stalls."""

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from tests.support.page_locks import CudaStandIn
from tests.support.tiny_transformers import SERVED, build, tokens

from kvdepot.adapters.hf import DepotModel, attach
from kvdepot.adapters.hf import model as hf_model
from kvdepot.store.open import open_store
from kvdepot.store.store import Store
from kvdepot.testing.faults import (
    Call,
    Corrupt,
    Fail,
    Fault,
    FaultyFiles,
    Operation,
    Stall,
)

BLOCK = 16
PROMPT = 10 * BLOCK + 3
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4}
OpenDepot = Callable[..., Store]


@pytest.fixture(
    params=["llama", pytest.param("mistral", marks=pytest.mark.slow), "gemma3", "deepseek"]
)
def model(request: pytest.FixtureRequest) -> Any:
    return build(SERVED[request.param]())


def learn(model: Any, store: Store, ids: Any) -> Any:
    """Have a depot on disk know a prompt. Returns the model's answer."""
    with store, attach(model, store, block_tokens=BLOCK) as depot_model:
        answer = depot_model.generate(ids, **GREEDY)
        depot_model.flush()
        assert store.flush()
    return answer


def fetched(model: DepotModel) -> dict[str, int]:
    return model.last.rows[0].fetched


def test_a_session_goes_to_another_depot(model: Any, open_depot: OpenDepot, tmp_path: Path) -> None:
    """Layers with a window too: their keys have no link to the block before."""
    ids, file = tokens(PROMPT), tmp_path / "chat.kvsession"
    with open_depot() as store, attach(model, store, block_tokens=BLOCK) as served:
        answer = served.generate(ids, **GREEDY)
        served.flush()
        blocks = served.session("chat", ids[0].tolist())
        assert store.sessions.export("chat", file)["blocks"] == blocks >= PROMPT // BLOCK
    with open_store(dram="16MiB") as other, attach(model, other, block_tokens=BLOCK) as served:
        assert other.sessions.import_file(file)["complete"]
        assert torch.equal(served.generate(ids, **GREEDY), answer)
        assert served.last.rows[0].computed_tokens == PROMPT % BLOCK


def test_from_disk_after_a_restart_then_from_memory(model: Any, open_depot: OpenDepot) -> None:
    ids = tokens(PROMPT)
    answer = learn(model, open_depot(), ids)
    assert torch.equal(answer, model.generate(ids, **GREEDY))
    with open_depot() as store, attach(model, store, block_tokens=BLOCK) as again:
        for tier in ("ssd", "dram"):
            assert torch.equal(again.generate(ids, **GREEDY), answer)
            assert set(fetched(again)) == {tier}
            assert again.last.rows[0].computed_tokens == 3


def test_a_flipped_bit_in_memory_is_recomputed_on_a_gpu_too(
    model: Any, memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokens(PROMPT)
    expected = model.generate(ids, **GREEDY)
    monkeypatch.setattr(hf_model, "open_mover", lambda memory, _: CudaStandIn(memory))
    with attach(model, memory, block_tokens=BLOCK) as served:
        served.generate(ids, **GREEDY)
        served.flush()
        for chunk in range(0, len(memory.memory[0]), 4096):
            memory.memory[0][chunk + 100] ^= 1  # one bit in every page of the arena
        assert torch.equal(served.generate(ids, **GREEDY), expected)
        assert fetched(served) == {}


def test_memory_that_is_not_page_locked_costs_misses(
    model: Any, memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a daemon's restart, until its new memory is locked."""
    ids = tokens(PROMPT)
    with attach(model, memory, block_tokens=BLOCK) as served:
        expected = served.generate(ids, **GREEDY)
    monkeypatch.setattr(hf_model, "open_mover", lambda *_: CudaStandIn(list))
    with attach(model, memory, block_tokens=BLOCK) as served:
        assert torch.equal(served.generate(ids, **GREEDY), expected)
        assert fetched(served) == {}
    assert memory.stats()["leased"] == 0


def is_record(operation: Operation) -> bool:
    """Reads of blocks, not the reads at the opening of a store."""
    return operation.nbytes > 4096


@pytest.mark.parametrize(
    "effect", [Fail(errno.EIO), Corrupt(at=4096 + 7)], ids=["fails", "damages"]
)
@pytest.mark.parametrize("skip", [0, 9])
def test_a_bad_block_costs_the_blocks_after_it(
    model: Any, open_depot: OpenDepot, effect: Any, skip: int
) -> None:
    ids = tokens(PROMPT)
    answer = learn(model, open_depot(), ids)
    files = FaultyFiles()
    with open_depot(files) as store, attach(model, store, block_tokens=BLOCK) as again:
        fault = files.add(Fault(Call.RUN_READ, effect, skip=skip, where=is_record))
        assert torch.equal(again.generate(ids, **GREEDY), answer)
        assert again.flush()
        if fault.hits:  # a window needs fewer blocks than are skipped
            reason = "failed" if isinstance(effect, Fail) else "corrupt"
            assert again.last.misses == {reason: 1}
            assert again.counters.onboard_failed[reason] == 1
        if not model.config.to_dict().get("sliding_window"):
            assert fetched(again) == ({"ssd": skip * BLOCK} if skip else {}), "the good prefix"
        files.clear()
        assert torch.equal(again.generate(ids, **GREEDY), answer)
        assert again.last.rows[0].computed_tokens <= 3 + BLOCK, "what was recomputed is kept"


def test_a_stall_costs_no_more_than_the_deadline(model: Any, open_depot: OpenDepot) -> None:
    ids = tokens(PROMPT)
    answer = learn(model, open_depot(), ids)
    files = FaultyFiles()
    store = open_depot(files)
    with store, attach(model, store, block_tokens=BLOCK, timeout_s=0.3) as again:
        stall = files.add(Fault(Call.RUN_READ, Stall(), times=None, where=is_record))
        began = time.monotonic()
        assert torch.equal(again.generate(ids, **GREEDY), answer)
        took_s = time.monotonic() - began
        assert stall.hits
        assert took_s < 20, "the stall ends with the test, the call did not wait for that"
        assert again.last.misses.get("late")
        assert again.last.rows[0].computed_tokens == PROMPT
        files.clear()


def test_a_block_that_is_removed_between_lookup_and_fetch(
    model: Any, memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokens(PROMPT)
    with attach(model, memory, block_tokens=BLOCK) as depot_model:
        answer = depot_model.generate(ids, **GREEDY)
        depot_model.flush()
        lease, groups = memory.lease, depot_model._parts.binding.groups
        gone = [group.keys(ids[0].numpy())[7] for group in groups]

        def lease_late(keys: Any) -> Any:
            memory.remove(gone)
            return lease(keys)

        monkeypatch.setattr(memory, "lease", lease_late)
        assert torch.equal(depot_model.generate(ids, **GREEDY), answer)
        assert depot_model.last.rows[0].computed_tokens >= 3


def test_two_threads_share_a_model(model: Any, memory: Store) -> None:
    prompts = [tokens(90, seed=seed) for seed in range(4)]
    expected = [model.generate(ids, **GREEDY) for ids in prompts]
    wrong: list[int] = []
    with attach(model, memory, block_tokens=BLOCK) as depot_model:

        def ask(first: int) -> None:
            for turn in range(4):
                number = (first + turn) % len(prompts)
                if not torch.equal(
                    depot_model.generate(prompts[number], **GREEDY), expected[number]
                ):
                    wrong.append(number)

        threads = [threading.Thread(target=ask, args=(first,)) for first in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert depot_model.counters.calls == 8
        assert depot_model.counters.fetched_tokens["dram"] > 0
