"""Fills a cache from the depot as far as possible.

The prompts are looked up, their blocks are fetched into the tensors of a new cache, and the rows of
a batch are brought to one length. A block that cannot be fetched, or not in time, shortens the
prefix; nothing raises. On a GPU copies may continue after the fetch: `FetchedRow.wait` makes the
users of a layer wait for them, and the blocks stay leased until `FetchedRow.close`.

The depot has prefixes of different lengths for the rows of a batch, and a cache has one length. The
model computes the rest of short rows by themselves. If the difference is less than a block, the
long rows are cut instead.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from kvdepot.adapters.audit import AuditedHits
from kvdepot.adapters.hf.binding import AXES, ORDER, Binding
from kvdepot.adapters.hf.caches import KV, DepotCache, DepotLayer, DepotSlidingLayer, join
from kvdepot.adapters.hf.calls import PromptRow
from kvdepot.adapters.hf.stats import CallStats, ServedRow
from kvdepot.adapters.tensors import KVTensors, OnboardTicket, TensorMover
from kvdepot.core.block import MISS, BlockKey, GetResult
from kvdepot.core.depot import Arrival, Lease
from kvdepot.depot import Depot
from kvdepot.errors import KVDepotError

_TRIES: Final = 6
"""Prefixes that are tried for a row; each is shorter than the one before."""
_TIMED_OUT: Final = ("late", "busy")
"""Reasons of a miss after the whole timeout."""
_FASTEST_FIRST: Final = ("dram", "cxl", "ssd", "hdd", "plugin", "object")

CatchUp = Callable[[DepotCache, PromptRow, int, int], None]
"""Runs tokens start <= i < stop of one prompt, unpadded, through the model."""


@dataclass(slots=True)
class FetchedRow:
    """One prompt of a batch, and the blocks that were fetched for it."""

    number: int
    """The index in the batch."""
    prompt: PromptRow
    keys: list[list[BlockKey]]
    """The keys of the prompt's full blocks, by group."""
    tokens: int = 0
    """The model can continue after this many tokens."""
    fetched_blocks: Counter[int] = field(default_factory=Counter)
    """The number of leading blocks in place, by group."""
    windows: dict[int, list[KV]] = field(default_factory=dict)
    """The tensors of each group with a window; they end with token `tokens`."""
    tiers: dict[int, str] = field(default_factory=dict)
    """The slowest tier that a group's part of each block came from."""
    misses: Counter[str] = field(default_factory=Counter)
    tickets: dict[int, list[OnboardTicket]] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)

    def wait(self, group: int, layer: int) -> None:
        """Make this thread's stream wait for the group's layer."""
        for ticket in self.tickets.get(group, ()):
            ticket.wait_layer(layer)

    def stats(self, block_tokens: int) -> ServedRow:
        fetched: Counter[str] = Counter()
        for block, tier in self.tiers.items():
            count = min(self.tokens, (block + 1) * block_tokens) - block * block_tokens
            fetched[tier] += max(0, count)
        total = len(self.prompt.tokens)
        unneeded = self.tokens - fetched.total()
        return ServedRow(total, dict(+fetched), unneeded, total - self.tokens)

    def close(self) -> None:
        """Wait for all copies, and release the leases. May be called again."""
        for tickets in self.tickets.values():
            for ticket in tickets:
                ticket.synchronize()
        self.tickets.clear()
        while self.leases:
            self.leases.pop().release()


@dataclass(slots=True)
class PreparedCache:
    """A cache that is filled up to a column."""

    cache: DepotCache
    column: int
    windows_from: list[int]
    """The first token of each row from which the cache keeps all K and V of windows."""
    rows: list[FetchedRow] = field(default_factory=list)

    def close(self) -> None:
        """Release the depot's blocks. May be called again."""
        while self.rows:
            self.rows.pop().close()


class BatchFetch:
    """The prompts of one call, from the lookup to their common cache."""

    def __init__(
        self, store: Depot, binding: Binding, mover: TensorMover, prompts: Sequence[PromptRow]
    ) -> None:
        self._store = store
        self._binding = binding
        self._groups = binding.groups
        self._mover = mover
        self._rows = [
            FetchedRow(number, prompt, [group.keys(prompt.tokens) for group in binding.groups])
            for number, prompt in enumerate(prompts)
        ]
        self._tensors: dict[int, list[KV]] = {}
        """The tensors of the whole batch for each group of full attention."""
        self._deadline_s: float | None = None
        """None: as long as the depot allows for one read."""
        self._late = False
        """A block was late: from now on only blocks that need no wait are taken."""
        self._column = 0
        self._caught_up: dict[int, DepotCache] = {}
        """Caches of rows that were caught up, by row."""

    def prepare(
        self,
        hits: AuditedHits,
        stats: CallStats,
        catch_up: CatchUp,
        *,
        timeout_s: float | None,
        busy: bool,
    ) -> PreparedCache:
        """A cache for the prompts, filled from the depot with all but their last tokens if the
        depot has them. `busy`: the model has other calls."""
        started_s, size = time.monotonic(), self._binding.block_tokens
        lengths = [self._find_unaudited(row, hits, busy=busy) for row in self._rows]
        looked_up_s = time.monotonic()
        self._deadline_s = None if timeout_s is None else looked_up_s + timeout_s
        with contextlib.ExitStack() as unused:
            for row in self._rows:
                unused.callback(row.close)
            self._fetch(lengths)
            stats.lookup_s = looked_up_s - started_s
            stats.onboard_s = time.monotonic() - looked_up_s
            stats.rows += [row.stats(size) for row in self._rows]
            stats.misses = dict(sum((row.misses for row in self._rows), Counter(stats.misses)))
            if any(row.tokens for row in self._rows):
                prepared = self._assemble(catch_up)
                unused.pop_all()
                return prepared
        return PreparedCache(DepotCache(self._binding.windows), 0, [0] * len(self._rows))

    def _find_unaudited(self, row: FetchedRow, hits: AuditedHits, *, busy: bool) -> int:
        """Leading tokens to fetch; without the last block if that is to be audited."""
        size = self._binding.block_tokens
        found = self._find(row.keys, len(row.prompt.tokens) - 1)
        if not found or not hits.choose(row.keys[0][0], busy=busy):
            return found
        block = (found - 1) // size
        hits.expect([keys[block] for keys in row.keys])
        return self._find(row.keys, block * size)

    def _find(self, keys: Sequence[Sequence[BlockKey]], limit: int) -> int:
        """The most leading tokens, `limit` at most, for which no group lacks a block.

        May end inside a block if the limit does; the depot has that block.
        """
        tokens = min(limit, len(keys[0]) * self._binding.block_tokens)
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

    def _fetch(self, lengths: Sequence[int]) -> None:
        """Fetch up to `lengths` tokens of each row until the deadline."""
        columns = [row.prompt.pad + count for row, count in zip(self._rows, lengths, strict=True)]
        column = max(columns)
        if column - min(columns) < self._binding.block_tokens:
            column = min(columns)
        limits = [
            max(0, min(count, column - row.prompt.pad))
            for row, count in zip(self._rows, lengths, strict=True)
        ]
        if any(limits):
            self._allocate(limits)
            for row, limit in zip(self._rows, limits, strict=True):
                self._fetch_row(row, limit)

    def _allocate(self, limits: Sequence[int]) -> None:
        """Tensors for whole prompts and for the whole blocks that are fetched. Padding is zero."""
        size = self._binding.block_tokens
        columns = max(
            max(row.prompt.columns, row.prompt.pad + -(-limit // size) * size)
            for row, limit in zip(self._rows, limits, strict=True)
        )
        for number, group in enumerate(self._groups):
            if group.window is None:
                self._tensors[number] = [
                    group.empty_layer(len(self._rows), columns) for _ in group.layers
                ]
        for row in self._rows:
            for pairs in self._tensors.values() if row.prompt.pad else ():
                for key, value in pairs:
                    key[row.number, :, : row.prompt.pad] = 0  # masked, but 0 times NaN is NaN
                    value[row.number, :, : row.prompt.pad] = 0

    def _fetch_row(self, row: FetchedRow, limit: int) -> None:
        for _ in range(_TRIES):
            limit = self._find(row.keys, limit)
            if not limit:
                break
            for number in range(len(self._groups)):
                reach = self._fetch_group(number, limit, row)
                if reach < limit:
                    limit = reach
                    break
            else:
                row.tokens = limit
                return
        row.tiers.clear()

    def _fetch_group(self, number: int, tokens: int, row: FetchedRow) -> int:
        """Fetch one group's blocks for `tokens` tokens. Returns `tokens`, or the start of the first
        block that is missing."""
        group = self._groups[number]
        size, needed = group.block_tokens, group.needed(tokens)
        if group.window is None:
            needed = range(min(row.fetched_blocks[number], needed.stop), needed.stop)
            tensors, offset, batch = self._tensors[number], row.prompt.pad, row.number
        else:
            tensors = [group.empty_layer(1, len(needed) * size) for _ in group.layers]
            offset, batch = -needed.start * size, 0
            row.windows[number] = [
                (key[:, :, : tokens + offset], value[:, :, : tokens + offset])
                for key, value in tensors
            ]
        if not needed:
            return tokens
        first, targets = needed.start * size + offset, KVTensors(tensors, AXES, order=ORDER)
        tickets = row.tickets.setdefault(number, [])

        def scatter(arrivals: list[Arrival]) -> None:
            starts = [first + arrival.index * size for arrival in arrivals]
            pieces = [targets.span(start, start + size, batch) for start in starts]
            ticket = self._mover.onboard([arrival.view for arrival in arrivals], pieces)
            if all(arrival.lasting for arrival in arrivals):
                tickets.append(ticket)
            else:
                ticket.synchronize()

        answers = self._read(row, row.keys[number][needed.start : needed.stop], scatter)
        good = next((at for at, answer in enumerate(answers) if not answer), len(answers))
        for block, answer in enumerate(answers[:good], needed.start):
            tiers = (str(answer.tier), row.tiers.get(block, "dram"))
            row.tiers[block] = max(tiers, key=_FASTEST_FIRST.index)
        row.fetched_blocks[number] = needed.start + good
        return tokens if good == len(needed) else (needed.start + good) * size

    def _read(
        self, row: FetchedRow, keys: Sequence[BlockKey], sink: Callable[[list[Arrival]], None]
    ) -> list[GetResult]:
        """Lease blocks and hand them to `sink`. One answer for each key."""
        lease = self._store.lease(keys)
        row.leases.append(lease)
        timeout_s = None
        if self._late:
            timeout_s = 0.0
        elif self._deadline_s is not None:
            timeout_s = max(0.0, self._deadline_s - time.monotonic())
        answers: list[GetResult] = []
        if len(lease):
            # The cores verify while the bus copies; an answer counts only if the check succeeds.
            on_gpu = self._mover.device.type == "cuda"
            try:
                answers = lease.deliver(sink, verify_concurrently=on_gpu, timeout_s=timeout_s)
            except (KVDepotError, RuntimeError):
                # After the restart of a daemon, until the mover has locked its memory.
                answers = [GetResult(None, "failed")] * len(lease)
        answers += [MISS] * (len(keys) - len(answers))
        row.misses.update(answer.reason for answer in answers if not answer)
        self._late = self._late or any(answer.reason in _TIMED_OUT for answer in answers)
        return answers

    def _assemble(self, catch_up: CatchUp) -> PreparedCache:
        """Let the model compute the rest of short rows, and make one cache of all rows."""
        self._column = max(row.prompt.pad + row.tokens for row in self._rows)
        for row in self._rows:
            stop = self._column - row.prompt.pad
            if row.tokens < stop:
                cache = self._row_cache(row)
                catch_up(cache, row.prompt, row.tokens, stop)
                assert cache.is_in_place(), "the batch's tensors lack the added tokens"
                self._caught_up[row.number] = cache
        cache = DepotCache(self._binding.windows)
        for number, group in enumerate(self._groups):
            for layer, index in enumerate(group.layers):
                self._fill(cache.depot_layers[index], number, layer)
        windows_from = [self._windows_from(row) for row in self._rows]
        return PreparedCache(cache, self._column, windows_from, self._rows)

    def _row_cache(self, row: FetchedRow) -> DepotCache:
        """A cache of one row. Added tokens are written to the batch's tensors."""
        own, pad = slice(row.number, row.number + 1), row.prompt.pad
        cache = DepotCache(self._binding.windows)
        for number, group in enumerate(self._groups):
            for layer, index in enumerate(group.layers):
                target = cache.depot_layers[index]
                if group.window is None:
                    keys, values = self._tensors[number][layer]
                    target.fill((keys[own, :, pad:], values[own, :, pad:]), row.tokens)
                elif row.tokens:
                    target.fill(row.windows[number][layer], row.tokens)
                target.wait = partial(row.wait, number, layer)
        return cache

    def _fill(self, target: DepotLayer | DepotSlidingLayer, number: int, layer: int) -> None:
        if isinstance(target, DepotLayer):
            target.fill(self._tensors[number][layer], self._column)
        elif len(self._rows) == 1 and not self._rows[0].prompt.pad:
            target.fill(self._rows[0].windows[number][layer], self._column)
        else:
            self._wait(number, layer)
            self._fill_window(target, number, layer)
            return
        target.wait = partial(self._wait, number, layer)

    def _wait(self, number: int, layer: int) -> None:
        for row in self._rows:
            row.wait(number, layer)

    def _fill_window(self, target: DepotSlidingLayer, number: int, layer: int) -> None:
        """The last columns of all rows, and the kept tokens of rows that were caught up."""
        group = self._groups[number]
        index = group.layers[layer]
        ends: list[KV | None] = []
        for row in self._rows:
            if row.number in self._caught_up:
                ends.append(_tensors_of(self._caught_up[row.number].depot_layers[index]))
            else:
                ends.append(row.windows[number][layer] if row.tokens else None)
        columns = min(self._column, target.sliding_window - 1)
        target.fill(_stack(group.empty_layer(len(ends), columns), ends), self._column)
        kept = self._column - min(self._windows_from(row) + row.prompt.pad for row in self._rows)
        if kept > 0:
            kept_ends: list[KV | None] = [None] * len(self._rows)
            for number, cache in self._caught_up.items():
                filled = cache.depot_layers[index]
                assert isinstance(filled, DepotSlidingLayer)
                kept_ends[number] = join(filled.kept)
            target.keep_before(_stack(group.empty_layer(len(ends), kept), kept_ends))

    def _windows_from(self, row: FetchedRow) -> int:
        """A row that was fetched keeps nothing; a row that was caught up its last block."""
        size, stop = self._binding.block_tokens, self._column - row.prompt.pad
        start = stop // size * size
        if row.number in self._caught_up and start >= row.tokens:
            return start
        return max(0, stop)


def _tensors_of(layer: DepotLayer | DepotSlidingLayer) -> KV:
    assert layer.keys is not None and layer.values is not None
    return layer.keys, layer.values


def _stack(batch: KV, rows: Sequence[KV | None]) -> KV:
    """Put the last tokens of each row at the end of a batch's tensors, and zeros before them."""
    for plane, target in enumerate(batch):
        target.zero_()
        for row, tensors in enumerate(rows):
            if tensors is not None:
                count = min(target.shape[-2], tensors[plane].shape[-2])
                if count:
                    target[row, :, -count:] = tensors[plane][0, :, -count:]
    return batch
