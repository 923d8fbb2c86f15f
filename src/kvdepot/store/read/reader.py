"""Onboarding: from memory at once, else from drives (disk_reads.py), within a deadline."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from kvdepot.core.block import ANSWERS, MISS, TAG_BYTES, CopyState, GetResult
from kvdepot.core.keys import Keys, as_keys
from kvdepot.core.requests import Array, Arrived
from kvdepot.format.copy_ops import copy_op, read_op, transfers, verified_ops
from kvdepot.format.record import HEAD_BYTES, KEY_WORD, TABLE_OFFSET, holds_key
from kvdepot.index.table import NONE, Bools, Rows
from kvdepot.index.tree import FEW
from kvdepot.native import COPY, TRANSFER_DTYPE, VERIFY, transfer
from kvdepot.native.memory import view_at
from kvdepot.store.read.disk_reads import CORRUPT, BlockRead, DiskReads, ReadCall, Sink
from kvdepot.store.read.lease import BlockLease, addresses_of
from kvdepot.store.read.timed_out import TimedOutIo
from kvdepot.store.state.state import StoreState
from kvdepot.store.write.memory_eviction import ArenaTier, SlotAllocator

_CODES: Final = {(answer.tier, answer.reason): code for code, answer in enumerate(ANSWERS)}
_ABSENT: Final = _CODES[None, "absent"]
_READY: Final = int(CopyState.READY)
_FILLING: Final = int(CopyState.FILLING)
_CACHED_BYTES: Final = 16 << 20
_CHECKS_MAX: Final = 4
"""Calls that have blocks verified beside their sinks at the same time; others wait for a turn."""
_CHECK_THREADS_MAX: Final = 8
"""On an H200's host this many read memory faster than its bus does."""
_WAIT_SHARE: Final = 0.5
"""Of the time that is left, how long to wait for another call that reads the same block."""


class Reader:
    """Serves `get`, `deliver` and prefetches."""

    def __init__(self, state: StoreState, slots: SlotAllocator) -> None:
        self._state = state
        self.late = TimedOutIo(state)
        self._disks = DiskReads(state, slots, self.late)
        self._checks = ThreadPoolExecutor(_CHECKS_MAX, "kvdepot-check")
        self._check_threads = min(_CHECK_THREADS_MAX, os.cpu_count() or 1)
        self.after_read: Callable[[Sequence[BlockRead]], None] | None = None
        """Told of every read that a caller asked for (read-ahead)."""

    def close(self, timeout_s: float) -> bool:
        """Stop the threads; no call may be under way. False: late I/O still uses the memory."""
        self._checks.shutdown()
        return self.late.wait(timeout_s)

    def read(
        self,
        blocks: Array,
        wanted: Array,
        timeout_s: float,
        *,
        keep: BlockLease | None,
        sink: Sink | None,
        verify: bool | None,
    ) -> bytes:
        """See Engine.read. `wanted`: the indices of the blocks that the caller may have."""
        state, began_s = self._state, self._state.clock.now()
        if verify is None:
            verify = state.config.dram.verify
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
            found = self.fetch(
                reads,
                timeout_s,
                verify=verify or at_once,
                sink=None if sink is None else self._indexed(left, reads, sink, keep),
                counts_as_use=not at_once,
                read_ahead=not at_once,
            )
            for index, answer in zip(left.tolist(), found, strict=True):
                answers[index] = _CODES[answer.tier, answer.reason]
        if at_once and self.after_read is not None:
            self.after_read(self._known_reads(blocks, wanted))
        state.traffic.get.observe(state.clock.now() - began_s)
        return bytes(answers)

    def deliver(
        self,
        blocks: Array,
        wanted: Array,
        timeout_s: float,
        sink: Sink,
        *,
        verify_concurrently: bool,
    ) -> bytes:
        """See Engine.deliver. `wanted`: the indices of the blocks that the caller may have."""
        state, began_s = self._state, self._state.clock.now()
        answers = bytearray([_ABSENT]) * len(blocks)
        if len(wanted):
            reads = _block_reads(blocks, wanted)
            found = self.fetch(
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

    def fetch(
        self,
        reads: Sequence[BlockRead],
        timeout_s: float,
        *,
        verify: bool | None = None,
        sink: Sink | None = None,
        verify_concurrently: bool = False,
        is_prefetch: bool = False,
        counts_as_use: bool = True,
        read_ahead: bool = True,
    ) -> list[GetResult]:
        """Fill each block's target or say why not. Never raises for a fault of a tier.

        Blocks without a target go to `sink` as they arrive; what it raises is passed on. `verify`
        is for what lies in memory (default: as configured); from drives everything is verified.
        `verify_concurrently`: see Lease.deliver.
        `is_prefetch`: no caller waits for it, and it does not count as a use. `counts_as_use`:
        false where the use was counted already. `read_ahead`: false for a part of a call, where
        the caller calls `after_read` for the whole.
        """
        state, catalog = self._state, self._state.catalog
        if verify is None:
            verify = state.config.dram.verify
        deadline = state.clock.now() + timeout_s
        call = ReadCall(
            reads, [MISS] * len(reads), deadline, verify, sink, is_prefetch, verify_concurrently
        )
        in_memory: list[int] = []
        elsewhere: list[int] = []
        held: list[int] = []
        with state.lock:
            memory, residency = catalog.memory.state.view, catalog.residency.view
            for index, row in enumerate(catalog.rows([read.key for read in reads])):
                if row == NONE or not residency[row]:
                    continue
                reads[index].row = row
                held.append(row)
                (in_memory if memory[row] == _READY else elsewhere).append(index)
            catalog.lease(held)
            if not is_prefetch:
                if counts_as_use:
                    catalog.use(held)
                state.write_used(held)
            locations = catalog.memory.location.view
            places = [locations[reads[index].row] for index in in_memory]
            slower = self._in_slower_memory(call, elsewhere)
        try:
            elsewhere += self._from_memory(call, state.memory_tiers[0], in_memory, places)
            if slower or (elsewhere and len(state.memory_tiers) > 1):
                elsewhere = self._from_slower_memory(call, slower, elsewhere)
            if elsewhere:
                self._from_drives(call, elsewhere)
        finally:
            with state.lock:
                if not is_prefetch:
                    self._count(call)
                state.unlease(held)
        if self.after_read is not None and read_ahead and not is_prefetch:
            self.after_read(reads)
        return call.results

    def _in_slower_memory(self, call: ReadCall, indices: list[int]) -> dict[int, int]:
        """Those of the blocks that are in the slower memory tier, and where."""
        state, reads = self._state, call.reads
        if len(state.memory_tiers) == 1:
            return {}
        assert state.held()
        upper, lower = state.memory_tiers
        found = {
            index: int(lower.copies.location.view[reads[index].row])
            for index in indices
            if lower.copies.ready(reads[index].row)
        }
        if found and not call.is_prefetch:
            upper.note_hits_below([reads[index].row for index in found])
        return found

    def _from_slower_memory(
        self, call: ReadCall, found: dict[int, int], left: list[int]
    ) -> list[int]:
        """Serve what is in the slower memory, where it lies. Returns what is not, or is damaged."""
        damaged = [index for index in left if call.results[index] is CORRUPT]
        if damaged:
            with self._state.lock:
                found |= self._in_slower_memory(call, damaged)
        lower = self._state.memory_tiers[1]
        bad = self._from_memory(call, lower, list(found), list(found.values())) if found else []
        return [index for index in left if index not in found] + bad

    def _from_memory(
        self, call: ReadCall, memory: ArenaTier, hits: list[int], places: list[int]
    ) -> list[int]:
        """Serve hits in leased slots. Returns those that failed verification and are elsewhere too.

        A slot that holds another block is never served. What is verified and then read in place by
        the sink goes in small parts, so that the sink finds it in the processor's cache.
        """
        view, reads = memory.arena.memory.view, call.reads
        pairs = list(zip(hits, places, strict=True))
        wrong = [index for index, place in pairs if not holds_key(view, place, reads[index].key)]
        if wrong:
            pairs = [pair for pair in pairs if pair[0] not in wrong]
            hits, places = [index for index, _ in pairs], [place for _, place in pairs]
        return self._give_up(call, memory, wrong) + self._serve(call, memory, hits, places)

    def _serve(
        self, call: ReadCall, memory: ArenaTier, hits: list[int], places: list[int]
    ) -> list[int]:
        """`_from_memory` for slots that name the right keys."""
        if not (call.verify and call.sink is not None and hits):
            return self._copy_out(call, memory, hits, places)
        if call.verify_concurrently:
            return self._check_beside(call, memory, hits, places)
        count = max(1, _CACHED_BYTES // max(call.reads[index].payload_bytes for index in hits))
        starts = range(0, len(hits), count)
        parts = [(hits[at : at + count], places[at : at + count]) for at in starts]
        return [index for part in parts for index in self._copy_out(call, memory, *part)]

    def _check_beside(
        self, call: ReadCall, memory: ArenaTier, hits: list[int], places: list[int]
    ) -> list[int]:
        """Hand hits over while other threads verify them."""
        ops = []
        for index, place in zip(hits, places, strict=True):
            read = call.reads[index]
            size = read.payload_bytes
            ops.append(read_op(memory.address + place, 0, 0, size, read.chunk_bytes))
        check = self._checks.submit(transfers, ops, self._check_threads)
        try:
            self._hand_over(call, memory, hits, places)
        finally:  # the slots are leased until here
            codes = check.result().tolist()
        for index in hits:
            call.results[index] = memory.served
        bad = [index for index, code in zip(hits, codes, strict=True) if code]
        return self._give_up(call, memory, bad)

    def _copy_out(
        self, call: ReadCall, memory: ArenaTier, hits: list[int], places: list[int]
    ) -> list[int]:
        """Verify and copy as asked. Returns the hits that failed verification."""
        base, served, reads, results = memory.address, memory.served, call.reads, call.results
        ops = []
        partial = []
        asked = []
        for index, place in zip(hits, places, strict=True):
            read = reads[index]
            slot = base + place
            results[index] = served
            if call.verify:
                span = (read.start, read.stop)
                verify, copy = verified_ops(
                    slot, read.target, span, read.payload_bytes, read.chunk_bytes
                )
                asked.append(index)
                ops.append(verify)
                if copy is not None:
                    partial.append(copy)
            elif read.target:
                asked.append(index)
                ops.append(copy_op(slot, read.target, read.start, read.stop))
        codes = transfers(ops).tolist() if ops else []
        if partial:
            transfers(partial)
        bad = {index for index, code in zip(asked, codes, strict=True) if code}
        if call.sink is not None:
            good = [
                (index, place)
                for index, place in zip(hits, places, strict=True)
                if index not in bad and not reads[index].target
            ]
            self._hand_over(call, memory, [index for index, _ in good], [at for _, at in good])
        return self._give_up(call, memory, list(bad))

    def _hand_over(
        self, call: ReadCall, memory: ArenaTier, hits: list[int], places: list[int]
    ) -> None:
        addresses = memory.address + np.array(places, np.int64)
        is_verified = call.verify and not call.verify_concurrently
        call.hand_over(hits, addresses, np.ones(len(hits), bool), is_verified=is_verified)

    def _give_up(self, call: ReadCall, memory: ArenaTier, bad: list[int]) -> list[int]:
        """These are not what was asked for. Returns those that a slower tier has."""
        for index in bad:
            call.results[index] = CORRUPT
        return [index for index in bad if self._quarantine(memory, call.reads[index].row)]

    def _quarantine(self, memory: ArenaTier, row: int) -> bool:
        """Drop a damaged copy in memory. True: a slower tier has another one."""
        state, catalog = self._state, self._state.catalog
        with state.lock:
            state.counters.quarantined += 1
            below = state.memory_tiers[state.memory_tiers.index(memory) + 1 :]
            other = state.source(row) or any(one.copies.ready(row) for one in below)
            idle = catalog.leases(row) == 1 and not state.is_dirty(row)
            if other and idle and memory.copies.ready(row):
                memory.drop(row)
                return True
            catalog.mark_deleted(row)
            return False

    def _from_drives(self, call: ReadCall, left: list[int]) -> None:
        """Read, but for what another call is reading: that is waited for first."""
        self._disks.read(call, left)
        if not call.left_to_others:
            return
        came = self._await_others(call)
        bad = self._from_memory(call, self._state.memory_tiers[0], list(came), list(came.values()))
        still = [*(call.left_to_others - came.keys()), *bad]
        call.waits_for_others = False
        self._disks.read(call, still)

    def _await_others(self, call: ReadCall) -> dict[int, int]:
        """Wait for what other calls read into memory, not too long. Those that came, and where.

        They are leased: they stay.
        """
        state, memory, reads = self._state, self._state.catalog.memory, call.reads
        rows = {index: reads[index].row for index in call.left_to_others}
        with state.lock:
            wait_s = _WAIT_SHARE * max(0.0, call.deadline - state.clock.now())
            state.arrived.wait_for(
                lambda: not any(memory.state.view[row] == _FILLING for row in rows.values()), wait_s
            )
            here = [index for index, row in rows.items() if memory.ready(row)]
            return {index: memory.location[rows[index]] for index in here}

    def _count(self, call: ReadCall) -> None:
        counters, traffic = self._state.counters, self._state.traffic
        groups: dict[tuple[str | None, bytes], list[BlockRead]] = {}
        for read, got in zip(call.reads, call.results, strict=True):
            groups.setdefault((got.tier, read.key[:TAG_BYTES]), []).append(read)
        for (tier, tag), reads in groups.items():
            counters.add("get", tier or "miss", len(reads))
            if tier is not None:
                nbytes = sum(read.stop - read.start for read in reads)
                counters.get_bytes += nbytes
                traffic.served_bytes[tier] += nbytes
                self._count_tokens(tier, tag, reads, nbytes)

    def _count_tokens(self, tier: str, tag: bytes, reads: list[BlockRead], nbytes: int) -> None:
        """Tell the ledger of blocks of one namespace that a tier has served."""
        catalog, ledger = self._state.catalog, self._state.ledger
        before, last = catalog.tree.depth(reads[0].row) - 1, catalog.table.digest(reads[-1].row)
        ledger.served(tag, tier, nbytes / reads[0].payload_bytes, before, last)

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
        state, catalog = self._state, self._state.catalog
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
            intact = self._copy_blocks(blocks[hot], addresses, verify=verify)
            cold = np.sort(np.concatenate([cold, hot[~intact]]))
            hot, rows, addresses = hot[intact], rows[intact], addresses[intact]
        if not len(hot):
            return cold
        tiers = self._tiers_at(addresses)
        for index, tier in zip(hot.tolist(), tiers.tolist(), strict=True):
            answers[index] = tier
        with state.lock:
            for tier in np.unique(tiers).tolist():
                self._count_served(tier, rows[tiers == tier], blocks[hot[tiers == tier]])
        if sink is not None:
            sink(Arrived(hot, addresses, np.ones(len(hot), bool), False))
        return cold

    def _copy_blocks(self, blocks: Array, addresses: Array, *, verify: bool) -> Bools:
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
        for memory in self._state.memory_tiers:
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
        for memory in self._state.memory_tiers:
            nbytes = memory.arena.memory.nbytes
            here = (addresses >= memory.address) & (addresses < memory.address + nbytes)
            codes[here] = _CODES[memory.name, ""]
        return codes

    def _count_served(self, code: int, rows: Rows, blocks: Array) -> None:
        """Blocks were served from a memory tier."""
        state, catalog, tier = self._state, self._state.catalog, ANSWERS[code].tier
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
                with self._state.lock:
                    keep.add([reads[index].row for index in lasting])
            mine = indices[blocks.indices]
            sink(Arrived(mine, blocks.addresses, blocks.is_lasting, blocks.is_verified))

        return arrived

    def _known_reads(self, blocks: Array, wanted: Array) -> list[BlockRead]:
        """Reads of blocks that are here, for read-ahead."""
        reads = _block_reads(blocks, wanted)
        with self._state.lock:
            rows = self._state.catalog.rows([read.key for read in reads])
        for read, row in zip(reads, rows, strict=True):
            read.row = row
        return reads


def _block_reads(blocks: Array, indices: Array) -> list[BlockRead]:
    chosen = blocks[indices]
    names = ("address", "payload_bytes", "chunk_bytes", "start", "stop")
    columns = (chosen[name].tolist() for name in names)
    return [BlockRead(*row) for row in zip(as_keys(chosen["key"]), *columns, strict=True)]
