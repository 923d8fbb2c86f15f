"""Scheduler's side and worker together, driven as vLLM drives them, against a model of its own."""

import errno
import random
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.toy_engine import (
    FULL_PAGES,
    PAGE_TOKENS,
    PROMPT,
    OpenEngine,
    OpenStore,
    Split,
    ToyRequest,
    answer_at_random,
    answer_of,
    ask,
    forget_local,
)
from tests.support.waiting import until

from kvdepot.adapters.vllm.messages import LoadJob, StepPlan
from kvdepot.core.depot import Reservation
from kvdepot.errors import KVDepotError
from kvdepot.testing.faults import Call, Corrupt, Fail, Fault, FaultyFiles, Stall


@pytest.mark.parametrize("block_tokens", [0, 8, 12])
def test_every_full_block_is_hit(
    open_store: OpenStore, open_engine: OpenEngine, block_tokens: int
) -> None:
    engine = open_engine(open_store(), settings={"block_tokens": block_tokens})
    assert ask(engine, "cold", PROMPT) == len(PROMPT) + 2
    forget_local(engine)
    size = block_tokens or PAGE_TOKENS
    assert ask(engine, "warm", PROMPT) == len(PROMPT) % size + 2


def test_answers_are_hit_by_the_next_turn(open_store: OpenStore, open_engine: OpenEngine) -> None:
    engine = open_engine(open_store())
    ask(engine, "first", PROMPT, 14)
    forget_local(engine)
    turn = PROMPT + answer_of(PROMPT, 14) + [1, 2]
    known = (len(PROMPT) + 13) // PAGE_TOKENS * PAGE_TOKENS
    assert ask(engine, "second", turn, 1) == len(turn) - known


def test_saves_that_are_over_are_let_go_step_by_step(
    open_store: OpenStore, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM waits for none of them too, as on a processor; one that failed is counted."""
    store = open_store()
    engine = open_engine(store)
    (worker,) = engine.workers
    saver, reserve = worker._saver, store.reserve
    assert saver is not None

    def fail(*_: object) -> None:
        raise KVDepotError("no more")

    def reserve_in_vain(*given: Any, **more: Any) -> Reservation:
        slots = reserve(*given, **more)
        monkeypatch.setattr(type(slots), "seal", fail)
        return slots

    monkeypatch.setattr(store, "reserve", reserve_in_vain)
    for turn in range(3):
        engine.add(ToyRequest(f"{turn}", [turn, *PROMPT], 2))

    def over() -> bool:
        engine.step()
        return len(engine.done) == 3 and not saver._reading

    until(over)
    counts = worker.metrics()
    assert counts is not None
    assert counts["failed_saves"] >= 3


def test_only_prompts_are_saved_if_told_so(open_store: OpenStore, open_engine: OpenEngine) -> None:
    engine = open_engine(open_store(), settings={"save": "prompt"})
    ask(engine, "first", PROMPT, 14)
    forget_local(engine)
    turn = PROMPT + answer_of(PROMPT, 14) + [1, 2]
    assert ask(engine, "second", turn, 1) == len(turn) - FULL_PAGES * PAGE_TOKENS


def test_a_prompt_of_whole_blocks_computes_one_token(
    open_store: OpenStore, open_engine: OpenEngine
) -> None:
    engine = open_engine(open_store())
    ask(engine, "cold", PROMPT[:40])
    forget_local(engine)
    assert ask(engine, "warm", PROMPT[:40], 1) == 1


def test_a_local_hit_that_ends_inside_a_block_is_completed(
    open_store: OpenStore, open_engine: OpenEngine
) -> None:
    engine = open_engine(open_store(), settings={"block_tokens": 12})
    ask(engine, "cold", PROMPT)
    kept = [name for name in engine.pool.known if len(name[2]) <= 2 * PAGE_TOKENS + 12]
    engine.pool.known = {name: engine.pool.known[name] for name in kept}
    assert ask(engine, "warm", PROMPT) == len(PROMPT) % 12 + 2


def test_it_survives_a_restart(open_store: OpenStore, open_engine: OpenEngine) -> None:
    store = open_store()
    engine = open_engine(store)
    ask(engine, "cold", PROMPT)
    engine.close()
    again = open_engine(open_store())
    assert ask(again, "warm", PROMPT) == len(PROMPT) % PAGE_TOKENS + 2
    figures = again.workers[0].counts.take()
    assert figures is not None
    assert figures["loaded_blocks:ssd"] == FULL_PAGES


def test_shards_share_nothing_and_hit_together(
    open_store: OpenStore, open_engine: OpenEngine
) -> None:
    store = open_store()
    engine = open_engine(store, split=Split(2))
    ask(engine, "cold", PROMPT)
    forget_local(engine)
    assert ask(engine, "warm", PROMPT) == len(PROMPT) % PAGE_TOKENS + 2
    store.remove(engine.side._spaces[""][1].keys(PROMPT)[5])
    forget_local(engine)
    assert ask(engine, "one shard lacks a block", PROMPT) == len(PROMPT) - 5 * PAGE_TOKENS + 2


def test_salted_requests_do_not_meet(open_store: OpenStore, open_engine: OpenEngine) -> None:
    engine = open_engine(open_store())
    ask(engine, "plain", PROMPT)
    assert ask(engine, "salted", PROMPT, cache_salt="s") == len(PROMPT) + 2
    assert ask(engine, "other salt", PROMPT, cache_salt="t") == len(PROMPT) + 2
    forget_local(engine)
    assert ask(engine, "same salt", PROMPT, cache_salt="s") == len(PROMPT) % PAGE_TOKENS + 2


def test_a_producer_saves_and_a_consumer_loads(
    open_store: OpenStore, open_engine: OpenEngine
) -> None:
    store = open_store()
    producer = open_engine(store, roles="producer")
    consumer = open_engine(store, roles="consumer")
    ask(producer, "one", PROMPT)
    forget_local(producer)
    assert ask(producer, "two", PROMPT) == len(PROMPT) + 2
    assert ask(consumer, "three", PROMPT) == len(PROMPT) % PAGE_TOKENS + 2
    before = store.stats()["counters"]["put_stored"]
    ask(consumer, "four", PROMPT[::-1])
    assert store.stats()["counters"]["put_stored"] == before


@pytest.mark.parametrize("effect", [Fail(errno.EIO), Corrupt(at=5000)])
def test_what_cannot_be_read_is_recomputed_and_saved_again(
    open_store: OpenStore, open_engine: OpenEngine, effect: Fail | Corrupt
) -> None:
    engine = open_engine(open_store())
    ask(engine, "cold", PROMPT)
    engine.close()
    files = FaultyFiles()
    again = open_engine(open_store(files))
    files.add(Fault(Call.RUN_READ, effect, skip=4))
    assert ask(again, "warm", PROMPT) > len(PROMPT) % PAGE_TOKENS + 2
    figures = again.workers[0].counts.take()
    assert figures is not None
    assert any(name.startswith("missed_blocks:") for name in figures)
    forget_local(again)
    assert ask(again, "again", PROMPT) == len(PROMPT) % PAGE_TOKENS + 2


def test_a_disk_that_never_answers_right_ends_in_a_recompute(
    open_store: OpenStore, open_engine: OpenEngine
) -> None:
    engine = open_engine(open_store())
    ask(engine, "cold", PROMPT)
    engine.close()
    files = FaultyFiles()
    again = open_engine(open_store(files))
    files.add(Fault(Call.RUN_READ, Fail(errno.EIO), times=None))
    assert ask(again, "warm", PROMPT) == len(PROMPT) + 2


def test_what_a_slow_disk_has_and_was_recomputed_is_in_memory(
    open_store: OpenStore, open_engine: OpenEngine
) -> None:
    """Else it would be recomputed for ever."""
    engine = open_engine(open_store())
    ask(engine, "cold", PROMPT)
    engine.close()
    files = FaultyFiles()
    store = open_store(files)
    again = open_engine(store, settings={"load_timeout": 0.01})
    files.add(Fault(Call.RUN_READ, Stall(), times=None))
    assert ask(again, "slow", PROMPT) == len(PROMPT) + 2
    forget_local(again)
    assert ask(again, "again", PROMPT) == len(PROMPT) % PAGE_TOKENS + 2
    assert store.stats()["counters"]["get_dram"] == FULL_PAGES
    assert store.stats()["counters"]["written"] <= 1, "the disk had all but the answer's block"
    files.clear()


def test_what_is_loaded_from_disk_is_not_saved_again(
    open_store: OpenStore, open_engine: OpenEngine
) -> None:
    engine = open_engine(open_store())
    ask(engine, "cold", PROMPT)
    engine.close()
    store = open_store(promote=False)
    again = open_engine(store)
    assert ask(again, "warm", PROMPT) == len(PROMPT) % PAGE_TOKENS + 2
    assert store.stats()["counters"]["put_stored"] == 1, "the answer's block was computed"


def test_a_depot_that_is_closed_ends_in_a_recompute(
    open_store: OpenStore, open_engine: OpenEngine
) -> None:
    store = open_store()
    engine = open_engine(store)
    ask(engine, "cold", PROMPT)
    forget_local(engine)
    store.close()
    assert ask(engine, "warm", PROMPT) == len(PROMPT) + 2


def test_a_small_memory_tier_loses_blocks_not_answers(
    open_store: OpenStore, open_engine: OpenEngine
) -> None:
    engine = open_engine(open_store(dram=192 << 10))
    for number in range(4):
        ask(engine, f"cold {number}", [number, *PROMPT])
    forget_local(engine)
    for number in range(4):
        ask(engine, f"warm {number}", [number, *PROMPT])


def test_preempted_requests_come_back_from_the_depot(
    open_store: OpenStore, open_engine: OpenEngine
) -> None:
    engine = open_engine(open_store(), pages=16)
    for number in range(3):
        engine.add(ToyRequest(f"r{number}", [number, *PROMPT[:20]], 24))
    engine.run()
    assert engine.preemptions
    for number in range(3):
        assert engine.done[f"r{number}"].answer == answer_of([number, *PROMPT[:20]], 24)
    figures = engine.side.counts.take()
    assert figures is not None
    assert figures["hit_tokens"]


def test_blocks_behind_what_vllm_has_are_found_without_those_before(
    open_store: OpenStore, open_engine: OpenEngine
) -> None:
    store = open_store()
    engine = open_engine(store)
    ask(engine, "cold", PROMPT)
    keys = engine.side._spaces[""][0].keys(PROMPT)
    assert store.remove(keys[0])
    kept = [name for name in engine.pool.known if len(name[2]) <= 4 * PAGE_TOKENS]
    engine.pool.known = {name: engine.pool.known[name] for name in kept}
    assert ask(engine, "warm", PROMPT) == len(PROMPT) % PAGE_TOKENS + 2
    assert len(store.match(keys)) == FULL_PAGES


def test_what_one_request_loads_others_wait_for(
    open_store: OpenStore, open_engine: OpenEngine
) -> None:
    engine = open_engine(open_store())
    ask(engine, "cold", PROMPT)
    forget_local(engine)
    for number in range(4):
        engine.add(ToyRequest(f"r{number}", [*PROMPT[:40], number, 9], 2))
    engine.run()
    assert engine.waits
    figures = engine.workers[0].counts.take()
    assert figures is not None
    assert figures["loaded_blocks:dram"] == 10
    for number in range(4):
        assert engine.done[f"r{number}"].answer == answer_of([*PROMPT[:40], number, 9], 2)


@pytest.mark.parametrize("whole", [False, True])
def test_what_fails_is_a_page_or_the_whole_load(
    open_store: OpenStore, open_engine: OpenEngine, whole: bool
) -> None:
    engine = open_engine(open_store())
    ask(engine, "cold", PROMPT)
    (worker,) = engine.workers
    keys = engine.side._spaces[""][0].keys(PROMPT)[:2]
    lacking = engine.side._spaces[""][0].keys([9] * PAGE_TOKENS)
    load = LoadJob("r", "", ((*keys, *lacking),), (5, 6, 7), 0, timeout_s=20.0, whole=whole)
    worker.begin(StepPlan(loads=[load]))
    received: set[str] = set()
    failed: set[str] = set()
    while not received:
        over = worker.finished(StepPlan(idle=True))
        received, failed = over.received, over.failed
    assert received == {"r"}
    assert failed == ({"r"} if whole else set())
    assert worker.take_invalid() == (set() if whole else {7})


def test_the_toy_notices_a_wrong_page(open_store: OpenStore, open_engine: OpenEngine) -> None:
    engine = open_engine(open_store())
    engine.add(ToyRequest("r", list(PROMPT), 3))
    engine.step()
    engine.caches[0][1][engine.requests["r"].tables[0][0], -1, -1, -1] += 1
    with pytest.raises(AssertionError):
        engine.run()


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("block_tokens", [0, 12])
def test_many_requests_with_preemptions_aborts_and_faults(
    open_store: OpenStore, open_engine: OpenEngine, seed: int, block_tokens: int, shards: int
) -> None:
    chance = random.Random(seed)
    files = FaultyFiles()
    store = open_store(files, dram=1 << 20)
    settings = {"block_tokens": block_tokens, "decide": chance.random() < 0.5}
    engine = open_engine(store, pages=30, settings=settings, split=Split(shards))
    files.add(Fault(Call.RUN_READ, Corrupt(at=4500), skip=20, times=3))
    files.add(Fault(Call.RUN_READ, Fail(errno.EIO), skip=40, times=3))
    answer_at_random(engine, chance, 30, forgets=0.1)
    assert store.stats()["leased"] == 0
    engine.close()
    assert open_store(dram=1 << 20).check().ok


@pytest.mark.parametrize("salt", [None, "secret"])
def test_blocks_are_saved_with_their_token_ids_unless_salted(
    open_store: OpenStore, open_engine: OpenEngine, salt: str | None
) -> None:
    store = open_store()
    engine = open_engine(store)
    prompt = PROMPT[: FULL_PAGES * PAGE_TOKENS]
    ask(engine, "one", prompt, 1, cache_salt=salt)
    with store.inspect().state.lock:
        keys = [
            store.inspect().catalog.table.key(row) for row in store.inspect().catalog.live_rows()
        ]
    known = sorted(ids for ids in store.token_ids(keys) if ids)
    pages = [prompt[at : at + PAGE_TOKENS] for at in range(0, len(prompt), PAGE_TOKENS)]
    assert known == ([] if salt else sorted(pages))
