"""A session with one daemon: its memory, mapped here, and a few connections to it.

A session ends once: when a connection breaks, an answer is late or makes no sense, or the store is
closed. Its sockets are closed, and with them everything given back, only after the last user has
left: a call that copies, a lease, a reservation. So the daemon never gives a slot to somebody else
that is still read or written here.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

from kvdepot.client.link import DaemonAwayError, Link, connect
from kvdepot.errors import DaemonError, WireError
from kvdepot.tiers.memory.memory import Memory
from kvdepot.wire.frames import FrameKind
from kvdepot.wire.messages import NO_TOKEN

_LINKS_MAX: Final = 8
"""Connections of a session; calls beyond them wait for one."""
_WAIT_S: Final = 30.0


class Session:
    """Thread-safe."""

    def __init__(self, path: str) -> None:
        """DaemonAwayError when nobody answers, DaemonError when they cannot be used."""
        self.path = path
        link, (*arena_fds, staging_fd) = connect(path, NO_TOKEN)
        self.welcome = link.welcome
        sizes = (self.welcome.arena_bytes, self.welcome.cxl_bytes)
        try:
            self.arena = Memory.mapped(*zip(arena_fds, sizes, strict=False))
        except OSError as error:
            os.close(staging_fd)
            link.close()
            raise DaemonAwayError(str(error)) from error
        try:
            self.staging = Memory.mapped((staging_fd, self.welcome.staging_bytes))
        except OSError as error:
            self.arena.close()
            link.close()
            raise DaemonAwayError(str(error)) from error
        self.pid = os.getpid()
        self._changed = threading.Condition()
        self._home = link
        self._idle = [link]
        self._links = [link]
        self._users = 0
        self._over = False
        self._closed = False
        if self.welcome.prefault:
            self.arena.prefault(bool)
            self.staging.prefault(bool)

    def is_usable(self) -> bool:
        """Whether calls can be made, as far as is known; not in a child after fork."""
        return not self._over and os.getpid() == self.pid and self._home.is_open()

    @property
    def over(self) -> bool:
        """Whether leases and reservations of this session are void."""
        return self._over or os.getpid() != self.pid

    @contextmanager
    def link(self) -> Iterator[Link]:
        """A connection for one call. A failure in the midst of a request ends the session."""
        self.enter()
        try:
            link = self._borrow()
            try:
                yield link
            except (WireError, DaemonAwayError) as error:
                self.end()
                raise DaemonAwayError(str(error)) from error
            finally:
                if link.waiting:
                    self.end()
                self._give_back(link)
        finally:
            self.leave()

    def tell(self, kind: FrameKind, body: bytes) -> None:
        """Send something that has no answer. Nothing happens if the session is over."""
        if self.over:
            return
        try:
            with self.link() as link:
                link.send(kind, body)
        except DaemonAwayError:
            return  # with the session everything is given back

    def is_intact(self) -> bool:
        """Whether the daemon has held for us, until now, what it said it would."""
        with self._changed:
            links = list(self._links)
        return not self._over and all(link.is_open() for link in links)

    def release(self, numbers: list[int]) -> None:
        """End leases."""
        held = [number for number in numbers if number]
        if held:
            self.tell(FrameKind.RELEASE, np.array(held, "<u8").tobytes())

    def enter(self) -> None:
        """Somebody uses the session's memory until `leave`."""
        with self._changed:
            if self.over:
                raise DaemonAwayError("the session is over")
            self._users += 1

    def leave(self) -> None:
        with self._changed:
            self._users -= 1
            self._close_if_unused()

    def end(self) -> None:
        """Make no more calls. May be called twice."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        """Lock held."""
        if not self._over or self._users or self._closed:
            return
        self._closed = True
        for link in self._links:
            link.close()
        self.arena.close()
        self.staging.close()

    def _borrow(self) -> Link:
        with self._changed:
            if not self._changed.wait_for(self._can_borrow, _WAIT_S) or self._over:
                raise DaemonAwayError("no connection is free")
            if self._idle:
                return self._idle.pop()
            link = self._join()
            self._links.append(link)
            return link

    def _can_borrow(self) -> bool:
        return self._over or bool(self._idle) or len(self._links) < _LINKS_MAX

    def _join(self) -> Link:
        try:
            return connect(self.path, self.welcome.token)[0]
        except DaemonError as error:
            raise DaemonAwayError(str(error)) from error

    def _give_back(self, link: Link) -> None:
        with self._changed:
            self._idle.append(link)
            self._changed.notify()
