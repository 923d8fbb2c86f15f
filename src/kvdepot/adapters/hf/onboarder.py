"""Onboarding: from prompts to a cache that is filled from the depot as far as possible.

A prompt is looked up, its blocks are fetched into the tensors of a cache to be, and the rows of a
batch are brought level. What cannot be fetched in time, or at all, shortens the prefix; it never
raises. On a GPU the copies may still be under way when a row is fetched: `FetchedRow.wait` orders a
layer's users after them, and the blocks stay leased until `FetchedRow.close`.

The rows of a batch are found in the depot to different lengths, and a cache has one length. Rows
that are behind are computed up to the others by themselves; where that is less than a block, the
others are cut instead.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvdepot.adapters.audit import BlockAuditor, HitChooser
from kvdepot.adapters.hf.binding import AXES, ORDER, Binding
from kvdepot.adapters.hf.caches import KV, DepotCache, DepotLayer, DepotSlidingLayer, join
from kvdepot.adapters.hf.calls import PromptRow
from kvdepot.adapters.hf.stats import CallStats, ServedRow
from kvdepot.adapters.tensors import KVTensors, OnboardTicket, TensorMover
from kvdepot.core.block import MISS, BlockKey, GetResult
from kvdepot.core.depot import Arrival, Depot, Lease
from kvdepot.errors import KVDepotError

_TRIES: Final = 6
"""How often a shorter prefix is tried where blocks of a window could not be fetched."""
_WAITED: Final = ("late", "busy")
"""Why a block was missed after all the time that there was."""
_FASTEST_FIRST: Final = ("dram", "cxl", "ssd", "hdd", "plugin", "object")

CatchUp = Callable[[DepotCache, PromptRow, int, int], None]
"""Runs tokens start <= i < stop of one prompt, unpadded, through the model."""
Room = dict[int, list[KV]]
"""For each group of full attention the tensors of the whole batch."""


@dataclass(slots=True)
class Budget:
    """The time that one call may wait for the depot."""

    timeout_s: float | None
    """None: as long as the store allows for one read."""
    started: float = field(default_factory=time.monotonic)
    late: bool = False
    """Something was late already: only what is there at once is taken."""

    def left_s(self) -> float | None:
        if self.late:
            return 0.0
        if self.timeout_s is None:
            return None
        return max(0.0, self.timeout_s - (time.monotonic() - self.started))


@dataclass(slots=True)
class FetchedRow:
    """One prompt of a batch, and what was fetched for it."""

    number: int
    """In the batch."""
    prompt: PromptRow
    keys: list[list[BlockKey]]
    """For each group the keys of the prompt's full blocks."""
    tokens: int = 0
    """The model can go on after so many of its tokens."""
    fetched_blocks: Counter[int] = field(default_factory=Counter)
    """For each group the leading blocks that are in place, or up to where its window is."""
    windows: dict[int, list[KV]] = field(default_factory=dict)
    """For each group that sees a window: tensors that end with token `tokens`."""
    tiers: dict[int, dict[int, str]] = field(default_factory=dict)
    """For each group the tier that each block came from."""
    misses: Counter[str] = field(default_factory=Counter)
    tickets: dict[int, list[OnboardTicket]] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)

    def wait(self, group: int, layer: int) -> None:
        """What this thread's stream does next finds the group's layer in place."""
        for ticket in self.tickets.get(group, ()):
            ticket.wait_layer(layer)

    def stats(self, block_tokens: int) -> ServedRow:
        """Tokens by tier; of several groups the slower tier counts."""
        slowest: dict[int, str] = {}
        for blocks in self.tiers.values():
            for block, tier in blocks.items():
                slowest[block] = max(tier, slowest.get(block, tier), key=_FASTEST_FIRST.index)
        fetched: Counter[str] = Counter()
        for block, tier in slowest.items():
            count = min(self.tokens, (block + 1) * block_tokens) - block * block_tokens
            if count > 0:
                fetched[tier] += count
        total = len(self.prompt.tokens)
        return ServedRow(total, dict(fetched), self.tokens - fetched.total(), total - self.tokens)

    def close(self) -> None:
        """Wait until nothing is copied any more, and give up the leases. May be called again."""
        for several in self.tickets.values():
            for ticket in several:
                ticket.synchronize()
        self.tickets.clear()
        while self.leases:
            self.leases.pop().release()


@dataclass(slots=True)
class PreparedCache:
    """A cache, filled up to a column, and what is known about it."""

    cache: DepotCache
    column: int
    windows_from: list[int]
    """For each row the token from which on its windows are remembered whole."""
    rows: list[FetchedRow] = field(default_factory=list)

    def close(self) -> None:
        """Let go of the depot's blocks. May be called again."""
        while self.rows:
            self.rows.pop().close()


class AuditedCalls:
    """The calls of one model, and which of their hits are computed again. Thread-safe."""

    def __init__(self, chooser: HitChooser, auditor: BlockAuditor) -> None:
        self._chooser = chooser
        self.auditor = auditor
        self._lock = threading.Lock()
        self._calls = 0

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """One call, while it lasts."""
        with self._lock:
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1

    def chosen(self, key: BlockKey) -> bool:
        return self._chooser.choose(key, busy=self._calls > 1)


class Onboarder:
    """Prepares caches for one model. Thread-safe."""

    def __init__(
        self,
        store: Depot,
        binding: Binding,
        mover: TensorMover,
        timeout_s: float | None,
        audit: "AuditedCalls",
    ) -> None:
        self.audit = audit
        self._store = store
        self._binding = binding
        self._groups = binding.groups
        self._mover = mover
        self._timeout_s = timeout_s

    def prepare(
        self, prompts: list[PromptRow], stats: CallStats, catch_up: CatchUp
    ) -> PreparedCache:
        """A cache for the prompts, with all but their last tokens from the depot where it can."""
        started = time.monotonic()
        rows = [
            FetchedRow(number, prompt, [group.keys(prompt.tokens) for group in self._groups])
            for number, prompt in enumerate(prompts)
        ]
        found = [self._find(row.keys, len(row.prompt.tokens) - 1) for row in rows]
        found = [self._audited(row, tokens) for row, tokens in zip(rows, found, strict=True)]
        looked = time.monotonic()
        wanted = self._level(prompts, found)
        room: Room = {}
        with contextlib.ExitStack() as unused:
            for row in rows:
                unused.callback(row.close)
            if any(wanted):
                room = self._make_room(prompts, wanted)
                budget = Budget(self._timeout_s)
                for row, limit in zip(rows, wanted, strict=True):
                    self._fetch(row, limit, room, budget)
            stats.lookup_s, stats.onboard_s = looked - started, time.monotonic() - looked
            stats.rows += [row.stats(self._binding.block_tokens) for row in rows]
            stats.misses = dict(sum((row.misses for row in rows), Counter(stats.misses)))
            if any(row.tokens for row in rows):
                prepared = _BatchAssembly(self._binding, rows, room).assemble(catch_up)
                unused.pop_all()
                return prepared
        return PreparedCache(DepotCache.of(self._binding.windows), 0, [0] * len(prompts))

    def _audited(self, row: FetchedRow, found: int) -> int:
        """How many of the tokens that were found to fetch: without the last block where it is to be
        computed again.
        """
        if not found or not self.audit.chosen(row.keys[0][0]):
            return found
        block = (found - 1) // self._binding.block_tokens
        self.audit.auditor.expect([keys[block] for keys in row.keys])
        return self._find(row.keys, block * self._binding.block_tokens)

    def _find(self, keys: Sequence[Sequence[BlockKey]], limit: int) -> int:
        """The most leading tokens, `limit` at most, for which no group lacks a block.

        Ends inside a block where the limit does; the depot has that block then.
        """
        tokens = min(limit, len(keys[0]) * self._groups[0].block_tokens)
        while tokens > 0:
            reach = tokens
            for group, chain in zip(self._groups, keys, strict=True):
                needed = group.needed(tokens)
                found = len(self._store.match(chain[needed.start : needed.stop]))
                if found < len(needed):
                    reach = min(reach, (needed.start + found) * group.block_tokens)
            if reach == tokens:
                return tokens
            tokens = reach
        return 0

    def _level(self, prompts: Sequence[PromptRow], found: Sequence[int]) -> list[int]:
        """The tokens to fetch of each row: all, unless the rows are nearly level."""
        reaches = [prompt.pad + count for prompt, count in zip(prompts, found, strict=True)]
        column = max(reaches)
        if column - min(reaches) < self._binding.block_tokens:
            column = min(reaches)
        return [
            max(0, min(count, column - prompt.pad))
            for prompt, count in zip(prompts, found, strict=True)
        ]

    def _make_room(self, prompts: Sequence[PromptRow], tokens: Sequence[int]) -> Room:
        """Tensors for a batch, with room for whole prompts; padding is zero, the rest undefined."""
        size = self._binding.block_tokens
        columns = max(prompt.columns for prompt in prompts)
        for prompt, count in zip(prompts, tokens, strict=True):
            columns = max(columns, prompt.pad + -(-count // size) * size)
        room = {
            number: group.empty(len(prompts), columns)
            for number, group in enumerate(self._groups)
            if group.window is None
        }
        for row, prompt in enumerate(prompts):
            for pairs in room.values() if prompt.pad else ():
                for key, value in pairs:
                    key[row, :, : prompt.pad] = 0  # masked, but 0 times NaN would be NaN
                    value[row, :, : prompt.pad] = 0
        return room

    def _fetch(self, row: FetchedRow, limit: int, room: Room, budget: Budget) -> None:
        """Bring in as many leading tokens as can be fetched, `limit` at most."""
        for _ in range(_TRIES):
            limit = self._find(row.keys, limit)
            if not limit:
                break
            for number in range(len(self._groups)):
                reach = self._fetch_group(number, limit, row, room, budget)
                if reach < limit:
                    limit = reach
                    break
            else:
                row.tokens = limit
                return
        row.tiers.clear()

    def _fetch_group(
        self, number: int, tokens: int, row: FetchedRow, room: Room, budget: Budget
    ) -> int:
        """One group's blocks for `tokens` tokens. Returns `tokens`, or the start of the first block
        that is missing."""
        group = self._groups[number]
        needed = group.needed(tokens)
        if group.window is None:
            needed = range(min(row.fetched_blocks[number], needed.stop), needed.stop)
            tensors, offset, batch = room[number], row.prompt.pad, row.number
        else:
            tensors, batch = group.empty(1, len(needed) * group.block_tokens), 0
            offset = -needed.start * group.block_tokens
            row.windows[number] = [
                (key[:, :, : tokens + offset], value[:, :, : tokens + offset])
                for key, value in tensors
            ]
            row.tiers[number] = {}
        if not needed:
            return tokens
        first = needed.start * group.block_tokens + offset
        targets = KVTensors(list(tensors), AXES, order=ORDER)
        scatter = _Scatter(self._mover, group.block_tokens, targets, first, batch)
        answers = self._deliver(row.keys[number][needed.start : needed.stop], scatter, row, budget)
        row.tickets.setdefault(number, []).extend(scatter.under_way)
        good = next((at for at, answer in enumerate(answers) if not answer), len(answers))
        tiers = row.tiers.setdefault(number, {})
        for at, answer in enumerate(answers[:good]):
            tiers[needed.start + at] = str(answer.tier)
        row.fetched_blocks[number] = needed.start + good
        return tokens if good == len(needed) else (needed.start + good) * group.block_tokens

    def _deliver(
        self, keys: Sequence[BlockKey], scatter: "_Scatter", row: FetchedRow, budget: Budget
    ) -> list[GetResult]:
        lease = self._store.lease(keys)
        row.leases.append(lease)
        # While the bus is busy the processor's cores verify; only then is a block a success.
        beside = self._mover.device.type == "cuda"
        limit_s = budget.left_s()
        answers: list[GetResult] = []
        if len(lease):
            try:
                answers = lease.deliver(scatter, beside=beside, timeout_s=limit_s)
            except (KVDepotError, RuntimeError):
                # After a daemon's restart, until the mover has locked the new daemon's memory.
                answers = [GetResult(None, "failed")] * len(lease)
        answers += [MISS] * (len(keys) - len(answers))
        row.misses.update(answer.reason for answer in answers if not answer)
        budget.late = budget.late or any(answer.reason in _WAITED for answer in answers)
        return answers


@dataclass(slots=True)
class _Scatter:
    """Takes blocks that a lease delivers, and copies them into a group's tensors."""

    mover: TensorMover
    block_tokens: int
    tensors: KVTensors
    first: int
    batch: int
    under_way: list[OnboardTicket] = field(default_factory=list)

    def __call__(self, arrivals: list[Arrival]) -> None:
        size = self.block_tokens
        starts = [self.first + arrival.index * size for arrival in arrivals]
        pieces = [self.tensors.span(start, start + size, self.batch) for start in starts]
        ticket = self.mover.onboard([arrival.view for arrival in arrivals], pieces)
        if all(arrival.lasting for arrival in arrivals):
            self.under_way.append(ticket)
        else:
            ticket.synchronize()


class _BatchAssembly:
    """Makes one cache of the rows that were fetched."""

    def __init__(self, binding: Binding, rows: list[FetchedRow], room: Room) -> None:
        self._binding = binding
        self._rows = rows
        self._room = room
        self._column = max(row.prompt.pad + row.tokens for row in rows)
        self._caught_up: dict[int, DepotCache] = {}

    def assemble(self, catch_up: CatchUp) -> PreparedCache:
        for row in self._rows:
            stop = self._column - row.prompt.pad
            if row.tokens < stop:
                cache = self._row_cache(row)
                catch_up(cache, row.prompt, row.tokens, stop)
                self._copy_back(cache, row)
                self._caught_up[row.number] = cache
        cache = DepotCache.of(self._binding.windows)
        for number, group in enumerate(self._binding.groups):
            for layer, index in enumerate(group.layers):
                self._fill(cache.depot_layers[index], number, layer)
        windows_from = [self._windows_from(row) for row in self._rows]
        return PreparedCache(cache, self._column, windows_from, self._rows)

    def _row_cache(self, row: FetchedRow) -> DepotCache:
        """A cache of one row alone; what is added to it lands in the batch's tensors."""
        mine, pad = slice(row.number, row.number + 1), row.prompt.pad
        cache = DepotCache.of(self._binding.windows)
        for number, group in enumerate(self._binding.groups):
            for layer, index in enumerate(group.layers):
                target = cache.depot_layers[index]
                if group.window is None:
                    keys, values = self._room[number][layer]
                    target.fill((keys[mine, :, pad:], values[mine, :, pad:]), row.tokens)
                elif row.tokens:
                    target.fill(row.windows[number][layer], row.tokens)
                target.wait = partial(row.wait, number, layer)
        return cache

    def _copy_back(self, cache: DepotCache, row: FetchedRow) -> None:
        """Copy what was added to a row's cache into the batch's tensors where it is not there."""
        for number, pairs in self._room.items():
            for layer, pair in zip(self._binding.groups[number].layers, pairs, strict=True):
                filled = cache.depot_layers[layer]
                if isinstance(filled, DepotLayer) and not filled.in_place:
                    assert filled.keys is not None and filled.values is not None
                    for target, source in zip(pair, (filled.keys, filled.values), strict=True):
                        target[row.number, :, row.prompt.pad : self._column] = source[0]

    def _fill(self, target: DepotLayer | DepotSlidingLayer, number: int, layer: int) -> None:
        if isinstance(target, DepotLayer):
            target.fill(self._room[number][layer], self._column)
        elif len(self._rows) == 1 and not self._rows[0].prompt.pad:
            target.fill(self._rows[0].windows[number][layer], self._column)
        else:
            self._fill_window(target, number, layer)
            return
        target.wait = partial(self._wait, number, layer)

    def _wait(self, number: int, layer: int) -> None:
        for row in self._rows:
            row.wait(number, layer)

    def _fill_window(self, target: DepotSlidingLayer, number: int, layer: int) -> None:
        """The last columns of all rows, and what rows that were caught up remember of a block."""
        self._wait(number, layer)
        group = self._binding.groups[number]
        index = group.layers[layer]
        tails: list[KV | None] = []
        for row in self._rows:
            if row.number in self._caught_up:
                filled = self._caught_up[row.number].depot_layers[index]
                assert filled.keys is not None and filled.values is not None
                tails.append((filled.keys, filled.values))
            else:
                tails.append(row.windows[number][layer] if row.tokens else None)
        columns = min(self._column, target.sliding_window - 1)
        target.fill(_stack(group.empty_layer(len(tails), columns), tails), self._column)
        kept = self._column - min(self._windows_from(row) + row.prompt.pad for row in self._rows)
        if kept > 0:
            pieces = [self._kept(row.number, index, kept) for row in self._rows]
            target.remember(_stack(group.empty_layer(len(tails), kept), pieces))

    def _kept(self, row: int, index: int, count: int) -> KV | None:
        if row not in self._caught_up:
            return None
        layer = self._caught_up[row].layers[index]
        assert isinstance(layer, DepotSlidingLayer)
        keys, values = join(layer.kept)
        return keys[:, :, -count:], values[:, :, -count:]

    def _windows_from(self, row: FetchedRow) -> int:
        """A row that was fetched remembers nothing; one that was caught up its last block."""
        stop = self._column - row.prompt.pad
        start = stop // self._binding.block_tokens * self._binding.block_tokens
        if row.number in self._caught_up and start >= row.tokens:
            return start
        return max(0, stop)


def _stack(batch: KV, rows: Sequence[KV | None]) -> KV:
    """Put the last tokens of each row at the end of a batch's tensors; zeros before them."""
    for plane, target in enumerate(batch):
        target.zero_()
        for row, tensors in enumerate(rows):
            if tensors is not None:
                count = min(target.shape[-2], tensors[plane].shape[-2])
                if count:
                    target[row, :, -count:] = tensors[plane][0, :, -count:]
    return batch
