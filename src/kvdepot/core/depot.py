"""Results of a depot's calls: matches, leases, reservations, reports. Calls: kvdepot.depot."""

import math
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol, Self

from kvdepot.core.block import BlockKey, GetResult, PutResult
from kvdepot.core.keys import TokenIds
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.core.volume import TIER_NAMES
from kvdepot.errors import ConfigError, LeaseError

CLOSE_TIMEOUT_S: Final = 30.0
"""Default time that `flush` and `close` wait for the disks."""
Layout = KVLayout | Mapping[str, Any] | str | os.PathLike[str]
"""A KVLayout, or a Hugging Face config.json: its content or its path."""


MEMORY_TIERS: Final = ("dram", "cxl")


@dataclass(frozen=True, slots=True)
class Match:
    """The longest resident prefix of a chain of keys. `len(match)` is its length in blocks."""

    tiers: tuple[str, ...]
    """For each matched block the fastest tier that has it."""

    @classmethod
    def of(cls, codes: bytes) -> Self:
        """A match whose tiers are given as places in TIER_NAMES. Most often they are the same."""
        for code in codes[:1]:
            if codes.count(code) == len(codes):
                return cls((TIER_NAMES[code],) * len(codes))
        return cls(tuple(TIER_NAMES[code] for code in codes))

    def __len__(self) -> int:
        return len(self.tiers)

    @property
    def blocks_in_memory(self) -> int:
        """Leading blocks that lie in memory: the others are worth offering again."""
        there = enumerate(self.tiers)
        return next((at for at, tier in there if tier not in MEMORY_TIERS), len(self.tiers))


class Durability(StrEnum):
    """Why a block would not survive the end of the process; DURABLE if it would."""

    DURABLE = "durable"
    """On a drive, and made durable as configured."""
    WAITING = "waiting"
    """Not written, or not made durable, when time ran out."""
    POLICY = "policy"
    """The write mode keeps it in memory."""
    BUDGET = "budget"
    """The drives have no writes left for it."""
    READ_ONLY = "read-only"
    """The store may not write."""
    NO_DRIVE = "no-drive"
    """The store has memory only."""
    FAILED = "failed"
    """It could not be written, or its drive has failed."""
    EVICTED = "evicted"
    """It had to make room on its drive, and is in memory still; or in memory, and is gone."""
    ABSENT = "absent"
    """The store does not have it."""
    DAEMON = "daemon"
    """It was put to a daemon that is gone since, and may have gone with it."""


DURABILITY: Final = tuple(Durability)
"""A block's durability is its place in here, in the index and between processes."""
_UNFINISHED: Final = (Durability.WAITING, Durability.FAILED, Durability.DAEMON)


@dataclass(frozen=True, slots=True)
class FlushReport:
    """Answer to `flush` and `close`. True only when all that was asked for is durable."""

    complete: bool
    """True if every block that the configuration sends to drives is durable there."""
    durable: int = 0
    """Blocks that are on drives."""
    not_durable: Mapping[Durability, int] = field(default_factory=dict)
    """Number of blocks that are not durable, by reason."""
    blocks: tuple[Durability, ...] = ()
    """One for each of the keys that were asked for."""

    @classmethod
    def of(cls, blocks: Iterable[Durability]) -> Self:
        """The report on these blocks."""
        found = tuple(blocks)
        counts = Counter(found)
        durable = counts.pop(Durability.DURABLE, 0)
        return cls(not any(counts[why] for why in _UNFINISHED), durable, +counts, found)

    def __bool__(self) -> bool:
        return self.ok

    @property
    def ok(self) -> bool:
        return self.complete and not self.not_durable

    @property
    def waiting(self) -> int:
        """Blocks still waiting to be written when time ran out."""
        return self.not_durable.get(Durability.WAITING, 0)

    @property
    def given_up(self) -> int:
        """Blocks that could not be written; they are in memory only, or gone."""
        return self.not_durable.get(Durability.FAILED, 0)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(slots=True)
class CheckReport:
    """Answer to `check`. True when nothing was found."""

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
            "findings": [{"where": f.where, "what": f.what} for f in self.findings],
        }


@dataclass(frozen=True, slots=True)
class NamespaceHandle:
    """A namespace as one depot knows it: its layout, and the keys of its prompts."""

    namespace: Namespace
    layout: KVLayout = field(init=False)
    block_bytes: int = field(init=False)
    """Size of the buffer that one block fills."""
    chunk_bytes: int = field(init=False)
    """The payload is checksummed in pieces of this size."""
    producer: int = field(init=False, default=0, compare=False)
    """Number of the software that computes the blocks; 0 if unknown."""

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
        """One key for each full block of a prompt. See Namespace.keys."""
        return self.namespace.keys(token_ids, parent=parent)

    def made_by(self, producer: int) -> None:
        """Blocks that are put from now on say so in their records. See core.audit.producer_id."""
        object.__setattr__(self, "producer", producer)

    def hashed_key(self, engine_hash: bytes, parent_hash: bytes | None = None) -> BlockKey:
        """The key of a block that an engine names by a hash. See Namespace.hashed_key."""
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
    """The leading blocks of a prompt, protected from eviction until `release` or the end of `with`.

    `len(lease)` is how many blocks were resident; `keys` are theirs. Views must not be used after
    `release`.
    """

    keys: list[BlockKey]
    _released = False

    @abstractmethod
    def view(self, index: int) -> memoryview | None:
        """Payload of one leased block in place, read-only; None if it is on disk only. Memory as it
        is: `deliver` and `get` verify it.
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
        """Onboard without a copy: hand leased blocks, start <= i < stop, to `sink` in place.

        `sink` gets lists of Arrivals, in this thread, as blocks come: those in memory first, then
        what is read from disk, all verified (blocks in memory unless dram.verify is off). One
        answer for each block asked for; a block with a false answer was not handed over. Returns
        after `timeout_s` (default ssd.read_timeout) plus the sink's own time. What the sink raises
        is passed on; the lease goes on. Not a further use: the lease has counted it.

        `verify_concurrently`: blocks in memory are handed over while several threads still verify
        them. The sink may copy them, but only the answer says whether a copy is good, and a block
        that was not may be handed over a second time, from another tier.
        """

    @abstractmethod
    def _release(self) -> None:
        """End the protection."""

    def release(self) -> None:
        """Give up the protection. A second call is a LeaseError."""
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

    `outcomes` has one answer for each key: STORED blocks have a slot to fill (`view`) and become
    blocks of the store with `seal`; all others need nothing. THROTTLED ones did not fit together
    with those before them: seal these, then reserve again. For one thread at a time.
    """

    outcomes: list[PutResult]

    @abstractmethod
    def view(self, index: int) -> memoryview | None:
        """The payload of a slot, to be filled; None where there is none. Not to be used after
        `seal` or `close`.
        """

    @abstractmethod
    def seal(self, indices: Iterable[int] | None = None) -> None:
        """These slots, or all, are filled: checksum them, make them blocks, queue them for disk.

        Head first; a block is worth nothing without those before it.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back the slots that were not sealed. May be called twice."""

    def __len__(self) -> int:
        return len(self.outcomes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PrefetchHint(Protocol):
    """Answer to `prefetch`: blocks that come to memory in the background."""

    wanted: int
    """Blocks that it is to bring; others are in memory, unknown, or too many."""
    resident: int
    """Leading blocks that are in the store."""

    @property
    @abstractmethod
    def brought(self) -> int:
        """Blocks that are in memory because of it, so far."""

    @abstractmethod
    def cancel(self) -> None:
        """Bring no more; what is under way still arrives. May be called twice."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """True once everything was brought, or will not be; False after `timeout_s`."""


def checked_deadline(deadline_s: float) -> float:
    """Seconds from now. Raises ConfigError for what is no such number."""
    if math.isnan(deadline_s) or deadline_s < 0:
        raise ConfigError("deadline_s", f"must be a number of seconds from now, not {deadline_s!r}")
    return float(deadline_s)
