"""Creates and checks folders and files that only this user may access.

Another user may have created a folder, file or link with the chosen name. Nothing is written,
truncated or locked before these checks have passed.
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

    It is in XDG_RUNTIME_DIR or else /run/user/UID, if that is a private folder of this user; else
    in the home directory. UnsafePathError if there is none.
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
    """Create a private folder and its parents. An existing folder is checked."""
    path = path.expanduser()
    for parent in reversed(path.parents):
        _make_folder(parent)
    _make_folder(path)
    check_private_folder(path)
    return path


def check_private_folder(path: Path) -> None:
    """Raise UnsafePathError for a link, another user's folder, or one that others may write to."""
    check_folder_status(path, path.lstat())


def check_folder_status(path: Path, found: os.stat_result) -> None:
    """`check_private_folder` for a result of lstat."""
    if stat.S_ISLNK(found.st_mode):
        raise UnsafePathError(path, "is a symbolic link", hint="name the folder itself")
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafePathError(path, "is not a folder", hint="choose another path")
    _check_owner(path, found)


def check_link(path: Path) -> None:
    """Raise UnsafePathError for a symbolic link of a user other than this one and root."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
        raise UnsafePathError(
            path, f"is a symbolic link of user {found.st_uid}", hint="name the folder itself"
        )


def open_private_file(path: Path, flags: int) -> int:
    """Open a private regular file: no symbolic or hard link, not writable by others.

    O_CREAT creates it with mode 0600; O_TRUNC takes effect after the checks. Raises OSError as
    os.open does, and UnsafePathError for any other kind of file.
    """
    safe = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, safe, FILE_MODE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            reason = "is a symbolic link" if error.errno == errno.ELOOP else "is not a regular file"
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
    """Raise UnsafePathError unless the open file is a private regular file with one name."""
    found = os.fstat(fd)
    check_file_status(path, found)
    if found.st_nlink > 1:
        raise UnsafePathError(
            path, f"has {found.st_nlink} hard links", hint="remove it, or copy it"
        )


def check_file_status(path: Path, found: os.stat_result) -> None:
    """Raise UnsafePathError unless a result of stat is that of a private regular file."""
    if not stat.S_ISREG(found.st_mode):
        raise UnsafePathError(
            path, "is not a regular file", hint="remove it, or choose another path"
        )
    _check_owner(path, found)


def write_private_file(path: Path, text: bytes) -> None:
    """Write a private file, in place of its previous content."""
    with os.fdopen(open_private_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(text)


def replace_private_file(path: Path, text: bytes) -> None:
    """Replace a private file atomically by a new one. An existing file is not written to."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with os.fdopen(open_private_file(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(text)
    fresh.replace(path)


def replace_file(path: Path, text: bytes) -> None:
    """Replace the content of an existing file atomically. It keeps its owner and mode."""
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
