"""Prefetch: blocks that will soon be read come to memory in the background.

One thread serves the most urgent hint first, a few blocks at a time, and rests while callers read.
The blocks that may wait are bounded; further ones are not taken. Blocks from a hard drive go to the
SSDs as well, as after any other read. A block for which there is no room in memory is not read.

Read-ahead hints at the next piece of a prompt that is read piece by piece from a hard drive.
"""

import threading
from collections import OrderedDict
from typing import Final

import numpy as np

from kvdepot.core.order import SessionState
from kvdepot.core.requests import BLOCK_DTYPE, Array
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
"""Longest wait of a call for a step that began before it."""
_MEMORY_SHARE: Final = 0.25
"""Share of the memory that hints may fill before it is used."""
_HINTS_MAX: Final = 4096
_STEP_S_MAX: Final = 60.0
"""A drive that takes longer for one step is too late for any deadline."""
_ENDS_MAX: Final = 1024
_AHEAD_DEADLINE_S: Final = 10.0


class Hint:
    """Blocks that are brought to memory; can be awaited or cancelled."""

    def __init__(
        self, blocks: Array, deadline_s: float, session_state: SessionState = SessionState.NONE
    ) -> None:
        """`blocks`: rows of BLOCK_DTYPE. `deadline_s`: by the store's clock."""
        self.deadline_s = deadline_s
        self.wanted = len(blocks)
        """Blocks that it is to bring; others are in memory, unknown, or too many."""
        self.resident = 0
        """Leading blocks of what was asked for that are in the store."""
        self.brought = 0
        """Blocks that are in memory because of it."""
        self.session_state = session_state
        self._lock = threading.Lock()
        self._left = blocks
        self._ended = threading.Event()
        if not len(blocks):
            self._ended.set()

    @property
    def nbytes(self) -> int:
        """Bytes of records that are still to come."""
        return int(record_sizes(self._left["payload_bytes"]).sum())

    def cancel(self) -> None:
        """Bring no more; what is under way still arrives. May be called twice."""
        with self._lock:
            self._left = self._left[:0]
        self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        """True once everything was brought, or will not be."""
        return self._ended.wait(timeout_s)

    def first(self, count: int) -> Array:
        """The first blocks that are left."""
        return self._left[:count]

    def take(self, volumes: Ints, limit_bytes: int, each_bytes: int) -> tuple[Array, Ints]:
        """The next blocks, and the volume of each.

        `volumes` are those of the first that are left. At least one block, and of each volume one;
        otherwise at most `limit_bytes`, and from one volume `each_bytes`.
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
        """Bytes read in one step while no call reads."""
        self._size.nbytes = _FIRST_BYTES
        self._small_size = ChunkSizer(_STEP_BYTES)
        """Bytes read from one drive in one step while calls read too."""
        self._thread: threading.Thread | None = None
        contiguous_bytes = max(
            (lower.volumes.contiguous_bytes for lower in state.lower_tiers), default=0
        )
        if contiguous_bytes:
            reader.after_read = ReadAhead(state, self, contiguous_bytes).after_read

    def start(
        self, blocks: Array, deadline_s: float, session_state: SessionState = SessionState.NONE
    ) -> Hint:
        """Begin to read blocks into memory within `within_s`, as far as there is room.

        `session_state` is that of the session that they belong to.
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
        """Cancel everything and wait for the thread. False: it still reads."""
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
        """Choose the next reads: many while no call reads there, else few from each drive."""
        state = self._state
        keys = np.ascontiguousarray(hint.first(_LOOK_MAX)["key"])
        with state.lock:
            volumes = state.locations(state.catalog.table.find_many(keys)) >> VOLUME_SHIFT
        if self._busy(volumes, since_s):
            return hint.take(volumes, _STEP_BYTES, self._small_size.nbytes)
        return hint.take(volumes, self._size.nbytes, _STEP_BYTES)

    def _busy(self, volumes: Ints, since_s: float) -> list[LowerTier]:
        """The tiers of these volumes from which calls have read since."""
        numbers = np.unique(volumes[volumes >= 0]).tolist()
        tiers = {self._state.tier_of(number) for number in numbers}
        return [lower for lower in tiers if lower.foreground.busy_since(since_s)]

    def _learn(self, blocks: Array, volumes: Ints, spent_s: float) -> None:
        sizes = record_sizes(blocks["payload_bytes"])
        if len(sizes):
            parts = [int(sizes[volumes == number].sum()) for number in np.unique(volumes)]
            self._size.learn(sum(parts), spent_s)
            self._small_size.learn(max(parts), spent_s)

    def _mark(self, blocks: Array, session_state: SessionState) -> None:
        """Blocks that have just come to memory are in the state of their session."""
        if session_state is SessionState.NONE:
            return
        catalog = self._state.catalog
        with self._state.lock:
            rows = catalog.table.find_many(np.ascontiguousarray(blocks["key"])).tolist()
            here = [row for row in rows if row >= 0 and catalog.memory.ready(row)]
            catalog.leaves.session_changed(here, session_state)

    def _most_urgent(self) -> Hint | None:
        """The hint to go on with; those that are too late, or done, are forgotten."""
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
        """Leave the drives to calls that wait for them, as far as the deadline allows."""
        busy = self._busy(volumes, since_s)
        if hint.wait(0.0) or not busy:
            return
        share = HEAD_SHARE if any(lower.volumes.contiguous_bytes for lower in busy) else FLASH_SHARE
        now_s = self._state.clock.now()
        pause_s = min(backoff_s(now_s - since_s, share), max(0.0, hint.deadline_s - now_s) / 2)
        hint.wait(pause_s)


class ReadAhead:
    """Watches reads, and hints at what continues them.

    Only after a read that goes on where one ended before: an engine asks for a whole prompt at
    once, and what continues that is another turn of the conversation.
    """

    def __init__(self, state: StoreState, prefetcher: Prefetcher, contiguous_bytes: int) -> None:
        self._state = state
        self._prefetcher = prefetcher
        self._contiguous_bytes = contiguous_bytes
        self._ends: OrderedDict[bytes, bytes] = OrderedDict()
        """Keys of the last blocks of the latest reads; with each the key of the block whose read
        starts the next read-ahead, or nothing."""

    def after_read(self, call: ReadCall) -> None:
        """Blocks were read, those of one prompt head first."""
        with self._state.lock:
            wanted = self._next_blocks(call)
        if wanted is not None:
            self._prefetcher.start(wanted, _AHEAD_DEADLINE_S)

    def _next_blocks(self, call: ReadCall) -> Array | None:
        """Return the keys to read ahead after a call."""
        catalog, rows = self._state.catalog, call.rows
        # Rows of blocks that are still what they were when they were read.
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
        """Returns the following blocks of the prompt on a hard-drive tier that are not in memory,
        if the prefix has one continuation; at most `contiguous_bytes`.
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
