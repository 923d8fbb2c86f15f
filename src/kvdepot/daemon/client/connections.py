"""The connections of a client to its daemon, the mapping of its memory, and reconnecting.

All connections of a client end together: when one breaks, an answer is late or malformed, or the
store is closed. The sockets are closed after the last user has left (a call that copies, a lease, a
reservation). Only then does the daemon release what it holds for this client, so it never reuses a
slot that is still read or written here.
"""

import fcntl
import json
import os
import pwd
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvdepot.core.block import ANSWERS, MISS, GetResult
from kvdepot.core.clock import Clock
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.keys import Keys
from kvdepot.core.log import RateLimitedLog
from kvdepot.core.namespace import FORMAT_VERSION
from kvdepot.core.requests import Array
from kvdepot.daemon.wire import frames
from kvdepot.daemon.wire.frames import KEYS_MAX, Channel, Flag, Frame, FrameKind
from kvdepot.daemon.wire.versions import (
    PROTOCOL,
    PROTOCOL_OLDEST,
    REFUSED_FOR_VERSIONS,
    SINCE,
    SpokenVersions,
)
from kvdepot.errors import ConfigError, DaemonError, WireError
from kvdepot.format.record import HEAD_BYTES, PAGE, record_bytes
from kvdepot.format.record import VERSION as RECORD_VERSION
from kvdepot.memory.memory import Memory

HELLO_TIMEOUT_S: Final = 2.0
ROOT: Final = 0
_LINKS_MAX: Final = 8
"""Most connections of a client; further calls wait for a free one."""
_WAIT_S: Final = 30.0
_PAUSE_FIRST_S: Final = 0.05
_PAUSE_MAX_S: Final = 2.0
_SHARE: Final = 10
"""The pause after a failed attempt to attach, as a multiple of the time that it took."""
_SERIALS: Final = 1 << 32
_UNANSWERED: Final = (
    FrameKind.RELEASE,
    FrameKind.ABANDON,
    FrameKind.CANCEL_HINT,
    FrameKind.FIRST_TOKEN,
)
_SPOKEN: Final = SpokenVersions(PROTOCOL_OLDEST, PROTOCOL, FORMAT_VERSION, RECORD_VERSION)
_log: Final = RateLimitedLog("kvdepot.client")
Answer = TypeVar("Answer")
AWAY: Final = ANSWERS.index(GetResult(None, "failed"))
"""The answer for every block while no daemon is connected."""
CORRUPT: Final = ANSWERS.index(GetResult(None, "corrupt"))
ABSENT: Final = ANSWERS.index(MISS)
FROM_DRAM: Final = ANSWERS.index(GetResult("dram"))
FROM_CXL: Final = ANSWERS.index(GetResult("cxl"))
Codes = npt.NDArray[np.uint8]


class DaemonAwayError(Exception):
    """The daemon has ended or does not answer in time. Calls of this package answer with misses."""


class Link:
    """One connection, used by one thread at a time. It carries one request and its answers."""

    def __init__(self, path: str, channel: Channel, welcome: frames.Welcome) -> None:
        self.welcome = welcome
        self._path = path
        self.waiting = 0
        """Requests whose last answer has not been received."""
        self._channel = channel
        self._serial = 0

    def call(self, kind: FrameKind, body: bytes, limit_s: float, flags: int = 0) -> Frame:
        """Send a request; return its only answer. ConfigError if the daemon refuses a setting."""
        return self.answer(self.send(kind, body, flags), limit_s)

    def send(self, kind: FrameKind, body: bytes = b"", flags: int = 0) -> int:
        """Send a request. Returns its serial, for `answer`.

        DaemonError if the agreed protocol version does not have the request.
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
        """Send a request and return its answer, a number."""
        frame = expect(self.call(kind, body, limit_s, flags), FrameKind.NUMBER)
        return frames.Number.parse(frame.body).value

    def text(self, kind: FrameKind, body: bytes, limit_s: float) -> Any:
        """Send a request and return its answer, parsed from JSON."""
        first = self.call(kind, body, limit_s)
        try:
            return json.loads(self._channel.receive_text(first, limit_s))
        except (OSError, WireError, ValueError) as error:
            raise DaemonAwayError(str(error)) from error

    def is_open(self) -> bool:
        return self._channel.is_open()

    def end(self) -> None:
        """Close the connection, also for a forked child that has its socket."""
        self._channel.cut()
        self._channel.close()

    def close(self) -> None:
        """Close this process's copy of the socket."""
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
    """All connections of one attachment to a daemon, and the mapped memory. Thread-safe."""

    def __init__(
        self, path: str, call_s: float, count_away: Callable[[], None], daemon_uid: int
    ) -> None:
        """Attach to the daemon at `path`. Raises as `connect` does."""
        self.path = path
        self._daemon_uid = daemon_uid
        self.call_s = call_s
        """Time that an answer may take beyond the timeout of its request."""
        self.count_away = count_away
        """Called for each call that was answered without the daemon."""
        self.count_stored: Callable[[int], None] = lambda blocks: None
        """Called with the number of blocks that were put."""
        link, (*arena_fds, staging_fd) = connect(path, frames.NO_TOKEN, daemon_uid)
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
        """True if calls can be made, as far as is known. False in a forked child."""
        return not self._over and os.getpid() == self.pid and self._home.is_open()

    @property
    def over(self) -> bool:
        """True if leases and reservations made over these connections are void."""
        return self._over or os.getpid() != self.pid

    @contextmanager
    def link(self) -> Iterator[Link]:
        """Borrow a connection for one call. An exception during a request ends all connections."""
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
        """DaemonAwayError unless all connections are open: leased blocks were kept so far."""
        with self._changed:
            links = list(self._links)
        if self._over or not all(link.is_open() for link in links):
            raise DaemonAwayError("the daemon went while its blocks were read")

    def enter(self) -> None:
        """Keep the memory mapped and the connections open until `leave`."""
        with self._changed:
            if self.over:
                raise DaemonAwayError("the connections are over")
            self._users += 1

    def leave(self) -> None:
        with self._changed:
            self._users -= 1
            self._close_if_unused()

    def end(self) -> None:
        """Refuse further calls; close the sockets when nothing uses them. May be called twice."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            self._close_if_unused()

    def forget_in_child(self) -> None:
        """In a forked child: close its copies of the sockets. The daemon must see the parent end.

        The lock is replaced: a thread that the child does not have may hold it.
        """
        self._changed = threading.Condition()
        self._over = True
        self._close(Link.close)

    def _close_if_unused(self) -> None:
        """Lock held."""
        if self._over and not self._users:
            self._close(Link.end)

    def _close(self, close_link: Callable[[Link], None]) -> None:
        if self._closed:
            return
        self._closed = True
        for link in self._links:
            close_link(link)
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
    """The connections to a daemon, made again after it was restarted. Thread-safe.

    A call that finds the connections broken attaches again, or is answered as a miss at once if the
    last attempt was too recent.
    """

    def __init__(self, path: str, clock: Clock, call_s: float, daemon_uid: int = ROOT) -> None:
        self.path = path
        self._daemon_uid = daemon_uid
        """A further user whose daemon is trusted; this process's user and root always are."""
        self.call_s = call_s
        """Time that an answer may take beyond the timeout of its request."""
        self.reason = ""
        """Why no daemon is connected, or why it refused a namespace; else empty."""
        self._clock = clock
        self._lock = threading.Lock()
        self._spaces: dict[bytes, NamespaceHandle] = {}
        self._current: Connections | None = None
        self._pause_s = _PAUSE_FIRST_S
        self._retry_at = 0.0
        self._unflushed: Counter[bytes] = Counter()
        """Blocks put to each instance of the daemon since the last complete flush."""
        self._counts = {"attached": 0, "lost": 0, "away": 0}
        _of_this_process.add(self)

    def begin(self) -> frames.Welcome:
        """Attach for the first time. Raises DaemonError with the reason if that fails."""
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
        """The present connections, or new ones. DaemonAwayError if no daemon answers."""
        with self._lock:
            current = self._current
            if current is not None and current.is_usable():
                return current
            if current is not None:
                self._current = None
                self._counts["lost"] += 1
                current.end()
                _log.warning("daemon lost, calls are misses until it is back: %s", self.path)
            if self._clock.now() < self._retry_at:
                raise DaemonAwayError(self.reason)
            self._current = self._try_again()
            return self._current

    @contextmanager
    def link(self) -> Iterator[tuple[Connections, Link]]:
        """Borrow a connection for one call."""
        connections = self.connections()
        with connections.link() as link:
            yield connections, link

    def ask(self, call: Callable[[Connections, Link], Answer], away: Answer) -> Answer:
        """Make a call over one connection. Returns `away` if no daemon is connected."""
        try:
            with self.link() as (connections, link):
                return call(connections, link)
        except DaemonAwayError:
            self.count_away()
            return away

    def call_service(
        self, service: str, call: str, given: Mapping[str, Any], timeout_s: float
    ) -> Any:
        """Call a service in JSON and return its answer. DaemonError if no daemon answers."""
        body = json.dumps({"service": service, "call": call, "given": given}).encode()
        try:
            with self.link() as (_, link):
                return link.text(FrameKind.SERVICE, body, timeout_s)
        except DaemonAwayError as error:
            self.count_away()
            reason = f"the daemon did not answer: {error}"
            raise DaemonError(self.path, reason, hint="see its log") from error

    def register(self, space: NamespaceHandle) -> None:
        """Register a namespace with the daemon, and again after each restart of it.

        ConfigError if the daemon refuses it.
        """
        try:
            with self.link() as (_, link):
                _register(link, space, self.call_s)
        except DaemonAwayError:
            self.count_away()
        with self._lock:
            self._spaces[space.tag] = space

    def count_away(self) -> None:
        """Count a call that was answered without the daemon."""
        with self._lock:
            self._counts["away"] += 1

    def _count_stored(self, instance: bytes, blocks: int) -> None:
        """Count blocks of this instance of the daemon that were not flushed."""
        with self._lock:
            self._unflushed[instance] += blocks

    def unflushed(self, connections: Connections) -> tuple[int, int]:
        """Blocks not flushed: of this instance of the daemon, and of instances that have ended."""
        with self._lock:
            mine = self._unflushed[connections.welcome.instance]
            return mine, self._unflushed.total() - mine

    def told(self, connections: Connections, flushed: int) -> None:
        """Count `flushed` blocks as durable, and forget those of instances that have ended."""
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
        """Reset the state in a forked child, which attaches with its first call."""
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
    description = space.namespace.describe()
    head = frames.Register(space.tag, space.block_bytes, space.chunk_bytes)
    link.number(FrameKind.REGISTER, head.body() + description, call_s)


def connect(path: str, token: bytes, daemon_uid: int) -> tuple[Link, list[int]]:
    """Open a connection; for a new client also receive the descriptors of the daemon's memory.

    Checks the daemon's user before anything is sent. DaemonAwayError if no daemon answers,
    DaemonError if it cannot be used.
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
    """The file that the daemon on this socket keeps locked while it runs."""
    return path.with_name(path.name + ".lock")


def is_served(path: Path) -> bool:
    """True if a daemon with this socket is running, even if it does not answer."""
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
    """DaemonError for the daemon of an untrusted user, who could read all blocks put to it."""
    if uid in (os.geteuid(), ROOT, daemon_uid):
        return
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    raise DaemonError(
        path,
        f"the daemon is run by user {name}, not by user {os.geteuid()} or root",
        hint=f"to trust this user with all blocks: daemon_user={name!r} (--daemon-user {name})",
    )


def _greet(path: str, channel: Channel, token: bytes) -> tuple[Link, list[int]]:
    hello = frames.Hello(
        frames.MAGIC,
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
        welcome = _welcome(path, frame, len(descriptors), is_new=token == frames.NO_TOKEN)
    except (WireError, DaemonError):
        for fd in descriptors:
            os.close(fd)
        raise
    return Link(path, channel, welcome), descriptors


def _welcome(path: str, frame: Frame | None, files: int, *, is_new: bool) -> frames.Welcome:
    if frame is None:
        raise WireError("the daemon hung up")
    if frame.kind is FrameKind.REFUSED:
        raise _refused(path, frame)
    if frame.kind is not FrameKind.WELCOME:
        raise WireError(f"{frame.kind.name} instead of WELCOME")
    welcome = frames.Welcome.parse(frame.body)
    expected = 0 if not is_new else 3 if welcome.cxl_bytes else 2
    if files != expected:
        raise WireError(f"{files} descriptors instead of {expected}")
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


def batches(keys: Sized) -> Iterator[range]:
    """Split keys into parts that fit in a frame, as ranges of their indices."""
    for start in range(0, len(keys), KEYS_MAX):
        yield range(start, min(start + KEYS_MAX, len(keys)))


def answers_of(frame: Frame, count: int) -> tuple[int, Codes]:
    """Parse a DONE frame: the number of the lease, and an answer for each block."""
    head, codes = frames.split(frames.Number, expect(frame, FrameKind.DONE).body)
    if len(codes) != count or (codes and max(codes) >= len(ANSWERS)):
        raise DaemonAwayError("malformed answers")
    return head.value, np.frombuffer(codes, np.uint8).copy()


def arrivals_of(frame: Frame, count: int) -> tuple[int, Array]:
    """Parse an ARRIVED frame: the number of the lease if it is the last, and the blocks."""
    number, rows = frames.table(frame.body, frames.ARRIVAL_DTYPE)
    if len(rows) and rows["index"].max() >= count:
        raise DaemonAwayError("a block arrived that was not requested")
    return number, rows


def slots_in(connections: Connections, arrivals: Array, payload_bytes: Array) -> Array:
    """Addresses of slots. DaemonAwayError for one outside the mapping, from a faulty daemon."""
    staged = arrivals["staged"] != 0
    arena, staging = connections.arena, connections.staging
    room = np.where(staged, staging.nbytes, arena.nbytes)
    places = arrivals["location"]
    ends = places + HEAD_BYTES + -(-payload_bytes // PAGE) * PAGE
    if ((places < 0) | (places % PAGE != 0) | (ends > room)).any():
        raise DaemonAwayError("a slot outside the memory")
    found: Array = np.where(staged, staging.address, arena.address) + places
    return found


def address_in(memory: Memory, location: int, payload_bytes: int) -> int:
    """`slots_in` for one slot."""
    end = location + record_bytes(payload_bytes)
    if location < 0 or location % PAGE or end > memory.nbytes:
        raise DaemonAwayError(f"a slot at {location}, outside the memory")
    return memory.address + location


def payload_in(memory: Memory, location: int, payload_bytes: int) -> memoryview:
    start = address_in(memory, location, payload_bytes) - memory.address + HEAD_BYTES
    return memory.view[start : start + payload_bytes]


def keys_of(keys: Keys, part: range) -> bytes:
    """The bytes of a part of the keys, for a frame."""
    return keys[part.start : part.stop].tobytes()
