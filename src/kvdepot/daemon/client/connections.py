"""Connections to one daemon, its memory mapped here, and attaching again after it was gone.

All connections of a client end together: when one breaks, an answer is late or makes no sense, or
the store is closed. The sockets are closed, and with them everything the daemon holds for this
client is released, only after the last user has left: a call that copies, a lease, a reservation.
So the daemon never reuses a slot that is still read or written here.
"""

import fcntl
import json
import os
import pwd
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvdepot.core.clock import Clock
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.log import RateLimitedLog
from kvdepot.core.namespace import FORMAT_VERSION
from kvdepot.daemon.wire import messages
from kvdepot.daemon.wire.frames import Channel, Flag, Frame, FrameKind
from kvdepot.daemon.wire.versions import (
    PROTOCOL,
    PROTOCOL_OLDEST,
    REFUSED_FOR_VERSIONS,
    SINCE,
    SpokenVersions,
)
from kvdepot.errors import ConfigError, DaemonError, WireError
from kvdepot.format.record import VERSION as RECORD_VERSION
from kvdepot.memory.memory import Memory

HELLO_TIMEOUT_S: Final = 2.0
ROOT: Final = 0
_LINKS_MAX: Final = 8
"""Connections of a client; calls beyond them wait for one."""
_WAIT_S: Final = 30.0
_PAUSE_FIRST_S: Final = 0.05
_PAUSE_MAX_S: Final = 2.0
_SHARE: Final = 10
"""An attempt to attach that took long is followed by a pause this many times as long."""
_SERIALS: Final = 1 << 32
_UNANSWERED: Final = (
    FrameKind.RELEASE,
    FrameKind.ABANDON,
    FrameKind.CANCEL_HINT,
    FrameKind.FIRST_TOKEN,
)
_SPOKEN: Final = SpokenVersions(PROTOCOL_OLDEST, PROTOCOL, FORMAT_VERSION, RECORD_VERSION)
_log: Final = RateLimitedLog("kvdepot.client")


class DaemonAwayError(Exception):
    """The daemon is gone, or does not answer in time. Never leaves this package: a miss instead."""


class Link:
    """One connection: a request, and its answers, at a time. For one thread at a time."""

    def __init__(self, path: str, channel: Channel, welcome: messages.Welcome) -> None:
        self.welcome = welcome
        self._path = path
        self.waiting = 0
        """Requests whose last answer has not been received."""
        self._channel = channel
        self._serial = 0

    def call(self, kind: FrameKind, body: bytes, limit_s: float, flags: int = 0) -> Frame:
        """One request and its one answer. ConfigError when the daemon refuses a setting."""
        return self.answer(self.send(kind, body, flags), limit_s)

    def send(self, kind: FrameKind, body: bytes = b"", flags: int = 0) -> int:
        """Send a request. Returns its serial, for `answer`.

        DaemonError for one that came after the protocol that was agreed on.
        """
        if SINCE.get(kind, 0) > self.welcome.protocol:
            raise self._too_new(kind)
        self._serial = (self._serial + 1) % _SERIALS
        try:
            self._channel.send(kind, self._serial, body, flags)
        except OSError as error:
            raise DaemonAwayError(str(error)) from error
        if kind not in _UNANSWERED:
            self.waiting += 1
        return self._serial

    def follow_up(self, serial: int, kind: FrameKind) -> None:
        try:
            self._channel.send(kind, serial)
        except OSError as error:
            raise DaemonAwayError(str(error)) from error

    def answer(self, serial: int, limit_s: float) -> Frame:
        try:
            frame = self._channel.receive(limit_s)
        except (OSError, WireError) as error:
            raise DaemonAwayError(str(error)) from error
        if frame is None:
            raise DaemonAwayError("the daemon has closed the connection")
        if frame.serial != serial:
            raise DaemonAwayError("an answer to another request")
        if frame.kind is not FrameKind.ARRIVED or frame.flags & Flag.LAST:
            self.waiting -= 1
        if frame.kind is FrameKind.REFUSED:
            raise _refusal_of(frame)
        return frame

    def number(self, kind: FrameKind, body: bytes, limit_s: float, flags: int = 0) -> int:
        """The answer to a request that is answered with a number."""
        frame = expect(self.call(kind, body, limit_s, flags), FrameKind.NUMBER)
        return messages.Number.parse(frame.body).value

    def text(self, kind: FrameKind, body: bytes, limit_s: float) -> Any:
        """The answer to a request that is answered with JSON."""
        first = self.call(kind, body, limit_s)
        try:
            return json.loads(self._channel.receive_text(first, limit_s))
        except (OSError, WireError, ValueError) as error:
            raise DaemonAwayError(str(error)) from error

    def is_open(self) -> bool:
        return self._channel.is_open()

    def close(self) -> None:
        self._channel.close()

    def _too_new(self, kind: FrameKind) -> DaemonError:
        spoken = f"the daemon speaks protocol {self.welcome.protocol}"
        return DaemonError(
            self._path,
            f"{spoken}; {kind.name} came with {SINCE[kind]}",
            hint="upgrade the daemon and restart it; clients attach again by themselves",
        )


def expect(frame: Frame, kind: FrameKind) -> Frame:
    if frame.kind is not kind:
        raise DaemonAwayError(f"{frame.kind.name} instead of {kind.name}")
    return frame


class Connections:
    """What one attachment to a daemon consists of. Thread-safe."""

    def __init__(
        self, path: str, call_s: float, count_away: Callable[[], None], daemon_uid: int
    ) -> None:
        """See `connect` for what it raises."""
        self.path = path
        self._daemon_uid = daemon_uid
        self.call_s = call_s
        """How much longer than asked for an answer may take."""
        self.count_away = count_away
        """A call was answered without the daemon."""
        self.count_stored: Callable[[int], None] = lambda blocks: None
        """So many blocks were put."""
        link, (*arena_fds, staging_fd) = connect(path, messages.NO_TOKEN, daemon_uid)
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
        _of_this_process.add(self)

    def is_usable(self) -> bool:
        """Whether calls can be made, as far as is known; not in a child after fork."""
        return not self._over and os.getpid() == self.pid and self._home.is_open()

    @property
    def over(self) -> bool:
        """Whether leases and reservations made over these connections are void."""
        return self._over or os.getpid() != self.pid

    @contextmanager
    def link(self) -> Iterator[Link]:
        """A connection for one call. A failure in the midst of a request ends all of them."""
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
                with self._changed:
                    self._idle.append(link)
                    self._changed.notify()
        finally:
            self.leave()

    def tell(self, kind: FrameKind, body: bytes) -> None:
        """Send a request that has no answer. Nothing happens if the connections are over."""
        if self.over:
            return
        try:
            with self.link() as link:
                link.send(kind, body)
        except DaemonAwayError:
            return  # with the connections everything is released

    def check_intact(self) -> None:
        """DaemonAwayError unless the daemon has held until now what it said it would."""
        with self._changed:
            links = list(self._links)
        if self._over or not all(link.is_open() for link in links):
            raise DaemonAwayError("the daemon went while its blocks were read")

    def enter(self) -> None:
        """The memory is in use until `leave`."""
        with self._changed:
            if self.over:
                raise DaemonAwayError("the connections are over")
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

    def forget_in_child(self) -> None:
        """After fork, in the child: close its copies, so that the parent's end is the end of all.

        The locks may be held by threads that the child does not have.
        """
        self._changed = threading.Condition()
        self._over = True
        self._close()

    def _close_if_unused(self) -> None:
        """Lock held."""
        if self._over and not self._users:
            self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for link in self._links:
            link.close()
        self.arena.close()
        self.staging.close()

    def _borrow(self) -> Link:
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._over or self._idle or len(self._links) < _LINKS_MAX, _WAIT_S
            )
            if not free or self._over:
                raise DaemonAwayError("no connection is free")
            if self._idle:
                return self._idle.pop()
            try:
                link, _ = connect(self.path, self.welcome.token, self._daemon_uid)
            except DaemonError as error:
                raise DaemonAwayError(str(error)) from error
            self._links.append(link)
            return link


class Reconnector:
    """The connections to a daemon, made anew after it was gone. Thread-safe.

    No thread watches: a call that finds the connections broken attaches anew, if the last attempt
    was long enough ago; otherwise it is answered at once, as a miss.
    """

    def __init__(self, path: str, clock: Clock, call_s: float, daemon_uid: int = ROOT) -> None:
        self.path = path
        self._daemon_uid = daemon_uid
        """A user whose daemon is trusted, beside this process's own and root."""
        self.call_s = call_s
        """How much longer than asked for an answer may take."""
        self.reason = ""
        """Why there is no daemon; empty if there is one."""
        self._clock = clock
        self._lock = threading.Lock()
        self._spaces: dict[bytes, NamespaceHandle] = {}
        self._current: Connections | None = None
        self._pause_s = _PAUSE_FIRST_S
        self._retry_at = 0.0
        self._unflushed: Counter[bytes] = Counter()
        """Blocks put to each run of the daemon since the last flush that was true."""
        self._counts = {"attached": 0, "lost": 0, "away": 0}
        _of_this_process.add(self)

    def begin(self) -> messages.Welcome:
        """Attach for the first time. Raises DaemonError with the reason when that fails."""
        with self._lock:
            try:
                self._current = self._attach()
            except DaemonAwayError as error:
                raise DaemonError(
                    self.path,
                    f"no daemon answers: {error}",
                    hint=f"start one: kvdepot serve --socket {self.path}",
                ) from error
            return self._current.welcome

    def connections(self) -> Connections:
        """Those in force, or new ones. DaemonAwayError when no daemon answers."""
        with self._lock:
            current = self._current
            if current is not None and current.is_usable():
                return current
            if current is not None:
                self._current = None
                self._counts["lost"] += 1
                current.end()
                _log.warning("daemon gone, calls are misses until it is back: %s", self.path)
            if self._clock.now() < self._retry_at:
                raise DaemonAwayError(self.reason)
            self._current = self._try_again()
            return self._current

    @contextmanager
    def link(self) -> Iterator[tuple[Connections, Link]]:
        """A connection for one call."""
        connections = self.connections()
        with connections.link() as link:
            yield connections, link

    def ask(self, kind: FrameKind, call: str, given: Mapping[str, Any], timeout_s: float) -> Any:
        """A question in JSON, and its answer. DaemonError when no daemon answers."""
        body = json.dumps({"call": call, "given": given}).encode()
        try:
            with self.link() as (_, link):
                return link.text(kind, body, timeout_s)
        except DaemonAwayError as error:
            self.count_away()
            reason = f"the daemon did not answer: {error}"
            raise DaemonError(self.path, reason, hint="see its log") from error

    def register(self, space: NamespaceHandle) -> None:
        """Tell this daemon, if there is one, and every later one of a namespace, or ConfigError."""
        try:
            with self.link() as (_, link):
                _register(link, space, self.call_s)
        except DaemonAwayError:
            self.count_away()
        with self._lock:
            self._spaces[space.tag] = space

    def count_away(self) -> None:
        """A call was answered without the daemon."""
        with self._lock:
            self._counts["away"] += 1

    def _count_stored(self, instance: bytes, blocks: int) -> None:
        """This run of the daemon has blocks that were not flushed."""
        with self._lock:
            self._unflushed[instance] += blocks

    def unflushed(self, connections: Connections) -> tuple[int, int]:
        """Blocks that this daemon has, and that others before it had, when they went."""
        with self._lock:
            mine = self._unflushed[connections.welcome.instance]
            return mine, self._unflushed.total() - mine

    def told(self, connections: Connections, flushed: int) -> None:
        """The caller knows that so many are durable, and what went with daemons before."""
        instance = connections.welcome.instance
        with self._lock:
            self._unflushed = Counter({instance: self._unflushed[instance] - flushed})

    def describe(self) -> dict[str, Any]:
        with self._lock:
            return {
                "socket": self.path,
                "is_attached": self._current is not None,
                "reason": self.reason,
                **self._counts,
            }

    def end(self) -> None:
        with self._lock:
            connections, self._current = self._current, None
        if connections is not None:
            connections.end()

    def forget_in_child(self) -> None:
        """After fork, in the child, which attaches by itself when it makes a call."""
        self._lock = threading.Lock()
        self._current = None
        self._retry_at = 0.0

    def _try_again(self) -> Connections:
        """Lock held."""
        began = self._clock.now()
        try:
            connections = self._attach()
        except (DaemonAwayError, DaemonError) as error:
            self.reason = str(error)
            now = self._clock.now()
            self._retry_at = now + max(self._pause_s, _SHARE * (now - began))
            self._pause_s = min(2 * self._pause_s, _PAUSE_MAX_S)
            raise DaemonAwayError(self.reason) from error
        _log.info("daemon back, process %d: %s", connections.welcome.pid, self.path)
        return connections

    def _attach(self) -> Connections:
        """Lock held."""
        connections = Connections(self.path, self.call_s, self.count_away, self._daemon_uid)
        connections.count_stored = partial(self._count_stored, connections.welcome.instance)
        self.reason = ""
        try:
            with connections.link() as link:
                for space in self._spaces.values():
                    try:
                        _register(link, space, self.call_s)
                    except ConfigError as error:
                        # It may have less room; it then answers REFUSED and absent by itself.
                        self.reason = str(error)
        except DaemonAwayError:
            connections.end()
            raise
        self._pause_s = _PAUSE_FIRST_S
        self._counts["attached"] += 1
        return connections


_of_this_process: "weakref.WeakSet[Connections | Reconnector]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for one in list(_of_this_process):
        one.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)


def _register(link: Link, space: NamespaceHandle, call_s: float) -> None:
    description = json.dumps(space.namespace.description(), sort_keys=True).encode()
    head = messages.Register(space.tag, space.block_bytes, space.chunk_bytes)
    link.number(FrameKind.REGISTER, head.body() + description, call_s)


def connect(path: str, token: bytes, daemon_uid: int) -> tuple[Link, list[int]]:
    """A new connection and, for a new client, the descriptors of the daemon's memory.

    Nothing is sent before it is known whose daemon it is. DaemonAwayError when no daemon answers,
    DaemonError when it is one that cannot be used.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.settimeout(HELLO_TIMEOUT_S)
        connected.connect(path)
        channel = Channel(connected)
        _check_trusted(path, channel.peer().uid, daemon_uid)
        return _greet(path, channel, token)
    except (OSError, WireError) as error:
        connected.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise DaemonAwayError(reason) from error
    except DaemonError:
        connected.close()
        raise


def lock_of(path: Path) -> Path:
    """The file that the daemon on this socket has locked as long as it lives."""
    return path.with_name(path.name + ".lock")


def is_served(path: Path) -> bool:
    """Whether a daemon lives that has this socket, whether it answers or not."""
    try:
        lock = os.open(lock_of(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _check_trusted(path: str, uid: int, daemon_uid: int) -> None:
    """DaemonError for the daemon of another user, who could read all that is put there."""
    if uid in (os.geteuid(), ROOT, daemon_uid):
        return
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    raise DaemonError(
        path,
        f"the daemon is run by user {name}, not by user {os.geteuid()} or root",
        hint=f"if it may see all that is put there: daemon_user={name!r} (--daemon-user {name})",
    )


def _greet(path: str, channel: Channel, token: bytes) -> tuple[Link, list[int]]:
    hello = messages.Hello(
        messages.MAGIC,
        _SPOKEN.oldest,
        _SPOKEN.format,
        _SPOKEN.record,
        _SPOKEN.newest,
        os.getpid(),
        token,
    )
    channel.send(FrameKind.HELLO, 0, hello.body())
    frame, descriptors = channel.receive_with(HELLO_TIMEOUT_S)
    try:
        welcome = _welcome(path, frame, len(descriptors), is_new=token == messages.NO_TOKEN)
    except (WireError, DaemonError):
        for fd in descriptors:
            os.close(fd)
        raise
    return Link(path, channel, welcome), descriptors


def _welcome(path: str, frame: Frame | None, files: int, *, is_new: bool) -> messages.Welcome:
    if frame is None:
        raise WireError("the daemon hung up")
    if frame.kind is FrameKind.REFUSED:
        raise _refused(path, frame)
    if frame.kind is not FrameKind.WELCOME:
        raise WireError(f"{frame.kind.name} instead of WELCOME")
    welcome = messages.Welcome.parse(frame.body)
    expected = 0 if not is_new else 3 if welcome.cxl_bytes else 2
    if files != expected:
        raise WireError(f"{files} descriptors instead of {expected}")
    if not welcome.protocol:
        return replace(welcome, protocol=_SPOKEN.oldest)
    if not _SPOKEN.oldest <= welcome.protocol <= _SPOKEN.newest:
        raise WireError(f"protocol {welcome.protocol}, which was not offered")
    return welcome


def _refused(path: str, frame: Frame) -> DaemonError:
    said = _json_of(frame)
    reason = str(said.get("reason", "no reason given"))
    if reason.startswith(REFUSED_FOR_VERSIONS):
        return DaemonError(
            path,
            f"the daemon speaks {said.get('daemon')}; this client speaks {_SPOKEN}",
            hint="install the same version of kvdepot on both sides, and restart the daemon",
        )
    return DaemonError(path, f"the daemon refused: {reason}")


def _refusal_of(frame: Frame) -> ConfigError:
    said = _json_of(frame)
    path = str(said.get("path", "daemon"))
    reason = str(said.get("reason", "refused")).removeprefix(f"{path}: ")
    return ConfigError(path, reason, hint=str(said.get("hint", "")))


def _json_of(frame: Frame) -> dict[str, Any]:
    try:
        said = json.loads(bytes(frame.body))
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
