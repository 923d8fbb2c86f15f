"""What a drive keeps back, so that a full one can still be reclaimed and told of removals."""

from pathlib import Path

import pytest

from kvdepot.codec.record import record_bytes
from kvdepot.core.block import BlockKey
from kvdepot.core.config import load
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.images import make_image, make_key
from kvdepot.tiers.log.drive import Drive

SEGMENT_BYTES = 128 << 10
SEGMENTS = 4


@pytest.fixture
def store(tmp_path: Path) -> Store:
    ssd = {
        "path": str(tmp_path / "drive"),
        "capacity": SEGMENTS * SEGMENT_BYTES,
        "segment": SEGMENT_BYTES,
    }
    dram = {"capacity": 1 << 20, "huge_pages": "never", "prefault": False}
    return assemble(load(overrides={"dram": dram, "ssd": ssd}))


def block(number: int) -> memoryview:
    return make_image(make_key(number), bytes(12_000))


def fill(drive: Drive) -> int:
    """Append blocks until one is refused; how many went in."""
    for number in range(1000):
        if drive.append([block(number)]) == [None]:
            return number
    raise AssertionError("the drive never fills up")


def test_blocks_leave_the_last_spare_segment(store: Store) -> None:
    with store:
        assert store._stock.levels
        drive = store._stock.levels[0].tier.drives[0]
        count = fill(drive)
        assert drive.spare_slots() == 1
        assert count >= (SEGMENTS - 1) * (SEGMENT_BYTES // record_bytes(12_000) - 2)


def test_a_full_drive_still_takes_notes(store: Store) -> None:
    with store:
        ssd = store._stock.levels[0].tier
        assert ssd is not None
        fill(ssd.drives[0])
        removal = ssd.removal(BlockKey(bytes(32)))
        for _ in range(8):
            assert ssd.notebooks[0].remove([removal])


def test_blocks_wait_while_the_spare_segment_is_in_use(store: Store) -> None:
    """Notes or moves have taken it: until one is reclaimed, the rest of it is theirs."""
    with store:
        ssd = store._stock.levels[0].tier
        assert ssd is not None
        drive = ssd.drives[0]
        fill(drive)
        while drive.spare_slots():
            assert ssd.notebooks[0].remove([ssd.removal(BlockKey(bytes(32)))])
        assert drive.append([block(5000)]) == [None]
        assert not drive.has_room(record_bytes(12_000))
        slot = next(s.slot for s in drive.segments.values() if s.sealed)
        assert ssd.carry(0, slot)
        ssd.release(0, slot)
        assert drive.append([block(5000)]) != [None]


def test_a_segment_is_not_reclaimed_before_its_blocks_are_counted(store: Store) -> None:
    with store:
        ssd = store._stock.levels[0].tier
        assert ssd is not None
        drive = ssd.drives[0]
        places: list[int | None] = []
        while len(drive.segments) < 2:
            places += ssd.append(0, [block(len(places))])
        assert not drive.sealed()
        for place in places:
            assert place is not None
            ssd.count(place, 12_000)
        assert len(drive.sealed()) == 1
