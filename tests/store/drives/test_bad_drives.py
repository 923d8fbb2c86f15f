"""A store opens without the drives that cannot be used, and takes them back when they can."""

import contextlib
import logging
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.store_contract import prompt, put, space_of, tiers
from tests.support.stores import settings
from tests.support.waiting import eventually, until

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.errors import DriveError, KVDepotError, StoreBusyError, UnsafePathError
from kvdepot.store.check.offline import audit
from kvdepot.store.check.repair import repair
from kvdepot.store.store import Store

pytestmark = pytest.mark.usefixtures("quick_watchdog")
Harm = Callable[[Path], None]
QUICK = {"retry_initial": 0.01, "retry_max": 0.05}


def two_drives(folder: Path, **ssd: Any) -> dict[str, Any]:
    paths = [str(folder / "a"), str(folder / "b")]
    more = {"path": paths, "capacity": "8MiB", "retry_initial": 0.01, "retry_max": 0.05, **ssd}
    tree = settings(folder, ssd=more)
    del tree["hdd"]
    return tree


def in_place_of(name: str, make: Harm) -> Harm:
    """Something else has the name of a file of the drive; the file is kept aside."""

    def harm(drive: Path) -> None:
        there = drive / name
        if there.exists():
            there.rename(drive / f"{name}.kept")
        make(there)

    return harm


def undo(drive: Path, name: str) -> None:
    there, kept = drive / name, drive / f"{name}.kept"
    shutil.rmtree(there) if there.is_dir() and not there.is_symlink() else there.unlink()
    if kept.exists():
        kept.rename(there)


def fill(store: Store, prompts: int = 12) -> list[list[BlockKey]]:
    space = space_of(store)
    found = [prompt(space, number, 5) for number in range(prompts)]
    for keys in found:
        assert all(put(store, keys))
        assert store.flush()
    return found


def hits(store: Store, chains: list[list[BlockKey]]) -> int:
    space_of(store)
    return sum(tier is not None for keys in chains for tier in tiers(store, keys))


def an_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


KINDS: dict[str, Harm] = {"folder": Path.mkdir, "fifo": os.mkfifo, "endless": an_endless_device}
FILES = ["segment-000000.kvs", "superblock", "lock"]
EACH_ONCE = list(zip(FILES, KINDS, strict=True))


class TestSomethingElseInPlaceOfAFile:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            pytest.param(name, kind, marks=() if (name, kind) in EACH_ONCE else pytest.mark.slow)
            for name in FILES
            for kind in KINDS
        ],
    )
    def test_the_store_opens_with_the_other_drive(
        self, tmp_path: Path, name: str, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with kvdepot.open(**two_drives(tmp_path)) as store:
            chains = fill(store)
        in_place_of(name, KINDS[kind])(tmp_path / "b")
        with caplog.at_level(logging.WARNING, "kvdepot.volumes"):
            store = kvdepot.open(**two_drives(tmp_path))
        with store:
            assert any(str(tmp_path / "b") in line for line in caplog.messages)
            assert 0 < hits(store, chains) < 60
            assert all(put(store, prompt(space_of(store), 100, 5)))
            assert store.flush()
            undo(tmp_path / "b", name)
            until(lambda: not store.inspect().volumes.down)
            assert hits(store, chains) == 60
            assert store.admin.check().ok

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_store_without_any_other_drive_says_why(
        self, tmp_path: Path, name: str, kind: str
    ) -> None:
        alone = two_drives(tmp_path, path=str(tmp_path / "b"))
        with kvdepot.open(**alone) as store:
            fill(store, 1)
        in_place_of(name, KINDS[kind])(tmp_path / "b")
        with pytest.raises(KVDepotError, match=str(tmp_path / "b")):
            kvdepot.open(**alone)
        undo(tmp_path / "b", name)
        with kvdepot.open(**alone) as store:
            assert store.admin.check().ok


def test_the_tier_above_may_be_missing(tmp_path: Path) -> None:
    with kvdepot.open(**settings(tmp_path)) as store:
        fill(store)
    in_place_of("lock", Path.mkdir)(tmp_path / "ssd")
    with kvdepot.open(**settings(tmp_path)) as store:
        keys = prompt(space_of(store), 100, 5)
        assert all(put(store, keys))
        assert tiers(store, keys) == ["dram"] * 5
        ssd, hdd = store.inspect().volumes.entries
        assert ssd.error is not None
        assert hdd.error is None


def test_all_drives_are_named_where_none_works(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"a file")
    with pytest.raises(DriveError, match=r"/a is neither .*/b is neither"):
        kvdepot.open(**two_drives(tmp_path))


@pytest.fixture
def stranger() -> int:
    """A user that is not this one; only root can give files to others."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make another user's files")
    return 12345


class TestAnotherUsers:
    def alone(self, folder: Path) -> dict[str, Any]:
        return two_drives(folder, path=str(folder / "b"))

    def refused(self, folder: Path, match: str) -> None:
        for mode in ("rw", "r"):
            with pytest.raises(UnsafePathError, match=match) as raised:
                kvdepot.open(**self.alone(folder), mode=mode)
            assert raised.value.hint

    def test_folder_is_not_used(self, tmp_path: Path, stranger: int) -> None:
        (tmp_path / "b").mkdir()
        os.chown(tmp_path / "b", stranger, stranger)
        self.refused(tmp_path, f"belongs to user {stranger}")
        assert os.listdir(tmp_path / "b") == []

    @pytest.mark.parametrize("mode", [0o770, 0o707])
    def test_folder_that_others_may_write_to_is_not_used(self, tmp_path: Path, mode: int) -> None:
        (tmp_path / "b").mkdir()
        (tmp_path / "b").chmod(mode)
        self.refused(tmp_path, "may be written by other users")
        assert os.listdir(tmp_path / "b") == []

    @pytest.mark.parametrize("name", FILES)
    def test_file_is_not_used(self, tmp_path: Path, stranger: int, name: str) -> None:
        with kvdepot.open(**self.alone(tmp_path)) as store:
            fill(store, 1)
        os.chown(tmp_path / "b" / name, stranger, stranger)
        with pytest.raises(UnsafePathError, match=name):
            kvdepot.open(**self.alone(tmp_path))

    def test_file_that_others_may_write_to_is_not_used(self, tmp_path: Path) -> None:
        with kvdepot.open(**self.alone(tmp_path)) as store:
            fill(store, 1)
        (tmp_path / "b" / FILES[0]).chmod(0o620)
        self.refused(tmp_path, FILES[0])

    def test_file_behind_a_link_is_left_alone(self, tmp_path: Path) -> None:
        with kvdepot.open(**self.alone(tmp_path)) as store:
            fill(store, 1)
        secret = tmp_path / "secret"
        secret.write_text("of another program")
        (tmp_path / "b" / "lock").unlink()
        (tmp_path / "b" / "lock").symlink_to(secret)
        with pytest.raises(KVDepotError, match=str(tmp_path / "b")):
            kvdepot.open(**self.alone(tmp_path))
        assert secret.read_text() == "of another program"

    def test_link_to_a_folder_is_not_followed(self, tmp_path: Path, stranger: int) -> None:
        (tmp_path / "own").mkdir(mode=0o700)
        (tmp_path / "b").symlink_to(tmp_path / "own")
        os.lchown(tmp_path / "b", stranger, stranger)
        self.refused(tmp_path, "is a symbolic link")
        os.lchown(tmp_path / "b", os.geteuid(), os.getegid())
        with kvdepot.open(**self.alone(tmp_path)) as store:
            assert store.admin.check().ok

    def test_what_is_made_is_for_this_user_alone(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            with kvdepot.open(**self.alone(tmp_path)) as store:
                fill(store, 1)
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o700
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("b/*")}
        assert set(modes.values()) == {0o600}, modes
        (tmp_path / "b" / FILES[0]).chmod(0o644)
        with kvdepot.open(**self.alone(tmp_path)):
            assert stat.S_IMODE((tmp_path / "b" / FILES[0]).stat().st_mode) == 0o600

    def test_the_other_drive_is_used(self, tmp_path: Path) -> None:
        (tmp_path / "b").mkdir()
        (tmp_path / "b").chmod(0o777)
        with kvdepot.open(**two_drives(tmp_path)) as store:
            fill(store, 2)
            assert os.listdir(tmp_path / "b") == []


class TestAnotherStoresSuperblock:
    def stolen(self, folder: Path, **other: Any) -> list[list[BlockKey]]:
        with kvdepot.open(**two_drives(folder)) as store:
            chains = fill(store)
        (folder / "elsewhere").mkdir()
        with kvdepot.open(**two_drives(folder / "elsewhere", **other)) as store:
            fill(store, 2)
        shutil.copy(folder / "elsewhere" / "b" / "superblock", folder / "b" / "superblock")
        return chains

    @pytest.mark.parametrize("segment", ["256KiB", "128KiB", "512KiB"])
    def test_the_metadata_decides(
        self, tmp_path: Path, segment: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        chains = self.stolen(tmp_path, segment=segment)
        with caplog.at_level(logging.WARNING, "kvdepot.volumes"):
            store = kvdepot.open(**two_drives(tmp_path))
        with store:
            assert any("of another store" in line for line in caplog.messages)
            assert hits(store, chains) == 60
        assert audit(tmp_path / "b").ok

    def test_a_check_says_so(self, tmp_path: Path) -> None:
        self.stolen(tmp_path)
        (finding,) = audit(tmp_path / "b").findings
        assert "of another store" in finding.what
        repair(tmp_path / "b")
        assert audit(tmp_path / "b").ok


def test_a_huge_superblock_is_not_read(tmp_path: Path) -> None:
    alone = two_drives(tmp_path, path=str(tmp_path / "b"))
    with kvdepot.open(**alone) as store:
        chains = fill(store, 2)
    (tmp_path / "b" / "superblock").unlink()
    with (tmp_path / "b" / "superblock").open("wb") as file:
        file.truncate(8 << 30)
    assert not audit(tmp_path / "b").ok
    with kvdepot.open(**alone) as store:
        assert hits(store, chains) == 10


def test_close_in_a_forked_child_leaves_the_store_alone(tmp_path: Path) -> None:
    with kvdepot.open(**two_drives(tmp_path)) as store:
        chains = fill(store, 2)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                store.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert hits(store, chains) == 10
        assert all(put(store, prompt(space_of(store), 100, 5)))
        assert store.flush()
        with pytest.raises(StoreBusyError):
            kvdepot.open(**two_drives(tmp_path))


def open_descriptors() -> int:
    """But for the rings of the I/O engine, which has one for each call at a time."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("io_uring" not in target for target in found)


def test_a_drive_that_comes_and_goes_leaves_no_descriptors(tmp_path: Path) -> None:
    with kvdepot.open(**two_drives(tmp_path)) as store:
        chains, inside = fill(store), store.inspect()
        entry, seen = inside.volumes.entries[1], []

        def is_there() -> bool:
            inside.drives.watchdog.look(inside.lower(), entry)  # as its thread does every second
            return not inside.volumes.down and not entry.volume.facts().lost

        for _ in range(6):
            (tmp_path / "b").rename(tmp_path / "hidden")
            (tmp_path / "b").write_text("in the way")
            until(lambda: not is_there())
            (tmp_path / "b").unlink()
            (tmp_path / "hidden").rename(tmp_path / "b")
            until(is_there)
            assert hits(store, chains) == 60
            seen.append(open_descriptors())
        assert len(set(seen)) == 1, seen


@pytest.mark.root
def test_a_read_only_file_system_is_left_out(tmp_path: Path) -> None:
    with kvdepot.open(**two_drives(tmp_path)) as store:
        chains = fill(store)
    b = str(tmp_path / "b")
    subprocess.run(["mount", "--bind", b, b], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", b], check=True)
        with kvdepot.open(**two_drives(tmp_path)) as store:
            assert "Read-only" in str(store.inspect().volumes.entries[1].error)
            assert 0 < hits(store, chains) < 60
            subprocess.run(["mount", "-o", "remount,rw,bind", b], check=True)
            until(lambda: not store.inspect().volumes.down)
            assert hits(store, chains) == 60
    finally:
        subprocess.run(["umount", "-l", b], check=True)


def test_flush_is_not_true_when_segment_files_were_unlinked(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "dram": {"capacity": "8MiB", "prefault": False},
        "ssd": {"path": tmp_path / "ssd", "capacity": "4MiB", "segment": "1MiB", **QUICK},
        "writeback": {"staging": "2MiB"},
    }
    with kvdepot.open(**config) as store:
        space = store.namespace(model="m", layout=kvdepot.KVLayout.opaque(48 << 10, 16))
        first, second = space.keys([1] * 64), space.keys([2] * 64)
        store.put_many(first, [bytes(48 << 10)] * 4)
        assert store.flush()
        for file in (tmp_path / "ssd").glob("segment-*"):
            file.unlink()
        assert not store.flush(), "nothing of it is on disk"
        assert eventually(lambda: store.stats()["tiers"]["ssd"]["drives"][0]["healthy"])
        assert all(store.put_many(second, [bytes(48 << 10)] * 4))
        assert eventually(lambda: bool(store.flush(keys=second)))
    with kvdepot.open(**config) as store:
        store.namespace(model="m", layout=kvdepot.KVLayout.opaque(48 << 10, 16))
        assert len(store.match(second)) == 4
