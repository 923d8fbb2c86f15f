"""What an attached client reads counts as if it had read in the daemon's process."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.cold_prompt import left_on_the_hard_drive
from tests.support.store_contract import prompt, put, small, space_of, tiers
from tests.support.stores import settings
from tests.support.waiting import eventually

import kvdepot
from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey
from kvdepot.daemon.server.daemon import Daemon
from kvdepot.daemon.server.listener import Listener
from kvdepot.depot import Depot
from kvdepot.store.open import open_store
from kvdepot.store.store import Store

WAIT_S = 20.0


@contextmanager
def served(folder: Path, **given: Any) -> Iterator[tuple[Store, Depot]]:
    """The store of a daemon in this process, and an attached client's view of it."""
    listener = Listener(folder / "depot.sock")
    daemon = Daemon(load(overrides=given), listener)
    listener.listen()
    loop = threading.Thread(target=daemon.run)
    loop.start()
    try:
        with kvdepot.open(f"unix:{folder / 'depot.sock'}") as depot:
            yield daemon.store, depot
    finally:
        daemon.stop()
        loop.join()
        assert daemon.close(WAIT_S)


@pytest.fixture(params=["embedded", "attached"])
def both(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Store, Depot]]:
    """A store, and what a program talks to."""
    given = small(tmp_path / "kv")
    if request.param == "attached":
        with served(tmp_path, **given) as found:
            yield found
    else:
        with open_store(**given) as store:
            yield store, store


def uses(store: Store, keys: Sequence[BlockKey]) -> set[int]:
    inspector = store.inspect()
    hits = inspector.catalog.tree.hits.view
    return {int(hits[row]) for row in inspector.rows(keys)}


def test_a_load_through_a_lease_is_one_use(both: tuple[Store, Depot]) -> None:
    store, depot = both
    keys = prompt(space_of(depot), 1, 4)
    assert all(put(depot, keys))
    before = uses(store, keys)
    with depot.lease(keys) as lease:
        assert all(lease.deliver(lambda arrivals: None))
    assert before == {0}
    assert uses(store, keys) == {1}


@pytest.mark.parametrize("tier", ["dram", "ssd"])
def test_a_get_is_one_use(both: tuple[Store, Depot], tier: str) -> None:
    store, depot = both
    space = space_of(depot)
    keys = prompt(space, 1, 4)
    assert all(put(depot, keys))
    if tier == "ssd":
        assert depot.flush()
        for number in range(2, 12):
            assert all(put(depot, prompt(space, number, 10)))
    assert set(depot.match(keys).tiers) == {tier}
    assert set(tiers(depot, keys)) == {tier}
    assert uses(store, keys) == {1}


def test_read_ahead_sees_what_comes_from_memory(tmp_path: Path) -> None:
    keys = left_on_the_hard_drive(tmp_path, 12)
    with served(tmp_path, **settings(tmp_path)) as (_, depot):
        space_of(depot)
        assert depot.prefetch(keys[:1], WAIT_S).wait(WAIT_S)
        assert tiers(depot, keys[:1]) == ["dram"]
        assert tiers(depot, keys[1:2]) == ["hdd"]
        assert eventually(lambda: depot.stats()["counters"]["hinted"] > 1)
        assert eventually(lambda: depot.match(keys[2:3]).tiers == ("dram",))


def test_a_prompt_that_lies_in_part_in_memory_is_one_read(tmp_path: Path) -> None:
    """Its end does not look like another read that goes on where the first ended."""
    keys = left_on_the_hard_drive(tmp_path, 12)
    with served(tmp_path, **settings(tmp_path)) as (store, depot):
        space_of(depot)
        assert depot.prefetch(keys[:3], WAIT_S).wait(WAIT_S)
        assert tiers(depot, keys[:6]) == ["dram"] * 3 + ["hdd"] * 3
        assert depot.stats()["counters"]["hinted"] == 3
        assert not store.inspect().prefetcher._hints
