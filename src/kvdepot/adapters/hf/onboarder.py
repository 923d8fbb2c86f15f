"""Onboarding: a prompt's leading blocks, from the depot into the tensors of a cache to be.

What cannot be had in time, or at all, shortens the prefix; it never raises. On a GPU the copies may
still be under way when a row has landed: `Landing.wait` orders a layer's users after them, and the
blocks stay leased until `Landing.close`.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvdepot.adapters.hf.caches import KV
from kvdepot.adapters.hf.groups import ORDER, Group
from kvdepot.adapters.hf.prefix import Chains, longest
from kvdepot.adapters.hf.prompts import Prompt
from kvdepot.adapters.tensors import BlockMover, KVTensors, OnboardTicket, Pieces
from kvdepot.core.block import MISS, BlockKey, Got
from kvdepot.core.depot import Arrival, Depot, Lease

AXES: Final = "batch head token dim"
_TRIES: Final = 6
"""How often a shorter prefix is tried where blocks of a window could not be had."""


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
class Target:
    """Where a row's blocks go."""

    row: int
    """In the batch."""
    pad: int
    """Columns before its first token."""
    room: dict[int, list[KV]]
    """For each group of full attention the tensors of the whole batch."""


@dataclass(slots=True)
class Landing:
    """What one row got."""

    tokens: int = 0
    """The model can go on after so many of its tokens."""
    windows: dict[int, list[KV]] = field(default_factory=dict)
    """For each group that sees a window: tensors that end with token `tokens`."""
    tiers: dict[int, dict[int, str]] = field(default_factory=dict)
    """For each group the tier that each block came from."""
    misses: Counter[str] = field(default_factory=Counter)
    arrivals: dict[int, list[OnboardTicket]] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)

    def wait(self, group: int, layer: int) -> None:
        """What this thread's stream does next finds the group's layer in place."""
        for arrivals in self.arrivals.get(group, ()):
            arrivals.wait_layer(layer)

    def fetched(self, block_tokens: int) -> Counter[str]:
        """The tokens that came from each tier; of several groups the slower tier counts."""
        slowest: dict[int, str] = {}
        for blocks in self.tiers.values():
            for block, tier in blocks.items():
                slowest[block] = max(tier, slowest.get(block, tier), key=_slowness)
        tokens: Counter[str] = Counter()
        for block, tier in slowest.items():
            count = min(self.tokens, (block + 1) * block_tokens) - block * block_tokens
            if count > 0:
                tokens[tier] += count
        return tokens

    def close(self) -> None:
        """Wait until nothing is copied any more, and give up the leases."""
        for several in self.arrivals.values():
            for arrivals in several:
                arrivals.synchronize()
        self.arrivals.clear()
        while self.leases:
            self.leases.pop().release()


class Onboarder:
    """Brings prefixes of prompts into tensors. Thread-safe."""

    def __init__(self, store: Depot, groups: Sequence[Group], mover: BlockMover) -> None:
        self._store = store
        self._groups = groups
        self._mover = mover

    def find(self, chains: Chains, limit: int) -> int:
        """How many leading tokens, `limit` at most, the depot has."""
        return longest(self._store, self._groups, chains, limit)

    def fetch(self, chains: Chains, limit: int, target: Target, budget: Budget) -> Landing:
        """Bring in as many leading tokens as can be had, `limit` at most."""
        landing = Landing()
        try:
            self._land(chains, limit, landing, (target, budget))
        except BaseException:
            landing.close()
            raise
        return landing

    def _land(
        self, chains: Chains, limit: int, landing: Landing, scope: tuple[Target, Budget]
    ) -> None:
        landed = [0] * len(self._groups)
        for _ in range(_TRIES):
            limit = self.find(chains, limit)
            if not limit:
                break
            for number in range(len(self._groups)):
                reach = self._bring(number, chains[number], limit, landed, (landing, *scope))
                if reach < limit:
                    limit = reach
                    break
            else:
                landing.tokens = limit
                return
        landing.tiers.clear()

    def _bring(
        self,
        number: int,
        keys: Sequence[BlockKey],
        tokens: int,
        landed: list[int],
        scope: tuple[Landing, Target, Budget],
    ) -> int:
        """One group's blocks for `tokens` tokens. Returns `tokens`, or up to where all is well."""
        landing, target, budget = scope
        group = self._groups[number]
        needed = group.needed(tokens)
        if group.window is None:
            needed = range(min(landed[number], needed.stop), needed.stop)
            tensors, offset = target.room[number], target.pad
        else:
            tensors = group.empty(1, len(needed) * group.block_tokens)
            offset = -needed.start * group.block_tokens
            landing.windows[number] = [
                (key[:, :, : tokens + offset], value[:, :, : tokens + offset])
                for key, value in tensors
            ]
            landing.tiers[number] = {}
        if not needed:
            return tokens
        batch = target.row if group.window is None else 0
        sink = Sink(self._mover, group, tensors, (needed.start, offset, batch))
        answers = self._deliver(keys[needed.start : needed.stop], sink, landing, budget)
        landing.arrivals.setdefault(number, []).extend(sink.under_way)
        good = _leading(answers)
        tiers = landing.tiers.setdefault(number, {})
        for index, answer in enumerate(answers[:good]):
            tiers[needed.start + index] = str(answer.tier)
        landed[number] = needed.start + good
        return tokens if good == len(needed) else landed[number] * group.block_tokens

    def _deliver(
        self, keys: Sequence[BlockKey], sink: "Sink", landing: Landing, budget: Budget
    ) -> list[Got]:
        lease = self._store.lease(keys)
        landing.leases.append(lease)
        # To check what lies in memory takes the processor longer than the bus takes to move it.
        verify = False if self._mover.device.type == "cuda" else None
        limit_s = budget.left_s()
        answers = lease.deliver(sink, verify=verify, timeout_s=limit_s) if len(lease) else []
        answers += [MISS] * (len(keys) - len(answers))
        landing.misses.update(answer.reason for answer in answers if not answer)
        budget.late = budget.late or any(answer.reason == "late" for answer in answers)
        return answers


class Sink:
    """Takes blocks that a lease delivers, and scatters them into a group's tensors."""

    def __init__(
        self,
        mover: BlockMover,
        group: Group,
        tensors: Sequence[KV],
        place: tuple[int, int, int],
    ) -> None:
        self._mover = mover
        self._block_tokens = group.block_tokens
        self._tensors = KVTensors(list(tensors), AXES, order=ORDER)
        self._first, self._offset, self._batch = place
        self.under_way: list[OnboardTicket] = []

    def __call__(self, arrivals: list[Arrival]) -> None:
        pieces = [self._pieces(arrival.index) for arrival in arrivals]
        copies = self._mover.onboard([arrival.view for arrival in arrivals], pieces)
        if all(arrival.lasting for arrival in arrivals):
            self.under_way.append(copies)
        else:
            copies.synchronize()

    def _pieces(self, index: int) -> Pieces:
        start = (self._first + index) * self._block_tokens + self._offset
        return self._tensors.span(start, start + self._block_tokens, self._batch)


def room_for(
    groups: Sequence[Group], prompts: Sequence[Prompt], tokens: Sequence[int]
) -> dict[int, list[KV]]:
    """Tensors for a batch, with room for whole prompts; padding is zero, the rest undefined."""
    columns = max(prompt.columns for prompt in prompts)
    for prompt, count in zip(prompts, tokens, strict=True):
        blocks = -(-count // groups[0].block_tokens)
        columns = max(columns, prompt.pad + blocks * groups[0].block_tokens)
    room = {
        number: group.empty(len(prompts), columns)
        for number, group in enumerate(groups)
        if group.window is None
    }
    for row, prompt in enumerate(prompts):
        if prompt.pad:
            for pairs in room.values():
                for key, value in pairs:
                    key[row, :, : prompt.pad] = 0  # masked, but 0 times NaN would be NaN
                    value[row, :, : prompt.pad] = 0
    return room


def _leading(answers: Sequence[Got]) -> int:
    for index, answer in enumerate(answers):
        if not answer:
            return index
    return len(answers)


def _slowness(tier: str) -> int:
    return ("dram", "cxl", "ssd", "hdd", "plugin").index(tier)
