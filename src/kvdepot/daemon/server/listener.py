"""The listening socket of a daemon.

A running daemon holds a lock on the file SOCKET.lock. The holder of the lock may replace the socket
of a killed daemon. The socket gets its permissions before it gets its name.
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

_BACKLOG: Final = 1024
_PATH_BYTES_MAX: Final = 107
_NEW: Final = ".new"


class Listener:
    """The lock and the socket at `path`, for the owner and optionally a group, until `close`."""

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
        """Make the socket. Clients can connect when this returns."""
        try:
            self._bind()
        except OSError as error:
            foreign = isinstance(error, PermissionError) and self._gid >= 0
            hint = "run the daemon as a member of --group" if foreign else ""
            reason = f"cannot listen: {error.strerror}"
            raise DaemonError(str(self.path), reason, hint=hint) from error

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> socket.socket | None:
        """Accept a connection. None if it was closed again, or no descriptor is free."""
        try:
            return self._socket.accept()[0]
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in (errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.EINTR):
                return None
            raise

    def admits(self, channel: Channel) -> bool:
        """True if the peer is the daemon's user, root or a member of the group."""
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
    """Lock the file and return its descriptor. DaemonError if another daemon holds the lock."""
    name = lock_of(path)
    try:
        fd = open_private_file(name, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        hint = "create the directory" if error.errno == errno.ENOENT else ""
        raise DaemonError(str(path), f"{name}: {error.strerror}", hint=hint) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise DaemonError(
            str(path),
            f"a daemon is already running, process {holder}",
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
        raise DaemonError(str(path), "exists and is not a socket", hint="choose another --socket")


def _group_id(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError("--group", f"there is no group {group!r}") from None
