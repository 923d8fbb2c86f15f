"""From prompts to a cache that a model can go on from: looked up, onboarded, brought level.

The rows of a batch are found in the depot to different lengths, and a cache has one length. Rows
that are behind are computed up to the others by themselves; where that is less than a block, the
others are cut instead.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from kvdepot.adapters.hf.binding import Binding
from kvdepot.adapters.hf.caches import KV, DepotCache, DepotLayer, DepotSlidingLayer
from kvdepot.adapters.hf.onboarder import Budget, Landing, Onboarder, Target, room_for
from kvdepot.adapters.hf.prefix import chains_of
from kvdepot.adapters.hf.prompts import Prompt
from kvdepot.adapters.hf.served import Served, ServedRow

CatchUp = Callable[[DepotCache, Prompt, int, int], None]
"""Runs tokens start <= i < stop of one prompt, unpadded, through the model."""


@dataclass(slots=True)
class Prepared:
    """A cache, filled up to a column, and what is known about it."""

    cache: DepotCache
    column: int
    windows_from: list[int]
    """For each row the token from which on its windows are remembered whole."""
    landings: list[Landing] = field(default_factory=list)

    def close(self) -> None:
        """Let go of the depot's blocks. May be called again."""
        while self.landings:
            self.landings.pop().close()


class Preparer:
    """Prepares caches for one model."""

    def __init__(self, binding: Binding, onboarder: Onboarder, timeout_s: float | None) -> None:
        self._binding = binding
        self._groups = binding.groups
        self._onboarder = onboarder
        self._timeout_s = timeout_s

    def prepare(self, prompts: list[Prompt], served: Served, catch_up: CatchUp) -> Prepared:
        """A cache for the prompts, with all but their last tokens from the depot where it can."""
        started = time.monotonic()
        chains = [chains_of(self._groups, prompt.tokens) for prompt in prompts]
        found = [
            self._onboarder.find(keys, len(prompt.tokens) - 1)
            for keys, prompt in zip(chains, prompts, strict=True)
        ]
        looked = time.monotonic()
        wanted = self._level(prompts, found)
        landings: list[Landing] = []
        try:
            if any(wanted):
                room = room_for(self._groups, prompts, wanted)
                budget = Budget(self._timeout_s)
                for row, (keys, prompt) in enumerate(zip(chains, prompts, strict=True)):
                    target = Target(row, prompt.pad, room)
                    landings.append(self._onboarder.fetch(keys, wanted[row], target, budget))
            served.lookup_s, served.onboard_s = looked - started, time.monotonic() - looked
            self._report(prompts, landings, served)
            if not any(landing.tokens for landing in landings):
                for landing in landings:
                    landing.close()
                return Prepared(DepotCache.of(self._binding.windows), 0, [0] * len(prompts))
            return _Batch(self._binding, prompts, landings, room).assemble(catch_up)
        except BaseException:
            for landing in landings:
                landing.close()
            raise

    def _level(self, prompts: Sequence[Prompt], found: Sequence[int]) -> list[int]:
        """The tokens to fetch of each row: all, unless the rows are nearly level."""
        reaches = [prompt.pad + count for prompt, count in zip(prompts, found, strict=True)]
        column = max(reaches)
        if column - min(reaches) < self._binding.block_tokens:
            column = min(reaches)
        return [
            max(0, min(count, column - prompt.pad))
            for prompt, count in zip(prompts, found, strict=True)
        ]

    def _report(
        self, prompts: Sequence[Prompt], landings: Sequence[Landing], served: Served
    ) -> None:
        for row, prompt in enumerate(prompts):
            landing = landings[row] if landings else Landing()
            fetched = landing.fetched(self._binding.block_tokens)
            served.rows.append(
                ServedRow(
                    len(prompt.tokens),
                    dict(fetched),
                    landing.tokens - fetched.total(),
                    len(prompt.tokens) - landing.tokens,
                )
            )
            for reason, count in landing.misses.items():
                served.misses[reason] = served.misses.get(reason, 0) + count


class _Batch:
    """Rows that have landed, on their way to one cache."""

    def __init__(
        self,
        binding: Binding,
        prompts: list[Prompt],
        landings: list[Landing],
        room: dict[int, list[KV]],
    ) -> None:
        self._binding = binding
        self._prompts = prompts
        self._landings = landings
        self._room = room
        self._column = max(
            prompt.pad + landing.tokens for prompt, landing in zip(prompts, landings, strict=True)
        )
        self._caught_up: dict[int, DepotCache] = {}

    def assemble(self, catch_up: CatchUp) -> Prepared:
        for row, (prompt, landing) in enumerate(zip(self._prompts, self._landings, strict=True)):
            stop = self._column - prompt.pad
            if landing.tokens < stop:
                cache = self._row_cache(row)
                catch_up(cache, prompt, landing.tokens, stop)
                self._take_back(cache, row)
                self._caught_up[row] = cache
        cache = DepotCache.of(self._binding.windows)
        for number, group in enumerate(self._binding.groups):
            for layer, index in enumerate(group.layers):
                self._fill(cache.depot_layers[index], number, layer)
        windows_from = [self._windows_from(row) for row in range(len(self._prompts))]
        return Prepared(cache, self._column, windows_from, self._landings)

    def _row_cache(self, row: int) -> DepotCache:
        """A cache of one row alone; what is added to it lands in the batch's tensors."""
        prompt, landing = self._prompts[row], self._landings[row]
        cache = DepotCache.of(self._binding.windows)
        for number, group in enumerate(self._binding.groups):
            for layer, index in enumerate(group.layers):
                target = cache.depot_layers[index]
                if group.window is None:
                    keys, values = self._room[number][layer]
                    mine = slice(row, row + 1)
                    target.fill(
                        (keys[mine, :, prompt.pad :], values[mine, :, prompt.pad :]),
                        landing.tokens,
                    )
                elif landing.tokens:
                    target.fill(landing.windows[number][layer], landing.tokens)
                target.wait = partial(landing.wait, number, layer)
        return cache

    def _take_back(self, cache: DepotCache, row: int) -> None:
        """What was added to a row's cache must be in the batch's tensors, however it got there."""
        start = self._prompts[row].pad
        for number, pairs in self._room.items():
            for layer, pair in zip(self._binding.groups[number].layers, pairs, strict=True):
                filled = cache.depot_layers[layer]
                if isinstance(filled, DepotLayer) and not filled.in_place:
                    assert filled.keys is not None and filled.values is not None
                    for target, source in zip(pair, (filled.keys, filled.values), strict=True):
                        target[row, :, start : self._column] = source[0]

    def _fill(self, target: DepotLayer | DepotSlidingLayer, number: int, layer: int) -> None:
        """One layer of the batch's cache."""
        if isinstance(target, DepotLayer):
            target.fill(self._room[number][layer], self._column)
        elif len(self._prompts) == 1 and not self._prompts[0].pad:
            target.fill(self._landings[0].windows[number][layer], self._column)
        else:
            self._fill_window(target, number, layer)
            return
        target.wait = partial(self._wait, number, layer)

    def _wait(self, number: int, layer: int) -> None:
        for landing in self._landings:
            landing.wait(number, layer)

    def _fill_window(self, target: DepotSlidingLayer, number: int, layer: int) -> None:
        """The last columns of all rows, and what rows that were caught up remember of a block."""
        self._wait(number, layer)
        group = self._binding.groups[number]
        tails = [self._tail(row, number, layer) for row in range(len(self._prompts))]
        columns = min(self._column, target.sliding_window - 1)
        target.fill(_stack(group.empty_layer(len(tails), columns), tails), self._column)
        starts = [self._windows_from(row) + p.pad for row, p in enumerate(self._prompts)]
        kept = self._column - min(starts)
        if kept > 0:
            index = group.layers[layer]
            pieces = [self._kept(row, index, kept) for row in range(len(tails))]
            target.remember(_stack(group.empty_layer(len(tails), kept), pieces))

    def _tail(self, row: int, number: int, layer: int) -> KV | None:
        if row in self._caught_up:
            index = self._binding.groups[number].layers[layer]
            filled = self._caught_up[row].depot_layers[index]
            assert filled.keys is not None and filled.values is not None
            return filled.keys, filled.values
        landing = self._landings[row]
        return landing.windows[number][layer] if landing.tokens else None

    def _kept(self, row: int, index: int, count: int) -> KV | None:
        if row not in self._caught_up:
            return None
        kept = self._caught_up[row].sliding_layer(index).kept
        keys, values = zip(*kept, strict=True)
        joined = torch.cat(keys, dim=-2), torch.cat(values, dim=-2)
        return joined[0][:, :, -count:], joined[1][:, :, -count:]

    def _windows_from(self, row: int) -> int:
        """A row that was fetched remembers nothing; one that was caught up its last block."""
        stop = self._column - self._prompts[row].pad
        start = stop // self._binding.block_tokens * self._binding.block_tokens
        if row in self._caught_up and start >= self._landings[row].tokens:
            return start
        return max(0, stop)


def _stack(batch: KV, rows: Sequence[KV | None]) -> KV:
    """Put the last tokens of each row at the end of a batch's tensors; zeros before them."""
    for target, plane in zip(batch, range(2), strict=True):
        target.zero_()
        for row, tensors in enumerate(rows):
            if tensors is not None:
                count = min(target.shape[-2], tensors[plane].shape[-2])
                if count:
                    target[row, :, -count:] = tensors[plane][0, :, -count:]
    return batch
