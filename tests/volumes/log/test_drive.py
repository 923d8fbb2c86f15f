"""What a log volume keeps back, which locks it holds, and what it leaves behind."""

import errno
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from tests.support.small_store import settings
from tests.support.volumes import open_log
from tests.support.waiting import until

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.core.metadata import OWN_KINDS, MetaEntry, MetaKind
from kvdepot.core.volume import (
    NO_PLACE,
    Outcome,
    PendingRead,
    Priority,
    Purpose,
    VolumeContext,
    segment_of,
)
from kvdepot.format.record import record_bytes
from kvdepot.io.breaker import RetryPauses
from kvdepot.io.files import Files
from kvdepot.store.shared_metadata import Written
from kvdepot.store.volume_set import VolumeSet
from kvdepot.testing.contract import contents_of, load, put, store
from kvdepot.testing.fakes import CONTEXT
from kvdepot.testing.faults import Call, Fail, Fault, FaultyFiles, Stall
from kvdepot.testing.images import STAMPS, Reads, make_key, make_records, removal_of
from kvdepot.testing.power import PowerFiles
from kvdepot.volumes.log.volume import LogVolume

SEGMENT_BYTES = 128 << 10
SEGMENTS = 4
NBYTES = 12_000
Fsync = Literal["always", "flush", "never"]
OpenSet = Callable[..., VolumeSet]


def open_volume(
    path: Path,
    files: Files,
    segments: int = SEGMENTS,
    fsync: Fsync = "flush",
    context: VolumeContext = CONTEXT,
) -> LogVolume:
    return open_log(
        path, files, segments=segments, segment_bytes=SEGMENT_BYTES, context=context,
        fsync=fsync, pauses=RetryPauses(0.001, 0.01),
    )  # fmt: skip


@pytest.fixture
def files() -> Iterator[FaultyFiles]:
    files = FaultyFiles()
    yield files
    files.clear()
    files.close()


@pytest.fixture
def volume(tmp_path: Path, files: FaultyFiles) -> Iterator[LogVolume]:
    opened = open_volume(tmp_path / "drive", files)
    yield opened
    files.clear()
    opened.close()


@pytest.fixture
def open_set(tmp_path: Path, files: FaultyFiles) -> Iterator[OpenSet]:
    """Opens volumes in folders with these names, which share their metadata."""
    opened: list[VolumeSet] = []

    def open_one(name: str, fsync: Fsync, context: VolumeContext) -> LogVolume:
        return open_volume(tmp_path / name, files, fsync=fsync, context=context)

    def open_named(*names: str, fsync: Fsync = "flush") -> VolumeSet:
        opened.append(VolumeSet(CONTEXT))
        opened[-1].open_all([("ssd", name, partial(open_one, name, fsync)) for name in names])
        return opened[-1]

    yield open_named
    files.clear()
    for volumes in opened:
        volumes.close()


def test_a_volume_that_deletes_its_files_has_not_lost_them(
    volume: LogVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As seen by another thread, which looks whether somebody else has deleted one."""
    store(volume, [make_key(1)])
    files, medium = volume.segment_set.files, volume.segment_set.medium
    sync_directory, seen = files.sync_directory, []

    def sync(fd: int) -> None:
        seen.append(medium.intact(every_slot=True))
        sync_directory(fd)

    monkeypatch.setattr(files, "sync_directory", sync)
    volume.set_limits(0, may_write=False)
    assert seen and all(seen)


def test_a_volume_that_was_given_back_takes_no_more_metadata(
    tmp_path: Path, files: FaultyFiles
) -> None:
    volume = open_volume(tmp_path / "drive", files)
    assert volume.put_meta(removal_of(make_key(1)))
    volume.set_limits(0, may_write=False)
    volume.put_meta(removal_of(make_key(2)))  # by another thread, which does not know yet
    volume.close()
    again = open_volume(tmp_path / "drive", files)
    assert [one for one in again.contents(None).metadata if one.kind not in OWN_KINDS] == []
    again.close()


def fill(volume: LogVolume) -> int:
    """Append blocks until one is refused; how many went in."""
    for number in range(1000):
        if put(volume, make_records([make_key(number)], NBYTES)) == [NO_PLACE]:
            return number
    raise AssertionError("the drive never fills up")


def begin_read(volume: LogVolume, reads: Reads) -> PendingRead:
    return volume.read(reads.rows, Priority.FOREGROUND, 30.0)


def test_blocks_leave_the_last_spare_segment(volume: LogVolume) -> None:
    count = fill(volume)
    assert volume.facts().spare_segments == 1
    assert count >= (SEGMENTS - 1) * (SEGMENT_BYTES // record_bytes(NBYTES) - 2)


def test_a_full_drive_still_takes_removals(volume: LogVolume) -> None:
    fill(volume)
    before = volume.facts().spare_segments
    assert all(volume.put_meta(removal_of(make_key(number))) for number in range(8))
    assert volume.facts().spare_segments == before, "they take no segment"


def test_a_removal_is_recorded_on_a_disk_without_room(
    volume: LogVolume, files: FaultyFiles
) -> None:
    """The room of the metadata log is reserved when it is written anew."""
    assert volume.put_meta(removal_of(make_key(0)))
    files.add(Fault(frozenset({Call.ALLOCATE, Call.RUN_WRITE}), Fail(errno.ENOSPC), times=None))
    assert put(volume, make_records([make_key(1)], NBYTES)) == [NO_PLACE]
    for number in range(1, 8):
        assert volume.put_meta(removal_of(make_key(number))) and volume.sync(5.0)
    assert len(volume.contents(None).metadata) == 8


def test_blocks_wait_while_the_spare_segment_is_in_use(volume: LogVolume) -> None:
    """Moves have taken it: until one is released, the rest of it is theirs."""
    fill(volume)
    for number in range(9000, 9100):
        if not volume.facts().spare_segments:
            break
        moved = make_records([make_key(number)], NBYTES)
        assert volume.append(moved.rows, Purpose.MOVE)[0] != NO_PLACE
    block = make_records([make_key(5000)], NBYTES)
    assert put(volume, block) == [NO_PLACE]
    assert volume.facts().room_bytes < record_bytes(NBYTES)
    assert volume.release(int(volume.segments().segments[0]))
    assert put(volume, block) != [NO_PLACE]


def test_with_less_room_an_empty_segment_goes_before_one_with_blocks(
    tmp_path: Path, files: FaultyFiles, volume: LogVolume
) -> None:
    """One that was begun when the process was killed is the newest, and has nothing to lose."""
    count = fill(volume)
    assert len(volume.segments().segments) == SEGMENTS - 1
    files.add(Fault(Call.RUN_WRITE, Fail(errno.EIO)))
    moved = make_records([make_key(5000)], 50_000)
    assert volume.append(moved.rows, Purpose.MOVE)[0] == NO_PLACE
    assert len(volume.segments().segments) == SEGMENTS
    volume.close()
    again = open_volume(tmp_path / "drive", files, SEGMENTS - 1)
    assert len(contents_of(again)) == count
    again.close()


def test_a_segment_is_not_reclaimed_before_its_blocks_are_in_the_index(tmp_path: Path) -> None:
    with kvdepot.open(**settings(tmp_path / "drive")) as opened:
        inspector = opened.inspect()
        lower, volume = inspector.lower(), inspector.log_volume()
        reclaimer = inspector.drives.rooms[lower].reclaimer
        lower.appending[0] += 1  # as a thread that copies blocks to the volume
        number = 0
        while not volume.segments().sealed.any():
            store(volume, [make_key(number)])
            number += 1
        assert not reclaimer.reclaim(0)
        lower.appending[0] -= 1  # it has entered none of them
        assert reclaimer.reclaim(0)


def test_blocks_are_appended_while_others_are_made_durable(
    volume: LogVolume, files: FaultyFiles
) -> None:
    stall = Stall()
    store(volume, [make_key(1)])
    fault = files.add(Fault(Call.SYNC, stall))
    sync = threading.Thread(target=volume.sync, args=[30.0])
    sync.start()
    until(lambda: fault.hits == 1)
    (place,) = store(volume, [make_key(2)])
    assert sync.is_alive()
    stall.release()
    sync.join()
    assert load(volume, make_key(2), place)


def open_files(path: Path) -> list[str]:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if os.path.islink(link)]
    return [name for name in names if name.startswith(str(path))]


def test_a_volume_that_was_given_back_has_no_file_open(tmp_path: Path, volume: LogVolume) -> None:
    (place,) = store(volume, [make_key(1)], NBYTES)
    volume.put_meta(removal_of(make_key(9)))
    assert open_files(tmp_path / "drive")
    volume.set_limits(None, may_write=False)
    refused = make_records([make_key(2)], NBYTES)
    assert put(volume, refused) == [NO_PLACE]
    volume.set_limits(0, may_write=False)
    assert not list((tmp_path / "drive").glob("segment-*"))
    volume.close()
    assert not open_files(tmp_path / "drive")
    assert volume.facts().spare_segments == volume.facts().capacity_bytes == 0
    late = Reads().add(make_key(1), place, NBYTES)
    assert begin_read(volume, late).result().tolist() == [Outcome.FAILED]
    assert put(volume, refused) == [NO_PLACE]
    assert not volume.put_meta(removal_of(make_key(1)))
    assert volume.maintain(lambda: True) > 0


def test_a_volume_that_was_given_back_is_empty_when_it_is_opened_again(
    tmp_path: Path, volume: LogVolume, files: FaultyFiles
) -> None:
    store(volume, [make_key(1)])
    volume.put_meta([described(1)])
    volume.set_limits(0, may_write=False)
    volume.close()
    again = open_volume(tmp_path / "drive", files)
    found = again.contents(None)
    assert not len(found.words) and not found.metadata
    again.close()


def test_a_read_that_comes_after_its_file_is_closed_fails(
    tmp_path: Path, volume: LogVolume, files: FaultyFiles
) -> None:
    (place,) = store(volume, [make_key(1)], NBYTES)
    stall, outcomes = Stall(), list[int]()
    fault = files.add(Fault(Call.RUN_READ, stall))
    reads = Reads().add(make_key(1), place, NBYTES)
    pending = begin_read(volume, reads)
    reader = threading.Thread(target=lambda: outcomes.extend(pending.result().tolist()))
    reader.start()
    until(lambda: fault.hits == 1)
    volume.set_limits(0, may_write=False)
    volume.close()
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    stall.release()
    reader.join()
    os.close(other)
    assert outcomes == [Outcome.FAILED]


def test_a_drive_that_goes_down_and_comes_back_is_logged_once_each(
    volume: LogVolume, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvdepot.volumes")
    files.add(Fault(Call.RUN_WRITE, Fail(errno.EROFS), times=2))
    assert put(volume, make_records([make_key(1), make_key(2)], NBYTES)) == [NO_PLACE] * 2
    until(lambda: is_up(volume))
    label = volume.facts().label
    assert [record.getMessage() for record in caplog.records] == [
        f"{label}: the volume is down: Read-only file system",
        f"{label}: the volume works again",
    ]


def is_up(volume: LogVolume) -> bool:
    """Whether it works, after a look as the watchdog's."""
    volume.maintain(lambda: False)
    return volume.facts().up


def test_recovery_after_a_crash_is_logged(
    tmp_path: Path, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvdepot.volumes")
    pid = os.fork()
    if pid == 0:
        try:
            store(open_volume(tmp_path / "drive", Files("python")), [make_key(1)])
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    open_volume(tmp_path / "drive", files).close()
    (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert f"{tmp_path / 'drive'}: 1 blocks in 1 segments" in said.getMessage()
    assert said.getMessage().endswith("1 were scanned after a crash")


def test_a_block_that_is_being_written_keeps_its_file_while_the_volume_is_given_back(
    tmp_path: Path, volume: LogVolume, files: FaultyFiles
) -> None:
    store(volume, [make_key(1)])
    stall, block = Stall(), make_records([make_key(2)], NBYTES)
    fault = files.add(Fault(Call.RUN_WRITE, stall))
    places: list[int] = []
    writer = threading.Thread(target=lambda: places.extend(put(volume, block)))
    writer.start()
    until(lambda: fault.hits == 1)
    leaving = threading.Thread(target=volume.set_limits, args=[0], kwargs={"may_write": False})
    leaving.start()
    until(lambda: not volume.facts().capacity_bytes)
    leaving.join(0.05)
    assert list((tmp_path / "drive").glob("segment-*")), "removed under a write"
    stall.release()
    writer.join()
    leaving.join()
    assert NO_PLACE not in places and not list((tmp_path / "drive").glob("segment-*"))


@pytest.mark.parametrize("call", [Call.WRITE, Call.SYNC])
def test_a_removal_that_is_being_recorded_while_a_volume_goes_is_on_the_other(
    call: Call, open_set: OpenSet, files: FaultyFiles
) -> None:
    volumes = open_set("first", "second")
    first, second = volumes.entries
    store(first.volume, [make_key(1)])
    assert volumes.metadata.put(removal_of(make_key(3)), 5.0) == Written(2, 2)
    stall = Stall()
    fault = files.add(
        Fault(call, stall, where=lambda one: "second" in one.path and "metadata" in one.path)
    )
    told: list[Written] = []
    removal = removal_of(make_key(1))
    remover = threading.Thread(target=lambda: told.append(volumes.metadata.put(removal, 5.0)))
    remover.start()
    until(lambda: fault.hits == 1)
    retire = threading.Thread(target=volumes.retire, args=[second])
    retire.start()
    stall.release()
    remover.join()
    retire.join()
    assert told[0].have and second.retired
    assert volumes.metadata.put(removal_of(make_key(2))) == Written(1, 1), (
        "it is not asked any more"
    )
    volumes.close()
    assert not contents_of(open_set("first").entries[0].volume)


def test_what_only_the_leaving_volume_knows_stays_with_the_others(
    open_set: OpenSet, files: FaultyFiles
) -> None:
    """The first could not record the removal; the second has, and is given back."""
    volumes = open_set("first", "second")
    first, second = volumes.entries
    store(first.volume, [make_key(1)])
    assert first.volume.sync(5.0)
    files.add(Fault(Call.WRITE, Fail(errno.EIO), times=None, where=lambda one: "first" in one.path))
    assert volumes.metadata.put(removal_of(make_key(1))) == Written(1, 2)
    assert volumes.metadata.behind() == [first]
    assert not volumes.retire(second), "no other volume has taken what it knows"
    assert not second.retired
    files.clear()
    assert isinstance(first.volume, LogVolume)
    until(partial(is_up, first.volume))
    assert volumes.retire(second)
    volumes.close()
    assert not contents_of(open_set("first").entries[0].volume)


def test_a_release_may_come_after_its_volume_has_gone(volume: LogVolume) -> None:
    """As when a removal makes room on a volume whose drain ends meanwhile."""
    (place,) = store(volume, [make_key(1)], NBYTES)
    volume.set_limits(0, may_write=False)
    volume.release(segment_of(place))
    volume.close()
    volume.release(segment_of(place))
    assert not len(volume.segments().segments)


def test_metadata_can_be_read_while_other_is_written(open_set: OpenSet) -> None:
    """The answers are copies, of one moment."""
    volumes = open_set("drive")
    volume = volumes.entries[0].volume
    for number in range(50):
        assert volumes.metadata.put([described(number)]).have
    failed: list[BaseException] = []
    stop = threading.Event()

    def look() -> None:
        try:
            while not stop.is_set():
                assert len(volumes.metadata.known().values(MetaKind.NAMESPACE)) >= 50
                assert len(volume.contents(None).metadata) >= 50
        except (RuntimeError, AssertionError) as error:
            failed.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(50, 400):
        assert volumes.metadata.put([described(number)]).have
    stop.set()
    reader.join()
    assert not failed
    volumes.metadata.known().add(described(9000))
    assert len(volumes.metadata.values(MetaKind.NAMESPACE)) == 400


def described(number: int) -> MetaEntry:
    return MetaEntry(MetaKind.NAMESPACE, number.to_bytes(8, "big"), STAMPS.next(), b"{}")


@pytest.mark.parametrize("fsync", ["flush", "always"])
def test_metadata_that_a_volume_could_not_take_is_brought_later(
    fsync: Fsync, open_set: OpenSet, files: FaultyFiles
) -> None:
    volumes = open_set("first", "second", fsync=fsync)
    second = volumes.entries[1]
    store(second.volume, [make_key(1)])
    files.add(
        Fault(Call.WRITE, Fail(errno.EIO), times=None, where=lambda one: "second" in one.path)
    )
    assert volumes.metadata.put(removal_of(make_key(1)), 5.0) == Written(1, 2)
    assert volumes.metadata.behind() == [second]
    files.clear()

    def has_caught_up() -> bool:
        second.volume.maintain(lambda: False)  # as the watchdog does
        volumes.metadata.catch_up(second)
        return not volumes.metadata.behind()

    until(has_caught_up)
    volumes.close()
    assert not contents_of(open_set("second").entries[0].volume)


def test_a_removed_description_is_not_on_the_disk(
    tmp_path: Path, volume: LogVolume, files: FaultyFiles
) -> None:
    secret = b'{"tenant": "confidential-client"}'
    entry = MetaEntry(MetaKind.NAMESPACE, b"namespac", STAMPS.next(), secret)
    assert volume.put_meta([entry, described(1)]) and volume.sync(5.0)
    assert on_disk(tmp_path, secret)
    removal = MetaEntry(entry.kind, entry.name, STAMPS.next(), None)
    assert volume.put_meta([removal]) and volume.sync(5.0)
    assert not on_disk(tmp_path, secret)
    volume.close()
    again = open_volume(tmp_path / "drive", files)
    known = [one.name for one in again.contents(None).metadata if one.value is not None]
    assert known == [described(1).name]
    again.close()
    assert not on_disk(tmp_path, secret)


def on_disk(folder: Path, text: bytes) -> bool:
    return any(text in file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_a_disk_without_room_is_read_as_ever(
    volume: LogVolume, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    (place,) = store(volume, [make_key(1)])
    fault = files.add(Fault(Call.RUN_WRITE, Fail(errno.ENOSPC), times=None))
    for number in range(2, 40):
        assert put(volume, make_records([make_key(number)], NBYTES)) == [NO_PLACE]
        assert volume.facts().up
        assert load(volume, make_key(1), place)
    assert fault.hits, "it is asked now and then"
    assert sum("the disk is full" in line for line in caplog.messages) == 1
    assert volume.facts().full
    files.clear()
    until(lambda: volume.facts().takes_blocks)
    store(volume, [make_key(50)])
    assert not volume.facts().full


def test_two_keys_may_share_a_word(tmp_path: Path, volume: LogVolume, files: FaultyFiles) -> None:
    first = make_key(1)
    second = BlockKey(first[:24] + bytes(8))
    other_tag = BlockKey(bytes(8) + first[8:])
    store(volume, [first, second, other_tag, first])
    volume.close()
    again = open_volume(tmp_path / "drive", files)
    found = contents_of(again)
    assert sorted(found) == sorted([first, second, other_tag])
    for key, (place, _) in found.items():
        assert load(again, key, place)
    again.close()


@pytest.mark.parametrize("what", ["wipe", "header"])
def test_a_slot_is_not_used_again_before_a_late_write_has_arrived(
    what: str, tmp_path: Path
) -> None:
    files = PowerFiles(random.Random(1), "python")
    volume = open_volume(tmp_path / "drive", files)
    segments = volume.segment_set
    try:
        fill(volume)
        oldest = int(volume.segments().segments[0])
        if what == "wipe":
            files.late = 1.0
            assert volume.release(oldest)
        else:
            assert volume.release(oldest)
            files.late = 1.0
            assert put(volume, make_records([make_key(0)], NBYTES)) == [NO_PLACE]
        (slot,) = segments.releasing
        files.late = 0.0
        for _ in range(3):
            until(lambda: not volume.facts().retry_in_s)
            assert not is_up(volume), "the kernel still has the page"
        assert slot not in segments.free and slot not in segments.by_slot
        for late in list(files._late):
            assert late.wait(1.0)
        until(lambda: is_up(volume))
        assert slot in segments.free
    finally:
        volume.close()
        files.close()
