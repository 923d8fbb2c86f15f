"""Results of a depot's calls: matches, leases, reservations, reports. See kvdepot.depot."""

import math
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Protocol, Self

from kvdepot.core.block import BlockKey, GetResult, PutResult
from kvdepot.core.keys import TokenIds
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.core.volume import TIER_NAMES
from kvdepot.errors import ConfigError, LeaseError

CLOSE_TIMEOUT_S: Final = 30.0
"""Default timeout of `flush` and `close`."""
Layout = KVLayout | Mapping[str, Any] | str | os.PathLike[str]
"""A KVLayout, or the content or path of a Hugging Face config.json."""


MEMORY_TIERS: Final = ("dram", "cxl")


@dataclass(frozen=True, slots=True)
class Match:
    """The longest resident prefix of a chain of keys. `len(match)` is its length in blocks."""

    tiers: tuple[str, ...]
    """The fastest tier of each matched block."""

    @classmethod
    def of(cls, codes: bytes) -> Self:
        """A match with the tiers given as indices in TIER_NAMES, which are mostly the same."""
        for code in codes[:1]:
            if codes.count(code) == len(codes):
                return cls((TIER_NAMES[code],) * len(codes))
        return cls(tuple(TIER_NAMES[code] for code in codes))

    def __len__(self) -> int:
        return len(self.tiers)

    @property
    def blocks_in_memory(self) -> int:
        """Number of leading blocks in memory. The others are worth another put."""
        there = enumerate(self.tiers)
        return next((at for at, tier in there if tier not in MEMORY_TIERS), len(self.tiers))


class Durability(StrEnum):
    """Why a block would be lost with the process; DURABLE if it would not."""

    DURABLE = "durable"
    """Written to a drive, and synced as configured."""
    WAITING = "waiting"
    """Not written, or not synced, before the timeout."""
    POLICY = "policy"
    """The write mode keeps it in memory."""
    BUDGET = "budget"
    """The drives' write budget is used up."""
    READ_ONLY = "read-only"
    """The store is read-only."""
    NO_DRIVE = "no-drive"
    """The store has no drive."""
    FAILED = "failed"
    """A write failed, or its drive is down."""
    EVICTED = "evicted"
    """Evicted: from its drive, and still in memory; or from memory before it was written."""
    ABSENT = "absent"
    """Not in the store."""
    DAEMON = "daemon"
    """Put to a daemon that has ended since, so that it may be lost."""


DURABILITY: Final = tuple(Durability)
"""In the index and between processes a durability is an index in this tuple."""
_UNFINISHED: Final = (Durability.WAITING, Durability.FAILED, Durability.DAEMON)


@dataclass(frozen=True, slots=True)
class TierReport:
    """The part of a flush report about one tier below memory."""

    durable: int = 0
    """Number of blocks that are durable in this tier."""
    waiting: int = 0
    """Blocks that were not written, or not synced, before the timeout."""
    owed: int = 0
    """Blocks that could not be written while the tier was away, and are written when it is back."""
    given_up: int = 0
    """Blocks that were owed and will not be written, since the last flush without keys."""

    def __add__(self, other: "TierReport") -> "TierReport":
        """The report on the blocks of both."""
        return TierReport(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def is_complete(self) -> bool:
        return not (self.waiting or self.owed or self.given_up)


@dataclass(frozen=True, slots=True)
class FlushReport:
    """Result of `flush` and `close`. True if all requested blocks are durable."""

    complete: bool
    """True if every block that the write modes send to drives is durable there, and every removal
    if no keys were given."""
    durable: int = 0
    """Number of durable blocks."""
    not_durable: Mapping[Durability, int] = field(default_factory=dict)
    """Number of other blocks, by reason."""
    blocks: tuple[Durability, ...] = ()
    """The durability of each key, if keys were given."""
    tiers: Mapping[str, TierReport] = field(default_factory=dict)
    """What each tier below memory has of the blocks. A block counts as durable if one tier has it;
    the report is complete if all have it that should."""

    @classmethod
    def of(
        cls, blocks: Iterable[Durability], tiers: Mapping[str, TierReport] = MappingProxyType({})
    ) -> Self:
        """The report on these blocks."""
        found = tuple(blocks)
        counts = Counter(found)
        durable = counts.pop(Durability.DURABLE, 0)
        complete = not any(counts[why] for why in _UNFINISHED)
        complete = complete and all(one.is_complete for one in tiers.values())
        return cls(complete, durable, +counts, found, tiers)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def ok(self) -> bool:
        return self.complete and not self.not_durable

    @property
    def waiting(self) -> int:
        """Blocks that were not written before the timeout."""
        return self.not_durable.get(Durability.WAITING, 0)

    @property
    def given_up(self) -> int:
        """Blocks whose writes failed: they are only in memory, or lost."""
        return self.not_durable.get(Durability.FAILED, 0)


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that a check found."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(slots=True)
class CheckReport:
    """Result of `check`. True if there are no findings."""

    blocks: int = 0
    nbytes: int = 0
    findings: list[Finding] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.findings

    @property
    def ok(self) -> bool:
        return not self.findings

    def add(self, where: str, what: str) -> None:
        self.findings.append(Finding(where, what))

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "blocks": self.blocks,
            "bytes": self.nbytes,
            "findings": [asdict(finding) for finding in self.findings],
        }


@dataclass(frozen=True, slots=True)
class NamespaceHandle:
    """A namespace registered with a depot. Computes the keys of prompts."""

    namespace: Namespace
    layout: KVLayout = field(init=False)
    block_bytes: int = field(init=False)
    """Size of a block's buffer."""
    chunk_bytes: int = field(init=False)
    """Size of the parts of a payload that have a checksum each."""
    producer: int = field(init=False, default=0, compare=False)
    """Number of the producer of the blocks; 0 if unknown."""

    def __post_init__(self) -> None:
        layout = self.namespace.layout
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "block_bytes", layout.block_bytes)
        object.__setattr__(self, "chunk_bytes", layout.chunk_bytes)

    @property
    def tag(self) -> bytes:
        """First bytes of every key in this namespace."""
        return self.namespace.tag

    def keys(self, token_ids: TokenIds, *, parent: BlockKey | None = None) -> list[BlockKey]:
        """Return a key for each full block of a prompt. See Namespace.keys."""
        return self.namespace.keys(token_ids, parent=parent)

    def made_by(self, producer: int) -> None:
        """Record this producer with all blocks put from now on. See core.audit.producer_id."""
        object.__setattr__(self, "producer", producer)

    def hashed_key(self, engine_hash: bytes, parent_hash: bytes | None = None) -> BlockKey:
        """Return the key of a block that an engine names by a hash. See Namespace.hashed_key."""
        return self.namespace.hashed_key(engine_hash, parent_hash)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A block that can be read in place."""

    index: int
    """Index of the block in the request."""
    view: memoryview
    """Its payload, read-only, at the start of a page."""
    lasting: bool
    """True if the view is valid until the lease ends; else it is valid until the sink returns."""


Sink = Callable[[list[Arrival]], None]


class Lease(ABC):
    """Protects the leading blocks of a prompt from eviction until `release` or the end of `with`.

    `len(lease)` is the number of leased blocks; `keys` are their keys. Views must not be used after
    `release`.
    """

    keys: list[BlockKey]
    _released = False

    @abstractmethod
    def view(self, index: int) -> memoryview | None:
        """The payload of a leased block in place, read-only; None if it is on disk only. It is not
        verified; `deliver` and `get_many` do that.
        """

    @abstractmethod
    def deliver(
        self,
        sink: Sink,
        *,
        start: int = 0,
        stop: int | None = None,
        verify_concurrently: bool = False,
        timeout_s: float | None = None,
    ) -> list[GetResult]:
        """Pass the leased blocks start <= i < stop to `sink` in place: a read without a copy.

        Calls `sink` in this thread with lists of Arrivals: first the blocks in memory, then blocks
        as they are read from drives. All are verified (blocks in memory unless dram.verify is off).
        Returns a result for each block; a block with a false result was not passed on. Blocks for
        `timeout_s` at most (default ssd.read_timeout), plus the time of the sink. Exceptions of the
        sink are passed on, and the lease stays valid. Does not count as a further use.

        `verify_concurrently`: blocks in memory are passed on while threads still verify them. The
        sink may copy them, but a copy is valid only if its result is true. A damaged block may be
        passed on a second time, from another tier.
        """

    @abstractmethod
    def _release(self) -> None:
        """End the protection."""

    def release(self) -> None:
        """End the protection. A second call raises LeaseError."""
        if self._released:
            raise LeaseError("the lease was released already")
        self._released = True
        self._release()

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self.keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._released:
            self.release()


class Reservation(ABC):
    """Slots for new blocks. `close` and the end of `with` free slots that are not sealed.

    `outcomes` has a result for each key. STORED: there is a slot to fill (`view`) and then to
    `seal`. THROTTLED: there was no room together with the slots before; seal those, then reserve
    again. Not thread-safe.
    """

    outcomes: list[PutResult]

    @abstractmethod
    def view(self, index: int) -> memoryview | None:
        """The payload of a slot, to be filled by the caller; None if the block has no slot. Must
        not be used after `seal` or `close`.
        """

    @abstractmethod
    def seal(self, indices: Iterable[int] | None = None) -> None:
        """Checksum filled slots (default: all), make them visible and queue them for the drives.

        Seal the first blocks of a prompt first: later ones are useless without them. LeaseError for
        an index without an open slot.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the slots that were not sealed. May be called twice."""

    def __len__(self) -> int:
        return len(self.outcomes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PrefetchHint(Protocol):
    """Result of `prefetch`: blocks that are read into memory in the background."""

    wanted: int
    """Number of blocks to read; others are in memory, unknown, or too many."""
    resident: int
    """Number of leading blocks that are in the store."""
    may_come: bool
    """False if missing blocks cannot come from other nodes: the tier that they share is down."""

    @property
    @abstractmethod
    def brought(self) -> int:
        """Number of blocks that it has read into memory so far."""

    @abstractmethod
    def cancel(self) -> None:
        """Start no further reads; those under way complete. May be called twice."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the prefetch. False if it has not ended after `timeout_s`."""


def checked_deadline(deadline_s: float) -> float:
    """Return a valid deadline in seconds from now, or raise ConfigError."""
    if math.isnan(deadline_s) or deadline_s < 0:
        raise ConfigError("deadline_s", f"must be a number of seconds from now, not {deadline_s!r}")
    return float(deadline_s)
