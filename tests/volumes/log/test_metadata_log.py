"""The metadata log of a volume: two copies, torn writes, damage, compaction."""

import errno
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.volumes import open_log

from kvdepot.core.metadata import MetaEntry, MetaKind, Tombstone
from kvdepot.format.metadata import FRAMES_AT, LogCopy, VolumeHeader
from kvdepot.io.files import Files
from kvdepot.store.check.offline import audit
from kvdepot.testing.images import STAMPS
from kvdepot.volumes.log.medium import MountSettings, mount
from kvdepot.volumes.log.metadata import COPIES, FileCopy, MetadataLog

STORE = bytes(range(16))


_files: list[Files] = []


@pytest.fixture(autouse=True)
def files() -> Iterator[None]:
    _files.append(Files("threads"))
    yield
    _files.pop().close()


def opened(folder: Path, limit: int = 1 << 20) -> MetadataLog:
    copies = [FileCopy(folder / name, _files[-1], limit, writable=True) for name in COPIES]
    return MetadataLog(copies, VolumeHeader(STORE, 1 << 20), STAMPS, fsync="flush")


def loaded(folder: Path) -> MetadataLog:
    log = opened(folder)
    log.load()
    return log


def entry(number: int, stamp: int, value: bytes | None = b"{}") -> MetaEntry:
    return MetaEntry(MetaKind.NAMESPACE, number.to_bytes(8, "big"), stamp, value)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A log with ten synced entries."""
    log = opened(tmp_path)
    log.create()
    for number in range(10):
        log.put([entry(number, number + 1)])
    log.sync()
    log.put([entry(99, 100)])  # says that the others were synced
    log.sync()
    log.close()
    return tmp_path


def names(log: MetadataLog) -> set[int]:
    return {int.from_bytes(name, "big") for name in log.known.values(MetaKind.NAMESPACE)}


def test_entries_survive_reopening(filled: Path) -> None:
    log = loaded(filled)
    assert log.is_whole and not log.damage
    assert names(log) == {*range(10), 99}


def test_the_newest_stamp_of_a_name_counts(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.create()
    log.put([entry(1, 5, b"new")])
    log.put([entry(1, 4, b"old")])
    assert loaded(tmp_path).known.values(MetaKind.NAMESPACE) == {entry(1, 0).name: b"new"}


def test_a_deletion_outlives_an_older_entry(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.create()
    log.put([entry(1, 5), entry(1, 6, None)])
    again = loaded(tmp_path)
    again.put([entry(1, 5)])  # as a volume that was away would bring it
    assert names(again) == set() and names(loaded(tmp_path)) == set()


def test_tombstones_of_one_key_are_merged(tmp_path: Path) -> None:
    key = bytes(32)
    log = opened(tmp_path)
    log.create()
    log.put([Tombstone(key, below=50, recorded=50).entry])
    log.put([Tombstone(key, below=10, recorded=60).entry])
    assert loaded(tmp_path).known.tombstones[key] == Tombstone(key, below=50, recorded=60)


@pytest.mark.parametrize("lost", COPIES)
def test_one_copy_is_enough(filled: Path, lost: str) -> None:
    (filled / lost).unlink()
    log = loaded(filled)
    assert log.is_whole and log.damage
    assert names(log) == {*range(10), 99}
    log.put([entry(11, 200)])
    assert (filled / lost).exists(), "the next write makes both copies again"


@pytest.mark.parametrize("lost", COPIES)
def test_a_missing_copy_is_written_before_anything_else(tmp_path: Path, lost: str) -> None:
    """A process may be killed between the copies of a new log, and again soon after the start."""
    open_log(tmp_path, _files[-1], segments=8, segment_bytes=1 << 20).close()
    (tmp_path / lost).unlink()
    (tmp_path / "superblock").unlink()
    mounted = mount(tmp_path, _files[-1], MountSettings(8 << 20, 1 << 20))
    mounted.open_metadata(STAMPS)  # killed here
    assert not audit(tmp_path).findings


def test_both_copies_lost_is_not_whole(filled: Path) -> None:
    for name in COPIES:
        (filled / name).unlink()
    assert not loaded(filled).is_whole


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_bit_of_one_copy_changes_nothing(filled: Path, seed: int, every: int) -> None:
    path = filled / COPIES[0]
    image = bytearray(path.read_bytes())
    used = LogCopy.parse(bytes(image), STORE)
    assert used is not None
    bits = [*range(64 * 8), *range(FRAMES_AT * 8, used.end * 8)]
    for bit in bits[seed % every :: every]:
        image[bit // 8] ^= 1 << bit % 8
        path.write_bytes(image)
        log = loaded(filled)
        assert log.is_whole and names(log) == {*range(10), 99}, f"bit {bit}"
        image[bit // 8] ^= 1 << bit % 8


def test_an_entry_that_is_damaged_in_both_copies_is_missed(filled: Path) -> None:
    for name in COPIES:
        image = bytearray((filled / name).read_bytes())
        image[FRAMES_AT + 100] ^= 1
        (filled / name).write_bytes(image)
    log = loaded(filled)
    assert not log.is_whole
    assert len(names(log)) == 10, "the others are still known"


def test_different_entries_damaged_in_the_copies_are_made_good(filled: Path) -> None:
    for place, name in zip((60, 200), COPIES, strict=True):
        image = bytearray((filled / name).read_bytes())
        image[FRAMES_AT + place] ^= 1
        (filled / name).write_bytes(image)
    log = loaded(filled)
    assert log.is_whole and names(log) == {*range(10), 99}


def test_what_was_not_synced_may_be_torn_anywhere(tmp_path: Path, seed: int) -> None:
    """A power cut keeps any part of what was written since the last sync: never damage."""
    chance = random.Random(seed)
    log = opened(tmp_path)
    log.create()
    log.put([entry(number, number + 1) for number in range(5)])
    log.sync()
    synced = {name: (tmp_path / name).read_bytes() for name in COPIES}
    for number in range(5, 60):
        log.put([entry(number, number + 1, bytes(200))])
    written = {name: (tmp_path / name).read_bytes() for name in COPIES}
    for _ in range(50):
        for name in COPIES:
            before = synced[name].ljust(len(written[name]), b"\0")
            mixed = bytearray(before)
            for at in range(0, len(mixed), 512):
                if chance.random() < 0.5:
                    mixed[at : at + 512] = written[name][at : at + 512]
            (tmp_path / name).write_bytes(mixed)
        again = loaded(tmp_path)
        assert again.is_whole
        assert names(again) >= set(range(5))


def test_a_log_that_is_written_anew_keeps_what_counts(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.create()
    for stamp in range(1, 2000):
        log.put([entry(stamp % 7, stamp, b"x" * 100)])
    assert (tmp_path / COPIES[0]).stat().st_size <= 256 << 10
    assert names(loaded(tmp_path)) == set(range(7))


def test_an_older_copy_that_is_put_back_does_not_count(filled: Path) -> None:
    old = (filled / COPIES[0]).read_bytes()
    log = loaded(filled)
    log.put([entry(0, 300, None)])
    log.sync()
    log.close()
    (filled / COPIES[0]).write_bytes(old)
    assert 0 not in names(loaded(filled))


def test_a_full_log_refuses_and_keeps_what_it_has(tmp_path: Path) -> None:
    log = opened(tmp_path, limit=16 << 10)
    log.create()
    log.put([entry(1, 1)])
    with pytest.raises(OSError, match="full"):
        log.put([entry(2, 2, bytes(20 << 10))])
    log.put([entry(3, 3)])
    assert names(log) == {1, 3} and names(loaded(tmp_path)) == {1, 3}


class RenamedThenFailed(FileCopy):
    """A copy whose folder cannot be synced once: the new file has the name, and may stay."""

    fails = False

    def replace(self, image: bytes, room_bytes: int) -> None:
        super().replace(image, room_bytes)
        if self.fails:
            self.fails = False
            raise OSError(errno.ETIMEDOUT, "the folder was not synced")


def test_a_generation_is_not_used_twice(tmp_path: Path) -> None:
    """After a power cut one copy may be of a rewrite that failed, the other of the next one."""
    first = RenamedThenFailed(tmp_path / COPIES[0], _files[-1], 1 << 20, writable=True)
    second = FileCopy(tmp_path / COPIES[1], _files[-1], 1 << 20, writable=True)
    log = MetadataLog([first, second], VolumeHeader(STORE, 1 << 20), STAMPS, fsync="flush")
    log.create()
    log.put([entry(1, 1)])
    first.fails = True
    with pytest.raises(OSError, match="not synced"):
        log.put([entry(1, 2, None)])  # a deletion writes both copies again
    failed = (tmp_path / COPIES[0]).read_bytes()
    log.put([entry(number, 10 + number) for number in range(2, 6)])
    log.sync()
    log.close()
    (tmp_path / COPIES[0]).write_bytes(failed)
    again = loaded(tmp_path)
    assert again.damage == [] and again.is_whole
    assert names(again) == {1, 2, 3, 4, 5}
    again.close()
