"""Folders and files that are one user's alone."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.other_user import OTHER_USERS, as_other_user, needs_other_user, shared_folder

from kvdepot.core.private import (
    check_private_folder,
    make_private_folder,
    open_private_file,
    replace_private_file,
    runtime_folder,
    write_private_file,
)
from kvdepot.errors import UnsafePathError

WRITE = os.O_RDWR | os.O_CREAT | os.O_TRUNC


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder where everybody may make files."""
    with shared_folder() as folder:
        yield Path(folder)


def test_what_is_made_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = make_private_folder(tmp_path / "a" / "b")
        write_private_file(folder / "file", b"secret")
        replace_private_file(folder / "file", b"another")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder)]
    assert modes == [0o700, 0o700]
    assert stat.S_IMODE((folder / "file").stat().st_mode) == 0o600
    assert (folder / "file").read_bytes() == b"another"
    assert [path.name for path in folder.iterdir()] == ["file"]


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(mode)
    with pytest.raises(UnsafePathError, match="may be written by other users") as caught:
        make_private_folder(tmp_path / "kv")
    assert caught.value.hint == f"chmod go-w {tmp_path / 'kv'}"


def test_a_link_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "kv").symlink_to(tmp_path / "real")
    with pytest.raises(UnsafePathError, match="symbolic link"):
        make_private_folder(tmp_path / "kv")
    (tmp_path / "file").touch()
    with pytest.raises(UnsafePathError, match="not a folder"):
        check_private_folder(tmp_path / "file")


def test_what_a_link_names_is_not_truncated(tmp_path: Path) -> None:
    (tmp_path / "diary").write_text("mine")
    (tmp_path / "lock").symlink_to(tmp_path / "diary")
    with pytest.raises(UnsafePathError, match="symbolic link"):
        open_private_file(tmp_path / "lock", WRITE)
    (tmp_path / "hard").hardlink_to(tmp_path / "diary")
    with pytest.raises(UnsafePathError, match="2 hard links"):
        open_private_file(tmp_path / "hard", WRITE)
    assert (tmp_path / "diary").read_text() == "mine"


def test_only_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
        with pytest.raises(UnsafePathError, match="not a regular file"):
            open_private_file(tmp_path / "fifo", flags)
    with pytest.raises(UnsafePathError, match="not a regular file"):
        open_private_file(tmp_path, os.O_RDWR)


def test_a_good_file_is_opened_as_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    fd = open_private_file(tmp_path / "file", WRITE)
    try:
        assert os.fstat(fd).st_size == 0
        assert os.get_blocking(fd)
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)
    with pytest.raises(FileNotFoundError):
        open_private_file(tmp_path / "none", os.O_RDWR)


@needs_other_user
@pytest.mark.parametrize("uid", OTHER_USERS)
def test_what_another_user_made_first_is_refused(public: Path, uid: int) -> None:
    as_other_user(
        "os.mkdir(sys.argv[1], 0o700); Path(sys.argv[2]).touch()",
        public / "kvdepot",
        public / "lock",
        uid=uid,
    )
    with pytest.raises(UnsafePathError, match=f"belongs to user {uid}"):
        make_private_folder(public / "kvdepot")
    with pytest.raises(UnsafePathError, match=f"belongs to user {uid}"):
        open_private_file(public / "lock", os.O_RDWR)
    assert runtime_folder({"XDG_RUNTIME_DIR": str(public / "kvdepot")}) != public / "kvdepot"


def test_the_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = make_private_folder(tmp_path / "run")
    assert runtime_folder({"XDG_RUNTIME_DIR": str(own)}) == own / "kvdepot"
    own.chmod(0o777)
    monkeypatch.setenv("HOME", str(tmp_path))
    unsafe = runtime_folder({"XDG_RUNTIME_DIR": str(own)})
    assert unsafe in (
        Path(f"/run/user/{os.getuid()}/kvdepot"),
        tmp_path / ".cache" / "kvdepot" / "run",
    )
    assert runtime_folder({"XDG_RUNTIME_DIR": "relative"}) == unsafe


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 987654)
    with pytest.raises(UnsafePathError, match="user 987654 has no home directory") as caught:
        runtime_folder({})
    assert "XDG_RUNTIME_DIR" in caught.value.hint
