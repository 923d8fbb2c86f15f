"""Frames: one message of the protocol is one datagram on a SOCK_SEQPACKET socket.

    0   u8   kind
    1   u8   flags
    2   u16  zero
    4   u32  serial     of the request; its answers carry the same
    8   …    body: a value of a fixed binary form, or JSON

All little-endian. The kernel preserves the borders of frames, so a frame has no length field: both
sides read into a buffer of FRAME_BYTES_MAX + 1 bytes, and a frame that fills it is too long.

`body` packs a value, `parse` unpacks it and raises WireError for another length. Keys are sent as
32 bytes each, one after the other.

A Channel sends and receives frames in blocking calls. Their time limits are the kernel's
(SO_RCVTIMEO, SO_SNDTIMEO): a call that waits costs one system call.
"""

import array
import contextlib
import math
import os
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any, ClassVar, Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvdepot.core.block import KEY_BYTES, TAG_BYTES, PutResult
from kvdepot.core.depot import TierReport
from kvdepot.core.first_token import FirstToken, Reason
from kvdepot.core.volume import TIER_NAMES
from kvdepot.errors import ConfigError, WireError

FRAME_BYTES_MAX: Final = 64 << 10
KEYS_MAX: Final = 1536
"""Most keys in one frame; larger batches are split. Every answer for as many blocks fits too."""

SEND_TIMEOUT_S: Final = 10.0
"""A peer that does not read within this time is disconnected."""

_AT_ONCE: Final = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
_TIMEVAL: Final = struct.Struct("@ll")
_CREDENTIALS: Final = struct.Struct("@iII")
_SO_PEERGROUPS: Final = 59
_SO_PEERPIDFD: Final = 77
"""Linux 6.5 and newer. Works for peers in other pid namespaces, which have no pid here."""
_GROUPS_MAX: Final = 256
"""Most groups that Python can read from the kernel."""
_GONE: Final = select.POLLHUP | select.POLLERR | select.POLLRDHUP
_DESCRIPTORS_MAX: Final = 3
TEXT_BYTES_MAX: Final = 64 << 20
_HEAD: Final = struct.Struct("<BBHI")
HEAD_BYTES: Final = _HEAD.size


class FrameKind(IntEnum):
    """The kinds of frames. Requests are below 64, answers above."""

    HELLO = 1
    REGISTER = 2
    MATCH = 3
    LEASE = 4
    WHERE = 5
    RELEASE = 6
    """No answer is sent."""
    DELIVER = 7
    FETCH = 8
    TAKEN = 9
    """The client has read the blocks that were lent to it. No answer is sent."""
    RESERVE = 10
    SEAL = 11
    ABANDON = 12
    """No answer is sent."""
    REMOVE = 13
    REMOVE_NAMESPACE = 14
    FLUSH = 15
    STATS = 16
    HAS_SECRET = 17
    HINT = 18
    HINT_SESSION = 19
    AWAIT_HINT = 20
    CANCEL_HINT = 21
    """No answer is sent."""
    SESSION = 22
    SERVICE = 23
    """A call of sessions, volumes, audits or admin, as JSON; answered with TEXT, or REFUSED."""
    FIRST_TOKEN = 24
    """The time to the first token of a request. No answer is sent."""

    WELCOME = 64
    REFUSED = 65
    NUMBER = 66
    TIERS = 67
    LEASED = 68
    ARRIVED = 69
    DONE = 70
    RESERVED = 71
    FLUSHED = 72
    TEXT = 73
    HINTED = 74
    BROUGHT = 75


class Flag(IntEnum):
    """Bits of `flags`."""

    MORE = 1
    """On TEXT: the next frame continues this one."""
    LENT = 2
    """On ARRIVED: these blocks are valid only until TAKEN, for which the daemon waits."""
    LAST = 8
    """On ARRIVED: no DONE follows. All listed blocks were in memory, all others are absent."""
    VERIFIED = 16
    """On ARRIVED: the daemon has compared these blocks with their checksums."""
    TOKENS = 32
    """On SEAL: the slots have token ids behind their checksums (format.record.fill_tokens). A
    daemon that does not know the flag stores none."""
    PRODUCER = 64
    """On SEAL: the slots have a producer (format.record.fill_producer). A daemon that does not know
    the flag stores none."""
    NONE_COMES = 128
    """On HINTED: missing blocks cannot come from other nodes, as the tier that they share is down.
    """
    PAD = 4
    """On RESERVE: answer every key; those after the first without room are THROTTLED."""


class Frame(NamedTuple):
    """A received frame. `body` is valid until the next frame is received."""

    kind: FrameKind
    flags: int
    serial: int
    body: memoryview


_KINDS: Final = {int(kind): kind for kind in FrameKind}


def pack(kind: FrameKind, serial: int, body: bytes | bytearray = b"", flags: int = 0) -> bytes:
    """The bytes of a frame. WireError if it is too long."""
    if HEAD_BYTES + len(body) > FRAME_BYTES_MAX:
        raise WireError(f"{len(body)} bytes do not fit in a frame")
    return _HEAD.pack(kind, flags, 0, serial) + body


def parse(data: memoryview) -> Frame:
    """Parse received bytes. Raises WireError unless they are a frame of a known kind."""
    if not HEAD_BYTES <= len(data) <= FRAME_BYTES_MAX:
        raise WireError(f"a frame of {len(data)} bytes")
    code, flags, zero, serial = _HEAD.unpack_from(data)
    kind = _KINDS.get(code)
    if kind is None or zero:
        raise WireError(f"a frame of unknown kind {code}")
    return Frame(kind, flags, serial, data[HEAD_BYTES:])


class Peer(NamedTuple):
    """The process at the other end, as the kernel reports it (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int


class Channel:
    """A connected socket. One thread may send and one may receive at a time."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = memoryview(bytearray(FRAME_BYTES_MAX + 1))
        self._limit_s: float | None = None
        self.is_patient = True
        """True: `send` waits for a peer that does not read. False: it raises BlockingIOError."""
        connected.setblocking(True)
        # A frame must fit in the socket's buffer, with what the kernel adds to it.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * FRAME_BYTES_MAX)
        self._set_limit(socket.SO_SNDTIMEO, SEND_TIMEOUT_S)

    def send(
        self, kind: FrameKind, serial: int, body: bytes | bytearray = b"", flags: int = 0
    ) -> None:
        """Send one frame. OSError if the peer has closed or does not read in time."""
        how = socket.MSG_NOSIGNAL if self.is_patient else _AT_ONCE
        self._socket.send(pack(kind, serial, body, flags), how)

    def send_with(
        self, descriptors: Sequence[int], kind: FrameKind, serial: int, body: bytes
    ) -> None:
        """Send one frame together with open files."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        self._socket.sendmsg([pack(kind, serial, body)], [rights], socket.MSG_NOSIGNAL)

    def send_text(self, serial: int, text: bytes) -> None:
        """Send a text of any length, as TEXT frames."""
        step = FRAME_BYTES_MAX // 2
        for at in range(0, max(1, len(text)), step):
            more = Flag.MORE if at + step < len(text) else 0
            self.send(FrameKind.TEXT, serial, text[at : at + step], more)

    def receive(self, limit_s: float | None = None) -> Frame | None:
        """Receive the next frame; None if the peer has closed. Blocks for `limit_s`, or forever.

        OSError if the connection broke, BlockingIOError after `limit_s`, WireError for malformed
        bytes.
        """
        if limit_s != self._limit_s:
            self._set_limit(socket.SO_RCVTIMEO, limit_s)
            self._limit_s = limit_s
        nbytes = self._socket.recv_into(self._buffer)
        return parse(self._buffer[:nbytes]) if nbytes else None

    def receive_now(self) -> Frame | None:
        """`receive` without waiting: BlockingIOError if no frame has arrived."""
        nbytes = self._socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
        return parse(self._buffer[:nbytes]) if nbytes else None

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive_with(self, limit_s: float) -> tuple[Frame | None, list[int]]:
        """`receive` a frame and the open files sent with it, which the caller must close."""
        self._set_limit(socket.SO_RCVTIMEO, limit_s)
        self._limit_s = limit_s
        room = socket.CMSG_SPACE(_DESCRIPTORS_MAX * array.array("i").itemsize)
        nbytes, extras, _, _ = self._socket.recvmsg_into(
            [self._buffer], room, socket.MSG_CMSG_CLOEXEC
        )
        found = array.array("i")
        for level, kind, data in extras:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
        try:
            return (parse(self._buffer[:nbytes]) if nbytes else None), list(found)
        except WireError:
            for fd in found:
                os.close(fd)
            raise

    def receive_text(self, first: Frame, limit_s: float) -> bytes:
        """Receive the rest of the text that begins with `first`. Returns the whole text."""
        parts, length, frame = [], 0, first
        while True:
            if frame.kind is not FrameKind.TEXT or frame.serial != first.serial:
                raise WireError(f"{frame.kind.name} in the middle of a text")
            parts.append(bytes(frame.body))
            length += len(frame.body)
            if length > TEXT_BYTES_MAX:
                raise WireError("a text that is too long")
            if not frame.flags & Flag.MORE:
                return b"".join(parts)
            following = self.receive(limit_s)
            if following is None:
                raise WireError("a truncated text")
            frame = following

    def is_open(self) -> bool:
        """True unless a side is known to have closed. Any thread may call it. Does not block."""
        fd = self._socket.fileno()
        if fd < 0:
            return False
        poll = select.poll()
        poll.register(fd, _GONE)
        return not poll.poll(0)

    def peer(self) -> Peer:
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return Peer(*_CREDENTIALS.unpack(raw))

    def peer_pidfd(self) -> int:
        """A descriptor that is readable when the peer's process has ended; -1 if the kernel has
        none. The caller must close it.
        """
        with contextlib.suppress(OSError):
            return self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        with contextlib.suppress(OSError, ValueError):
            return os.pidfd_open(self.peer().pid)
        return -1

    def peer_groups(self) -> set[int]:
        """The groups of the peer, as the kernel reports them."""
        found = array.array("I")
        room = _GROUPS_MAX * found.itemsize
        with contextlib.suppress(OSError):  # too many groups: use the primary one only
            found.frombytes(self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, room))
        return {self.peer().gid, *found}

    def hang_up(self) -> None:
        """Shut down sending. The peer sees the end; its frames can still be received."""
        self._shut(socket.SHUT_WR)

    def cut(self) -> None:
        """Shut down both directions. Wakes a thread that receives."""
        self._shut(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):  # it may be down already
            self._socket.shutdown(how)

    def _set_limit(self, option: int, limit_s: float | None) -> None:
        """Set a timeout of the socket; None waits forever. At least 1 ms, as 0
        would wait forever.
        """
        micros = 0 if limit_s is None else max(1000, int(limit_s * 1e6))
        value = _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000)
        self._socket.setsockopt(socket.SOL_SOCKET, option, value)


MAGIC: Final = b"KVDEPOTD"
TOKEN_BYTES: Final = 16
NO_TOKEN: Final = bytes(TOKEN_BYTES)
TIMEOUT_S_MAX: Final = 86400.0

PLACE_DTYPE: Final = np.dtype([("location", "<i8"), ("nbytes", "<u8")])
"""A leased block: the offset of its slot in the arena, NOWHERE if it is not in memory, or not
protected."""

ARRIVAL_DTYPE: Final = np.dtype([("location", "<i8"), ("index", "<u4"), ("staged", "<u4")])
"""A block in memory: its index in the request, and the offset of its slot in arena or staging.

Offsets in the slower memory, if there is one, begin at the end of the arena."""

SLOT_DTYPE: Final = np.dtype([("location", "<i8"), ("outcome", "<u8")])
"""The answer to one key of a reservation."""

NOWHERE: Final = -1
PUTS: Final = (PutResult.STORED, PutResult.PRESENT, PutResult.THROTTLED, PutResult.REFUSED)
PUT_CODES: Final = {put: code for code, put in enumerate(PUTS)}
REASONS: Final = tuple(Reason)

Array = npt.NDArray[Any]


def key_words(raw: bytes) -> npt.NDArray[np.uint64]:
    """Parse keys, four words each. WireError for a wrong length, or for too many."""
    if len(raw) % KEY_BYTES or len(raw) > KEYS_MAX * KEY_BYTES:
        raise WireError(f"{len(raw)} bytes are not a batch of keys")
    return np.frombuffer(raw, np.uint64).reshape(-1, 4)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A body with a fixed binary form."""

    FORM: ClassVar[struct.Struct]

    def body(self) -> bytes:
        names: tuple[str, ...] = self.__match_args__
        return self.FORM.pack(*[getattr(self, name) for name in names])

    @classmethod
    def parse(cls, body: memoryview) -> Self:
        if len(body) != cls.FORM.size:
            raise WireError(f"{cls.__name__}: {len(body)} bytes, not {cls.FORM.size}")
        return cls(*cls.FORM.unpack(body))


@dataclass(frozen=True, slots=True)
class Hello(Fixed):
    """The first frame of every connection. Its form never changes. See versions.py."""

    FORM = struct.Struct("<8sHHHHI16s")
    magic: bytes
    oldest: int
    """The oldest protocol that the client speaks."""
    format: int
    record: int
    newest: int
    """The newest protocol that the client speaks; 0 from clients that speak only one."""
    pid: int
    token: bytes
    """Token of the session to join; NO_TOKEN for a new one."""


@dataclass(frozen=True, slots=True)
class Welcome(Fixed):
    """The answer to HELLO. In a new session the descriptors of the memory are sent with it."""

    FORM = struct.Struct("<16s16sIIddQQQBBH4x")
    token: bytes
    instance: bytes
    """Identifies this run of the daemon. Blocks put to another run may be lost."""
    pid: int
    block_tokens: int
    read_timeout_s: float
    put_timeout_s: float
    arena_bytes: int
    cxl_bytes: int
    """Size of the slower memory, whose offsets begin at the end of the arena; 0: there is none, and
    no descriptor of it."""
    staging_bytes: int
    verify: bool
    prefault: bool
    protocol: int
    """The agreed protocol."""


@dataclass(frozen=True, slots=True)
class FirstTokenReport(Fixed):
    """Body of FIRST_TOKEN: a core.first_token.FirstToken."""

    FORM = struct.Struct("<IIdddB")
    prompt_tokens: int
    fetched_tokens: int
    seconds: float
    predicted_s: float
    recompute_s: float
    reason: int
    """Index in core.first_token.Reason."""

    @classmethod
    def of(cls, first: FirstToken) -> Self:
        times = (first.seconds, first.predicted_s, first.recompute_s)
        place = REASONS.index(first.reason)
        return cls(first.prompt_tokens, first.fetched_tokens, *times, place)

    def value(self) -> FirstToken:
        """Parse the report. WireError if its numbers are invalid."""
        if self.reason >= len(REASONS):
            raise WireError(f"a first token for reason {self.reason}")
        times = (self.seconds, self.predicted_s, self.recompute_s)
        reason = REASONS[self.reason]
        first = FirstToken(self.prompt_tokens, self.fetched_tokens, *times, reason)
        try:
            first.check()
        except ConfigError as error:
            raise WireError(str(error)) from error
        return first


@dataclass(frozen=True, slots=True)
class Deliver(Fixed):
    """Read leased blocks start <= i < stop into memory."""

    FORM = struct.Struct("<QIIBd")
    lease: int
    start: int
    stop: int
    verify_concurrently: bool
    """True: announce blocks in memory while they are still being verified."""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Fetch(Fixed):
    """Head of FETCH; keys follow. `start` and `stop` are bytes of the payload;
    both 0: all of it.
    """

    FORM = struct.Struct("<QQBd")
    start: int
    stop: int
    verify: bool
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Register(Fixed):
    """Head of REGISTER; the description follows, as JSON."""

    FORM = struct.Struct("<8sQQ")
    tag: bytes
    block_bytes: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Seconds(Fixed):
    """A timeout; head of FLUSH, RESERVE and HINT, in which keys follow."""

    FORM = struct.Struct("<d")
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Number(Fixed):
    """A count, an id, or 1 for true."""

    FORM = struct.Struct("<Q")
    value: int


@dataclass(frozen=True, slots=True)
class Flushed(Fixed):
    """Head of FLUSHED. A count for each value of core.depot.DURABILITY follows; or, if keys were
    given, an index into DURABILITY for each key. Then a FLUSHED_TIER for each tier below memory.
    """

    FORM = struct.Struct("<B7x")
    complete: bool


@dataclass(frozen=True, slots=True)
class FlushedTier(Fixed):
    """The report on one tier, an index in core.volume.TIER_NAMES. See core.depot.TierReport."""

    FORM = struct.Struct("<5Q")
    tier: int
    durable: int
    waiting: int
    owed: int
    given_up: int


@dataclass(frozen=True, slots=True)
class HintBySession(Fixed):
    """Head of HINT_SESSION; the name follows, as UTF-8. A tag of zeros stands for all namespaces
    that have the session.
    """

    FORM = struct.Struct("<8sd")
    tag: bytes
    deadline_s: float


@dataclass(frozen=True, slots=True)
class SessionUpdate(Fixed):
    """Head of SESSION; the name follows, as UTF-8, then keys from block `start` on, if any.

    Without keys only the state of the known prompt changes.
    """

    FORM = struct.Struct("<8sBBI")
    tag: bytes
    state: int
    name_bytes: int
    start: int


@dataclass(frozen=True, slots=True)
class Hinted(Fixed):
    """Answer to HINT and HINT_SESSION: the hint's number, 0 if there is nothing to prefetch."""

    FORM = struct.Struct("<QII")
    number: int
    resident: int
    """Leading blocks that are in the store."""
    wanted: int
    """Blocks that will be read into memory."""


@dataclass(frozen=True, slots=True)
class WaitHint(Fixed):
    FORM = struct.Struct("<Qd")
    number: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class HintStatus(Fixed):
    """Answer to AWAIT_HINT."""

    FORM = struct.Struct("<BQ")
    ended: bool
    brought: int


def split(form: type[Fixed], body: memoryview) -> tuple[Any, bytes]:
    """Split a body into a fixed head and the bytes that follow it."""
    size = form.FORM.size
    if len(body) < size:
        raise WireError(f"{form.__name__}: {len(body)} bytes, at least {size}")
    return form.parse(body[:size]), bytes(body[size:])


def pack_tiers(tiers: Mapping[str, TierReport]) -> bytes:
    """The end of a FLUSHED."""
    rows = [FlushedTier(TIER_NAMES.index(name), *astuple(one)) for name, one in tiers.items()]
    return b"".join(row.body() for row in rows)


def parse_tiers(raw: bytes) -> dict[str, TierReport]:
    """Parse the end of a FLUSHED. Raises WireError."""
    tiers, rest = {}, raw
    while rest:
        row, rest = split(FlushedTier, memoryview(rest))
        if row.tier >= len(TIER_NAMES):
            raise WireError(f"there is no tier {row.tier}")
        tiers[TIER_NAMES[row.tier]] = TierReport(row.durable, row.waiting, row.owed, row.given_up)
    return tiers


def table(body: memoryview, dtype: np.dtype[Any]) -> tuple[int, Array]:
    """Parse an id and the rows that follow it: LEASED, ARRIVED, RESERVED, SEAL."""
    head, rest = split(Number, body)
    if len(rest) % dtype.itemsize:
        raise WireError(f"{len(rest)} bytes are not rows of {dtype.itemsize}")
    return head.value, np.frombuffer(rest, dtype)


def with_table(identity: int, rows: Array) -> bytes:
    """The body that `table` parses: an id and rows."""
    return Number(identity).body() + rows.tobytes()


def checked_timeout(timeout_s: float) -> float:
    """Check a timeout of the peer and limit it to TIMEOUT_S_MAX. WireError if it is invalid."""
    if not math.isfinite(timeout_s) or timeout_s < 0:
        raise WireError(f"a timeout of {timeout_s} seconds")
    return min(timeout_s, TIMEOUT_S_MAX)


def checked_tag(tag: bytes) -> bytes:
    if len(tag) != TAG_BYTES:
        raise WireError(f"a tag of {len(tag)} bytes")
    return tag


def checked_text(raw: bytes, what: str) -> str:
    """Decode a text of the peer. WireError if it is not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"{what}: not UTF-8") from error
