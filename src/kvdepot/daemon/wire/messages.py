"""Bodies of frames, as values. Fixed binary forms; nothing here is ever evaluated.

`body` gives the bytes, `parse` takes them and raises WireError unless they are exactly of its form.
Keys travel as they are, 32 bytes each, one after the other.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from kvdepot.core.block import KEY_BYTES, TAG_BYTES, BlockKey, PutResult
from kvdepot.core.first_token import FirstToken, Reason
from kvdepot.daemon.wire.frames import KEYS_MAX
from kvdepot.errors import ConfigError, WireError

MAGIC: Final = b"KVDEPOTD"
TOKEN_BYTES: Final = 16
NO_TOKEN: Final = bytes(TOKEN_BYTES)
TIMEOUT_S_MAX: Final = 86400.0

PLACE_DTYPE: Final = np.dtype([("location", "<i8"), ("nbytes", "<u8")])
"""Where a leased block is: offset of its slot in the arena, NOWHERE if it is on disk only."""

ARRIVAL_DTYPE: Final = np.dtype([("location", "<i8"), ("index", "<u4"), ("staged", "<u4")])
"""A block in memory: which of those asked for, and its slot's offset in the arena or in staging.

The slower memory, where there is one, begins where the arena ends."""

SLOT_DTYPE: Final = np.dtype([("location", "<i8"), ("outcome", "<u8")])
"""Answer to one key of a reservation."""

NOWHERE: Final = -1
PUTS: Final = (PutResult.STORED, PutResult.PRESENT, PutResult.THROTTLED, PutResult.REFUSED)
PUT_CODES: Final = {put: code for code, put in enumerate(PUTS)}
REASONS: Final = tuple(Reason)

Array = npt.NDArray[Any]


def key_words(raw: bytes) -> npt.NDArray[np.uint64]:
    """Keys as they travel, four words each. WireError for a wrong length, or for too many."""
    if len(raw) % KEY_BYTES or len(raw) > KEYS_MAX * KEY_BYTES:
        raise WireError(f"{len(raw)} bytes are not a batch of keys")
    return np.frombuffer(raw, np.uint64).reshape(-1, 4)


def key_list(raw: bytes) -> list[BlockKey]:
    """`key_words`, each key for itself."""
    return [BlockKey(words.tobytes()) for words in key_words(raw)]


@dataclass(frozen=True, slots=True)
class Fixed:
    """A body of one fixed form."""

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
    """The first frame of every connection. This form never changes. See versions.py."""

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
    """Of the session to join; NO_TOKEN for a new one."""


@dataclass(frozen=True, slots=True)
class Welcome(Fixed):
    """The daemon's answer: what a client must know. Descriptors come with it in a new session."""

    FORM = struct.Struct("<16s16sIIddQQQBBH4x")
    token: bytes
    instance: bytes
    """Of this run of the daemon: what was put to another one may be gone."""
    pid: int
    block_tokens: int
    read_timeout_s: float
    put_timeout_s: float
    arena_bytes: int
    cxl_bytes: int
    """Of the slower memory, whose locations begin where the arena ends; 0: there is none, and no
    descriptor of it."""
    staging_bytes: int
    verify: bool
    prefault: bool
    protocol: int
    """What is spoken from here on; 0: the oldest that the client offered."""


@dataclass(frozen=True, slots=True)
class FirstTokenTold(Fixed):
    """Body of FIRST_TOKEN: a core.first_token.FirstToken."""

    FORM = struct.Struct("<IIdddB")
    prompt_tokens: int
    fetched_tokens: int
    seconds: float
    predicted_s: float
    recompute_s: float
    reason: int
    """Its place in core.first_token.Reason."""

    @classmethod
    def of(cls, first: FirstToken) -> Self:
        times = (first.seconds, first.predicted_s, first.recompute_s)
        place = REASONS.index(first.reason)
        return cls(first.prompt_tokens, first.fetched_tokens, *times, place)

    def value(self) -> FirstToken:
        """WireError for one that cannot be."""
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
    """Bring leased blocks start <= i < stop to memory."""

    FORM = struct.Struct("<QIIBd")
    lease: int
    start: int
    stop: int
    beside: bool
    """Announce those in memory while they are verified."""
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Fetch(Fixed):
    """Head of FETCH; keys follow. `start` and `stop` in bytes of the payload, both 0: all of it."""

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
    """A timeout: head of FLUSH and RESERVE, where keys follow."""

    FORM = struct.Struct("<d")
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Number(Fixed):
    """A count, an id or a yes."""

    FORM = struct.Struct("<Q")
    value: int


@dataclass(frozen=True, slots=True)
class Flushed(Fixed):
    """Head of FLUSHED. A count for each of core.depot.DURABILITY follows; or, where keys were asked
    for, the place of each in it.
    """

    FORM = struct.Struct("<B7x")
    complete: bool


@dataclass(frozen=True, slots=True)
class HintBySession(Fixed):
    """Head of HINT_SESSION; the name follows, as UTF-8."""

    FORM = struct.Struct("<8sd")
    tag: bytes
    deadline_s: float


@dataclass(frozen=True, slots=True)
class SessionUpdate(Fixed):
    """Head of SESSION; the name follows, as UTF-8, then keys from block `start` on, if any.

    Without keys it is the remembered prompt whose state is told.
    """

    FORM = struct.Struct("<8sBBI")
    tag: bytes
    state: int
    name_bytes: int
    start: int


@dataclass(frozen=True, slots=True)
class Hinted(Fixed):
    """Answer to HINT and HINT_SESSION: the hint's number, 0 if there is nothing to bring."""

    FORM = struct.Struct("<QII")
    number: int
    resident: int
    """Leading blocks that are in the store."""
    wanted: int
    """Blocks that will be brought to memory."""


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
    """A fixed head, and the bytes that follow it."""
    size = form.FORM.size
    if len(body) < size:
        raise WireError(f"{form.__name__}: {len(body)} bytes, at least {size}")
    return form.parse(body[:size]), bytes(body[size:])


def table(body: memoryview, dtype: np.dtype[Any]) -> tuple[int, Array]:
    """An id, and the rows that follow it: LEASED, ARRIVED, RESERVED, SEAL."""
    head, rest = split(Number, body)
    if len(rest) % dtype.itemsize:
        raise WireError(f"{len(rest)} bytes are not rows of {dtype.itemsize}")
    return head.value, np.frombuffer(rest, dtype)


def with_table(identity: int, rows: Array) -> bytes:
    """The body that `table` parses."""
    return Number(identity).body() + rows.tobytes()


def checked_timeout(timeout_s: float) -> float:
    """A timeout from the other side, or WireError."""
    if not math.isfinite(timeout_s) or timeout_s < 0:
        raise WireError(f"a timeout of {timeout_s} seconds")
    return min(timeout_s, TIMEOUT_S_MAX)


def checked_tag(tag: bytes) -> bytes:
    if len(tag) != TAG_BYTES:
        raise WireError(f"a tag of {len(tag)} bytes")
    return tag


def checked_text(raw: bytes, what: str) -> str:
    """A text from the other side, or WireError."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"{what} that is no text") from error
