"""Scheduler and workers together, driven as vLLM drives them, against a model of its own."""

import errno
import random
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.toy_engine import (
    ALL,
    FULL_PAGES,
    PAGE_TOKENS,
    PROMPT,
    REST,
    WINDOW,
    Split,
    ToyEngine,
    ToyRequest,
    Toys,
    answer_at_random,
    answer_of,
    ask,
    forget_local,
)
from tests.support.waiting import until

from kvdepot.adapters.vllm.messages import BlockOrigin, GroupBlocks, LoadJob, StepPlan
from kvdepot.adapters.vllm.requests import RequestSaves
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import Reservation
from kvdepot.core.keys import without_link
from kvdepot.errors import KVDepotError
from kvdepot.testing.faults import Call, Corrupt, Fail, Fault, FaultyFiles, Stall

Kinds = tuple[str, ...]
FULL: Kinds = ("full",)
MIXED: Kinds = ("full", "window", "state")
OTHERS: list[Kinds] = [
    ("window",),
    ("window", "full"),
    ("state", "full"),
    MIXED,
    ("window", "window", "full"),
    ("state",),
]
ALL_KINDS = pytest.mark.parametrize("kinds", [FULL, *OTHERS], ids="+".join)
TWO_KINDS = pytest.mark.parametrize("kinds", [FULL, MIXED], ids="+".join)


def keys_of(engine: ToyEngine, place: int) -> list[BlockKey]:
    """The keys of PROMPT for one group and shard, as the scheduler makes them."""
    rule = engine.side.names.groups.rules[place // len(engine.side.names.workers)]
    keys = engine.spaces()[place].keys(PROMPT)
    return keys if rule.kind == "full" else [without_link(key) for key in keys]


def counts_of(engine: ToyEngine) -> dict[str, float]:
    counts = engine.workers[0].metrics()
    assert counts is not None
    return counts


@ALL_KINDS
def test_all_groups_are_restored_at_the_end_of_the_prompt(toys: Toys, kinds: Kinds) -> None:
    assert ask(toys.saved(kinds=kinds), "warm", PROMPT) == REST


@ALL_KINDS
def test_a_restart_finds_all_groups_on_disk(toys: Toys, kinds: Kinds) -> None:
    again = toys.restarted(kinds=kinds)
    assert ask(again, "warm", PROMPT) == REST
    assert {name for name in counts_of(again) if "loaded_blocks" in name} == {"loaded_blocks:ssd"}


@pytest.mark.parametrize(
    ("size", "kinds"), [(8, FULL), (12, FULL), (12, ("full", "window"))], ids=str
)
def test_blocks_of_several_pages(toys: Toys, size: int, kinds: Kinds) -> None:
    """Windows begin inside them."""
    engine = toys.saved(kinds=kinds, settings={"block_tokens": size})
    assert ask(engine, "warm", PROMPT) == len(PROMPT) % size + 2


@TWO_KINDS
def test_answers_are_hit_by_the_next_turn(toys: Toys, kinds: Kinds) -> None:
    engine = toys.engine(kinds=kinds)
    ask(engine, "first", PROMPT, 14)
    forget_local(engine)
    turn = PROMPT + answer_of(PROMPT, 14) + [1, 2]
    known = (len(PROMPT) + 13) // PAGE_TOKENS * PAGE_TOKENS
    assert ask(engine, "second", turn, 1) == len(turn) - known


@pytest.mark.parametrize(("kinds", "computed"), [(FULL, 1), (MIXED, PAGE_TOKENS)], ids=str)
def test_the_last_token_of_a_prompt_of_whole_blocks_is_computed(
    toys: Toys, kinds: Kinds, computed: int
) -> None:
    """States go on from the one before it."""
    engine = toys.engine(kinds=kinds)
    ask(engine, "cold", PROMPT[:40])
    forget_local(engine)
    assert ask(engine, "warm", PROMPT[:40], 1) == computed


@TWO_KINDS
def test_salted_requests_do_not_meet(toys: Toys, kinds: Kinds) -> None:
    engine = toys.saved(kinds=kinds)
    assert ask(engine, "salted", PROMPT, cache_salt="s") == ALL
    assert ask(engine, "other salt", PROMPT, cache_salt="t") == ALL
    forget_local(engine)
    assert ask(engine, "same salt", PROMPT, cache_salt="s") == REST


@pytest.mark.parametrize(
    ("kinds", "place", "block", "computed"),
    [(FULL, 1, 5, ALL - 5 * PAGE_TOKENS), (MIXED, 5, FULL_PAGES - 1, ALL)],
    ids=str,
)
def test_a_hit_needs_the_blocks_of_all_shards(
    toys: Toys, kinds: Kinds, place: int, block: int, computed: int
) -> None:
    store = toys.store()
    engine = toys.saved(store, kinds=kinds, split=Split(2))
    assert ask(engine, "warm", PROMPT) == REST
    forget_local(engine)
    assert store.remove(keys_of(engine, place)[block])
    assert ask(engine, "one shard lacks a block", PROMPT) == computed


@pytest.mark.parametrize(
    ("kinds", "fault"),
    [
        (FULL, Fault(Call.RUN_READ, Fail(errno.EIO), skip=4)),
        (FULL, Fault(Call.RUN_READ, Corrupt(at=5000), skip=4)),
        (MIXED, Fault(Call.RUN_READ, Fail(errno.EIO), times=1)),
        (("window", "full"), Fault(Call.RUN_READ, Corrupt(at=5000), times=1)),
        (("state",), Fault(Call.RUN_READ, Corrupt(at=5000), times=1)),
    ],
)
def test_blocks_that_cannot_be_read_are_recomputed_and_saved_again(
    toys: Toys, kinds: Kinds, fault: Fault
) -> None:
    files = FaultyFiles()
    again = toys.restarted(files, kinds=kinds)
    files.add(fault)
    assert ask(again, "warm", PROMPT) > REST
    assert any(name.startswith("missed_blocks:") for name in counts_of(again))
    assert again.failed_loads == (kinds != FULL)
    forget_local(again)
    assert ask(again, "again", PROMPT) == REST


@TWO_KINDS
def test_the_toy_notices_a_wrong_page(toys: Toys, kinds: Kinds) -> None:
    engine = toys.engine(kinds=kinds)
    engine.add(ToyRequest("r", list(PROMPT), 3))
    engine.step()
    engine.caches[0][1][engine.requests["r"].tables[-1][-1], -1, 0, -1] += 1
    with pytest.raises(AssertionError):
        engine.run()


@pytest.mark.parametrize(
    ("kinds", "block_tokens", "shards"),
    [
        *[(FULL, size, shards) for size in (0, 12) for shards in (1, 2)],
        *[pytest.param(kinds, None, None, marks=pytest.mark.slow) for kinds in OTHERS],
    ],
    ids=str,
)
def test_many_requests_with_preemptions_aborts_and_faults(
    toys: Toys, seed: int, kinds: Kinds, block_tokens: int | None, shards: int | None
) -> None:
    chance = random.Random(seed)
    if block_tokens is None:
        block_tokens = 0 if "state" in kinds else chance.choice([0, 8])
    settings = {
        "block_tokens": block_tokens,
        "checkpoint_tokens": chance.choice([0, 8, 16]),
        "decide": chance.random() < 0.4,
    }
    files = FaultyFiles()
    store = toys.store(files, dram=1 << 20)
    split = Split(shards or chance.choice([1, 2]))
    pages = 30 * len(kinds)
    engine = toys.engine(store, pages=pages, settings=settings, split=split, kinds=kinds)
    files.add(Fault(Call.RUN_READ, Corrupt(at=4500), skip=20, times=3))
    files.add(Fault(Call.RUN_READ, Fail(errno.EIO), skip=40, times=3))
    answer_at_random(engine, chance, 30 if kinds == FULL else 24, forgets=0.15)
    assert store.stats()["leased"] == 0
    engine.close()
    assert toys.store(dram=1 << 20).admin.check().ok


def test_saves_are_forgotten_when_they_have_ended(
    toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if vLLM waits for none of them, as on a processor. Failed saves are counted."""
    store = toys.store()
    engine = toys.engine(store)
    (worker,) = engine.workers
    reserve = store.reserve

    def fail(*_: object) -> None:
        raise KVDepotError("no more")

    def reserve_in_vain(*given: Any, **more: Any) -> Reservation:
        slots = reserve(*given, **more)
        monkeypatch.setattr(type(slots), "seal", fail)
        return slots

    monkeypatch.setattr(store, "reserve", reserve_in_vain)
    for turn in range(3):
        engine.add(ToyRequest(f"{turn}", [turn, *PROMPT], 2))

    def have_ended() -> bool:
        engine.step()
        return len(engine.done) == 3 and not worker.saver.reading_requests()

    until(have_ended)
    assert counts_of(engine)["failed_saves"] >= 3


def test_only_prompts_are_saved_if_set_so(toys: Toys) -> None:
    engine = toys.engine(settings={"save": "prompt"})
    ask(engine, "first", PROMPT, 14)
    forget_local(engine)
    turn = PROMPT + answer_of(PROMPT, 14) + [1, 2]
    assert ask(engine, "second", turn, 1) == len(turn) - FULL_PAGES * PAGE_TOKENS


def keep_local(engine: ToyEngine, tokens: int) -> None:
    """Leave these first tokens of each prompt in the engine's own prefix cache."""
    kept = [name for name in engine.pool.known if len(name[2]) <= tokens]
    engine.pool.known = {name: engine.pool.known[name] for name in kept}


def test_a_local_hit_that_ends_inside_a_block_is_completed(toys: Toys) -> None:
    engine = toys.engine(settings={"block_tokens": 12})
    ask(engine, "cold", PROMPT)
    keep_local(engine, 2 * PAGE_TOKENS + 12)
    assert ask(engine, "warm", PROMPT) == len(PROMPT) % 12 + 2


def test_blocks_after_what_vllm_has_are_found_without_those_before(toys: Toys) -> None:
    store = toys.store()
    engine = toys.engine(store)
    ask(engine, "cold", PROMPT)
    keys = keys_of(engine, 0)
    assert store.remove(keys[0])
    keep_local(engine, 4 * PAGE_TOKENS)
    assert ask(engine, "warm", PROMPT) == REST
    assert len(store.match(keys)) == FULL_PAGES


def test_a_producer_saves_and_a_consumer_loads(toys: Toys) -> None:
    store = toys.store()
    producer = toys.saved(store, roles="producer")
    consumer = toys.engine(store, roles="consumer")
    assert ask(producer, "two", PROMPT) == ALL
    assert ask(consumer, "three", PROMPT) == REST
    before = store.stats()["counters"]["put_stored"]
    ask(consumer, "four", PROMPT[::-1])
    assert store.stats()["counters"]["put_stored"] == before


def test_blocks_of_a_slow_disk_that_were_recomputed_are_in_memory(toys: Toys) -> None:
    """Else they would be recomputed for ever."""
    toys.saved().close()
    files = FaultyFiles()
    store = toys.store(files)
    again = toys.engine(store, settings={"load_timeout": 0.01})
    files.add(Fault(Call.RUN_READ, Stall(), times=None))
    assert ask(again, "slow", PROMPT) == ALL
    forget_local(again)
    assert ask(again, "again", PROMPT) == REST
    assert store.stats()["counters"]["get_dram"] == FULL_PAGES
    assert store.stats()["counters"]["written"] <= 1, "the disk had all but the answer's block"
    files.clear()


def test_blocks_that_are_loaded_from_disk_are_not_saved_again(toys: Toys) -> None:
    toys.saved().close()
    store = toys.store(promote=False)
    assert ask(toys.engine(store), "warm", PROMPT) == REST
    assert store.stats()["counters"]["put_stored"] == 1, "the answer's block was computed"


def test_a_closed_depot_ends_in_a_recompute(toys: Toys) -> None:
    store = toys.store()
    engine = toys.saved(store)
    store.close()
    assert ask(engine, "warm", PROMPT) == ALL


def test_a_small_memory_tier_loses_blocks_not_answers(toys: Toys) -> None:
    engine = toys.engine(toys.store(dram=192 << 10))
    for turn in ("cold", "warm"):
        for number in range(4):
            ask(engine, f"{turn} {number}", [number, *PROMPT])
        forget_local(engine)


def test_preempted_requests_come_back_from_the_depot(toys: Toys) -> None:
    engine = toys.engine(pages=16)
    for number in range(3):
        engine.add(ToyRequest(f"r{number}", [number, *PROMPT[:20]], 24))
    engine.run()
    assert engine.preemptions
    for number in range(3):
        assert engine.done[f"r{number}"].answer == answer_of([number, *PROMPT[:20]], 24)
    assert (engine.side.metrics() or {})["hit_tokens"]


def test_requests_wait_for_blocks_that_another_one_loads(toys: Toys) -> None:
    engine = toys.saved()
    for number in range(4):
        engine.add(ToyRequest(f"r{number}", [*PROMPT[:40], number, 9], 2))
    engine.run()
    assert engine.waits
    assert counts_of(engine)["loaded_blocks:dram"] == 10
    for number in range(4):
        assert engine.done[f"r{number}"].answer == answer_of([*PROMPT[:40], number, 9], 2)


@pytest.mark.parametrize("whole", [False, True])
def test_a_page_fails_or_the_whole_load(toys: Toys, whole: bool) -> None:
    engine = toys.saved()
    (worker,) = engine.workers
    lacking = engine.spaces()[0].keys([9] * PAGE_TOKENS)
    blocks = GroupBlocks(0, ((*keys_of(engine, 0)[:2], *lacking),), (5, 6, 7), 0)
    load = LoadJob("r", BlockOrigin(), (blocks,), timeout_s=20.0, whole=whole)
    worker.begin(StepPlan(loads=[load]))
    while not (ended := worker.finished(StepPlan(idle=True))).received:
        pass
    assert ended.received == {"r"}
    assert ended.failed == ({"r"} if whole else set())
    assert worker.take_invalid() == (set() if whole else {7})


@pytest.mark.parametrize("salt", [None, "secret"])
def test_blocks_are_saved_with_their_token_ids_unless_salted(toys: Toys, salt: str | None) -> None:
    store = toys.store()
    prompt = PROMPT[: FULL_PAGES * PAGE_TOKENS]
    ask(toys.engine(store), "one", prompt, 1, cache_salt=salt)
    with store.inspect().state.lock:
        catalog = store.inspect().catalog
        keys = [catalog.table.key(row) for row in catalog.live_rows()]
    known = sorted(ids for ids in store.routing.token_ids(keys) if ids)
    pages = [prompt[at : at + PAGE_TOKENS] for at in range(0, len(prompt), PAGE_TOKENS)]
    assert known == ([] if salt else sorted(pages))


@pytest.mark.parametrize("kinds", [("state", "full"), ("window", "full")], ids="+".join)
def test_windows_and_states_inside_an_answer_leave_first(toys: Toys, kinds: Kinds) -> None:
    """Conversations in a memory that has no room for all they leave behind."""

    def second_turns() -> int:
        """Tokens that are computed for second turns."""
        engine = toys.engine(toys.depot(dram="3MiB"), kinds=kinds)
        prompts = [[*[user] * 9, *range(12)] for user in range(6)]
        for user, prompt in enumerate(prompts):
            ask(engine, f"first {user}", prompt, 30)
            engine.settle()
        forget_local(engine)
        turns = [prompt + answer_of(prompt, 30) + [1, 2] for prompt in prompts]
        return sum(ask(engine, f"second {user}", turn, 1) for user, turn in enumerate(turns))

    computed = second_turns()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestSaves, "superseded", lambda saves: [])
        assert computed < second_turns()


def test_windows_and_states_are_saved_at_few_places(toys: Toys) -> None:
    store = toys.store()
    engine = toys.engine(store, kinds=MIXED, budget=8)
    ask(engine, "cold", PROMPT, 1)
    full, window, state = (
        sum(len(store.match([key])) for key in keys_of(engine, place)) for place in range(3)
    )
    assert (full, window, state) == (FULL_PAGES, -(-(WINDOW - 1) // PAGE_TOKENS), 1)


def test_checkpoints_serve_prompts_that_part_anywhere(toys: Toys) -> None:
    engine = toys.saved(kinds=MIXED, settings={"checkpoint_tokens": 8}, budget=8)
    parted = [*PROMPT[:30], 1, 2, 3]
    assert ask(engine, "parted", parted, 1) == len(parted) - 24


def test_windows_are_saved_where_prompts_part_the_second_time(toys: Toys) -> None:
    engine = toys.saved(kinds=("full", "window"))
    for number, computed in enumerate((33, 33 - 28, 33 - 28)):
        forget_local(engine)
        assert ask(engine, f"parted {number}", [*PROMPT[:30], number, 2, 3], 1) == computed


@pytest.mark.parametrize("lacking", range(3))
def test_a_hit_ends_where_all_groups_have_what_they_need(toys: Toys, lacking: int) -> None:
    store = toys.store()
    engine = toys.saved(store, kinds=MIXED, settings={"checkpoint_tokens": 8}, budget=8)
    assert store.remove(keys_of(engine, lacking)[FULL_PAGES - 1])
    kept = 8 * ((FULL_PAGES - 1) * PAGE_TOKENS // 8)
    assert ask(engine, "warm", PROMPT) == ALL - kept


def test_groups_share_nothing_but_memory(toys: Toys) -> None:
    engine = toys.saved(kinds=("window", "window", "full"))
    assert len({space.tag for space in engine.spaces()}) == 3
