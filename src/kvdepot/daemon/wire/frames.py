"""Frames: one message of the protocol is one datagram on a SOCK_SEQPACKET socket.

    0   u8   kind
    1   u8   flags
    2   u16  zero
    4   u32  serial     of the request; its answers carry the same
    8   …    body, see messages.py

All little-endian. The kernel keeps the borders between frames, so there is no length to lie about:
both sides read into a buffer of FRAME_BYTES_MAX + 1 bytes, and a frame that fills it is too long.

A Channel sends and receives frames in blocking calls. Their time limits are the kernel's
(SO_RCVTIMEO, SO_SNDTIMEO): a call that waits costs one system call.
"""

import array
import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from kvdepot.errors import WireError

FRAME_BYTES_MAX: Final = 64 << 10
KEYS_MAX: Final = 1536
"""Keys in one frame; larger batches are several frames. Every answer about as many blocks fits."""

SEND_TIMEOUT_S: Final = 10.0
"""A peer that does not read for this long is given up."""

_AT_ONCE: Final = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
_TIMEVAL: Final = struct.Struct("@ll")
_CREDENTIALS: Final = struct.Struct("@iII")
_SO_PEERGROUPS: Final = 59
_GROUPS_MAX: Final = 256
"""More do not fit in what Python can ask the kernel for."""
_GONE: Final = select.POLLHUP | select.POLLERR | select.POLLRDHUP
_DESCRIPTORS_MAX: Final = 3
TEXT_BYTES_MAX: Final = 64 << 20
_HEAD: Final = struct.Struct("<BBHI")
HEAD_BYTES: Final = _HEAD.size


class FrameKind(IntEnum):
    """What a frame says. Requests are below 64, answers above."""

    HELLO = 1
    REGISTER = 2
    MATCH = 3
    LEASE = 4
    WHERE = 5
    RELEASE = 6
    """Has no answer."""
    DELIVER = 7
    FETCH = 8
    TAKEN = 9
    """The client has done with blocks that were lent for a moment. Has no answer."""
    RESERVE = 10
    SEAL = 11
    ABANDON = 12
    """Has no answer."""
    TOUCH = 13
    REMOVE = 14
    REMOVE_NAMESPACE = 15
    FLUSH = 16
    CHECK = 17
    STATS = 18
    HAS_SECRET = 19
    HINT = 20
    HINT_SESSION = 21
    AWAIT_HINT = 22
    CANCEL_HINT = 23
    """Has no answer."""
    SESSION = 24
    CHANGE = 25
    """What only the daemon's own user and root may: drives, sizes, write modes."""
    SESSIONS = 26
    """A call of core.sessions.DepotSessions, as JSON; answered with TEXT, or REFUSED."""
    AUDITS = 27
    """A call of core.audit.DepotAudits, likewise."""
    FIRST_TOKEN = 28
    """How soon an answer began. Has no answer."""

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
    """On TEXT: another frame goes on where this one ends."""
    LENT = 2
    """On ARRIVED: blocks of it may be gone after the next TAKEN, for which the daemon waits."""
    LAST = 8
    """On ARRIVED: there is no DONE. What is not in it is absent, what is was in memory."""
    VERIFIED = 16
    """On ARRIVED: the daemon has compared these blocks with their checksums."""
    TOKENS = 32
    """On SEAL: the slots have token ids behind their checksums, as format.record.fill_tokens lays
    them. A daemon that does not know the flag keeps none."""
    PRODUCER = 64
    """On SEAL: the slots have a producer, as format.record.fill_producer lays it. A daemon that
    does not know the flag keeps none."""
    PAD = 4
    """On RESERVE: answer for every key, THROTTLED where there was no room to try."""


class Frame(NamedTuple):
    """A frame that was received. `body` is good until the next one is."""

    kind: FrameKind
    flags: int
    serial: int
    body: memoryview


_KINDS: Final = {int(kind): kind for kind in FrameKind}


def pack(kind: FrameKind, serial: int, body: bytes | bytearray = b"", flags: int = 0) -> bytes:
    """A frame to be sent."""
    if HEAD_BYTES + len(body) > FRAME_BYTES_MAX:
        raise WireError(f"{len(body)} bytes do not fit in a frame")
    return _HEAD.pack(kind, flags, 0, serial) + body


def parse(data: memoryview) -> Frame:
    """What was received. Raises WireError unless it is a frame of a known kind."""
    if not HEAD_BYTES <= len(data) <= FRAME_BYTES_MAX:
        raise WireError(f"a frame of {len(data)} bytes")
    code, flags, zero, serial = _HEAD.unpack_from(data)
    kind = _KINDS.get(code)
    if kind is None or zero:
        raise WireError(f"a frame of unknown kind {code}")
    return Frame(kind, flags, serial, data[HEAD_BYTES:])


class Peer(NamedTuple):
    """Who is at the other end, as the kernel knows it."""

    pid: int
    uid: int
    gid: int


class Channel:
    """A connected socket. One thread at a time sends, one receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = memoryview(bytearray(FRAME_BYTES_MAX + 1))
        self._limit_s: float | None = None
        self.is_patient = True
        """Whether `send` waits for who does not read; else it raises BlockingIOError."""
        connected.setblocking(True)
        # A frame must fit in the socket's buffer, with what the kernel adds to it.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * FRAME_BYTES_MAX)
        self._set_limit(socket.SO_SNDTIMEO, SEND_TIMEOUT_S)

    def send(
        self, kind: FrameKind, serial: int, body: bytes | bytearray = b"", flags: int = 0
    ) -> None:
        """Send one frame. OSError when the other side is gone or does not read."""
        how = socket.MSG_NOSIGNAL if self.is_patient else _AT_ONCE
        self._socket.send(pack(kind, serial, body, flags), how)

    def send_with(
        self, descriptors: Sequence[int], kind: FrameKind, serial: int, body: bytes
    ) -> None:
        """Send one frame and, with it, open files."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        self._socket.sendmsg([pack(kind, serial, body)], [rights], socket.MSG_NOSIGNAL)

    def send_text(self, serial: int, text: bytes) -> None:
        """Send a text of any length, as TEXT frames."""
        step = FRAME_BYTES_MAX // 2
        for at in range(0, max(1, len(text)), step):
            more = Flag.MORE if at + step < len(text) else 0
            self.send(FrameKind.TEXT, serial, text[at : at + step], more)

    def receive(self, limit_s: float | None = None) -> Frame | None:
        """The next frame; None when the other side has closed.

        OSError when the connection broke or, as BlockingIOError, `limit_s` has passed; WireError
        for what is no frame.
        """
        if limit_s != self._limit_s:
            self._set_limit(socket.SO_RCVTIMEO, limit_s)
            self._limit_s = limit_s
        nbytes = self._socket.recv_into(self._buffer)
        return parse(self._buffer[:nbytes]) if nbytes else None

    def receive_now(self) -> Frame | None:
        """`receive` without waiting: BlockingIOError when nothing has come."""
        nbytes = self._socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
        return parse(self._buffer[:nbytes]) if nbytes else None

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive_with(self, limit_s: float) -> tuple[Frame | None, list[int]]:
        """`receive`, and the open files that came with the frame; they are the caller's."""
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
        """The whole text that begins with `first`."""
        parts, length, frame = [], 0, first
        while True:
            if frame.kind is not FrameKind.TEXT or frame.serial != first.serial:
                raise WireError(f"{frame.kind.name} in the middle of a text")
            parts.append(bytes(frame.body))
            length += len(frame.body)
            if length > TEXT_BYTES_MAX:
                raise WireError("a text without an end")
            if not frame.flags & Flag.MORE:
                return b"".join(parts)
            following = self.receive(limit_s)
            if following is None:
                raise WireError("a text that breaks off")
            frame = following

    def is_open(self) -> bool:
        """Whether neither side has closed, as far as is known. Any thread; does not block."""
        fd = self._socket.fileno()
        if fd < 0:
            return False
        poll = select.poll()
        poll.register(fd, _GONE)
        return not poll.poll(0)

    def peer(self) -> Peer:
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return Peer(*_CREDENTIALS.unpack(raw))

    def peer_groups(self) -> set[int]:
        """The groups of who is at the other end, as the kernel knows them."""
        found = array.array("I")
        room = _GROUPS_MAX * found.itemsize
        with contextlib.suppress(OSError):  # too many: its first group has to do
            found.frombytes(self._socket.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, room))
        return {self.peer().gid, *found}

    def hang_up(self) -> None:
        """Send nothing more; the other side sees the end. What it still sends can be received."""
        self._shut(socket.SHUT_WR)

    def cut(self) -> None:
        """End it for both sides; a thread that receives is woken."""
        self._shut(socket.SHUT_RDWR)

    def drain(self, limit_s: float) -> None:
        """Receive and ignore until the other side closes, for `limit_s` at most."""
        deadline = time.monotonic() + limit_s
        with contextlib.suppress(OSError):
            while (left_s := deadline - time.monotonic()) > 0:
                self._set_limit(socket.SO_RCVTIMEO, left_s)
                if not self._socket.recv_into(self._buffer):
                    return

    def close(self) -> None:
        self._socket.close()

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):  # it may be down already
            self._socket.shutdown(how)

    def _set_limit(self, option: int, limit_s: float | None) -> None:
        """None or 0 would wait for ever, so a limit is at least a millisecond."""
        micros = 0 if limit_s is None else max(1000, int(limit_s * 1e6))
        value = _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000)
        self._socket.setsockopt(socket.SOL_SOCKET, option, value)
