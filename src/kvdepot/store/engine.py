"""The engine of a store: every call of a program or of a daemon's client, on arrays.

Keys are rows of four words, blocks rows of core.requests.BLOCK_DTYPE, answers one byte for each
block: its place in core.block.ANSWERS. The first argument of each call is its Caller. Sizes are
those that the caller has registered; the engine does not take them from a request.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

import numpy as np

from kvdepot.core.block import ANSWERS, BlockKey, PutResult
from kvdepot.core.depot import FlushReport
from kvdepot.core.keys import Keys, as_keys, tag_word
from kvdepot.core.metadata import Tombstone
from kvdepot.core.order import SessionState
from kvdepot.core.requests import Array, Arrived, BlockSize, Offer
from kvdepot.core.units import format_bytes
from kvdepot.core.volume import TIER_NAMES
from kvdepot.errors import ConfigError, StateError
from kvdepot.format.record import (
    HEAD_BYTES,
    KEY_WORD,
    TABLE_OFFSET,
    chunk_count,
    filled_producer,
    filled_tokens,
    record_bytes,
)
from kvdepot.format.requests import check_block_bytes
from kvdepot.index.table import NONE, Bools, Rows
from kvdepot.index.tree import FEW
from kvdepot.native import COPY, TRANSFER_DTYPE, VERIFY, transfer
from kvdepot.native.memory import view_at
from kvdepot.store.move.mover import BlockMover
from kvdepot.store.read.disk_reads import BlockRead, Sink
from kvdepot.store.read.lease import BlockLease, addresses_of
from kvdepot.store.read.prefetch import Hint, Prefetcher
from kvdepot.store.read.reader import Reader
from kvdepot.store.read.timed_out import TimedOutIo
from kvdepot.store.state.state import StoreState
from kvdepot.store.write.memory_eviction import SlotAllocator
from kvdepot.store.write.put import NewBlock, Putter
from kvdepot.store.write.write_back import Flusher

_CODES: Final = {(answer.tier, answer.reason): code for code, answer in enumerate(ANSWERS)}
_ABSENT: Final = _CODES[None, "absent"]
_UNKNOWN: Final = BlockSize(0, 0)


@dataclass(eq=False, slots=True)
class Caller:
    """Who makes a call: the program that has opened the store, or one client of the daemon."""

    label: str
    spaces: dict[int, BlockSize] = field(default_factory=dict)
    """The namespaces that it has registered: the first word of their keys, and the size of a
    block."""

    def size_of(self, tag: int) -> BlockSize:
        """The size of blocks of a namespace; zeros if the caller may not use it."""
        return self.spaces.get(tag, _UNKNOWN)


@dataclass(eq=False, slots=True)
class DescribedCaller(Caller):
    """Reads namespaces on behalf of other nodes and users: all that are described on the drives."""

    described: Callable[[int], BlockSize | None] = lambda _: None

    def size_of(self, tag: int) -> BlockSize:
        return self.spaces.get(tag) or self.described(tag) or _UNKNOWN


class Engine:
    """The calls of one store. Thread-safe. No call raises for a fault of a medium."""

    def __init__(self, state: StoreState, mover: BlockMover) -> None:
        self.state = state
        self.memories = [arena.memory for arena in state.all_arenas]
        """All memory that blocks lie in: that of the memory tiers, then staging."""
        self.slots = SlotAllocator(state, state.memory_tiers[0])
        self.late = TimedOutIo(state)
        self.reader = Reader(state, self.slots, self.late)
        self.prefetcher = Prefetcher(state, self.reader)
        self._putter = Putter(state, self.slots)
        self._flusher = Flusher(state)
        self._mover = mover
        self._sizes: dict[int, BlockSize] = {}
        """Of all namespaces that a caller has registered."""
        self._registering = threading.Lock()
        tiers = [TIER_NAMES.index(copies.tier) for copies in state.catalog.tiers]
        lowest = [(bits & -bits).bit_length() - 1 for bits in range(1, 1 << len(tiers))]
        self._codes = np.array([0, *(tiers[bit] for bit in lowest)], np.uint8)
        """By residency, the fastest tier's place in TIER_NAMES."""
        self._quarantined = np.zeros(0, np.uint64)

    def payload(self, address: int, nbytes: int) -> memoryview:
        """The payload of the record at an address of the store's memory."""
        for memory in self.memories:
            start = address - memory.address + HEAD_BYTES
            if HEAD_BYTES <= start <= memory.nbytes:
                return memory.view[start : start + nbytes]
        raise StateError("the address is not in the store's memory")

    def address_of(self, slot: NewBlock) -> int:
        """Where the record of a new block is to lie."""
        return self.state.arena.address + slot.slot

    def quarantine(self, tags: Iterable[bytes]) -> None:
        """Serve and take nothing of these namespaces from now on, and of no others."""
        self._quarantined = np.array([tag_word(tag) for tag in tags], np.uint64)

    def close(self, timeout_s: float) -> bool:
        """Wait for what is under way. False: the kernel or a thread still uses the memory."""
        stuck = not self.prefetcher.close(timeout_s)
        if not stuck:
            self.reader.close()
        return self.late.wait(timeout_s) and not stuck

    def register(self, caller: Caller, tag: bytes, size: BlockSize, description: bytes) -> None:
        """Let a caller use a namespace until `unregister`. Records what its tag stands for.

        Raises ConfigError if its blocks do not fit, or another caller has it with another size.
        """
        if size.block_bytes <= 0 or size.chunk_bytes <= 0:
            raise ConfigError("layout", "a block without bytes")
        chunk_count(*size)
        check_block_bytes(size.block_bytes)
        self._check_fits(record_bytes(size.block_bytes))
        word = tag_word(tag)
        with self._registering:
            known = self._sizes.get(word, size)
            if known != size:
                raise ConfigError(
                    "layout", f"the namespace is known with {known.block_bytes} bytes"
                )
            if word in caller.spaces:
                return
            self.state.descriptions.register(tag, description)
            with self.state.lock:
                self.state.ledger.registered(tag, description)
            self._sizes[word] = caller.spaces[word] = size

    def unregister(self, caller: Caller) -> None:
        """A caller is gone."""
        with self._registering:
            tags = [word.to_bytes(8, "little") for word in caller.spaces]
            caller.spaces.clear()
            for tag in self.state.descriptions.unregister(tags):
                self._sizes.pop(tag_word(tag), None)

    def match(self, caller: Caller, keys: Keys, *, counts: bool = True) -> bytes:
        """For each block of the longest resident prefix its fastest tier: a place in TIER_NAMES.

        Waits for the lock only if something is missing. `counts`: it is a lookup of a prompt.
        """
        residency = self._all_resident(keys)
        if residency is None:
            with self.state.lock:
                residency = self.state.catalog.residency.array[self._resident(keys)]
        found = bytes(self._codes[residency])
        if counts:
            self._record_lookup(keys)
            lookups = self.state.traffic.match
            lookups.add(len(keys), len(found))
            lookups.add_found(found)
        return found

    def lease(self, caller: Caller, keys: Keys) -> BlockLease:
        """Protect the longest resident prefix from eviction, and count it as used."""
        state = self.state
        self._record_lookup(keys)
        with state.lock:
            rows = self._resident(keys).tolist()
            state.catalog.use(rows)
            state.lease(rows)
            state.traffic.lease.add(len(keys), len(rows))
        return BlockLease(state, rows, keys[: len(rows)])

    def touch(self, caller: Caller, keys: Keys) -> int:
        """Count the longest resident prefix as used. Returns its length."""
        with self.state.lock:
            rows = self._resident(keys).tolist()
            self.state.catalog.use(rows)
        return len(rows)

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
        """Fill the buffer of each block, or hand it to `sink` in place and protect it by `keep`.

        Those in memory come first, in one go, then what is read from drives, which is always
        verified. `verify`: verify what is in memory too (default: as configured); a damaged copy is
        dropped and read from elsewhere. What the sink raises is passed on. With `keep`, blocks that
        came to stay are protected until it is released.
        """
        state, began_s = self.state, self.state.clock.now()
        if verify is None:
            verify = state.config.dram.verify
        blocks, wanted = self._allowed(caller, blocks)
        answers = bytearray([_ABSENT]) * len(blocks)
        at_once = not verify if keep is not None else self._are_many_and_whole(blocks, wanted)
        left = wanted
        if at_once:
            with_lease = keep if keep is not None else BlockLease(state)
            try:
                left = self._read_memory(blocks, wanted, with_lease, sink, answers, verify=verify)
            finally:
                if keep is None:
                    with_lease.release()
        if len(left):
            reads = _block_reads(blocks, left)
            found = self.reader.fetch(
                reads,
                timeout_s,
                verify=verify or at_once,
                sink=None if sink is None else self._indexed(left, reads, sink, keep),
                counts_as_use=not at_once,
                read_ahead=not at_once,
            )
            for index, answer in zip(left.tolist(), found, strict=True):
                answers[index] = _CODES[answer.tier, answer.reason]
        if at_once and self.reader.after_read is not None:
            self.reader.after_read(self._known_reads(blocks, wanted))
        state.traffic.get.observe(state.clock.now() - began_s)
        return bytes(answers)

    def deliver(
        self,
        caller: Caller,
        lease: BlockLease,
        blocks: Array,
        timeout_s: float,
        sink: Sink,
        *,
        verify_concurrently: bool = False,
    ) -> bytes:
        """Hand blocks to `sink` in place that the lease protects: not a further use of them.

        `verify_concurrently`: see core.depot.Lease.deliver.
        """
        state, began_s = self.state, self.state.clock.now()
        blocks, wanted = self._allowed(caller, blocks)
        answers = bytearray([_ABSENT]) * len(blocks)
        if len(wanted):
            reads = _block_reads(blocks, wanted)
            found = self.reader.fetch(
                reads,
                timeout_s,
                sink=self._indexed(wanted, reads, sink, None),
                verify_concurrently=verify_concurrently,
                counts_as_use=False,
            )
            for index, answer in zip(wanted.tolist(), found, strict=True):
                answers[index] = _CODES[answer.tier, answer.reason]
            state.traffic.get.observe(state.clock.now() - began_s)
        return bytes(answers)

    def put(self, caller: Caller, offer: Offer, timeout_s: float) -> list[PutResult]:
        """Copy blocks into memory and queue them for the drives. See core.depot.Depot.put_many."""
        with self.state.using():
            answers = self._with_slots(caller, offer, self._putter.store, timeout_s)[1]
            self._flusher.write_through(timeout_s)
            return answers

    def reserve(
        self, caller: Caller, offer: Offer, timeout_s: float, *, pad: bool = True
    ) -> tuple[list[NewBlock | None], list[PutResult]]:
        """Slots for new blocks, None where there is none, and an answer for each block.

        Without `pad` there is no answer for blocks after the first that found no room.
        """
        find = self._putter.reserve if pad else self._putter.admit
        return self._with_slots(caller, offer, find, timeout_s)

    def seal(
        self, caller: Caller, slots: list[NewBlock], *, in_slots: tuple[bool, bool] | None = None
    ) -> None:
        """Make blocks of slots that were filled. `in_slots`: another process has filled them and
        their checksums; whether it has left token ids and a producer in them, too.
        """
        tokens, producer = in_slots or (False, False)
        for slot in slots if tokens or producer else ():
            image = self.state.arena.image(slot.slot, HEAD_BYTES)
            if producer:
                slot.producer = filled_producer(image)
            if tokens:
                slot.tokens = filled_tokens(image, slot.payload_bytes, slot.chunk_bytes)
        self._putter.finish(slots, summed=in_slots is not None)

    def abandon(self, caller: Caller, slots: list[NewBlock]) -> None:
        """Give back slots that were not sealed."""
        self._putter.abandon(slots)

    def remove(self, caller: Caller, keys: Keys | None = None, *, tag: bytes = b"") -> int:
        """Delete blocks everywhere, for good: those with these keys, or all of a namespace.

        Waits for those that are being written. Returns how many were there.
        """
        state = self.state
        tiers = [lower for lower in state.lower_tiers if lower.writable]
        limit_s = max((lower.config.write_timeout for lower in tiers), default=0.0)
        names: list[bytes] = [tag] if keys is None else [*dict.fromkeys(as_keys(keys))]
        with state.lock:
            rows = self._rows_of(tag) if keys is None else self._live_rows(names)
            state.mark_deleted(rows)
            state.counters.removed += len(rows)
            below = state.stamps.next()
            state.written.wait_for(
                lambda: not state.is_being_written(filter(state.catalog.is_deleted, rows)), limit_s
            )
            recorded = state.stamps.next()
        if names:
            self._mover.record_tombstones([Tombstone(name, below, recorded) for name in names])
        if keys is None:
            state.descriptions.removed(tag)
        return len(rows)

    def prefetch(
        self,
        caller: Caller,
        prompts: Sequence[Keys],
        deadline_s: float,
        session: SessionState = SessionState.NONE,
    ) -> Hint:
        """Bring prompts to memory in the background, the heads of all of them first. Looks for what
        other nodes have put if something is missing.
        """
        state, catalog, parts, resident, asked = self.state, self.state.catalog, [], 0, 0
        with state.lock:
            for keys in prompts:
                rows = self._resident(keys)
                sizes, chunks = self._sizes_for(caller, keys[: len(rows)])
                away = np.flatnonzero((addresses_of(state, rows) == 0) & (sizes > 0))
                away = away[catalog.nbytes.array[rows[away]] == sizes[away]]
                names = as_keys(keys[away])
                pairs = zip(names, sizes[away].tolist(), chunks[away].tolist(), strict=True)
                parts.append(
                    [BlockRead(key, 0, size, chunk, 0, size) for key, size, chunk in pairs]
                )
                resident, asked = resident + len(rows), asked + len(keys)
        if resident < asked:
            state.request_refresh()
        reads = [one for some in zip_longest(*parts) for one in some if one is not None]
        hint = self.prefetcher.start(reads, deadline_s, session)
        hint.resident = resident
        return hint

    def flush(self, caller: Caller, timeout_s: float, keys: Keys | None = None) -> FlushReport:
        """Wait until what was put before is durable. See core.depot.Depot.flush."""
        return self._flusher.flush(timeout_s, keys)

    def _record_lookup(self, keys: Keys) -> None:
        recorder = self.state.recorder
        if recorder is not None:
            recorder.add(keys)

    def _allowed(self, caller: Caller, blocks: Array) -> tuple[Array, Array]:
        """The blocks with the sizes that are registered, and the indices of those that the caller
        may have.
        """
        sizes, chunks = self._sizes_for(caller, blocks["key"])
        stop = np.where(blocks["stop"] == 0, sizes, blocks["stop"])
        blocks = blocks.copy()
        blocks["payload_bytes"], blocks["chunk_bytes"], blocks["stop"] = sizes, chunks, stop
        return blocks, np.flatnonzero((sizes > 0) & (stop <= sizes))

    def _sizes_for(self, caller: Caller, keys: Keys) -> tuple[Array, Array]:
        """Bytes of a block and of a chunk for each key; zeros for keys that the caller may not
        use: the one place that decides this.
        """
        if not len(keys):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        tags = keys[:, 0]
        if (tags == tags[0]).all():
            size = self._size(caller, int(tags[0]))
            return np.full(len(keys), size.block_bytes), np.full(len(keys), size.chunk_bytes)
        kinds, which = np.unique(tags, return_inverse=True)
        sizes = np.array([self._size(caller, int(tag)) for tag in kinds], np.int64)[which]
        return sizes[:, 0], sizes[:, 1]

    def _size(self, caller: Caller, tag: int) -> BlockSize:
        return _UNKNOWN if tag in self._quarantined else caller.size_of(tag)

    def _all_resident(self, keys: Keys) -> Array | None:
        """Residency of blocks that are all there, found without the lock; None: look with it.

        Other threads may be changing the index. A row that has a key before and after its residency
        is read was that block's, and resident, at a moment of this call, which is all that a match
        says. What is not found may be on its way to another place of the table.
        """
        catalog = self.state.catalog
        if len(self._quarantined):
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
        """Rows of the longest prefix that can be served."""
        assert self.state.held()
        catalog = self.state.catalog
        rows = catalog.table.find_many(keys)
        there: Bools = (rows != NONE) & (catalog.residency.array[rows] != 0)
        if len(self._quarantined):
            there &= ~np.isin(keys[:, 0], self._quarantined)
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

    def _are_many_and_whole(self, blocks: Array, wanted: Array) -> bool:
        """Whether blocks with buffers are worth one batch for those in memory: a few are read
        sooner one by one, and parts of a block may need chunks that are verified apart.
        """
        return len(wanted) >= FEW and bool(
            ((blocks["start"] == 0) & (blocks["stop"] == blocks["payload_bytes"])).all()
        )

    def _read_memory(
        self,
        blocks: Array,
        wanted: Array,
        lease: BlockLease,
        sink: Sink | None,
        answers: bytearray,
        *,
        verify: bool,
    ) -> Array:
        """Serve what is in memory, and protect it by the lease. Returns the indices of what is on
        drives, or was damaged.
        """
        state, catalog = self.state, self.state.catalog
        with state.lock:
            rows = catalog.table.find_many(np.ascontiguousarray(blocks["key"][wanted]))
            known = (rows != NONE) & (catalog.nbytes.array[rows] == blocks["payload_bytes"][wanted])
            addresses = addresses_of(state, rows)
            is_hot = known & (addresses != 0)
            is_cold = known & ~is_hot & (catalog.residency.array[rows] != 0)
            catalog.use(rows[is_hot | is_cold].tolist())
            state.write_used(rows[is_hot].tolist())
            lease.add(rows[is_hot].tolist())
            state.counters.get_miss += len(rows) - int((is_hot | is_cold).sum())
        hot, rows, addresses = wanted[is_hot], rows[is_hot], addresses[is_hot]
        cold: Array = wanted[is_cold]
        if len(hot) and sink is None:
            intact = self._copy_out(blocks[hot], addresses, verify=verify)
            cold = np.sort(np.concatenate([cold, hot[~intact]]))
            hot, rows, addresses = hot[intact], rows[intact], addresses[intact]
        if not len(hot):
            return cold
        tiers = self._tiers_at(addresses)
        for index, tier in zip(hot.tolist(), tiers.tolist(), strict=True):
            answers[index] = tier
        with state.lock:
            for tier in np.unique(tiers).tolist():
                self._count(tier, rows[tiers == tier], blocks[hot[tiers == tier]])
        if sink is not None:
            sink(Arrived(hot, addresses, np.ones(len(hot), bool), False))
        return cold

    def _copy_out(self, blocks: Array, addresses: Array, *, verify: bool) -> Bools:
        """Verify and copy blocks that lie in memory. Returns which of them are intact."""
        ops = np.zeros(len(blocks), TRANSFER_DTYPE)
        ops["source"], ops["target"] = addresses + HEAD_BYTES, blocks["address"]
        ops["nbytes"], ops["chunk_bytes"] = blocks["payload_bytes"], blocks["chunk_bytes"]
        ops["table"], ops["mode"] = addresses + TABLE_OFFSET, VERIFY if verify else COPY
        transfer(ops)
        same = (self._names_at(addresses) == blocks["key"]).all(axis=1)
        intact: Bools = same & (ops["result"] == 0)
        return intact

    def _names_at(self, addresses: Array) -> Keys:
        """The keys in the heads of records in memory."""
        found = np.zeros((len(addresses), 4), np.uint64)
        for memory in self.state.memory_tiers:
            nbytes = memory.arena.memory.nbytes
            here = (addresses >= memory.address) & (addresses < memory.address + nbytes)
            if here.any():
                words: Keys = view_at(memory.address, nbytes).view(np.uint64)
                first = (addresses[here] - memory.address) // 8 + KEY_WORD
                found[here] = words[first[:, None] + np.arange(4)]
        return found

    def _tiers_at(self, addresses: Array) -> Array:
        """The answer for each block by the memory that it lies in."""
        codes = np.zeros(len(addresses), np.uint8)
        for memory in self.state.memory_tiers:
            nbytes = memory.arena.memory.nbytes
            here = (addresses >= memory.address) & (addresses < memory.address + nbytes)
            codes[here] = _CODES[memory.name, ""]
        return codes

    def _count(self, code: int, rows: Rows, blocks: Array) -> None:
        """Blocks were served from a memory tier."""
        state, catalog, tier = self.state, self.state.catalog, ANSWERS[code].tier
        assert state.held() and tier is not None
        first, *others = state.memory_tiers
        if others and tier == others[0].name:
            first.note_hits_below(rows.tolist())
        parts = blocks["stop"] - blocks["start"]
        state.counters.add("get", tier, len(rows))
        state.counters.get_bytes += int(parts.sum())
        state.traffic.served_bytes[tier] += int(parts.sum())
        shares, tags = parts / blocks["payload_bytes"], blocks["key"][:, 0]
        for word in np.unique(tags):
            mine = tags == word
            ends = rows[mine][[0, -1]].tolist()
            before, last = catalog.tree.depth(ends[0]) - 1, catalog.table.digest(ends[1])
            state.ledger.served(word.tobytes(), tier, float(shares[mine].sum()), before, last)

    def _indexed(
        self, indices: Array, reads: Sequence[BlockRead], sink: Sink, keep: BlockLease | None
    ) -> Sink:
        """A sink for some blocks of a call: counts them as the call does, and protects them."""

        def arrived(blocks: Arrived) -> None:
            if keep is not None:
                lasting = blocks.indices[blocks.is_lasting].tolist()
                with self.state.lock:
                    keep.add([reads[index].row for index in lasting])
            mine = indices[blocks.indices]
            sink(Arrived(mine, blocks.addresses, blocks.is_lasting, blocks.is_verified))

        return arrived

    def _known_reads(self, blocks: Array, wanted: Array) -> list[BlockRead]:
        """Reads of blocks that are here, for read-ahead."""
        reads = _block_reads(blocks, wanted)
        with self.state.lock:
            rows = self.state.catalog.rows([read.key for read in reads])
        for read, row in zip(reads, rows, strict=True):
            read.row = row
        return reads

    def _with_slots(
        self,
        caller: Caller,
        offer: Offer,
        find: Callable[[Sequence[NewBlock], float], list[PutResult]],
        timeout_s: float,
    ) -> tuple[list[NewBlock | None], list[PutResult]]:
        """Have slots found for the blocks that the caller may put; the others are refused."""
        sizes, chunks = self._sizes_for(caller, offer.blocks["key"])
        slots = [
            NewBlock(key, address, size, chunk, producer=producer)
            for key, address, size, chunk, producer in zip(
                as_keys(offer.blocks["key"]),
                offer.blocks["address"].tolist(),
                sizes.tolist(),
                chunks.tolist(),
                offer.blocks["producer"].tolist(),
                strict=True,
            )
        ]
        for slot, tokens in zip(slots, offer.tokens, strict=False):
            slot.tokens = tokens
        allowed = [slot for slot in slots if slot.payload_bytes]
        found = iter(find(allowed, timeout_s))
        answers: list[PutResult] = []
        for slot in slots:
            answer = next(found, None) if slot.payload_bytes else PutResult.REFUSED
            if answer is None:
                break
            answers.append(answer)
        kept = [
            slot if answer is PutResult.STORED else None
            for slot, answer in zip(slots, answers, strict=False)
        ]
        return kept, answers

    def _check_fits(self, nbytes: int) -> None:
        """Raise ConfigError for blocks that a tier could never hold."""
        state = self.state
        if not state.arena.chunks_for(nbytes):
            raise ConfigError(
                "dram.capacity", f"a block takes {format_bytes(nbytes)}, more than the tier has"
            )
        if not state.lower_tiers:
            return
        if not state.staging.chunks_for(nbytes):
            raise ConfigError(
                "writeback.staging", f"a block takes {format_bytes(nbytes)}, more than there is"
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


def _block_reads(blocks: Array, indices: Array) -> list[BlockRead]:
    chosen = blocks[indices]
    names = ("address", "payload_bytes", "chunk_bytes", "start", "stop")
    columns = (chosen[name].tolist() for name in names)
    return [BlockRead(*row) for row in zip(as_keys(chosen["key"]), *columns, strict=True)]
