"""The seam to the OS: what it opens, and with which modes."""

import errno
import os
import re
from pathlib import Path

import pytest

from kvdepot.io.files import Files

VOLUMES = Path(__file__).parents[2] / "src/kvdepot/volumes/log"


@pytest.fixture
def files() -> Files:
    return Files("python")


def test_made_files_and_directories_are_for_their_owner(files: Files, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files.make_directory(tmp_path / "drive")
        os.close(files.open_file(tmp_path / "drive/segment", os.O_RDWR | os.O_CREAT))
    finally:
        os.umask(before)
    assert (tmp_path / "drive").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "drive/segment").stat().st_mode & 0o777 == 0o600


def test_a_symlink_is_not_followed(files: Files, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("mine")
    (tmp_path / "lock").symlink_to(tmp_path / "private")
    with pytest.raises(OSError) as failure:
        files.open_file(tmp_path / "lock", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    assert failure.value.errno == errno.ELOOP
    assert (tmp_path / "private").read_text() == "mine"


def test_what_is_no_file_is_refused_at_once(files: Files, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "folder"):
        with pytest.raises(OSError):
            files.open_file(tmp_path / name, os.O_RDONLY)


def test_descriptors_wait_and_are_not_inherited(files: Files, tmp_path: Path) -> None:
    fd = files.open_file(tmp_path / "segment", os.O_RDWR | os.O_CREAT)
    try:
        assert not os.get_inheritable(fd)
        assert os.get_blocking(fd)
    finally:
        os.close(fd)


def test_only_the_seam_changes_directories_of_drives() -> None:
    calls = re.compile(r"os\.(open|unlink|replace|rename|mkdir|ftruncate|fsync)\(|\.mkdir\(")
    lines = [
        line.strip() for path in VOLUMES.glob("*.py") for line in path.read_text().splitlines()
    ]
    assert len(lines) > 1000
    assert [line for line in lines if calls.search(line)] == []
