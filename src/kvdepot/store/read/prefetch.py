"""Prefetch: blocks that will be wanted soon come to memory in the background.

One thread, the most urgent hint first, a few blocks at a time with a rest while callers read. What
may wait is bounded; what does not fit is not taken. What comes from a hard drive goes to the SSDs
as well, as after any other read. A block for which there is no room in memory is not read.

Read-ahead hints at the next piece of a prompt that is read piece by piece from a hard drive.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from kvdepot.core.block import BlockKey
from kvdepot.core.order import SessionState
from kvdepot.core.volume import volume_of
from kvdepot.format.record import record_bytes
from kvdepot.index.table import NONE
from kvdepot.store.read.disk_reads import BlockRead
from kvdepot.store.read.reader import Reader
from kvdepot.store.state.background_throttle import FLASH_SHARE, HEAD_SHARE, ChunkSizer, backoff_s
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.state import StoreState

_STEP_BYTES: Final = 32 << 20
_LOOK_MAX: Final = 512
_FIRST_BYTES: Final = 1 << 20
_ALONE_S: Final = 0.15
"""How long a call may have to wait for a step that began before it."""
_MEMORY_SHARE: Final = 0.25
"""Of the memory that hints may fill before they are used."""
_HINTS_MAX: Final = 4096
_STEP_S_MAX: Final = 60.0
"""A drive that takes longer for one step is too late for any deadline."""
_ENDS_MAX: Final = 1024
_AHEAD_DEADLINE_S: Final = 10.0

Place = tuple[LowerTier, int] | None
"""A drive of a tier; None: memory, or nowhere."""
Step = dict[Place, list[BlockRead]]
"""Blocks to be read in one go."""


class Hint:
    """Answer to `Store.hint`: what it is about to bring, to be awaited or called off."""

    def __init__(
        self,
        reads: list[BlockRead],
        deadline_s: float,
        session_state: SessionState = SessionState.NONE,
    ) -> None:
        self.deadline_s = deadline_s
        """By the store's clock."""
        self.wanted = len(reads)
        """Blocks that it is to bring; others are in memory, unknown, or too many."""
        self.resident = 0
        """Leading blocks of what was asked for that are in the store."""
        self.brought = 0
        """Blocks that are in memory because of it."""
        self.session_state = session_state
        self._lock = threading.Lock()
        self._left = deque(reads)
        self._ended = threading.Event()
        self.nbytes = sum(record_bytes(read.payload_bytes) for read in reads)
        """What is still to come."""
        if not reads:
            self._ended.set()

    def cancel(self) -> None:
        """Bring no more; what is under way still arrives. May be called twice."""
        with self._lock:
            self._left.clear()
            self.nbytes = 0
        self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        """True once everything was brought, or will not be."""
        return self._ended.wait(timeout_s)

    def take(self, places: Sequence[Place], limit_bytes: int, each_bytes: int) -> Step:
        """The next blocks, by the place they are read from; at least one while there are any.

        `places` are those of the first that are left. No more than `each_bytes` from one of them,
        but one block always.
        """
        step: Step = {}
        later: list[BlockRead] = []
        with self._lock:
            for place in places[: len(self._left)]:
                read = self._left.popleft()
                nbytes = record_bytes(read.payload_bytes)
                mine = len(step.get(place, ()))
                if limit_bytes <= 0 or (mine and (mine + 1) * nbytes > each_bytes):
                    later.append(read)
                    continue
                step.setdefault(place, []).append(read)
                limit_bytes -= nbytes
                self.nbytes -= nbytes
            self._left.extendleft(reversed(later))
        return step

    def first(self, count: int) -> list[BlockRead]:
        """The first that are left."""
        with self._lock:
            return list(islice(self._left, count))

    def end_if_done(self) -> None:
        if not self._left:
            self._ended.set()


class Prefetcher:
    """Serves `hint`."""

    def __init__(self, state: StoreState, reader: Reader) -> None:
        self._state = state
        self._reader = reader
        self._hints: list[Hint] = []
        self._size = ChunkSizer(_STEP_BYTES, _ALONE_S)
        """What is read in one go while no call reads."""
        self._size.nbytes = _FIRST_BYTES
        self._small_size = ChunkSizer(_STEP_BYTES)
        """What one drive reads in one go while calls read too."""
        self._thread: threading.Thread | None = None
        contiguous_bytes = max(
            (lower.volumes.contiguous_bytes for lower in state.lower_tiers), default=0
        )
        if contiguous_bytes:
            reader.after_read = ReadAhead(state, self, contiguous_bytes).after_read

    def start(
        self,
        reads: list[BlockRead],
        deadline_s: float,
        session_state: SessionState = SessionState.NONE,
    ) -> Hint:
        """Begin to bring blocks within so many seconds, as far as there is room for them.

        `session_state` is that of the session that they belong to.
        """
        state = self._state
        due_s = state.clock.now() + deadline_s
        with state.lock:
            waiting = sum(hint.nbytes for hint in self._hints)
            room = int(state.arena.capacity_bytes * _MEMORY_SHARE) - waiting
            fitting: list[BlockRead] = []
            for read in reads:
                room -= record_bytes(read.payload_bytes)
                if room < 0 or len(self._hints) >= _HINTS_MAX or state.closing.is_set():
                    break
                fitting.append(read)
            hint = Hint(fitting, due_s, session_state)
            if fitting:
                self._hints.append(hint)
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="kvdepot-prefetch", daemon=True
                    )
                    self._thread.start()
        return hint

    def close(self, timeout_s: float) -> bool:
        """Call everything off and wait for the thread. False: it still reads."""
        with self._state.lock:
            for hint in self._hints:
                hint.cancel()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        state = self._state
        last_s = state.clock.now()
        while hint := self._most_urgent():
            step = self._next_step(hint, last_s)
            reads = [read for part in step.values() for read in part]
            last_s = started_s = state.clock.now()
            timeout_s = min(_STEP_S_MAX, max(0.0, hint.deadline_s - started_s))
            answers = self._reader.fetch(reads, timeout_s, is_prefetch=True)
            memories = [memory.name for memory in state.memory_tiers]
            with state.lock:
                brought = [
                    read
                    for read, answer in zip(reads, answers, strict=True)
                    if answer and answer.tier not in memories
                ]
                hint.brought += len(brought)
                state.counters.hinted += len(brought)
                self._mark(brought, hint.session_state)
            hint.end_if_done()
            self._learn(step, state.clock.now() - started_s)
            self._rest(hint, step, started_s)

    def _next_step(self, hint: Hint, since_s: float) -> Step:
        """What to read next: much while no call reads there, else a little from each drive."""
        state = self._state
        some = hint.first(_LOOK_MAX)
        with state.lock:
            places = [self._place(row) for row in state.catalog.rows([read.key for read in some])]
        if self._busy(places, since_s):
            return hint.take(places, _STEP_BYTES, self._small_size.nbytes)
        return hint.take(places, self._size.nbytes, _STEP_BYTES)

    def _place(self, row: int) -> Place:
        """The drive that a block is read from."""
        lower = self._state.source(row) if row != NONE else None
        return (lower, volume_of(lower.copies.location[row])) if lower is not None else None

    def _busy(self, places: Iterable[Place], since_s: float) -> list[LowerTier]:
        """The tiers among those from which calls have read since."""
        tiers = {place[0] for place in places if place is not None}
        return [lower for lower in tiers if lower.foreground.busy_since(since_s)]

    def _learn(self, step: Step, spent_s: float) -> None:
        sizes = [sum(record_bytes(read.payload_bytes) for read in part) for part in step.values()]
        if sizes:
            self._size.learn(sum(sizes), spent_s)
            self._small_size.learn(max(sizes), spent_s)

    def _mark(self, reads: list[BlockRead], session_state: SessionState) -> None:
        """Blocks that have just come to memory are in the state of their session."""
        assert self._state.held()
        if session_state is SessionState.NONE:
            return
        catalog = self._state.catalog
        rows = catalog.rows([read.key for read in reads])
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

    def _rest(self, hint: Hint, step: Step, since_s: float) -> None:
        """Leave the drives to calls that wait for them, as far as the deadline allows."""
        busy = self._busy(step, since_s)
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
        self._run_bytes = contiguous_bytes
        self._ends: OrderedDict[BlockKey, BlockKey | None] = OrderedDict()
        """The last blocks of the latest reads; with each the block whose read calls for more."""

    def after_read(self, reads: Sequence[BlockRead]) -> None:
        """Blocks were read, those of one prompt head first."""
        with self._state.lock:
            wanted = self._next_reads(reads)
        if wanted:
            self._prefetcher.start(wanted, _AHEAD_DEADLINE_S)

    def _next_reads(self, reads: Sequence[BlockRead]) -> list[BlockRead]:
        """What to read ahead after these."""
        assert self._state.held()
        catalog = self._state.catalog
        first = next(filter(self._is_known, reads), None)
        last = next(filter(self._is_known, reversed(reads)), None)
        if first is None or last is None:
            return []
        parent = catalog.tree.parent[first.row]
        end = catalog.table.key(parent) if parent != NONE else None
        goes_on = end in self._ends
        marker = self._ends.pop(end) if goes_on and end is not None else None
        rows: list[int] = []
        if goes_on and (marker is None or any(read.key == marker for read in reads)):
            rows = self._following(last.row)
            marker = catalog.table.key(rows[len(rows) // 2]) if rows else None
        self._ends[last.key] = marker
        if len(self._ends) > _ENDS_MAX:
            self._ends.popitem(last=False)
        whole = replace(last, target=0, start=0, stop=last.payload_bytes, row=NONE)
        return [replace(whole, key=catalog.table.key(row)) for row in rows]

    def _is_known(self, read: BlockRead) -> bool:
        """Whether a block is still what it was when it was read."""
        return read.row != NONE and self._state.catalog.row(read.key) == read.row

    def _following(self, row: int) -> list[int]:
        """What continues a block on a tier of runs and is not in memory, where there is one way.

        Not further than a run from here.
        """
        catalog = self._state.catalog
        nbytes = catalog.nbytes[row]
        found: list[int] = []
        for _ in range(max(1, self._run_bytes // record_bytes(nbytes))):
            children = list(catalog.tree.children(row))
            if len(children) != 1 or catalog.nbytes[children[0]] != nbytes:
                break
            row = children[0]
            lower = self._state.source(row)
            if lower is not None and lower.volumes.contiguous_bytes and not catalog.in_memory(row):
                found.append(row)
        return found
