"""A head in memory with a flipped bit is found by a check, and never served, nor an exception."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.small_store import prompt, put, space_of, tiers

from kvdepot.core.block import BlockKey
from kvdepot.core.clock import SystemClock
from kvdepot.core.tier import Outcome
from kvdepot.format.record import PAGE, TABLE_OFFSET
from kvdepot.io.files import Files
from kvdepot.store.open import open_store
from kvdepot.store.store import Store
from kvdepot.testing.images import loaded, make_image, make_key, make_load, payload_for
from kvdepot.volumes.log.medium import MountSettings
from kvdepot.volumes.log.tier import LogTier

CHUNK_BYTES_AT = 88
FIELD_BITS = 8 * (TABLE_OFFSET + 8)


@pytest.fixture
def store() -> Iterator[Store]:
    dram = {"capacity": "2MiB", "prefault": False, "huge_pages": "never", "verify": True}
    with open_store(dram=dram) as opened:
        yield opened


def head_of(store: Store, key: BlockKey) -> memoryview:
    seen = store.inspect()
    return seen.memory(0).image(seen.catalog.row(key))


def test_the_highest_bit_of_the_chunk_size(store: Store) -> None:
    (key,) = prompt(space_of(store), 1, 1)
    assert all(put(store, [key]))
    head_of(store, key)[CHUNK_BYTES_AT + 7] ^= 0x80
    assert not store.check(deep=True).ok


def test_every_bit_of_the_fields(store: Store) -> None:
    space = space_of(store)
    (key,) = prompt(space, 1, 1)
    for bit in range(FIELD_BITS):
        assert all(put(store, [key]))
        head = head_of(store, key)
        head[bit // 8] ^= 1 << bit % 8
        store.check(deep=True)
        tiers(store, [key])  # looks at every byte of a hit
        store.remove([key])


def test_a_drive_that_is_given_such_a_block_goes_on(tmp_path: Path) -> None:
    tier = LogTier([tmp_path / "ssd"], Files(), MountSettings(32 << 20, 1 << 20), SystemClock())
    try:
        for bit in range(FIELD_BITS):
            key, other = make_key(2 * bit), make_key(2 * bit + 1)
            images = [make_image(one, payload_for(one, PAGE)) for one in (key, other)]
            images[0][bit // 8] ^= 1 << bit % 8
            places = tier.append(0, images)
            for one, place in zip((key, other), places, strict=True):
                assert place is not None
                wanted = make_load(one, place, PAGE)
                (outcome,), _ = tier.load([wanted], 30.0)
                if outcome is Outcome.OK:
                    assert loaded(wanted) == payload_for(one, PAGE)
            assert outcome is Outcome.OK, "the block beside it"
    finally:
        tier.close()
    again = LogTier([tmp_path / "ssd"], Files(), MountSettings(32 << 20, 1 << 20), SystemClock())
    again.take_contents()
    again.close()
