"""Changes of residency: whatever happens between two looks, what was told is what is there."""

import random
from pathlib import Path

import numpy as np
from tests.support.small_store import BLOCK, TOKENS, prompt, put, settings, space_of

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.core.keys import as_keys
from kvdepot.store.announce.residency_watch import BELOW, IN_MEMORY, ResidencyWatch
from kvdepot.testing.images import payload_for


def follow(watch: ResidencyWatch, known: dict[BlockKey, int], limit: int = 7) -> None:
    """Take all changes in, as a router would."""
    while (change := watch.take(limit)).seen:
        assert len(change.gone) <= limit and len(change.come) <= limit
        for words, media in zip(change.gone, change.gone_from.tolist(), strict=True):
            key = BlockKey(words.tobytes())
            assert known[key] & media == media
            known[key] &= ~media
        for words, media in zip(change.come, change.come_to.tolist(), strict=True):
            key = BlockKey(words.tobytes())
            assert not known.get(key, 0) & media
            known[key] = known.get(key, 0) | media


def residency(store: kvdepot.Store) -> dict[BlockKey, int]:
    """What a router ought to know."""
    state = store.inspect().state
    with state.lock:
        rows = state.catalog.live_rows()
        keys = as_keys(state.catalog.table.words(rows))
        memory = state.catalog.residency.array[rows] & 1
    return {
        key: BELOW | (IN_MEMORY if here else 0)
        for key, here in zip(keys, memory.tolist(), strict=True)
    }


def test_what_was_told_is_what_is_there_after_random_changes(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with kvdepot.open(**settings(tmp_path / "kv")) as store:
        space, watch = space_of(store), ResidencyWatch(store.inspect().state)
        known: dict[BlockKey, int] = {}
        for _ in range(40):
            keys = prompt(space, rng.randrange(60), rng.randrange(1, 12))
            match rng.randrange(5):
                case 0:
                    store.remove(keys[rng.randrange(len(keys)) :])
                case 1:
                    targets = [bytearray(BLOCK) for _ in keys]
                    store.get_many(keys, targets)
                case 2:
                    with store.lease(keys):
                        store.remove(keys)
                        follow(watch, known)
                case _:
                    put(store, keys)
            if rng.random() < 0.5:
                follow(watch, known)
        assert store.flush()
        follow(watch, known)
        assert {key: media for key, media in known.items() if media} == residency(store)
        assert watch.told == len(residency(store))
        assert not watch.take(7).seen


def test_a_row_that_was_freed_and_used_again_is_another_block(tmp_path: Path) -> None:
    with kvdepot.open(**settings(tmp_path / "kv")) as store:
        space, watch = space_of(store), ResidencyWatch(store.inspect().state)
        known: dict[BlockKey, int] = {}
        first, second = prompt(space, 1, 1), prompt(space, 2, 1)
        put(store, first)
        follow(watch, known)
        row = store.inspect().rows(first)
        store.remove(first)
        put(store, second)
        assert store.inspect().rows(second) == row
        follow(watch, known)
        assert {key: bool(media) for key, media in known.items()} == {
            first[0]: False,
            second[0]: True,
        }


def test_what_is_silenced_is_not_told_again_until_it_has_gone(tmp_path: Path) -> None:
    with kvdepot.open(**settings(tmp_path / "kv")) as store:
        space, watch = space_of(store), ResidencyWatch(store.inspect().state)
        keys = prompt(space, 1, 3)
        put(store, keys)
        change = watch.take(7)
        assert len(change.come) == 3
        watch.silence(change.come_rows[:1], change.come_to[:1])
        assert watch.told == 2
        store.remove(keys)
        change = watch.take(7)
        assert sorted(words.tobytes() for words in change.gone) == sorted(keys[1:])
        put(store, keys)
        assert len(watch.take(7).come) == 3


def test_blocks_on_a_drive_that_is_down_are_not_told(tmp_path: Path) -> None:
    with kvdepot.open(**settings(tmp_path / "kv")) as store:
        space, watch = space_of(store), ResidencyWatch(store.inspect().state)
        known: dict[BlockKey, int] = {}
        keys = prompt(space, 1, 4)
        put(store, keys)
        assert store.flush()
        store.inspect().drop_from_memory(keys[2:])
        follow(watch, known)
        store.inspect().log_volume().health.breaker.failed("pulled", at_once=True)
        assert len(store.match(keys)) == 2
        follow(watch, known)
        assert [bool(known[key]) for key in keys] == [True, True, False, False]
        store.inspect().log_volume().health.breaker.succeeded()
        follow(watch, known)
        assert [known[key] for key in keys] == [IN_MEMORY | BELOW] * 2 + [BELOW] * 2


def test_a_store_of_memory_alone_tells_of_memory_alone() -> None:
    memory = {"capacity": "2MiB", "prefault": False, "huge_pages": "never"}
    with kvdepot.open(dram=memory) as store:
        space, watch = space_of(store), ResidencyWatch(store.inspect().state)
        keys = space.keys(list(range(TOKENS)))
        store.put_many([keys[0]], [payload_for(keys[0], BLOCK)])[0]
        assert np.array_equal(watch.take(7).come_to, [IN_MEMORY])
