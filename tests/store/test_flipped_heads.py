"""A head in memory with a flipped bit is found by a check, and never served, nor an exception."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.small_store import prompt, put, space_of, tiers

from kvdepot.core.block import BlockKey
from kvdepot.core.clock import StampClock, SystemClock, WallClock
from kvdepot.core.volume import NO_PLACE, Outcome, VolumeContext
from kvdepot.format.record import PAGE, TABLE_OFFSET
from kvdepot.io.files import Files
from kvdepot.store.open import open_store
from kvdepot.store.store import Store
from kvdepot.testing.contract import put as put_records
from kvdepot.testing.contract import read
from kvdepot.testing.images import Reads, make_key, make_records, payload_for
from kvdepot.volumes.log.medium import MountSettings
from kvdepot.volumes.log.volume import LogVolume

CHUNK_BYTES_AT = 88
FIELD_BITS = 8 * (TABLE_OFFSET + 8)


@pytest.fixture
def store() -> Iterator[Store]:
    dram = {"capacity": "2MiB", "prefault": False, "huge_pages": "never", "verify": True}
    with open_store(dram=dram) as opened:
        yield opened


def head_of(store: Store, key: BlockKey) -> memoryview:
    seen = store.inspect()
    return seen.memory(0).image(seen.catalog.table.find(key))


def test_the_highest_bit_of_the_chunk_size(store: Store) -> None:
    (key,) = prompt(space_of(store), 1, 1)
    assert all(put(store, [key]))
    head_of(store, key)[CHUNK_BYTES_AT + 7] ^= 0x80
    assert not store.admin.check(deep=True).ok


def test_every_bit_of_the_fields(store: Store) -> None:
    space = space_of(store)
    (key,) = prompt(space, 1, 1)
    for bit in range(FIELD_BITS):
        assert all(put(store, [key]))
        head = head_of(store, key)
        head[bit // 8] ^= 1 << bit % 8
        store.admin.check(deep=True)
        tiers(store, [key])  # looks at every byte of a hit
        store.remove([key])


def test_a_volume_that_is_given_such_a_block_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path / "ssd") as volume:
        for bit in range(FIELD_BITS):
            keys = [make_key(2 * bit), make_key(2 * bit + 1)]
            records = make_records(keys, PAGE)
            records.images[0][bit // 8] ^= 1 << bit % 8
            reads = Reads()
            for key, place in zip(keys, put_records(volume, records), strict=True):
                assert place != NO_PLACE
                reads.add(key, place, PAGE)
            outcomes = read(volume, reads)
            assert outcomes[1] == Outcome.OK, "the block beside it"
            for index, outcome in enumerate(outcomes):
                if outcome == Outcome.OK:
                    assert reads.payload(index) == payload_for(keys[index], PAGE)
    with opened(tmp_path / "ssd") as volume:
        volume.contents(None)


@contextmanager
def opened(path: Path) -> Iterator[LogVolume]:
    files, clock = Files(), SystemClock()
    context = VolumeContext(clock, WallClock(), StampClock(WallClock()))
    volume = LogVolume(path, files, MountSettings(32 << 20, 1 << 20), context, [])
    yield volume
    volume.close()
    files.close()
