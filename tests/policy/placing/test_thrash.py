"""Promotion rests while it only pushes out what would be hit; selective writing looks ahead."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.store_contract import prompt, put, space_of, tiers
from tests.support.stores import blocks_in, counter, settings

import kvdepot
from kvdepot.core.block import BlockKey, CopyState
from kvdepot.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The ssd holds some 90 blocks, the hdd all."""
    with kvdepot.open(**settings(tmp_path)) as opened:
        yield opened
        assert opened.admin.check().ok


def read(store: Store, prompts: list[list[BlockKey]]) -> None:
    for keys in prompts:
        assert None not in tiers(store, keys)
        assert store.flush()
        store.inspect().drop_from_memory()


def stored(store: Store, prompts: int) -> list[list[BlockKey]]:
    """Prompts of ten blocks, on the hard drives only."""
    store.volumes.set_write_mode("hdd", "pass-through")
    everything = [prompt(space_of(store), number, 10) for number in range(prompts)]
    for keys in everything:
        assert all(put(store, keys))
        assert store.flush()
        store.inspect().drop_from_memory()
    store.volumes.set_write_mode("hdd", "write-back")
    return everything


def thrashes(store: Store) -> bool:
    return bool(store.stats()["tiers"]["ssd"]["thrashing"])


class TestThrashing:
    def test_promotion_rests_and_comes_back(self, store: Store) -> None:
        """Users return one after the other, more than fit; then fewer do."""
        everything = stored(store, 17)
        loops = 0
        while not thrashes(store) and loops < 40:
            read(store, everything[:16])
            loops += 1
        assert thrashes(store)

        written, held = counter(store, "written"), counter(store, "held_below")
        hits = counter(store, "get_ssd")
        read(store, everything[:16])
        assert counter(store, "held_below") - held > 50
        assert counter(store, "written") - written <= 30, "but for a prompt of sixteen"
        assert counter(store, "get_ssd") - hits > 40, "what is there is hit now"

        for _ in range(100):
            if not thrashes(store):
                break
            read(store, everything[:4])
        assert not thrashes(store)
        read(store, everything[16:])
        store.inspect().drop_from_memory()
        assert tiers(store, everything[16]) == ["ssd"] * 10

    def test_users_who_fit_never_thrash(self, store: Store) -> None:
        everything = stored(store, 6)
        for _ in range(25):
            read(store, everything)
        assert not thrashes(store)
        assert counter(store, "held_below") == 0
        assert counter(store, "get_ssd") == 24 * 60

    def test_a_store_with_one_tier_of_files_does_not_watch(self, tmp_path: Path) -> None:
        tree = settings(tmp_path)
        del tree["hdd"]
        with kvdepot.open(**tree) as store:
            keys = prompt(space_of(store), 1, 200)
            assert all(put(store, keys))
            assert not thrashes(store)


class TestHits:
    def test_what_brought_a_block_to_the_ssd_does_not_make_it_warm_there(
        self, store: Store
    ) -> None:
        (keys,) = stored(store, 1)
        ssd, hdd = store.inspect().state.lower_tiers
        read(store, [keys])
        at = np.array(store.inspect().rows(keys))
        assert (ssd.copies.state.array[at] == CopyState.READY).all()
        assert (ssd.hits(at).tolist(), hdd.hits(at).tolist()) == ([0] * 10, [1] * 10)
        read(store, [keys])
        assert (ssd.hits(at).tolist(), hdd.hits(at).tolist()) == ([1] * 10, [2] * 10)


class TestSelective:
    def test_the_second_touch_writes_and_so_does_what_promises_one(self, tmp_path: Path) -> None:
        """Every session comes back once: after a while its new blocks need not wait for that."""
        tree = settings(tmp_path, ssd={"write_mode": "write-through-selective"})
        del tree["hdd"]
        with kvdepot.open(**tree) as store:
            space = space_of(store)
            first = prompt(space, 0, 2)
            assert all(put(store, first))
            assert blocks_in(store, "ssd") == 0
            assert None not in tiers(store, first)
            assert store.flush()
            assert blocks_in(store, "ssd") == 2
            for number in range(1, 100):
                keys = prompt(space, number, 2)
                assert all(put(store, keys))
                assert None not in tiers(store, keys)
            last = prompt(space, 100, 2)
            assert all(put(store, last))
            assert store.flush()
            assert all(
                store.inspect().lower().copies.ready(row) for row in store.inspect().rows(last)
            )

    def test_what_never_came_back_promises_nothing(self, tmp_path: Path) -> None:
        tree = settings(tmp_path, ssd={"write_mode": "write-through-selective"})
        del tree["hdd"]
        with kvdepot.open(**tree) as store:
            space = space_of(store)
            for number in range(400):
                assert all(put(store, prompt(space, number, 2)))
            assert store.flush().complete
            assert counter(store, "written") == 0
