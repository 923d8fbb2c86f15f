"""Full, failing, slow and vanishing disks: the store goes on as a smaller cache, and recovers."""

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from tests.support.failing_disks import (
    BLOCK,
    LAYOUT,
    assert_quiet,
    healthy,
    payload,
    prompt,
    put_all,
    settings,
    space_of,
    unplug,
    verified_hits,
    works_again,
)
from tests.support.waiting import until

import kvdepot
from kvdepot import errors
from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey, PutResult
from kvdepot.format.record import PAGE
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.faults import Call, Corrupt, Fail, Fault, FaultyFiles, Stall


def open_faulty(path: Path | list[Path], **ssd: object) -> tuple[Store, FaultyFiles]:
    files = FaultyFiles()
    return assemble(load(overrides=settings(path, **ssd)), files=files), files


def blocks_on_disk(store: Store) -> list[BlockKey]:
    """Put more blocks than fit into memory; the keys of those that are on the disk alone."""
    keys = prompt(space_of(store), 1, 64)
    put_all(store, keys)
    store.flush()
    return [key for key in keys if store.match([key]).tiers == ("ssd",)]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_failed_writes_make_a_smaller_cache_and_heal(tmp_path: Path, code: int) -> None:
    store, files = open_faulty(tmp_path / "s")
    with store:
        space = space_of(store)
        safe = prompt(space, 1, 8)
        put_all(store, safe)
        assert store.flush()
        files.add(Fault(frozenset({Call.RUN_WRITE, Call.WRITE}), Fail(code), times=None))
        lost = prompt(space, 2, 40)
        assert all(put_all(store, lost))
        report = store.flush()
        assert not report.ok and report.given_up > 0 and report.waiting == 0
        assert healthy(store) == (code == errno.ENOSPC)  # a full disk is read from
        assert store.stats()["counters"]["write_failed"] > 0
        assert 0 < verified_hits(store, lost) < 40  # what still fits into memory
        files.clear()
        works_again(store, space, 1000)
        assert verified_hits(store, safe) == 8
        assert_quiet(store)


def test_failed_reads_are_misses_and_the_blocks_can_be_put_again(tmp_path: Path) -> None:
    store, files = open_faulty(tmp_path / "s", promote=False)
    with store:
        on_disk = blocks_on_disk(store)
        assert len(on_disk) > 10
        files.add(Fault(Call.RUN_READ, Fail(errno.EIO), times=2))
        target = bytearray(BLOCK)
        assert store.get_many([on_disk[0]], [target])[0].reason == "failed"
        assert store.get_many([on_disk[1]], [target])[0].reason == "failed"
        assert store.put_many([on_disk[0]], [payload(on_disk[0])])[0] is PutResult.STORED
        assert verified_hits(store, on_disk) == len(on_disk) - 1
        assert healthy(store)
        assert store.flush()
        assert_quiet(store)


def test_a_dead_disk_answers_at_once_and_comes_back(tmp_path: Path) -> None:
    store, files = open_faulty(
        tmp_path / "s", promote=False, retry_initial="200ms", retry_max="200ms"
    )
    with store:
        on_disk = blocks_on_disk(store)
        fault = files.add(Fault(Call.RUN_READ, Fail(errno.EIO), times=None))
        target = bytearray(BLOCK)
        for key in on_disk[:10]:
            assert not store.get_many([key], [target])[0]
        assert not healthy(store)
        assert fault.hits < 10, "a disk that is known to be down is not asked again and again"
        assert len(store.match([on_disk[-1]])) == 0, "nor are its blocks promised"
        files.clear()
        until(lambda: verified_hits(store, on_disk[10:]) == len(on_disk) - 10)
        assert healthy(store)
        assert_quiet(store)


def test_damage_while_reading_is_never_served(tmp_path: Path) -> None:
    store, files = open_faulty(tmp_path / "s", promote=False)
    with store:
        on_disk = blocks_on_disk(store)
        files.add(Fault(Call.RUN_READ, Corrupt(at=20, mask=4), times=1))
        files.add(Fault(Call.RUN_READ, Corrupt(at=4096 + 1000, mask=128), times=1))
        target = bytearray(BLOCK)
        assert store.get_many([on_disk[0]], [target])[0].reason == "corrupt"
        assert store.get_many([on_disk[1]], [target])[0].reason == "corrupt"
        assert store.stats()["counters"]["quarantined"] == 2
        assert not store.match([on_disk[0]])
        assert store.put_many([on_disk[0]], [payload(on_disk[0])])[0] is PutResult.STORED
        assert store.flush()
        assert_quiet(store)


def test_a_stalled_read_is_a_miss_within_its_deadline(tmp_path: Path) -> None:
    store, files = open_faulty(tmp_path / "s")
    with store:
        on_disk = blocks_on_disk(store)
        stall = Stall()
        files.add(Fault(Call.RUN_READ, stall, times=1))
        targets = [bytearray(BLOCK) for _ in range(4)]
        started = time.monotonic()
        got = store.get_many(on_disk[:4], targets, timeout_s=1.0)
        assert time.monotonic() - started < 30.0
        assert [answer.reason for answer in got].count("late") == 1
        for key, answer, target in zip(on_disk, got, targets, strict=False):
            assert not answer or bytes(target) == payload(key)
        before = [bytes(target) for target in targets]
        stall.release()
        until(lambda: store.stats()["staging_bytes"] == 0)
        assert [bytes(target) for target in targets] == before, "late bytes must not reach a caller"
        until(lambda: verified_hits(store, on_disk) == len(on_disk))
        assert_quiet(store)


def test_late_bytes_are_there_for_who_asks_next(tmp_path: Path) -> None:
    store, files = open_faulty(tmp_path / "s")
    with store:
        key, stall = one_late_read(store, files)
        assert store.match([key]).tiers == ("ssd",)
        stall.release()
        until(lambda: store.match([key]).tiers == ("dram",))
        files.add(Fault(Call.RUN_READ, Fail(errno.EIO), times=None))
        assert verified_hits(store, [key]) == 1
        files.clear()
        assert_quiet(store)


def test_late_bytes_of_a_removed_block_are_not_kept(tmp_path: Path) -> None:
    store, files = open_faulty(tmp_path / "s")
    with store:
        key, stall = one_late_read(store, files)
        blocks = store.stats()["tiers"]["dram"]["blocks"]
        store.remove(key)
        stall.release()
        assert store.inspect().reader.late.wait(60.0)
        assert not store.match([key]).tiers
        assert store.stats()["tiers"]["dram"]["blocks"] == blocks
        put_all(store, [key])
        assert verified_hits(store, [key]) == 1
        assert store.flush()
        assert_quiet(store)


def test_late_bytes_that_are_damaged_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, files = open_faulty(tmp_path / "s")
    with store:
        key, stall = one_late_read(store, files)
        monkeypatch.setattr(
            "kvdepot.store.read.timed_out.payload_intact", lambda image, head: False
        )
        stall.release()
        assert store.inspect().reader.late.wait(60.0)
        assert store.match([key]).tiers == ("ssd",)
        until(lambda: verified_hits(store, [key]) == 1)
        assert_quiet(store)


def one_late_read(store: Store, files: FaultyFiles) -> tuple[BlockKey, Stall]:
    """A block on disk that was asked for and did not come in time."""
    key = blocks_on_disk(store)[0]
    stall = Stall()
    files.add(Fault(Call.RUN_READ, stall, times=1))
    assert store.get_many([key], [bytearray(BLOCK)], timeout_s=0.3)[0].reason == "late"
    return key, stall


def test_a_stalled_write_blocks_nobody_beyond_its_deadline(tmp_path: Path) -> None:
    store, files = open_faulty(tmp_path / "s")
    with store:
        space = space_of(store)
        safe = prompt(space, 1, 4)
        put_all(store, safe)
        assert store.flush()
        stall = Stall()
        files.add(Fault(Call.RUN_WRITE, stall, times=None))
        started = time.monotonic()
        outcomes = [
            store.put_many([key], [payload(key)], timeout_s=0.05)[0] for key in prompt(space, 2, 64)
        ]
        assert PutResult.THROTTLED in outcomes, "producers are told"
        assert set(outcomes) <= {PutResult.STORED, PutResult.THROTTLED}
        assert not store.flush(0.2)
        assert verified_hits(store, safe) == 4
        store.remove(safe[0])
        store.namespace(model="another", layout=LAYOUT)
        assert time.monotonic() - started < 25.0, "64 writes would take 32 s"
        files.clear()
        works_again(store, space, 1000)
        assert verified_hits(store, safe[1:]) == 3
        assert_quiet(store)


def test_one_drive_of_two_fails_and_the_other_goes_on(tmp_path: Path) -> None:
    store, files = open_faulty([tmp_path / "a", tmp_path / "b"], capacity="16MiB")
    with store:
        space = space_of(store)
        bad = str(tmp_path / "a")
        put_all(store, prompt(space, 1, 4))
        store.flush()
        files.add(
            Fault(
                frozenset({Call.RUN_WRITE, Call.WRITE, Call.RUN_READ}),
                Fail(errno.EIO),
                times=None,
                where=lambda operation: operation.path.startswith(bad),
            )
        )
        keys = prompt(space, 2, 64)
        assert all(put_all(store, keys))
        store.flush()
        drives = store.stats()["tiers"]["ssd"]["drives"]
        assert [drive["healthy"] for drive in drives] == [False, True]
        assert verified_hits(store, keys) > 32
        files.clear()
        until(lambda: all(put_all(store, prompt(space, 3, 8))) and bool(store.flush()))
        works_again(store, space, 1000)
        assert_quiet(store)


def test_a_deleted_directory_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with kvdepot.open(**settings(path)) as store:
        space = space_of(store)
        keys = prompt(space, 1, 40)
        put_all(store, keys)
        assert store.flush()
        unplug(path)
        verified_hits(store, keys)  # from open descriptors, or misses; never wrong
        assert not store.flush()
        assert not healthy(store) or path.is_dir()  # the watchdog may have made it anew already
        works_again(store, space, 1000)
        assert path.is_dir()
        last = prompt(space, 9, 8)
        put_all(store, last)
        assert store.flush()
        assert_quiet(store)
    with kvdepot.open(**settings(path)) as store:
        space = space_of(store)
        assert verified_hits(store, last) == 8


def mount_fs(kind: str, where: Path, mebibytes: int, image: Path | None = None) -> None:
    where.mkdir()
    if kind == "tmpfs":
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "none", str(where)], check=True
        )
        return
    assert image is not None
    image.write_bytes(b"")
    os.truncate(image, mebibytes << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, capture_output=True)
    options = "loop,errors=remount-ro"
    subprocess.run(["mount", "-o", options, str(image), str(where)], check=True)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "tmpfs"
    mount_fs("tmpfs", where, 6)
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "ext4"
    mount_fs("ext4", where, 24, tmp_path / "ext4.image")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_really_full_disk(request: pytest.FixtureRequest, kind: str) -> None:
    """Capacity says 64 MiB, the filesystem has less: the store uses what there is."""
    where: Path = request.getfixturevalue(kind)
    with kvdepot.open(**settings(where / "s", capacity="64MiB")) as store:
        space = space_of(store)
        for user in range(20):
            assert all(put_all(store, prompt(space, user, 32)))
        store.flush()
        stats = store.stats()["tiers"]["ssd"]
        files = sum(file.stat().st_size for file in (where / "s").glob("segment-*.kvs"))
        assert stats["held_bytes"] == files < 64 << 20
        assert stats["blocks"] > 16
        assert verified_hits(store, prompt(space, 19, 32)) > 0
        assert_quiet(store)
    with kvdepot.open(**settings(where / "s", capacity="64MiB")) as store:
        space = space_of(store)
        assert store.admin.check().ok
        assert sum(verified_hits(store, prompt(space, user, 32)) for user in range(20)) > 16


@pytest.mark.root
def test_room_that_appears_later_is_used(tmpfs: Path) -> None:
    ballast = tmpfs / "ballast"
    ballast.write_bytes(bytes(3 << 20))
    with kvdepot.open(**settings(tmpfs / "s", capacity="64MiB")) as store:
        space = space_of(store)
        for user in range(6):
            put_all(store, prompt(space, user, 32))
        store.flush()
        before = store.stats()["tiers"]["ssd"]["held_bytes"]
        ballast.unlink()

        users = count(100)

        def grown() -> bool:
            put_all(store, prompt(space, next(users), 16))
            store.flush()
            return bool(store.stats()["tiers"]["ssd"]["held_bytes"] > before)

        until(grown)
        assert_quiet(store)


@pytest.mark.root
def test_a_read_only_remount(ext4: Path) -> None:
    """ext4 makes itself read-only when it finds an error; here it is made to find one."""
    with kvdepot.open(**settings(ext4 / "s")) as store:
        space = space_of(store)
        keys = prompt(space, 1, 64)
        put_all(store, keys)
        store.flush()
        before = verified_hits(store, keys)
        mounted = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        (device,) = (Path(line[0]).name for line in mounted if line[1] == str(ext4))
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("a test")
        put_all(store, prompt(space, 2, 40))
        assert not store.flush()
        assert not healthy(store)
        assert verified_hits(store, keys) <= before
        stats = store.stats()
        assert stats["staging_bytes"] == 0 and stats["dirty_bytes"] == 0


@pytest.mark.root
def test_a_raw_block_device(tmp_path: Path) -> None:
    image = tmp_path / "disk.image"
    image.write_bytes(b"")
    os.truncate(image, 16 << 20)
    found = subprocess.run(
        ["losetup", "-f", "--show", str(image)], check=True, capture_output=True, text=True
    )
    device = Path(found.stdout.strip())
    try:
        with kvdepot.open(**settings(device)) as store:
            space = space_of(store)
            keys = prompt(space, 1, 64)
            put_all(store, keys)
            store.flush()
            resident = [key for key in keys if store.match([key])]
            assert store.stats()["tiers"]["ssd"]["held_bytes"] <= 8 << 20
            assert_quiet(store)
        with kvdepot.open(**settings(device)) as store:
            space = space_of(store)
            assert verified_hits(store, resident) >= 60
            assert_quiet(store)
            with pytest.raises(errors.StoreBusyError):
                kvdepot.open(**settings(device))
        filesystem = bytes(0x438) + b"\x53\xef" + bytes(PAGE - 0x43A)
        with image.open("r+b") as file:  # made over the store, whose segments are still there
            file.write(filesystem)
        subprocess.run(["losetup", "-c", str(device)], check=True)
        with pytest.raises(errors.FormatError, match="not a kvdepot store"):
            kvdepot.open(**settings(device))
        assert image.read_bytes()[:PAGE] == filesystem
        image.write_bytes(bytes(1024) + b"\x53\xef" * 2000 + bytes(16 << 20))
        subprocess.run(["losetup", "-c", str(device)], check=True)
        with pytest.raises(errors.FormatError, match="not a kvdepot store"):
            kvdepot.open(**settings(device))
    finally:
        subprocess.run(["losetup", "-d", str(device)], check=True)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_write_that_fails_on_one_drive_goes_to_another(tmp_path: Path, code: int) -> None:
    """Also where the drive that failed it is up again, or still, when that is decided."""
    folders = [tmp_path / "a", tmp_path / "b"]
    store, files = open_faulty(folders, retry_initial="1us", retry_max="1us")
    with store:
        space = space_of(store)
        faults = [
            files.add(Fault(Call.RUN_WRITE, Fail(code), where=lambda one: "/a/" in one.path))
            for _ in range(12)
        ]
        for number in range(100):
            assert all(put_all(store, prompt(space, number, 4)))
            assert store.flush()
            if faults[-1].hits:
                break
        assert faults[-1].hits, "all of them were met, one after the other"
        assert store.stats()["counters"]["write_failed"] == 0
        assert_quiet(store)
