"""After its deadline a call starts no read, and leaves behind what is in flight."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.store_contract import BLOCK_BYTES, prompt, put, space_of, tiers
from tests.support.stores import counter, settings

from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import Arrival
from kvdepot.store.open import assemble
from kvdepot.store.read import reader as store_reader
from kvdepot.store.store import Store
from kvdepot.testing.faults import Call, Fault, FaultyFiles, Operation, Stall
from kvdepot.volumes.log import reader

BLOCKS = 32
IN_A_WAVE = 2
TIME_S = 60.0
"""Never waited for: the clock jumps over it."""
UNDER_WAY = (1 + store_reader._WAVES_A_VOLUME) * IN_A_WAVE
"""Blocks of the wave that has come first, and of those that may be in flight by then."""


class JumpingClock:
    """The time, and what `jump` has added to it."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def now(self) -> float:
        return time.monotonic() + self._ahead_s

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def jump(self) -> None:
        self._ahead_s += 2 * TIME_S


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles(timeout_s=20.0)


@pytest.fixture
def store(tmp_path: Path, files: FaultyFiles) -> Iterator[Store]:
    tree = settings(tmp_path)
    del tree["hdd"]
    opened = assemble(load(overrides=tree), files=files)
    yield opened
    files.clear()
    opened.close()


@pytest.fixture
def keys(store: Store) -> list[BlockKey]:
    """Of blocks that are on disk only, to be read a few at a time."""
    found = prompt(space_of(store), 1, BLOCKS)
    assert all(put(store, found))
    assert store.flush()
    inside = store.inspect()
    inside.drop_from_memory()
    inside.lower().volumes.wave_bytes = IN_A_WAVE * (BLOCK_BYTES + 8192)
    return found


@pytest.fixture
def clock(store: Store) -> JumpingClock:
    jumping = JumpingClock()
    store.inspect().state.clock = jumping
    return jumping


def test_a_delivery_starts_nothing_after_its_deadline(
    store: Store, keys: list[BlockKey], files: FaultyFiles, clock: JumpingClock
) -> None:
    before = files.counts[Call.RUN_READ]
    came: set[int] = set()

    def sink(arrivals: list[Arrival]) -> None:
        if not came:
            clock.jump()
        came.update(one.index for one in arrivals)

    with store.lease(keys) as lease:
        answers = lease.deliver(sink, timeout_s=TIME_S)
    assert files.counts[Call.RUN_READ] - before <= UNDER_WAY
    assert {at for at, answer in enumerate(answers) if answer} == came
    assert came, "what had come was delivered"
    assert {answer.reason for answer in answers if not answer} == {"late"}
    assert counter(store, "read_late") == BLOCKS - len(came)
    assert tiers(store, keys).count(None) == 0


def test_a_get_starts_nothing_after_its_deadline(
    store: Store, keys: list[BlockKey], files: FaultyFiles, clock: JumpingClock
) -> None:
    before = files.counts[Call.RUN_READ]
    jumps: list[int] = []

    def jump_once(operation: Operation) -> bool:
        if not jumps:
            clock.jump()
            jumps.append(operation.number)
        return False

    files.add(Fault(Call.RUN_READ, Stall(), where=jump_once))
    answers = store.get_many(keys, [bytearray(BLOCK_BYTES) for _ in keys], timeout_s=TIME_S)
    assert jumps
    assert files.counts[Call.RUN_READ] - before <= UNDER_WAY
    assert {answer.reason for answer in answers if not answer} == {"late"}


def test_a_wave_that_waits_for_its_turn_is_taken_back(
    store: Store, keys: list[BlockKey], files: FaultyFiles
) -> None:
    """A stalled drive holds up its threads: what is queued behind them is never begun."""
    before = files.counts[Call.RUN_READ]
    free = store.inspect().state.arena.room(BLOCK_BYTES)
    stalled = reader._THREADS * IN_A_WAVE
    files.add(Fault(Call.RUN_READ, stall := Stall(), times=None))
    answers = store.get_many(keys, [bytearray(BLOCK_BYTES) for _ in keys], timeout_s=0.2)
    assert [answer.reason for answer in answers] == ["late"] * BLOCKS
    stall.release()
    assert store.inspect().reader.late.wait(10.0)
    assert files.counts[Call.RUN_READ] - before <= stalled
    files.clear()
    assert store.match(keys).tiers.count("dram") <= stalled
    store.inspect().drop_from_memory()
    assert store.inspect().state.arena.room(BLOCK_BYTES) == free
    assert tiers(store, keys).count(None) == 0


def test_without_time_only_memory_answers(
    store: Store, keys: list[BlockKey], files: FaultyFiles
) -> None:
    assert tiers(store, keys[:4]) == ["ssd"] * 4
    before = files.counts[Call.RUN_READ]
    answers = store.get_many(keys[:8], [bytearray(BLOCK_BYTES) for _ in range(8)], timeout_s=0.0)
    assert [answer.tier for answer in answers] == ["dram"] * 4 + [None] * 4
    assert files.counts[Call.RUN_READ] == before
