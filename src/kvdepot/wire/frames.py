"""Frames: one message of the protocol is one datagram on a SOCK_SEQPACKET socket.

    0   u8   kind
    1   u8   flags
    2   u16  zero
    4   u32  serial     of the request; its answers carry the same
    8   …    body, see messages.py

All little-endian. The kernel keeps the borders between frames, so there is no length to lie about:
both sides read into a buffer of FRAME_BYTES_MAX + 1 bytes, and a frame that fills it is too long.
"""

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from kvdepot.errors import WireError

PROTOCOL: Final = 4
"""Raised when a frame changes its meaning. Both sides must have the same."""

FRAME_BYTES_MAX: Final = 64 << 10
KEYS_MAX: Final = 1536
"""Keys in one frame; larger batches are several frames. Every answer about as many blocks fits."""

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
