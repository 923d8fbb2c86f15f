"""A folder that other programs use is refused, and no file in it is touched."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.small_store import prompt, put, space_of
from tests.support.volumes import open_log

from kvdepot.errors import FormatError
from kvdepot.io.files import Files
from kvdepot.store.open import open_store
from kvdepot.testing.contract import put as put_records
from kvdepot.testing.contract import store as store_records
from kvdepot.testing.images import make_key, make_records, removal_of

THEIRS = b"theirs\n"
NAMES = [
    "lock", "superblock", "removals", "superblock.new", "removals.new", "segment-000000.kvs",
    "notes.txt",
]  # fmt: skip


def open_in(folder: Path, tier: str = "ssd") -> Any:
    tree: dict[str, Any] = {
        "dram": {"capacity": "2MiB", "prefault": False, "huge_pages": "never"},
        "writeback": {"staging": "2MiB"},
        tier: {"path": folder, "capacity": "64MiB", "segment": "8MiB"},
    }
    return open_store(**tree)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("tier", ["ssd", "hdd"])
@pytest.mark.parametrize("names", [[name] for name in NAMES] + [NAMES, NAMES[:1] + NAMES[-1:]])
def test_files_of_other_programs(tmp_path: Path, tier: str, names: list[str]) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(0o700)
    for name in names:
        (folder / name).write_bytes(THEIRS)
        (folder / name).chmod(0o600)
    with pytest.raises(FormatError, match="not a kvdepot store") as caught:
        open_in(folder, tier)
    assert caught.value.hint
    assert contents(folder) == dict.fromkeys(names, THEIRS)


def test_a_folder_of_folders(tmp_path: Path) -> None:
    (tmp_path / "theirs" / "photos").mkdir(parents=True, mode=0o700)
    (tmp_path / "theirs").chmod(0o700)
    with pytest.raises(FormatError, match="'photos'"):
        open_in(tmp_path / "theirs")
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["photos"]


def test_a_new_filesystem_is_empty(tmp_path: Path) -> None:
    (tmp_path / "mount" / "lost+found").mkdir(parents=True)
    (tmp_path / "mount").chmod(0o700)
    open_in(tmp_path / "mount").close()
    assert (tmp_path / "mount" / "superblock").exists()


@pytest.mark.parametrize(
    "left",
    [
        {"lock": b""},
        {"lock": bytes(6)},
        {"lock": b"12345\n"},
        {"lock": b"12345\n", "superblock.new": b""},
        {"lock": b"12345\n", "superblock.new": bytes(4096)},
        {"lock": b"", "superblock": bytes(4096)},
    ],
    ids=str,
)
def test_a_crash_while_the_first_files_are_made(tmp_path: Path, left: dict[str, bytes]) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(0o700)
    for name, data in left.items():
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)
    open_in(folder).close()
    assert (folder / "superblock").stat().st_size == 4096


@pytest.mark.parametrize("kept", ["superblock", "metadata-a", "segment-000000.kvs", "lock"])
def test_a_store_is_known_by_any_one_of_its_files(tmp_path: Path, kept: str) -> None:
    folder = tmp_path / "kv"
    with open_in(folder) as store:
        keys = prompt(space_of(store), 1, 4)
        put(store, keys)
        store.flush()
        store.remove(keys[:1])
    for path in folder.iterdir():
        if path.name not in (kept, "lock"):
            path.write_bytes(bytes(4096))
        elif path.name != kept:
            path.unlink()
    if kept != "lock":
        (folder / "notes.txt").write_bytes(THEIRS)
    try:
        open_in(folder).close()
    except FormatError as error:  # a store, of which the metadata is lost
        assert kept in ("superblock", "segment-000000.kvs") and "metadata" in str(error)
    assert kept == "lock" or (folder / "notes.txt").read_bytes() == THEIRS


def test_another_store_that_takes_the_place_of_an_open_one_is_not_touched(tmp_path: Path) -> None:
    """The folder of a drive is moved away, and the folder of another drive is put there."""
    files = Files("python")
    other, volume = (
        open_log(tmp_path / name, files, segments=4, segment_bytes=128 << 10)
        for name in ("other", "kv")
    )
    for one in (other, volume):
        store_records(one, [make_key(1)])
    other.close()
    before = contents(tmp_path / "other")
    (tmp_path / "kv").rename(tmp_path / "away")
    (tmp_path / "other").rename(tmp_path / "kv")
    volume.metadata._rewrite_at = 0  # as after a failure, or when the log has grown
    assert not volume.put_meta(removal_of(make_key(1)))
    for number in range(40):  # more than the segment that it has
        put_records(volume, make_records([make_key(number)], 12_000))
    assert not volume.sync(1.0)
    volume.set_limits(0, may_write=False)
    volume.close()
    assert contents(tmp_path / "kv") == before
    files.close()
