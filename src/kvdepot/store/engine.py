"""The engine of a store: every call of a program or of a daemon's client, on arrays.

Keys are rows of four words, blocks rows of core.requests.BLOCK_DTYPE, answers one byte for each
block: its place in core.block.ANSWERS. The first argument of each call is its Caller. Sizes are
those that the caller has registered; the engine does not take them from a request.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.core.block import BlockKey, PutResult
from kvdepot.core.depot import FlushReport
from kvdepot.core.keys import Keys, as_keys, tag_word
from kvdepot.core.log import RateLimitedLog
from kvdepot.core.metadata import Tombstone
from kvdepot.core.requests import BLOCK_DTYPE, Array, BlockSize, Offer
from kvdepot.core.sessions import SessionState
from kvdepot.core.units import format_bytes
from kvdepot.core.volume import TIER_NAMES, Ints
from kvdepot.depot import check_block_bytes
from kvdepot.errors import ConfigError, StateError
from kvdepot.format.record import (
    HEAD_BYTES,
    chunk_count,
    filled_producer,
    filled_tokens,
    record_bytes,
    record_sizes,
)
from kvdepot.index.table import NONE, Bools, Rows
from kvdepot.store.events import LookedUp, Registered
from kvdepot.store.move.mover import BlockMover
from kvdepot.store.read.prefetch import Hint, Prefetcher
from kvdepot.store.read.reader import ABSENT, Reader, Sink
from kvdepot.store.state.state import BlockLease, StoreState
from kvdepot.store.write.put import NewBlock, Putter
from kvdepot.store.write.write_back import Flusher

_log = RateLimitedLog("kvdepot.store")
_UNKNOWN: Final = BlockSize(0, 0)


@dataclass(eq=False, slots=True)
class Caller:
    """The origin of a call: the program that opened the store, a client of the daemon, or another
    node or a person, who may use all namespaces described on the drives.
    """

    label: str
    spaces: dict[int, BlockSize] = field(default_factory=dict)
    """Block sizes of its registered namespaces, by the first word of their keys."""
    described: Callable[[int], BlockSize | None] = lambda _: None
    """Returns the block size of a namespace that it may use without registering it, or None."""
    told: Counter[int] = field(default_factory=Counter)
    """What its last flush, or its start, knew of `Catalog.left_unwritten`."""


class Access:
    """The namespaces that callers have registered, and those in quarantine. Thread-safe."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._sizes: dict[int, BlockSize] = {}
        """Block sizes of the namespaces that callers have registered."""
        self._lock = threading.Lock()
        """Guards `_sizes` and the namespaces of callers; held while a description is written."""
        self._quarantined: frozenset[int] = frozenset()

    def register(self, caller: Caller, tag: bytes, size: BlockSize, description: bytes) -> None:
        """See Engine.register."""
        if size.block_bytes <= 0 or size.chunk_bytes <= 0:
            raise ConfigError("layout", "a block must have at least 1 byte")
        chunk_count(*size)
        check_block_bytes(size.block_bytes)
        self._check_fits(record_bytes(size.block_bytes))
        word = tag_word(tag)
        with self._lock:
            known = self._sizes.get(word, size)
            if known != size:
                raise ConfigError(
                    "layout", f"the namespace already has blocks of {known.block_bytes} bytes"
                )
            if word in caller.spaces:
                return
            self._state.descriptions.register(tag, description)
            self._sizes[word] = caller.spaces[word] = size

    def unregister(self, caller: Caller) -> None:
        """Release the namespaces of a caller that has ended."""
        with self._lock:
            tags = [word.to_bytes(8, "little") for word in caller.spaces]
            caller.spaces.clear()
            for tag in self._state.descriptions.unregister(tags):
                self._sizes.pop(tag_word(tag), None)

    def is_registered(self, tag: bytes) -> bool:
        """True if a caller has registered the namespace."""
        return tag_word(tag) in self._sizes

    def quarantine(self, tags: Iterable[bytes]) -> None:
        """Set the namespaces in quarantine: their blocks are neither served nor stored."""
        self._quarantined = frozenset(map(tag_word, tags))

    def quarantined(self, keys: Keys) -> Bools | None:
        """True for keys of a namespace in quarantine; None if no namespace is."""
        tags = self._quarantined
        return np.isin(keys[:, 0], np.array([*tags], np.uint64)) if tags else None

    def allowed(self, caller: Caller, blocks: Array) -> Ints:
        """Set the sizes of blocks to the registered ones, also for whole blocks the end of the
        range. Returns the indices of those that the caller may use; the others have no size.
        """
        self.set_sizes(caller, blocks)
        sizes, stop = blocks["payload_bytes"], blocks["stop"]
        if np.count_nonzero(stop) < len(stop):
            np.copyto(stop, sizes, where=stop == 0)
        found: Ints = ((sizes > 0) & (stop <= sizes)).nonzero()[0]
        return found

    def set_sizes(self, caller: Caller, blocks: Array) -> None:
        """Set the sizes of blocks to the registered ones; zeros if the caller may not use them."""
        tags = blocks["key"][:, 0]
        known = set(tags.tolist())
        for tag in known:
            size = caller.spaces.get(tag) or caller.described(tag) or _UNKNOWN
            if tag in self._quarantined:
                size = _UNKNOWN
            mine = slice(None) if len(known) == 1 else tags == tag
            blocks["payload_bytes"][mine], blocks["chunk_bytes"][mine] = size

    def _check_fits(self, nbytes: int) -> None:
        """Raise ConfigError for blocks that a tier could never hold."""
        state = self._state
        if not state.arena.chunks_for(nbytes):
            raise ConfigError(
                "dram.capacity", f"a block takes {format_bytes(nbytes)}, more than the tier has"
            )
        if not state.lower_tiers:
            return
        if not state.staging.chunks_for(nbytes):
            raise ConfigError(
                "writeback.staging", f"a block takes {format_bytes(nbytes)}, more than staging has"
            )
        for lower in state.lower_tiers:
            facts = (one for _, one in lower.volumes.all_facts() if not one.lost)
            room = min((one.record_bytes_max for one in facts), default=nbytes)
            if nbytes > room:
                segment = f"{lower.name}.segment"
                raise ConfigError(
                    segment,
                    f"a block takes {format_bytes(nbytes)}, a segment of this store holds "
                    f"{format_bytes(room)}",
                    hint=f"make a new store with a larger {segment} or {lower.name}.capacity",
                )


class Engine:
    """The calls of one store. Thread-safe. No call raises for a fault of a medium."""

    def __init__(self, state: StoreState, mover: BlockMover) -> None:
        self.state = state
        self.memories = [arena.memory for arena in state.all_arenas]
        """The memory of all memory tiers, then that of staging."""
        self.putter = Putter(state)
        self.reader = Reader(state, self.putter.slots)
        self.prefetcher = Prefetcher(state, self.reader)
        self._flusher = Flusher(state)
        self._mover = mover
        self.access = Access(state)
        tiers = [TIER_NAMES.index(copies.tier) for copies in state.catalog.tiers]
        lowest = [(bits & -bits).bit_length() - 1 for bits in range(1, 1 << len(tiers))]
        self._codes = np.array([0, *(tiers[bit] for bit in lowest)], np.uint8)
        """The fastest tier (index in TIER_NAMES) by the bits of residency."""

    def payload(self, address: int, nbytes: int) -> memoryview:
        """The payload of the record at an address of the store's memory."""
        for memory in self.memories:
            start = address - memory.address + HEAD_BYTES
            if HEAD_BYTES <= start <= memory.nbytes:
                return memory.view[start : start + nbytes]
        raise StateError("the address is not in the store's memory")

    def address_of(self, slot: NewBlock) -> int:
        """Return the address for the record of a new block."""
        return self.state.arena.address + slot.slot

    def join(self, timeout_s: float) -> bool:
        """Wait for running reads. False: the kernel or a thread still uses the memory."""
        return self.prefetcher.close(timeout_s) and self.reader.close(timeout_s)

    def register(self, caller: Caller, tag: bytes, size: BlockSize, description: bytes) -> None:
        """Let a caller use a namespace until `unregister`. Writes its description to the drives.

        Raises ConfigError if its blocks do not fit, or it is registered with another size.
        """
        self.state.check_open()
        self.access.register(caller, tag, size, description)
        self.state.events.emit(Registered(tag, description))

    def unregister(self, caller: Caller) -> None:
        """Release the namespaces of a caller that has ended."""
        self.access.unregister(caller)

    def match(self, caller: Caller, keys: Keys, *, counts: bool = True) -> bytes:
        """Return the fastest tier (index in TIER_NAMES) of each block of the longest resident
        prefix.

        Takes the lock only if a block is missing. `counts`: count it as a lookup.
        """
        self.state.check_open()
        residency = self._all_resident(keys)
        if residency is None:
            with self.state.lock:
                residency = self.state.catalog.residency.array[self._resident(keys)]
        found = bytes(self._codes[residency])
        if counts:
            self.state.events.emit(LookedUp(self.state.clock.now(), keys, found))
        return found

    def lease(self, caller: Caller, keys: Keys) -> BlockLease:
        """Protect the longest resident prefix from eviction, and count it as used."""
        state, catalog = self.state, self.state.catalog
        state.check_open()
        with state.lock:
            resident = self._resident(keys)
            found = bytes(self._codes[catalog.residency.array[resident]])
            rows = resident.tolist()
            catalog.use(rows)
            state.lease(rows)
        state.events.emit(LookedUp(state.clock.now(), keys, found, is_lease=True))
        return BlockLease(state, rows, keys[: len(rows)])

    def read(
        self,
        caller: Caller,
        blocks: Array,
        timeout_s: float,
        *,
        keep: BlockLease | None = None,
        sink: Sink | None = None,
        verify: bool | None = None,
    ) -> bytes:
        """Copy blocks to their buffers, or pass them to `sink` in place. Returns an index into
        ANSWERS for each.

        Serves blocks in memory first, in one batch, then reads the others from drives, always
        verified. `verify`: verify blocks in memory too (default: as configured); a damaged copy is
        dropped and read from another tier. `keep` protects blocks that stay in memory until it is
        released. Exceptions of the sink are passed on.
        """
        wanted = self.access.allowed(caller, blocks)
        codes = self.reader.read(blocks, wanted, timeout_s, keep=keep, sink=sink, verify=verify)
        return codes if len(wanted) == len(blocks) else _answers(codes, wanted, len(blocks))

    def deliver(
        self,
        caller: Caller,
        lease: BlockLease,
        blocks: Array,
        timeout_s: float,
        sink: Sink,
        *,
        first: int = 0,
        verify_concurrently: bool = False,
    ) -> bytes:
        """Pass leased blocks to `sink` in place, without counting a use. See
        core.depot.Lease.deliver.

        `first`: the index in the lease of the first of `blocks`. Blocks that the lease does not
        protect are not lasting: those beyond its rows, and those that were removed and put again.
        """
        wanted = self.access.allowed(caller, blocks)
        rows = lease.rows[first : first + len(blocks)]
        leased = np.full(len(blocks), NONE, np.int64)
        leased[: len(rows)] = rows
        codes = self.reader.read(
            blocks,
            wanted,
            timeout_s,
            sink=sink,
            leased=leased,
            concurrently=verify_concurrently,
        )
        return codes if len(wanted) == len(blocks) else _answers(codes, wanted, len(blocks))

    def put(self, caller: Caller, offer: Offer, timeout_s: float) -> list[PutResult]:
        """Copy blocks into memory and queue them for the drives. See depot.Depot.put_many."""
        with self.state.using:
            answers = self._with_slots(caller, offer, self.putter.store, timeout_s)[1]
            if self.state.writes.written_through() is not None:
                self._flusher.write_through(timeout_s)
            return answers

    def reserve(
        self, caller: Caller, offer: Offer, timeout_s: float, *, pad: bool = True
    ) -> tuple[list[NewBlock | None], list[PutResult]]:
        """Reserve slots for new blocks. Returns them, None for blocks without one, and the results.

        Without `pad` there are no results for blocks after the first without room.
        """
        find = self.putter.reserve if pad else self.putter.admit
        return self._with_slots(caller, offer, find, timeout_s)

    def seal(
        self, caller: Caller, slots: list[NewBlock], *, in_slots: tuple[bool, bool] | None = None
    ) -> None:
        """Make filled slots visible as blocks. `in_slots`: another process has filled them and
        their checksums; True if it has also written token ids, and a producer.
        """
        tokens, producer = in_slots or (False, False)
        for slot in slots if tokens or producer else ():
            image = self.state.arena.image(slot.slot, HEAD_BYTES)
            if producer:
                slot.producer = filled_producer(image)
            if tokens:
                slot.tokens = filled_tokens(image, slot.payload_bytes, slot.chunk_bytes)
        self.putter.finish(slots, summed=in_slots is not None)

    def abandon(self, caller: Caller, slots: list[NewBlock]) -> None:
        """Free slots that were not sealed."""
        self.putter.abandon(slots)

    def remove(self, caller: Caller, keys: Keys | None = None, *, tag: bytes = b"") -> int:
        """Delete blocks from all tiers, durably: those with these keys, or all of a namespace.

        Waits for blocks that are being written. Returns the number of blocks that were stored. A
        key that no volume can have is not recorded. A namespace with more removed keys than the
        volumes can record is removed as a whole: its blocks from before this call.
        """
        self.state.check_open()
        if keys is None:
            return self._remove_namespace(tag)
        absent = self._absent(keys)
        removed = self._remove([*dict.fromkeys(as_keys(keys))], self._live_rows, without=absent)
        for crowded in self.state.volumes.metadata.crowded():
            blocks = self._remove_namespace(crowded)
            _log.warning(
                "namespace %s: its removed keys are too many to record; its %d other blocks are "
                "removed too",
                crowded.hex(),
                blocks,
            )
        return removed

    def _remove_namespace(self, tag: bytes) -> int:
        removed = self._remove([tag], lambda names: self._rows_of(names[0]))
        self.state.descriptions.removed(tag)
        return removed

    def _absent(self, keys: Keys) -> set[bytes]:
        """The keys that are neither in the index nor on a volume.

        Looks into the index first: a block that leaves it meanwhile is still on a volume.
        """
        with self.state.lock:
            missing = keys[self.state.catalog.table.find_many(keys) == NONE]
        return set(as_keys(missing[~self.state.volumes.metadata.may_hold(missing)]))

    def _remove(
        self,
        names: list[bytes],
        rows_of: Callable[[list[bytes]], list[int]],
        *,
        without: AbstractSet[bytes] = frozenset(),
    ) -> int:
        """Delete the rows of keys or of a namespace, and record tombstones for these names, for
        those in `without` only if they have come since.
        """
        state = self.state
        tiers = [lower for lower in state.lower_tiers if lower.writable]
        limit_s = max((lower.config.write_timeout for lower in tiers), default=0.0)
        with state.lock:
            rows = rows_of(names)
            if without:
                come = {state.catalog.table.key(row) for row in rows}
                names = [name for name in names if name not in without or name in come]
            state.mark_deleted(rows)
            state.events.count("removed", len(rows))
            below = state.stamps.next()
            state.volumes.metadata.announce([Tombstone(name, below, below) for name in names])
            state.lock.written.wait_for(
                lambda: not state.writes.are_moving(state.catalog.deleted(rows)), limit_s
            )
            recorded = state.stamps.next()
        if names:
            self._mover.record_tombstones([Tombstone(name, below, recorded) for name in names])
        return len(rows)

    def prefetch(
        self,
        caller: Caller,
        prompts: Sequence[Keys],
        deadline_s: float,
        session: SessionState = SessionState.NONE,
    ) -> Hint:
        """Read prompts into memory in the background, first the heads of all. If blocks are
        missing, requests a refresh of volumes shared with other nodes. Does not block.
        """
        state, catalog, parts, resident = self.state, self.state.catalog, [], 0
        with state.lock:
            for keys in prompts:
                rows = self._resident(keys)
                blocks = np.zeros(len(rows), BLOCK_DTYPE)
                blocks["key"] = keys[: len(rows)]
                wanted = self.access.allowed(caller, blocks)
                away = wanted[state.addresses(rows[wanted]) == 0]
                parts.append(
                    blocks[away[catalog.nbytes.array[rows[away]] == blocks["payload_bytes"][away]]]
                )
                resident += len(rows)
        if resident < sum(map(len, prompts)):
            state.request_refresh()
        depths = np.concatenate([np.arange(len(part)) for part in parts] or [np.zeros(0, int)])
        blocks = np.concatenate(parts or [np.zeros(0, BLOCK_DTYPE)])
        heads_first = np.argsort(depths, kind="stable")
        hint = self.prefetcher.start(blocks[heads_first], deadline_s, session)
        hint.resident = resident
        hint.may_come = not state.volumes.are_shared_down
        return hint

    def flush(self, caller: Caller, timeout_s: float, keys: Keys | None = None) -> FlushReport:
        """Wait until blocks put before are durable. See depot.Depot.flush."""
        self.state.check_open()
        return self._flusher.flush(timeout_s, keys, caller.told)

    def _all_resident(self, keys: Keys) -> Array | None:
        """The residency of blocks that are all resident, found without the lock; None if the lock
        is needed.

        Other threads may change the index meanwhile. If a row has the key before and after its
        residency is read, the block was resident at a moment of this call, which is all that a
        match guarantees. A key that is not found may be being moved within the table.
        """
        catalog = self.state.catalog
        if self.access.quarantined(keys) is not None:
            return None
        try:
            rows = catalog.table.find_many(keys)
            residency: Array = catalog.residency.array[rows]
            same = catalog.table.words(rows).tobytes() == keys.tobytes()
        except IndexError:  # the table grows just now
            return None
        all_up = not self.state.volumes.down
        return residency if same and all_up and (rows != NONE).all() and residency.all() else None

    def _resident(self, keys: Keys) -> Rows:
        """The rows of the longest prefix that can be served. With the lock."""
        assert self.state.lock.held()
        catalog = self.state.catalog
        rows = catalog.table.find_many(keys)
        there: Bools = (rows != NONE) & (catalog.residency.array[rows] != 0)
        quarantined = self.access.quarantined(keys)
        if quarantined is not None:
            there &= ~quarantined
        count = len(rows) if there.all() else int(there.argmin())
        if self.state.volumes.down:
            count = len(self.state.usable_prefix(rows[:count].tolist()))
        return rows[:count]

    def _live_rows(self, keys: Sequence[bytes]) -> list[int]:
        return [row for row in self.state.catalog.rows(list(map(BlockKey, keys))) if row != NONE]

    def _rows_of(self, tag: bytes) -> list[int]:
        catalog = self.state.catalog
        known = np.flatnonzero(catalog.table.tags() == tag_word(tag)).tolist()
        return [row for row in known if catalog.is_live(row)]

    def _with_slots(
        self,
        caller: Caller,
        offer: Offer,
        find: Callable[[Array, Sequence[NewBlock], float], list[PutResult]],
        timeout_s: float,
    ) -> tuple[list[NewBlock | None], list[PutResult]]:
        """Call `find` for the blocks that the caller may put; the others are REFUSED."""
        blocks = offer.blocks
        self.access.set_sizes(caller, blocks)
        slots = [
            NewBlock(index, payload_bytes, chunk_bytes, nbytes, producer=producer)
            for index, (payload_bytes, chunk_bytes, nbytes, producer) in enumerate(
                zip(
                    blocks["payload_bytes"].tolist(),
                    blocks["chunk_bytes"].tolist(),
                    record_sizes(blocks["payload_bytes"]).tolist(),
                    blocks["producer"].tolist(),
                    strict=True,
                )
            )
        ]
        for slot, tokens in zip(slots, offer.tokens, strict=False):
            slot.tokens = tokens
        answers = find(blocks, [slot for slot in slots if slot.payload_bytes], timeout_s)
        for index, slot in enumerate(slots):
            if not slot.payload_bytes and index <= len(answers):
                answers.insert(index, PutResult.REFUSED)
        kept = [
            slot if answer is PutResult.STORED else None
            for slot, answer in zip(slots, answers, strict=False)
        ]
        return kept, answers


def _answers(codes: bytes, wanted: Ints, count: int) -> bytes:
    """The answers for all blocks of a call: ABSENT for those that the caller may not use."""
    answers = np.full(count, ABSENT, np.uint8)
    answers[wanted] = np.frombuffer(codes, np.uint8)
    return answers.tobytes()
