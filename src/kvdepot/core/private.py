"""Folders and files of this user alone: made so, and checked before they are used.

A neighbour on the machine may have been there first, with a folder, a file or a link under the
chosen name. Nothing is written, truncated or locked before these checks have passed.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvdepot.errors import UnsafePathError

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


def runtime_folder(env: Mapping[str, str]) -> Path:
    """Return the folder for this user's sockets and locks; `make_private_folder` creates it.

    Below XDG_RUNTIME_DIR, else below /run/user/UID, where that is a private folder of this user;
    else in the home directory. UnsafePathError where there is none.
    """
    for given in (env.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}"):
        base = Path(given)
        if base.is_absolute() and is_private_folder(base):
            return base / "kvdepot"
    try:
        return Path.home() / ".cache" / "kvdepot" / "run"
    except RuntimeError:
        raise UnsafePathError(
            "runtime folder",
            f"user {os.getuid()} has no home directory",
            hint="set HOME or XDG_RUNTIME_DIR to a folder of this user, or name a socket",
        ) from None


def is_private_folder(path: Path) -> bool:
    """True if `path` is a folder of this user that no other user may write to."""
    try:
        check_private_folder(path)
    except (UnsafePathError, OSError):
        return False
    return True


def make_private_folder(path: Path) -> Path:
    """Make a folder, with its parents, for this user alone; one that is there is checked."""
    path = path.expanduser()
    for parent in reversed(path.parents):
        _make_folder(parent)
    _make_folder(path)
    check_private_folder(path)
    return path


def check_private_folder(path: Path) -> None:
    """UnsafePathError for a link, another user's folder, or one that others may write to."""
    check_folder_status(path, path.lstat())


def check_folder_status(path: Path, found: os.stat_result) -> None:
    """`check_private_folder`, of what lstat has found."""
    if stat.S_ISLNK(found.st_mode):
        raise UnsafePathError(path, "is a symbolic link", hint="name the folder itself")
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafePathError(path, "is no folder", hint="choose another path")
    _check_owner(path, found)


def check_link(path: Path) -> None:
    """UnsafePathError where the path is a link that neither this user nor root has made."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
        raise UnsafePathError(
            path, f"is a symbolic link of user {found.st_uid}", hint="name the folder itself"
        )


def open_private_file(path: Path, flags: int, *, dir_fd: int | None = None) -> int:
    """A descriptor of a regular file of this user: no link, with one name, not open to others.

    O_CREAT makes it with mode 0600; O_TRUNC takes effect after the checks. OSError as by os.open,
    UnsafePathError for anything else that has the name.
    """
    safe = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, safe, FILE_MODE, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            reason = "is a symbolic link" if error.errno == errno.ELOOP else "is no regular file"
            raise UnsafePathError(path, reason, hint="remove it, or choose another path") from error
        raise
    try:
        check_private_file(path, fd)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_private_file(path: Path, fd: int) -> None:
    """UnsafePathError unless the open file is regular, this user's, and known by one name."""
    found = os.fstat(fd)
    check_file_status(path, found)
    if found.st_nlink > 1:
        raise UnsafePathError(
            path, f"is one file with {found.st_nlink} names", hint="remove it, or copy it"
        )


def check_file_status(path: Path, found: os.stat_result) -> None:
    """UnsafePathError unless what was found is a regular file of this user, closed to others."""
    if not stat.S_ISREG(found.st_mode):
        raise UnsafePathError(path, "is no regular file", hint="remove it, or choose another path")
    _check_owner(path, found)


def write_private_file(path: Path, text: bytes) -> None:
    """Write a file of this user alone; what was in it is gone."""
    with os.fdopen(open_private_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(text)


def replace_private_file(path: Path, text: bytes) -> None:
    """`write_private_file`, whole or not at all; what has the name now is replaced, not written."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with os.fdopen(open_private_file(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(text)
    fresh.replace(path)


def replace_file(path: Path, text: bytes) -> None:
    """Change a file that is there, whole or not at all; it keeps its owner and its mode."""
    path = path.resolve(strict=True)
    was = path.stat()
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with os.fdopen(open_private_file(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(text)
        if (was.st_uid, was.st_gid) != (os.geteuid(), os.getegid()):
            os.fchown(file.fileno(), was.st_uid, was.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(was.st_mode))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(mode=FOLDER_MODE)
    except OSError:
        if not path.is_dir() and not path.is_symlink():
            raise


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise UnsafePathError(
            path,
            f"belongs to user {found.st_uid}, not to user {os.geteuid()}",
            hint="choose another path, or chown it once you know what is in it",
        )
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise UnsafePathError(
            path,
            f"may be written by other users (mode {stat.S_IMODE(found.st_mode):04o})",
            hint=f"chmod go-w {path}",
        )
