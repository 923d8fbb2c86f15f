"""More is made than the disk can write: memory takes it all, and what is lost is worth least."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.small_store import (
    BLOCK,
    IN_DRAM,
    RECORD,
    prompt,
    settings,
    space_of,
    tiers,
)
from tests.support.stores import counter

from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey, PutResult
from kvdepot.index.table import NONE
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.faults import Call, Fault, FaultyFiles, Stall
from kvdepot.testing.images import payload_for

HALF = IN_DRAM // 2
A_PROMPT = 8


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def store(tmp_path: Path, files: FaultyFiles) -> Iterator[Store]:
    """Its disk takes no block, and as much waits for it as may."""
    opened = assemble(load(overrides=settings(tmp_path / "kv", write_timeout="10min")), files=files)
    first = prompt(space_of(opened), 0, HALF)
    stalled = Fault(Call.RUN_WRITE, Stall(), times=None, where=lambda op: op.nbytes >= RECORD)
    files.add(stalled)
    assert all(offer(opened, first))
    yield opened
    files.clear()
    opened.close()


def offer(store: Store, keys: list[BlockKey]) -> list[PutResult]:
    """As an engine does that cannot wait."""
    return store.put_many(keys, [payload_for(key, BLOCK) for key in keys], timeout_s=0.0)


def burst(store: Store, prompts: int, first: int = 1) -> list[list[BlockKey]]:
    numbers = range(first, first + prompts)
    made = [prompt(space_of(store), number, A_PROMPT) for number in numbers]
    for keys in made:
        assert offer(store, keys) == [PutResult.STORED] * A_PROMPT
    return made


def test_nothing_is_turned_away(store: Store) -> None:
    made = burst(store, 3 * IN_DRAM // A_PROMPT)
    assert counter(store, "put_throttled") == 0
    assert tiers(store, made[-1]) == ["dram"] * A_PROMPT
    with store.reserve(prompt(space_of(store), 999, A_PROMPT), timeout_s=0.0) as slots:
        assert slots.outcomes == [PutResult.STORED] * A_PROMPT


def test_what_leaves_is_cold_and_tails_leave_before_heads(store: Store) -> None:
    asked, *others = burst(store, 3)
    assert tiers(store, asked) == ["dram"] * A_PROMPT
    later = burst(store, (IN_DRAM - HALF) // A_PROMPT - 2, first=4)
    assert tiers(store, prompt(space_of(store), 0, HALF)) == ["dram"] * HALF, "it waits its turn"
    assert len(store.match(later[-1])) == A_PROMPT
    assert len(store.match(asked)) >= max(len(store.match(keys)) for keys in others)
    for keys in others:
        there = [bool(store.match([key])) for key in keys]
        assert there == sorted(there, reverse=True), "a tail is useless without its head"
    assert not all(bool(store.match([key])) for keys in others for key in keys)


def test_what_stays_is_written_when_the_disk_goes_on(
    store: Store, files: FaultyFiles, tmp_path: Path
) -> None:
    made = burst(store, IN_DRAM // A_PROMPT)
    there = [key for keys in made for key in keys if store.match([key])]
    files.clear()
    inside = store.inspect()
    assert inside.wait_for(lambda: NONE not in inside.locations(there)), "without a flush"
    assert not inside.lower().queue.deferred
    report = store.flush()
    assert report.durable == len(there) + HALF
    assert store.admin.check()


def test_what_was_asked_for_is_written_first(store: Store) -> None:
    made = burst(store, 4)
    assert tiers(store, made[2]) == ["dram"] * A_PROMPT
    inside = store.inspect()
    first = list(inside.lower().queue.deferred)[:A_PROMPT]
    assert first == inside.rows(made[2])


def test_what_is_removed_is_not_written_later(store: Store, files: FaultyFiles) -> None:
    waiting, *deferred = burst(store, 3)
    for keys in deferred:
        assert store.remove(keys) == A_PROMPT
    assert len(store.inspect().lower().queue.deferred) < A_PROMPT
    files.clear()
    assert store.flush().durable == HALF + len(waiting)
