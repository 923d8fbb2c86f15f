"""What a drive keeps back, which locks it holds, and what it leaves behind."""

import errno
import logging
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from tests.support.waiting import until

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.core.clock import SystemClock
from kvdepot.core.metadata import MetaEntry, MetaKind
from kvdepot.core.tier import MetaWritten, Outcome, Purpose, segment_of
from kvdepot.errors import FormatError
from kvdepot.format.record import record_bytes
from kvdepot.format.segment import Superblock
from kvdepot.io.breaker import RetryPauses
from kvdepot.io.files import Files
from kvdepot.testing.contract import load, store
from kvdepot.testing.faults import Call, Fail, Fault, FaultyFiles, Stall
from kvdepot.testing.images import (
    STAMPS,
    make_image,
    make_key,
    make_load,
    payload_for,
    removal_of,
)
from kvdepot.testing.power import PowerFiles
from kvdepot.volumes.log.medium import MountSettings
from kvdepot.volumes.log.tier import LogTier

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


def open_tier(
    paths: list[Path],
    files: Files,
    segments: int = SEGMENTS,
    fsync: Literal["always", "flush", "never"] = "flush",
) -> LogTier:
    settings = MountSettings(
        segments * SEGMENT_BYTES, SEGMENT_BYTES, fsync=fsync, pauses=RetryPauses(0.001, 0.01)
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


def test_a_full_drive_still_takes_removals(tier: LogTier) -> None:
    fill(tier)
    before = tier.drive(0).spare_segments
    for number in range(8):
        assert tier.put_meta(removal_of(make_key(number))) == MetaWritten(1, 1)
    assert tier.drive(0).spare_segments == before, "they take no segment"


def test_a_removal_is_recorded_on_a_disk_without_room(tier: LogTier, files: FaultyFiles) -> None:
    """The room of the metadata log is reserved when it is written anew."""
    assert tier.put_meta(removal_of(make_key(0))).have
    files.add(Fault(frozenset({Call.ALLOCATE, Call.RUN_WRITE}), Fail(errno.ENOSPC), times=None))
    assert tier.append(0, [block(1)]) == [None]
    for number in range(1, 8):
        assert tier.put_meta(removal_of(make_key(number)), 5.0) == MetaWritten(1, 1)
    assert len(tier.drives[0].metadata.known.tombstones) == 8


def test_blocks_wait_while_the_spare_segment_is_in_use(tier: LogTier) -> None:
    """Moves have taken it: until one is reclaimed, the rest of it is theirs."""
    fill(tier)
    for number in range(100):
        if not tier.drive(0).spare_segments:
            break
        assert tier.append(0, [block(9000 + number)], Purpose.MOVE) != [None]
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
    caplog.set_level(logging.INFO, "kvdepot.volumes")
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
    caplog.set_level(logging.INFO, "kvdepot.volumes")
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


def test_a_block_that_is_being_written_keeps_its_file_while_the_drive_goes(
    tmp_path: Path, files: FaultyFiles
) -> None:
    tier = open_tier([tmp_path / "first", tmp_path / "second"], files)
    on_second(tier, 1)
    stall = Stall()
    fault = files.add(
        Fault(Call.RUN_WRITE, stall, where=lambda operation: "second" in operation.path)
    )
    places: list[int | None] = []
    writer = threading.Thread(target=lambda: places.extend(tier.append(1, [block(2)])))
    writer.start()
    until(lambda: fault.hits == 1)
    retire = threading.Thread(target=tier.retire, args=[1])
    retire.start()
    until(lambda: tier.drive(1).retired)
    tier.start_drain(1)  # waits for what has the drive's lock
    assert list((tmp_path / "second").glob("segment-*")), "removed under a write"
    stall.release()
    writer.join()
    retire.join()
    assert None not in places and not list((tmp_path / "second").glob("segment-*"))
    assert tier.flush()
    tier.close()


@pytest.mark.parametrize("call", [Call.WRITE, Call.SYNC])
def test_a_removal_that_is_being_recorded_while_a_drive_goes_is_on_the_other(
    call: Call, tmp_path: Path, files: FaultyFiles
) -> None:
    paths = [tmp_path / "first", tmp_path / "second"]
    tier = open_tier(paths, files)
    (place,) = tier.append(0, [block(1)])
    assert place is not None
    tier.count(place, 12_000)
    assert tier.put_meta(removal_of(make_key(3)), 5.0) == MetaWritten(2, 2)
    stall = Stall()
    fault = files.add(
        Fault(call, stall, where=lambda one: "second" in one.path and "metadata" in one.path)
    )
    told: list[MetaWritten] = []
    removal = removal_of(make_key(1))
    remover = threading.Thread(target=lambda: told.append(tier.put_meta(removal, 5.0)))
    remover.start()
    until(lambda: fault.hits == 1)
    retire = threading.Thread(target=tier.retire, args=[1])
    retire.start()
    stall.release()
    remover.join()
    retire.join()
    assert told[0].have and tier.drive(1).retired
    assert tier.put_meta(removal_of(make_key(2))) == MetaWritten(1, 1), "it is not asked any more"
    tier.close()
    again = open_tier(paths[:1], FaultyFiles())
    assert not len(again.take_contents().words)
    again.close()


def test_what_only_the_leaving_drive_knows_stays_with_the_others(
    tmp_path: Path, files: FaultyFiles
) -> None:
    """The first could not record the removal; the second has, and is given back."""
    paths = [tmp_path / "first", tmp_path / "second"]
    tier = open_tier(paths, files)
    (place,) = tier.append(0, [block(1)])
    assert place is not None
    tier.count(place, 12_000)
    assert tier.flush()
    files.add(Fault(Call.WRITE, Fail(errno.EIO), times=None, where=lambda one: "first" in one.path))
    assert tier.put_meta(removal_of(make_key(1))) == MetaWritten(1, 2)
    assert tier.behind() == [tier.drives[0]]
    assert not tier.retire(1), "no other drive has taken what it knows"
    assert not tier.drive(1).retired
    files.clear()

    def is_up() -> bool:
        tier.probe(0)  # as the watchdog does
        return tier.is_up(0)

    until(is_up)
    assert tier.retire(1)
    tier.close()
    again = open_tier(paths[:1], FaultyFiles())
    assert not len(again.take_contents().words)
    again.close()


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


def test_metadata_can_be_read_while_other_is_written(tier: LogTier) -> None:
    """The answer is a copy, of one moment."""
    for number in range(50):
        assert tier.put_meta([described(number)]).have
    failed: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                assert len(tier.metadata().values(MetaKind.NAMESPACE)) >= 50
        except (RuntimeError, AssertionError) as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(50, 400):
        assert tier.put_meta([described(number)]).have
    stop.set()
    reader.join()
    assert not failed
    known = tier.metadata()
    known.add(described(9000))
    assert len(tier.metadata().values(MetaKind.NAMESPACE)) == 400


def described(number: int) -> MetaEntry:
    return MetaEntry(MetaKind.NAMESPACE, number.to_bytes(8, "big"), STAMPS.next(), b"{}")


@pytest.mark.parametrize("fsync", ["flush", "always"])
def test_metadata_that_a_drive_could_not_take_is_brought_later(
    fsync: Literal["flush", "always"], tmp_path: Path, files: FaultyFiles
) -> None:
    paths = [tmp_path / "first", tmp_path / "second"]
    tier = open_tier(paths, files, fsync=fsync)
    on_second(tier, 1)
    files.add(
        Fault(Call.WRITE, Fail(errno.EIO), times=None, where=lambda one: "second" in one.path)
    )
    assert tier.put_meta(removal_of(make_key(1)), 5.0) == MetaWritten(1, 2)
    assert tier.behind() == [tier.drives[1]]
    files.clear()

    def has_caught_up() -> bool:
        tier.probe(1)
        return not tier.behind()

    until(has_caught_up)
    tier.close()
    again = open_tier(paths[1:], FaultyFiles())
    assert not len(again.take_contents().words)
    again.close()


def test_a_removed_description_is_not_on_the_disk(tmp_path: Path, files: FaultyFiles) -> None:
    secret = b'{"tenant": "confidential-client"}'
    tier = open_tier([tmp_path / "drive"], files)
    entry = MetaEntry(MetaKind.NAMESPACE, b"namespac", STAMPS.next(), secret)
    assert tier.put_meta([entry, described(1)], 5.0).have
    assert on_disk(tmp_path, secret)
    assert tier.put_meta([MetaEntry(entry.kind, entry.name, STAMPS.next(), None)], 5.0).have
    assert not on_disk(tmp_path, secret)
    tier.close()
    again = open_tier([tmp_path / "drive"], FaultyFiles())
    assert list(again.metadata().values(MetaKind.NAMESPACE)) == [described(1).name]
    again.close()
    assert not on_disk(tmp_path, secret)


def on_disk(folder: Path, text: bytes) -> bool:
    return any(text in file.read_bytes() for file in folder.rglob("*") if file.is_file())


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


def test_a_store_of_an_older_format_is_refused_and_not_touched(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    superblock = Superblock("6a5ad9c8-5a8e-4d2c-9f5e-0d3f1f6f3c11", 1 << 20, format=1)
    written = {
        "superblock": superblock.pack(),
        "segment-000000.kvs": bytes(range(256)) * 4096,
        "removals": b"KVREMOV1" + bytes(56),
        "lock": b"1\n",
    }
    for name, content in written.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)
    with pytest.raises(FormatError, match="store of format 1") as refused:
        kvdepot.open(dram="2MiB", ssd={"path": str(folder), "capacity": "16MiB"})
    assert "remove the folder" in refused.value.hint
    left = {one.name: one.read_bytes() for one in folder.iterdir()}
    left["lock"] = written["lock"]  # it has the process that looked
    assert left == written
