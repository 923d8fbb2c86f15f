"""Prefetch: reads blocks into memory in the background before they are requested.

One thread serves the most urgent hint first, a few blocks at a time, and pauses while callers read.
The number of waiting blocks is bounded; further ones are ignored. Blocks of a hard drive are
promoted to the SSDs, as after any other read. A block is not read if memory has no room for it.

Read-ahead prefetches the next part of a prompt that is read part by part from a hard drive.
"""

import threading
from collections import OrderedDict
from typing import Final

import numpy as np

from kvdepot.core.requests import BLOCK_DTYPE, Array
from kvdepot.core.sessions import SessionState
from kvdepot.core.volume import VOLUME_SHIFT, Ints
from kvdepot.format.record import record_bytes, record_sizes
from kvdepot.index.table import NONE
from kvdepot.store.read.reader import VOLUME_CODES, ReadCall, Reader
from kvdepot.store.state.background_throttle import FLASH_SHARE, HEAD_SHARE, ChunkSizer, backoff_s
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.state import StoreState

_STEP_BYTES: Final = 32 << 20
_LOOK_MAX: Final = 512
_FIRST_BYTES: Final = 1 << 20
_ALONE_S: Final = 0.15
"""Intended duration of a step while no call reads, which a new call may have to wait for."""
_MEMORY_SHARE: Final = 0.25
"""Share of memory that prefetched blocks may take."""
_HINTS_MAX: Final = 4096
_STEP_S_MAX: Final = 60.0
"""Longest time of one step; a slower drive would miss any deadline."""
_ENDS_MAX: Final = 1024
_AHEAD_DEADLINE_S: Final = 10.0


class Hint:
    """Blocks that are being read into memory. Implements core.depot.PrefetchHint."""

    def __init__(
        self, blocks: Array, deadline_s: float, session_state: SessionState = SessionState.NONE
    ) -> None:
        """`blocks` are rows of BLOCK_DTYPE; `deadline_s` is a time of the store's clock."""
        self.deadline_s = deadline_s
        self.wanted = len(blocks)
        """Number of blocks to read; others are in memory, unknown, or too many."""
        self.resident = 0
        """Number of leading blocks of the request that are in the store."""
        self.may_come = True
        self.brought = 0
        """Number of blocks that it has read into memory."""
        self.session_state = session_state
        self._lock = threading.Lock()
        self._left = blocks
        self._ended = threading.Event()
        if not len(blocks):
            self._ended.set()

    @property
    def nbytes(self) -> int:
        """Bytes of the records that are still to be read."""
        return int(record_sizes(self._left["payload_bytes"]).sum())

    def cancel(self) -> None:
        """Start no further reads; those under way complete. May be called twice."""
        with self._lock:
            self._left = self._left[:0]
        self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end. False if it has not ended after `timeout_s`."""
        return self._ended.wait(timeout_s)

    def first(self, count: int) -> Array:
        """The first blocks that are still to be read."""
        return self._left[:count]

    def take(self, volumes: Ints, limit_bytes: int, each_bytes: int) -> tuple[Array, Ints]:
        """Remove and return the next blocks, and the volume of each.

        `volumes` are those of the first remaining blocks. Takes at most `limit_bytes`, and
        `each_bytes` from one volume, but at least one block of each volume that it reaches.
        """
        with self._lock:
            volumes = volumes[: len(self._left)]
            sizes = record_sizes(self._left["payload_bytes"][: len(volumes)])
            chosen = np.cumsum(sizes) - sizes < limit_bytes
            for number in np.unique(volumes):
                mine = np.flatnonzero(volumes == number)
                chosen[mine[1:]] &= np.cumsum(sizes[mine])[1:] <= each_bytes
            blocks = self._left[: len(volumes)][chosen]
            later = np.concatenate([~chosen, np.ones(len(self._left) - len(volumes), bool)])
            self._left = self._left[later]
        return blocks, volumes[chosen]

    def end_if_done(self) -> None:
        if not len(self._left):
            self._ended.set()


class Prefetcher:
    """Serves hints."""

    def __init__(self, state: StoreState, reader: Reader) -> None:
        self._state = state
        self._reader = reader
        self._hints: list[Hint] = []
        self._size = ChunkSizer(_STEP_BYTES, _ALONE_S)
        """Bytes to read in one step while no call reads."""
        self._size.nbytes = _FIRST_BYTES
        self._small_size = ChunkSizer(_STEP_BYTES)
        """Bytes to read from one drive in one step while calls read from it."""
        self._thread: threading.Thread | None = None
        contiguous_bytes = max(
            (lower.volumes.contiguous_bytes for lower in state.lower_tiers), default=0
        )
        if contiguous_bytes:
            reader.after_read = ReadAhead(state, self, contiguous_bytes).after_read

    def start(
        self, blocks: Array, deadline_s: float, session_state: SessionState = SessionState.NONE
    ) -> Hint:
        """Begin to read blocks into memory within `deadline_s`, as far as there is room.

        `session_state` is that of the session of the blocks. Does not block.
        """
        state = self._state
        due_s = state.clock.now() + deadline_s
        with state.lock:
            waiting = sum(hint.nbytes for hint in self._hints)
            room = int(state.arena.capacity_bytes * _MEMORY_SHARE) - waiting
            fitting = np.cumsum(record_sizes(blocks["payload_bytes"])) <= room
            if len(self._hints) >= _HINTS_MAX or state.closing.is_set():
                fitting[:] = False
            hint = Hint(blocks[fitting], due_s, session_state)
            if hint.wanted:
                self._hints.append(hint)
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="kvdepot-prefetch", daemon=True
                    )
                    self._thread.start()
        return hint

    def close(self, timeout_s: float) -> bool:
        """Cancel all hints and wait for the thread. False: it is still reading."""
        with self._state.lock:
            for hint in self._hints:
                hint.cancel()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        state, last_s = self._state, self._state.clock.now()
        while hint := self._most_urgent():
            blocks, volumes = self._next_step(hint, last_s)
            last_s = started_s = state.clock.now()
            timeout_s = min(_STEP_S_MAX, max(0.0, hint.deadline_s - started_s))
            everything = np.arange(len(blocks))
            codes = self._reader.read(blocks, everything, timeout_s, is_prefetch=True)
            brought = np.isin(np.frombuffer(codes, np.uint8), VOLUME_CODES)
            hint.brought += int(brought.sum())
            state.events.count("hinted", int(brought.sum()))
            self._mark(blocks[brought], hint.session_state)
            hint.end_if_done()
            self._learn(blocks, volumes, state.clock.now() - started_s)
            self._rest(hint, volumes, started_s)

    def _next_step(self, hint: Hint, since_s: float) -> tuple[Array, Ints]:
        """Choose the blocks of the next step: fewer for each drive while calls read from it."""
        state = self._state
        keys = np.ascontiguousarray(hint.first(_LOOK_MAX)["key"])
        with state.lock:
            volumes = state.locations(state.catalog.table.find_many(keys)) >> VOLUME_SHIFT
        if self._busy(volumes, since_s):
            return hint.take(volumes, _STEP_BYTES, self._small_size.nbytes)
        return hint.take(volumes, self._size.nbytes, _STEP_BYTES)

    def _busy(self, volumes: Ints, since_s: float) -> list[LowerTier]:
        """The tiers of these volumes from which calls have read since `since_s`."""
        numbers = np.unique(volumes[volumes >= 0]).tolist()
        tiers = {self._state.tier_of(number) for number in numbers}
        return [lower for lower in tiers if lower.is_read_since(since_s)]

    def _learn(self, blocks: Array, volumes: Ints, spent_s: float) -> None:
        sizes = record_sizes(blocks["payload_bytes"])
        if len(sizes):
            parts = [int(sizes[volumes == number].sum()) for number in np.unique(volumes)]
            self._size.learn(sum(parts), spent_s)
            self._small_size.learn(max(parts), spent_s)

    def _mark(self, blocks: Array, session_state: SessionState) -> None:
        """Set the session state of blocks that were read into memory."""
        if session_state is SessionState.NONE:
            return
        catalog = self._state.catalog
        with self._state.lock:
            rows = catalog.table.find_many(np.ascontiguousarray(blocks["key"])).tolist()
            here = [row for row in rows if row >= 0 and catalog.memory.ready(row)]
            catalog.leaves.session_changed(here, session_state)

    def _most_urgent(self) -> Hint | None:
        """The hint with the nearest deadline. Drops hints that are done or too late."""
        with self._state.lock:
            now_s = self._state.clock.now()
            for hint in self._hints:
                if hint.deadline_s <= now_s:
                    hint.cancel()
            self._hints = [hint for hint in self._hints if not hint.wait(0.0)]
            if not self._hints:
                self._thread = None
                return None
            return min(self._hints, key=lambda hint: hint.deadline_s)

    def _rest(self, hint: Hint, volumes: Ints, since_s: float) -> None:
        """Pause if calls are reading from the same drives, as far as the deadline allows."""
        busy = self._busy(volumes, since_s)
        if hint.wait(0.0) or not busy:
            return
        share = HEAD_SHARE if any(lower.volumes.contiguous_bytes for lower in busy) else FLASH_SHARE
        now_s = self._state.clock.now()
        pause_s = min(backoff_s(now_s - since_s, share), max(0.0, hint.deadline_s - now_s) / 2)
        hint.wait(pause_s)


class ReadAhead:
    """Prefetches the blocks that continue a read.

    Only after a read that continues an earlier one: an engine mostly reads a whole prompt at once,
    whose continuation is a later turn of the conversation.
    """

    def __init__(self, state: StoreState, prefetcher: Prefetcher, contiguous_bytes: int) -> None:
        self._state = state
        self._prefetcher = prefetcher
        self._contiguous_bytes = contiguous_bytes
        self._ends: OrderedDict[bytes, bytes] = OrderedDict()
        """The key of the last block of each of the latest reads, and the key of the block whose
        read starts the next read-ahead, or nothing."""

    def after_read(self, call: ReadCall) -> None:
        """Called after a read of blocks, those of one prompt head first."""
        with self._state.lock:
            wanted = self._next_blocks(call)
        if wanted is not None:
            self._prefetcher.start(wanted, _AHEAD_DEADLINE_S)

    def _next_blocks(self, call: ReadCall) -> Array | None:
        """The blocks to read ahead after a call, or None."""
        catalog, rows = self._state.catalog, call.rows
        # Rows that still have the same block.
        same = (rows != NONE) & (catalog.table.words(rows) == call.blocks["key"]).all(axis=1)
        known = np.flatnonzero(same)
        if not len(known):
            return None
        first, last = int(rows[known[0]]), int(rows[known[-1]])
        parent = catalog.tree.parent[first]
        end = catalog.table.key(parent) if parent != NONE else b""
        goes_on = end in self._ends
        marker = self._ends.pop(end, b"")
        following: list[int] = []
        read = {key.tobytes() for key in call.blocks["key"]} if marker else set()
        if goes_on and (not marker or marker in read):
            following = self._following(last)
            marker = catalog.table.key(following[len(following) // 2]) if following else b""
        self._ends[catalog.table.key(last)] = marker
        if len(self._ends) > _ENDS_MAX:
            self._ends.popitem(last=False)
        if not following:
            return None
        blocks = np.zeros(len(following), BLOCK_DTYPE)
        blocks["key"] = catalog.table.words(np.array(following))
        size = call.blocks[known[-1]]
        blocks["payload_bytes"] = blocks["stop"] = size["payload_bytes"]
        blocks["chunk_bytes"] = size["chunk_bytes"]
        return blocks

    def _following(self, row: int) -> list[int]:
        """The following blocks of the prompt on a hard-drive tier that are not in memory, if the
        prefix has one continuation; at most `contiguous_bytes`.
        """
        catalog = self._state.catalog
        nbytes = catalog.nbytes[row]
        found: list[int] = []
        for _ in range(max(1, self._contiguous_bytes // record_bytes(nbytes))):
            children = list(catalog.tree.children(row))
            if len(children) != 1 or catalog.nbytes[children[0]] != nbytes:
                break
            row = children[0]
            lower = self._state.source(row)
            if lower is not None and lower.volumes.contiguous_bytes and not catalog.in_memory(row):
                found.append(row)
        return found
