"""What a drive keeps back, which locks it holds, and what it leaves behind."""

import errno
import logging
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import until

from kvdepot.codec.record import record_bytes
from kvdepot.core.block import BlockKey
from kvdepot.core.clock import SystemClock
from kvdepot.core.tier import Outcome, Purpose, segment_of
from kvdepot.testing.contract import load, store
from kvdepot.testing.faults import Call, Fail, Fault, FaultyFiles, Stall
from kvdepot.testing.images import make_image, make_key, make_load, payload_for
from kvdepot.testing.power import PowerFiles
from kvdepot.tiers.device.breaker import RetryPauses
from kvdepot.tiers.device.files import Files
from kvdepot.tiers.log.medium import MountSettings
from kvdepot.tiers.log.tier import LogTier

SEGMENT_BYTES = 128 << 10
SEGMENTS = 4


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def tier(tmp_path: Path, files: FaultyFiles) -> Iterator[LogTier]:
    opened = open_tier([tmp_path / "drive"], files)
    yield opened
    files.clear()
    opened.close()


def open_tier(paths: list[Path], files: Files, segments: int = SEGMENTS) -> LogTier:
    settings = MountSettings(
        segments * SEGMENT_BYTES, SEGMENT_BYTES, pauses=RetryPauses(0.001, 0.01)
    )
    return LogTier(paths, files, settings, SystemClock())


def block(number: int) -> memoryview:
    return make_image(make_key(number), bytes(12_000))


def fill(tier: LogTier) -> int:
    """Append blocks until one is refused; how many went in."""
    for number in range(1000):
        (place,) = tier.append(0, [block(number)])
        if place is None:
            return number
        tier.count(place, 12_000)
    raise AssertionError("the drive never fills up")


def test_blocks_leave_the_last_spare_segment(tier: LogTier) -> None:
    count = fill(tier)
    assert tier.drive(0).spare_segments == 1
    assert count >= (SEGMENTS - 1) * (SEGMENT_BYTES // record_bytes(12_000) - 2)


def test_a_full_drive_still_takes_notes(tier: LogTier) -> None:
    fill(tier)
    for _ in range(8):
        assert tier.erase([tier.removal(BlockKey(bytes(32)))]) == []


def test_blocks_wait_while_the_spare_segment_is_in_use(tier: LogTier) -> None:
    """Notes or moves have taken it: until one is reclaimed, the rest of it is theirs."""
    fill(tier)
    while tier.drive(0).spare_segments:
        assert tier.erase([tier.removal(BlockKey(bytes(32)))]) == []
    assert tier.append(0, [block(5000)]) == [None]
    assert not tier.has_room(0, record_bytes(12_000))
    assert tier.release(0, tier.segments(0)[0].slot)
    assert tier.append(0, [block(5000)]) != [None]


def test_with_less_room_an_empty_segment_goes_before_one_with_blocks(
    tmp_path: Path, files: FaultyFiles
) -> None:
    """One that was begun when the process was killed is the newest, and has nothing to lose."""
    tier = open_tier([tmp_path / "drive"], files)
    count = fill(tier)
    assert len(tier.segments(0, reclaimable=False)) == SEGMENTS - 1
    files.add(Fault(Call.RUN_WRITE, Fail(errno.EIO)))
    assert tier.append(0, [make_image(make_key(5000), bytes(50_000))], Purpose.MOVE) == [None]
    assert len(tier.segments(0, reclaimable=False)) == SEGMENTS
    tier.close()
    again = open_tier([tmp_path / "drive"], FaultyFiles(), SEGMENTS - 1)
    assert len(again.take_contents().words) == count
    again.close()


def test_a_segment_is_not_reclaimed_before_its_blocks_are_counted(tier: LogTier) -> None:
    places: list[int | None] = []
    while len(tier.segments(0, reclaimable=False)) < 2:
        places += tier.append(0, [block(len(places))])
    assert not tier.segments(0)
    for place in places:
        assert place is not None
        tier.count(place, 12_000)
    assert len(tier.segments(0)) == 1


def test_blocks_are_appended_while_others_are_made_durable(
    tier: LogTier, files: FaultyFiles
) -> None:
    stall = Stall()
    store(tier, [make_key(1)])
    fault = files.add(Fault(Call.SYNC, stall))
    flush = threading.Thread(target=tier.flush)
    flush.start()
    while not fault.hits:
        flush.join(0.01)
    (place,) = store(tier, [make_key(2)])
    assert flush.is_alive()
    stall.release()
    flush.join()
    assert load(tier, make_key(2), place)


def open_files(path: Path) -> list[str]:
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_is(fd)]
    return [name for name in names if name.startswith(str(path))]


def fd_is(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def test_a_retired_drive_has_no_file_open(tmp_path: Path, files: FaultyFiles) -> None:
    tier = open_tier([tmp_path / "first", tmp_path / "second"], files)
    (place,) = tier.append(1, [block(1)])
    assert place is not None
    tier.count(place, 12_000)
    assert open_files(tmp_path / "second")
    tier.start_drain(1)
    assert tier.append(1, [block(2)]) == [None]
    tier.retire(1)
    assert not open_files(tmp_path / "second")
    late = make_load(make_key(1), place, 12_000)
    assert tier.load([late], 1.0)[0] == [Outcome.FAILED]
    assert tier.flush()
    assert (tier.drive(1).retired, tier.drive(1).spare_segments) == (True, 0)
    tier.close()


def test_a_read_that_comes_after_its_file_is_closed_fails(
    tmp_path: Path, files: FaultyFiles
) -> None:
    tier = open_tier([tmp_path / "first", tmp_path / "second"], files)
    (place,) = tier.append(1, [block(1)])
    assert place is not None
    stall, outcomes = Stall(), []
    fault = files.add(Fault(Call.RUN_READ, stall))
    asked = [make_load(make_key(1), place, 12_000)]
    reader = threading.Thread(target=lambda: outcomes.extend(tier.load(asked, 30.0)[0]))
    reader.start()
    while not fault.hits:
        reader.join(0.01)
    tier.retire(1)
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    stall.release()
    reader.join()
    os.close(other)
    assert outcomes == [Outcome.FAILED]
    tier.close()


def test_a_drive_that_goes_down_and_comes_back_is_logged_once_each(
    tier: LogTier, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvdepot.tiers")
    files.add(Fault(Call.RUN_WRITE, Fail(errno.EROFS), times=2))
    assert tier.append(0, [block(1), block(2)]) == [None, None]
    while not tier.is_up(0):
        tier.probe(0)
    said = [record.getMessage() for record in caplog.records]
    label = tier.drive(0).label
    assert said == [
        f"{label}: the drive is down: Read-only file system",
        f"{label}: the drive works again",
    ]


def test_recovery_after_a_crash_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvdepot.tiers")
    pid = os.fork()
    if pid == 0:
        try:
            store(open_tier([tmp_path / "drive"], FaultyFiles()), [make_key(1)])
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    open_tier([tmp_path / "drive"], FaultyFiles()).close()
    (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "ssd: 1 blocks in 1 segments" in said.getMessage()
    assert said.getMessage().endswith("1 were scanned after a crash")


def on_second(tier: LogTier, number: int) -> list[int]:
    """Store a block on the second drive."""
    (place,) = tier.append(1, [block(number)])
    assert place is not None
    tier.count(place, 12_000)
    return [place]


def test_a_note_that_is_being_written_keeps_its_file_while_the_drive_goes(
    tmp_path: Path, files: FaultyFiles
) -> None:
    tier = open_tier([tmp_path / "first", tmp_path / "second"], files)
    on_second(tier, 1)
    stall = Stall()
    fault = files.add(
        Fault(Call.RUN_WRITE, stall, where=lambda operation: "second" in operation.path)
    )
    failed: list[int] = []
    removal = tier.removal(make_key(1))
    remover = threading.Thread(target=lambda: failed.extend(tier.erase([removal])))
    remover.start()
    until(lambda: fault.hits == 1)
    retire = threading.Thread(target=tier.retire, args=[1])
    retire.start()
    until(lambda: tier.drive(1).retired)
    tier.start_drain(1)  # waits for what has the drive's lock
    assert list((tmp_path / "second").glob("segment-*")), "removed under a write"
    assert not tier.erase([removal]), "a removal meets a drive that is about to go"
    stall.release()
    remover.join()
    retire.join()
    assert not failed and not list((tmp_path / "second").glob("segment-*"))
    assert tier.flush()
    tier.close()


def test_a_reclaim_may_end_after_its_drive_has_gone(tmp_path: Path, files: FaultyFiles) -> None:
    """As when a removal makes room on a drive whose drain ends meanwhile."""
    tier = open_tier([tmp_path / "first", tmp_path / "second"], files)
    (place,) = on_second(tier, 1)
    drive = tier.drives[1]
    segment = drive.segments[segment_of(place)]
    tier.retire(1)
    drive.segments[segment.slot] = segment  # looked up a moment ago
    image = make_image(make_key(1), bytes(12_000))
    assert tier.read_records([make_key(1)], [place], [image]) == [False]
    del drive.segments[segment.slot]
    drive.release(segment.slot)
    assert tier.release(1, segment.slot)
    tier.close()


def test_descriptions_can_be_read_while_others_are_written(tier: LogTier) -> None:
    spaces = tier.drives[0].notes.spaces

    class Growing(dict[bytes, tuple[int, bytes]]):
        def items(self) -> Any:
            for pair in super().items():
                spaces[bytes([100 + len(spaces)] * 8)] = (1, b"{}")
                yield pair

    spaces = tier.drives[0].notes.spaces = Growing({b"\1" * 8: (1, b"{}")})
    assert b"\1" * 8 in tier.descriptions()


def test_a_disk_without_room_is_read_as_ever(
    tier: LogTier, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    (place,) = store(tier, [make_key(1)])
    fault = files.add(Fault(Call.RUN_WRITE, Fail(errno.ENOSPC), times=None))
    for number in range(2, 40):
        assert tier.append(0, [block(number)]) == [None]
        assert tier.is_up(0)
        assert load(tier, make_key(1), place)
    assert fault.hits, "it is asked now and then"
    assert sum("no room" in line for line in caplog.messages) == 1
    assert [each["full"] for each in tier.describe_drives()] == [True]
    files.clear()
    until(lambda: tier.drive(0).takes_blocks)
    assert tier.append(0, [block(50)]) != [None]
    assert [each["full"] for each in tier.describe_drives()] == [False]


def test_two_keys_may_share_a_word(tmp_path: Path, files: FaultyFiles) -> None:
    first = make_key(1)
    second = BlockKey(first[:24] + bytes(8))
    other_tag = BlockKey(bytes(8) + first[8:])
    opened = open_tier([tmp_path / "a", tmp_path / "b"], files)
    for drive, key in enumerate([first, second, other_tag, first]):
        (location,) = opened.append(drive % 2, [make_image(key, payload_for(key, 12_000))])
        assert location is not None
    opened.close()
    again = open_tier([tmp_path / "a", tmp_path / "b"], FaultyFiles())
    found = again.take_contents()
    assert sorted(row.tobytes() for row in found.words) == sorted([first, second, other_tag])
    for row, place in zip(found.words, found.locations.tolist(), strict=True):
        assert again.load([make_load(BlockKey(row.tobytes()), place, 12_000)], 5.0)[0] == [
            Outcome.OK
        ]
    again.close()


@pytest.mark.parametrize("what", ["wipe", "header"])
def test_a_slot_is_not_used_again_before_a_late_write_has_arrived(
    what: str, tmp_path: Path
) -> None:
    files = PowerFiles(random.Random(1), "python")
    tier = open_tier([tmp_path / "drive"], files)
    drive = tier.drives[0]
    try:
        fill(tier)
        oldest = tier.segments(0)[0].slot
        if what == "wipe":
            files.late = 1.0
            assert tier.release(0, oldest)
        else:
            assert tier.release(0, oldest)
            files.late = 1.0
            assert tier.append(0, [block(0)]) == [None]
        (slot,) = drive.parting
        files.late = 0.0
        until(lambda: drive.breaker.allows())
        assert not drive.try_to_write(), "the kernel still has the page"
        assert slot not in drive.free and slot not in drive.segments
        for late in list(files._late):
            assert late.wait(1.0)
        assert drive.try_to_write()
        assert slot in drive.free
    finally:
        tier.close()
