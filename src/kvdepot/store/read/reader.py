"""Onboarding: from memory at once, else from drives (disk_reads.py), within a deadline."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from kvdepot.core.block import MISS, TAG_BYTES, CopyState, GetResult
from kvdepot.format.copy_ops import copy_op, read_op, transfers, verified_ops
from kvdepot.format.record import holds_key
from kvdepot.index.table import NONE
from kvdepot.store.read.disk_reads import CORRUPT, BlockRead, DiskReads, ReadCall, Sink
from kvdepot.store.read.timed_out import TimedOutIo
from kvdepot.store.state.state import StoreState
from kvdepot.store.write.memory_eviction import ArenaTier, SlotAllocator

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

    def __init__(self, state: StoreState, slots: SlotAllocator, late: TimedOutIo) -> None:
        self._state = state
        self._disks = DiskReads(state, slots, late)
        self._checks = ThreadPoolExecutor(_CHECKS_MAX, "kvdepot-check")
        self._check_threads = min(_CHECK_THREADS_MAX, os.cpu_count() or 1)
        self.after_read: Callable[[Sequence[BlockRead]], None] | None = None
        """Told of every read that a caller asked for (read-ahead)."""

    def close(self) -> None:
        """Stop the threads; nothing may be under way."""
        self._checks.shutdown()

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
