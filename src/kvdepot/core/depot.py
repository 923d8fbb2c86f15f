"""The depot: what a program talks to, and the values it answers with.

Implemented by store.store.Store, in this process, and client.remote.RemoteStore, over a socket.
`kvdepot.open` returns either. All methods may be called from several threads at a time.
"""

import math
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol, Self

from kvdepot.core.audit import DepotAudits
from kvdepot.core.block import BlockKey, GetResult, PutResult
from kvdepot.core.first_token import FirstToken
from kvdepot.core.keys import TokenIds
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.core.sessions import DepotSessions
from kvdepot.core.volume import TIER_NAMES
from kvdepot.errors import ConfigError, LeaseError

CLOSE_TIMEOUT_S: Final = 30.0
"""How long `flush` and `close` wait for the disks by default."""
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
    """Whether a block survives the end of the process, and why not."""

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
    """Whether everything that the configuration wants on drives is there, and durable."""
    durable: int = 0
    """Blocks that are on drives."""
    not_durable: Mapping[Durability, int] = field(default_factory=dict)
    """How many blocks are not, by the reason."""
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
    """What computes the blocks that are put; 0: not known."""

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
    """Which of the blocks asked for."""
    view: memoryview
    """Its payload, read-only, at the start of a page."""
    lasting: bool
    """Whether the view is good until the lease ends; else until the sink returns."""


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
        beside: bool = False,
        timeout_s: float | None = None,
    ) -> list[GetResult]:
        """Onboard without a copy: hand leased blocks, start <= i < stop, to `sink` in place.

        `sink` gets lists of Arrivals, in this thread, as blocks come: those in memory first, then
        what is read from disk, all verified (blocks in memory unless dram.verify is off). One
        answer for each block asked for; a block with a false answer was not handed over. Returns
        after `timeout_s` (default ssd.read_timeout) plus the sink's own time. What the sink raises
        is passed on; the lease goes on. Not a further use: the lease has counted it.

        `beside`: blocks in memory are handed over while several threads still verify them. The
        sink may copy them, but only the answer says whether a copy is good, and a block that was
        not may be handed over a second time, from another tier.
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
    """Slots for new blocks, until `close` or the end of `with`: what is not sealed is given back.

    `outcomes` has one answer for each key: STORED blocks have a slot to fill (`view`) and become
    blocks of the store with `seal`; all others need nothing. THROTTLED ones did not fit beside
    those before them: seal these, then reserve again. For one thread at a time.
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


_WAIT_LOOK_S: Final = 0.02
"""How often `wait_for` looks."""


class PrefetchHint(Protocol):
    """Answer to `hint`: blocks that come to memory in the background."""

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


class Depot(Protocol):
    """Keeps KV blocks in memory and on drives. Use as a context manager or call `close`.

    Buffers are anything with a contiguous buffer: bytes, bytearray, memoryview, numpy, torch CPU
    tensors through numpy. A buffer belongs to the caller again when the call returns. No call fails
    because of a disk. After `close` every call but `close` raises StoreClosedError.
    """

    @abstractmethod
    def namespace(
        self,
        *,
        model: str,
        layout: Layout,
        tenant: str = "",
        secret: bytes | None = None,
        **fields: Any,
    ) -> NamespaceHandle:
        """Register a namespace and return the handle that makes its keys.

        `layout` is a KVLayout, or a Hugging Face config.json (its path or content) of a model with
        one KV group, cut into the configuration's `block_tokens`. `secret` seeds the keys; left
        out, it is taken from the configuration's `tenants` table. Other fields are those of
        core.namespace.Namespace: fingerprint, shard_rank, shard_size, adapter, extra.
        """

    @abstractmethod
    def register(self, namespace: Namespace) -> NamespaceHandle:
        """`namespace` for a Namespace that exists already."""

    def put(
        self,
        key: BlockKey,
        buffer: Any,
        *,
        timeout_s: float | None = None,
        token_ids: TokenIds | None = None,
    ) -> PutResult:
        """Offload one block. See put_many."""
        return self.put_many([key], [buffer], timeout_s=timeout_s, token_ids=token_ids)[0]

    @abstractmethod
    def put_many(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[Any],
        *,
        timeout_s: float | None = None,
        token_ids: TokenIds | None = None,
    ) -> list[PutResult]:
        """Offload blocks: in memory when this returns, on disk later (`flush` waits for that).

        Keys of one prompt go head first. STORED or PRESENT are true. PRESENT: memory has it. What
        is on disk only is taken into memory again, and not written again. While too much waits to
        be written (writeback.dirty_limit) a put waits for `timeout_s` (default
        writeback.put_timeout), then it is THROTTLED, as where memory is in use. With 0 it does not
        wait for the disk: memory takes it, and it may be evicted before it is written.
        REFUSED: the block can never fit. Raises BadBufferError and KeyFormatError for a caller's
        mistake, before anything is stored.

        `token_ids` are those of all these blocks, one block after the other. They are kept in the
        blocks' records, so that what is here can be announced to routers (docs/routers.md) and
        inspected. As private as the blocks; left out, the blocks are not announced.
        """

    @abstractmethod
    def reserve(
        self,
        keys: Sequence[BlockKey],
        *,
        timeout_s: float | None = None,
        token_ids: TokenIds | None = None,
    ) -> Reservation:
        """Offload without a copy: slots in memory for new blocks, which the caller fills in place.

        Keys of one prompt go head first. Waits up to `timeout_s` (default writeback.put_timeout)
        for room for the first block; further ones that do not fit at once are THROTTLED.
        `token_ids` as for put_many.
        """

    @property
    @abstractmethod
    def memory(self) -> tuple[memoryview, ...]:
        """All memory that views of blocks lie in, for a device to be told of (page-locking)."""

    def get(
        self,
        key: BlockKey,
        into: Any,
        *,
        layers: range | None = None,
        timeout_s: float | None = None,
    ) -> GetResult:
        """Onboard one block. See get_many."""
        return self.get_many([key], [into], layers=layers, timeout_s=timeout_s)[0]

    @abstractmethod
    def get_many(
        self,
        keys: Sequence[BlockKey],
        intos: Sequence[Any],
        *,
        layers: range | None = None,
        timeout_s: float | None = None,
    ) -> list[GetResult]:
        """Onboard blocks, or only a range of their layers, each into its buffer.

        Every answer is true and the buffer holds exactly what was put, or false with a reason, and
        the buffer is undefined. Returns after `timeout_s` (default ssd.read_timeout) at the latest,
        with what is ready. Page-aligned buffers are not needed. Raises BadBufferError and
        KeyFormatError for a caller's mistake, before anything is read.
        """

    @abstractmethod
    def match(self, keys: Sequence[BlockKey]) -> Match:
        """The longest resident prefix. Answered from memory; changes nothing."""

    @abstractmethod
    def lease(self, keys: Sequence[BlockKey]) -> Lease:
        """Match, and protect what matched from eviction until the lease ends. Counts as a use."""

    @abstractmethod
    def touch(self, keys: Sequence[BlockKey]) -> int:
        """Count the resident prefix as used now. Returns its length."""

    @abstractmethod
    def session(
        self,
        name: str,
        keys: Sequence[BlockKey] | None = None,
        state: str = "alive",
        *,
        tenant: str = "",
    ) -> int:
        """Remember the prompt of a session, and what becomes of it: alive, pending (a tool call is
        under way) or closed (it will not come back). Returns how many of its blocks are here.

        `keys` of one prompt, head first; left out, those that `tenant` has given that name before.
        Not a use. What is known is on the drives too, some seconds later at most.
        """

    @property
    @abstractmethod
    def sessions(self) -> DepotSessions:
        """What else can be asked and done about sessions."""

    @abstractmethod
    def hint(
        self, keys: Sequence[BlockKey] | str, deadline_s: float, *, tenant: str = ""
    ) -> PrefetchHint:
        """Blocks of one prompt, head first, that will be wanted within `deadline_s` seconds; or the
        name of a session of `tenant`.

        They come to memory in the background as far as there is room. Does not block. A store that
        lacks some of them, and shares a tier with others, looks there for what is new.
        """

    def wait_for(self, keys: Sequence[BlockKey], timeout_s: float) -> Match:
        """The longest resident prefix, once all of it is here or `timeout_s` has passed: for blocks
        that another machine is about to commit to a tier that both share.

        What has come is brought to memory meanwhile, as by `hint`.
        """
        deadline_s = time.monotonic() + timeout_s
        found = 0
        while found < len(keys) and (left_s := deadline_s - time.monotonic()) > 0:
            more = self.hint(keys[found:], left_s).resident
            found += more
            if not more:
                time.sleep(min(_WAIT_LOOK_S, left_s))
        return self.match(keys)

    @abstractmethod
    def report_first_token(self, first: FirstToken) -> None:
        """An engine tells how soon an answer began, for `stats`, the metrics and the dashboard."""

    @abstractmethod
    def remove(self, keys: BlockKey | Sequence[BlockKey]) -> int:
        """Delete blocks everywhere, also after a restart. Returns how many were there.

        A leased block vanishes from lookups at once and from its tiers when its last lease ends. On
        a store opened read-only the removal lasts as long as this process has it open.
        """

    @property
    @abstractmethod
    def audits(self) -> DepotAudits:
        """What is known of blocks that were computed again, and of namespaces in quarantine."""

    def remove_namespace(self, space: NamespaceHandle) -> int:
        """Delete every block of a namespace, also after a restart. Returns how many were there."""
        return self.remove_tag(space.tag)

    @abstractmethod
    def remove_tag(self, tag: bytes) -> int:
        """`remove_namespace` by the first bytes of its keys."""

    @abstractmethod
    def flush(
        self, timeout_s: float = CLOSE_TIMEOUT_S, *, keys: Sequence[BlockKey] | None = None
    ) -> FlushReport:
        """Wait until what was put before this call is on disk, and durable as configured.

        True only if all of it is; `not_durable` says how many blocks are not, and why: those in
        memory, and those that left it unwritten since the last flush. What was on a drive and has
        made room there does not count. With `keys` it is about these blocks alone, and `blocks`
        answers for each. What could not be written before is tried again.
        """

    @abstractmethod
    def set_write_mode(self, tier: str, mode: str) -> None:
        """Change how a file tier gets its blocks (`write_mode` of its settings), from now on."""

    @abstractmethod
    def add_drive(self, tier: str, path: str | os.PathLike[str]) -> None:
        """Use one more drive, which must be empty, from now on; its capacity is the others'."""

    @abstractmethod
    def drain_drive(self, tier: str, path: str | os.PathLike[str]) -> int:
        """Move a drive's blocks to the others and use it no more. Returns how many were moved."""

    @abstractmethod
    def resize(self, tier: str, capacity: int | str) -> None:
        """Let a file tier have more or less room, as `capacity` of its settings."""

    @abstractmethod
    def record(self, path: str | os.PathLike[str]) -> None:
        """Write every lookup from now on to a new file, a trace for `kvdepot sim`."""

    @abstractmethod
    def stop_recording(self) -> int:
        """End `record`. Returns how many requests were written; 0 if nothing was recorded."""

    @abstractmethod
    def check(self, *, deep: bool = True) -> CheckReport:
        """Verify the index and the tiers against each other and, if `deep`, every byte in memory
        and on disk.
        """

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Counters, and what each tier holds and how it is, as plain values."""

    @abstractmethod
    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> FlushReport:
        """Write down what waits, stop the threads, release everything. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
