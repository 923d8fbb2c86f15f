"""Accepts connections for the HTTP servers, bounded in number.

A connection is waiting or busy. It waits while it owes a request: it is new, silent, sends its head
slowly, or is idle. If as many connections are open as there may be, a new one takes the place of
the one that has waited longest. So idle and silent peers cannot keep others out, and a server that
bounds its busy connections can always be asked for its health.
"""

import asyncio
import errno
import resource
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from kvdepot.core.log import RateLimitedLog

CONNECTIONS_MAX: Final = 1024
"""A silent or slow connection costs a descriptor and some KiB. Requests have limits of their own.
"""
BACKLOG: Final = 1024
"""Connections that the kernel holds until they are accepted. They need no descriptors."""
_DESCRIPTORS_SHARE: Final = 4
"""Connections take at most one in four of the descriptors that the process may have."""
_SILENT_S: Final = 10.0
"""A connection that sends nothing for this time is closed."""
_LOOK_S: Final = 1.0
_GRACE_S: Final = 0.05
"""A new connection has this time for its request before another may take its place."""
_AT_ONCE: Final = 256
"""Connections accepted before others are served."""
_DROPPED_AT_ONCE: Final = 16
"""Connections closed for new ones before others are served. Their descriptors are free after it."""
_RETRY_S: Final = 0.1
_SHORT_OF: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_log: Final = RateLimitedLog("kvdepot.http")


def connections_max() -> int:
    """How many connections a server of this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    share = CONNECTIONS_MAX if soft == resource.RLIM_INFINITY else soft // _DESCRIPTORS_SHARE
    return max(8, min(CONNECTIONS_MAX, share))


class Accepted:
    """An accepted connection, which waits until `work` is called."""

    def __init__(self, acceptor: "Acceptor", sock: socket.socket) -> None:
        self.socket = sock
        self._acceptor = acceptor

    def wait(self) -> None:
        """The connection owes a request from now on: another may take its place."""
        self._acceptor.waits(self)

    def work(self) -> None:
        """The connection keeps its place until `wait` is called."""
        self._acceptor.works(self)


class Acceptor:
    """Accepts the connections of a listening socket, and runs `serve` for each that sends
    something: silent ones cost a descriptor, and no more. Used by one event loop. A connection is
    closed when its `serve` returns; that of a waiting connection is cancelled if a new connection
    takes its place."""

    def __init__(
        self, listening: socket.socket, limit: int, serve: Callable[[Accepted], Awaitable[None]]
    ) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._limit = limit
        self._serve = serve
        self._open: dict[Accepted, asyncio.Task[None] | None] = {}
        """No task: nothing has been received yet."""
        self._waiting: dict[Accepted, float] = {}
        """When each began to wait, in that order."""
        self._accepting = False
        self._stopping = False

    def start(self) -> None:
        """Accept connections from now on. Called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._resume()
        self._close_silent()

    def pause(self) -> None:
        """Accept no further connections."""
        self._stopping = True
        self._ignore_new()

    async def stop(self, timeout_s: float) -> None:
        """Close all connections. Busy ones have `timeout_s` to notice it."""
        self.pause()
        for connection in list(self._waiting):
            self._drop(connection)
        tasks = [task for task in self._open.values() if task is not None]
        for connection in self._open:
            try:
                connection.socket.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                _log.info("a connection had already ended: %s", error)
        if tasks:
            _, busy = await asyncio.wait(tasks, timeout=timeout_s)
            for task in busy:
                task.cancel()

    def waits(self, connection: Accepted) -> None:
        if connection in self._open:
            self._waiting.pop(connection, None)
            self._waiting[connection] = self._loop.time()
            self._resume()

    def works(self, connection: Accepted) -> None:
        self._waiting.pop(connection, None)

    def _resume(self) -> None:
        if not self._accepting and not self._stopping:
            self._accepting = True
            self._loop.add_reader(self._listening, self._accept)

    def _ignore_new(self) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listening)

    def _accept(self) -> None:
        dropped = 0
        for _ in range(_AT_ONCE):
            full = len(self._open) >= self._limit
            if full and (dropped == _DROPPED_AT_ONCE or not self._has_waited_enough()):
                return
            try:
                accepted, _address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORT_OF:
                    raise
                _log.warning("a connection cannot be accepted: %s", error.strerror)
                self._drop_longest_waiting()
                self._ignore_new()
                self._loop.call_later(_RETRY_S, self._resume)
                return
            if full:
                _log.info("%d connections are open: those that ask nothing are closed", self._limit)
                self._drop_longest_waiting()
                dropped += 1
            self._begin(accepted)

    def _has_waited_enough(self) -> bool:
        """True if a connection may be closed for a new one. Otherwise no more are accepted until
        that may have changed."""
        longest = next(iter(self._waiting.values()), None)
        if longest is None:
            # A connection that ends or waits resumes.
            self._ignore_new()
            return False
        left_s = longest + _GRACE_S - self._loop.time()
        if left_s <= 0:
            return True
        self._ignore_new()
        self._loop.call_later(left_s, self._resume)
        return False

    def _begin(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        connection = Accepted(self, accepted)
        self._open[connection] = None
        self._waiting[connection] = self._loop.time()
        self._loop.add_reader(accepted, self._begin_to_serve, connection)

    def _begin_to_serve(self, connection: Accepted) -> None:
        """Something has been received: the rest has its time, too."""
        self._loop.remove_reader(connection.socket)
        self.waits(connection)
        task = self._loop.create_task(self._run(connection))
        task.add_done_callback(partial(self._ended, connection))
        self._open[connection] = task

    def _drop_longest_waiting(self) -> None:
        """Drop a connection, but none whose first bytes this loop has had no time to notice."""
        for connection in list(self._waiting):
            if self._open[connection] is not None or not _has_sent(connection.socket):
                self._drop(connection)
                return
            self._begin_to_serve(connection)

    def _drop(self, connection: Accepted) -> None:
        del self._waiting[connection]
        task = self._open.pop(connection)
        if task is not None:
            task.cancel()
        else:
            self._loop.remove_reader(connection.socket)
            connection.socket.close()

    def _close_silent(self) -> None:
        """Close the connections that have sent nothing for too long, now and from time to time."""
        since = self._loop.time() - _SILENT_S
        for connection in [one for one, began in self._waiting.items() if began <= since]:
            if self._open[connection] is None:
                self._drop(connection)
        if not self._stopping:
            self._loop.call_later(_LOOK_S, self._close_silent)

    async def _run(self, connection: Accepted) -> None:
        await self._serve(connection)

    def _ended(self, connection: Accepted, task: asyncio.Task[None]) -> None:
        connection.socket.close()
        self._waiting.pop(connection, None)
        self._open.pop(connection, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a connection failed by a bug in kvdepot", cause=error)
        self._resume()


def _has_sent(sock: socket.socket) -> bool:
    """True if the peer has sent something that was not read yet."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except OSError:
        return False
