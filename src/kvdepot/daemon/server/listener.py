"""The socket that clients connect to: made safely, one daemon at a time, and removed at the end.

A lock file beside the socket tells whether a daemon is there; the process that has its lock may
replace a socket that a killed daemon left. The socket appears under its name with its permissions
set.
"""

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
from pathlib import Path
from typing import Final

from kvdepot.core.private import open_private_file
from kvdepot.daemon.client.connections import lock_of
from kvdepot.daemon.wire.frames import Channel
from kvdepot.errors import ConfigError, DaemonError

_BACKLOG: Final = 64
_PATH_BYTES_MAX: Final = 107
_NEW: Final = ".new"


class Listener:
    """The right to a socket at `path`, for its owner only or also for a group, until `close`."""

    def __init__(self, path: Path, group: str = "") -> None:
        self.path = path
        self._mode = 0o660 if group else 0o600
        self._gid = _group_id(group) if group else -1
        if len(os.fsencode(path)) + len(_NEW) > _PATH_BYTES_MAX:
            raise DaemonError(
                str(path), f"a socket's path has at most {_PATH_BYTES_MAX - len(_NEW)} bytes"
            )
        _check_replaceable(path)
        self._lock = _take_lock(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def listen(self) -> None:
        """Let clients connect from now on."""
        try:
            self._bind()
        except OSError as error:
            foreign = isinstance(error, PermissionError) and self._gid >= 0
            hint = "only a member of --group can give the socket to it" if foreign else ""
            reason = f"cannot listen: {error.strerror}"
            raise DaemonError(str(self.path), reason, hint=hint) from error

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> socket.socket | None:
        """A new connection; None if it is gone already, or there is no descriptor for it."""
        try:
            return self._socket.accept()[0]
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in (errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.EINTR):
                return None
            raise

    def admits(self, channel: Channel) -> bool:
        """Whether the user at the other end may be served: the daemon's own, root, the group's."""
        if channel.peer().uid in (0, os.geteuid()):
            return True
        return self._gid >= 0 and self._gid in channel.peer_groups()

    def close(self) -> None:
        """Stop listening and remove the socket. The lock file stays: removing it would race."""
        if self._lock < 0:
            return
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        os.close(self._lock)
        self._lock = -1

    def _bind(self) -> None:
        new = self.path.with_name(self.path.name + _NEW)
        _check_replaceable(new)
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        before = os.umask(0o777 & ~self._mode)
        try:
            self._socket.bind(str(new))
        finally:
            os.umask(before)
        os.chmod(new, self._mode)
        if self._gid >= 0:
            os.chown(new, -1, self._gid)
        self._socket.setblocking(False)
        self._socket.listen(_BACKLOG)
        os.rename(new, self.path)


def _take_lock(path: Path) -> int:
    """A descriptor that has the lock, or DaemonError: a daemon is there."""
    name = lock_of(path)
    try:
        fd = open_private_file(name, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        hint = "make the directory first" if error.errno == errno.ENOENT else ""
        raise DaemonError(str(path), f"{name}: {error.strerror}", hint=hint) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise DaemonError(
            str(path),
            f"a daemon is there already, process {holder}",
            hint="use it, stop it, or choose another --socket",
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _check_replaceable(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise DaemonError(str(path), "is there and is no socket", hint="choose another --socket")


def _group_id(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError("--group", f"there is no group {group!r}") from None
