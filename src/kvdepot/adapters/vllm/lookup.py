"""The longest prefix of a prompt in the depot from which all KV groups can continue."""

from collections.abc import Sequence
from typing import Final

from kvdepot.adapters.vllm.metrics import Counts, warn
from kvdepot.adapters.vllm.namespaces import EngineNamespaces
from kvdepot.adapters.vllm.requests import DepotHit, RequestKeys, TrackedRequest
from kvdepot.core.depot import Match
from kvdepot.depot import Depot
from kvdepot.errors import KVDepotError

_SLOWEST_FIRST: Final = ("object", "plugin", "hdd", "ssd", "cxl", "dram")
_FASTEST: Final = "dram"


class PrefixLookup:
    """Looks requests up in the depot. Changes nothing there."""

    def __init__(self, store: Depot, names: EngineNamespaces, counts: Counts) -> None:
        self._store = store
        self._names = names
        self._counts = counts

    def find(self, tracked: TrackedRequest, local_tokens: int, blocks: int) -> DepotHit:
        """The longest hit within the leading `blocks` of a request, also in blocks from other
        numbers of shards. Records it in `tracked`."""
        hit, leading, shared = self._hit(tracked.keys, local_tokens, blocks)
        tracked.saves.found(hit, leading, shared)
        if hit.stop_block < blocks:
            if tracked.other_keys is None:
                at_size = self._names.other_keys(tracked.request, tracked.keys)
                for keys in at_size.values():
                    keys.grow(1)
                tracked.other_keys = {
                    size: keys
                    for size, keys in at_size.items()
                    if not keys.groups.full or self._resident(keys, [0], 0, 1)
                }
            hits = [hit]
            hits += [
                self._hit(keys, local_tokens, blocks)[0] for keys in tracked.other_keys.values()
            ]
            hit = max(hits, key=lambda each: each.stop_block)
        tracked.hit = hit
        return hit

    def last_boundary(self, keys: RequestKeys, local_tokens: int, stop: int) -> int:
        """The last block up to `stop` from whose start windows and states can continue."""
        return self._boundary(keys, local_tokens, stop)[0]

    def _hit(
        self, keys: RequestKeys, local_tokens: int, blocks: int
    ) -> tuple[DepotHit, Match, int]:
        """A hit, the leading blocks of full attention, and the number of resident ones,
        without regard to the other groups."""
        groups = keys.groups
        keys.grow(blocks)
        first = min(local_tokens // groups.grain, blocks)
        leading: tuple[str, ...] = ()
        tiers = (_FASTEST,) * (blocks - first)
        if groups.full:
            leading = self._resident(keys, groups.full, 0, blocks)
            tiers = leading[first:] or self._resident(keys, groups.full, first, blocks)
        if groups.ahead_blocks:
            tiers = tiers[:-1]
        stop, slower = self._boundary(keys, local_tokens, first + len(tiers))
        kept = enumerate(tiers[: max(0, stop - first)], first)
        slowest = tuple(_slowest(tier, slower.get(block)) for block, tier in kept)
        hit = DepotHit(local_tokens, first, slowest, keys.origin.shards)
        return hit, Match(leading), first + len(tiers) if groups.full else 0

    def _boundary(
        self, keys: RequestKeys, local_tokens: int, stop: int
    ) -> tuple[int, dict[int, str]]:
        """`last_boundary`, and by block the slowest tier of the windows and states there."""
        groups, grain = keys.groups, keys.groups.grain
        while stop * grain > local_tokens:
            tiers_at: dict[int, str] = {}
            lowered, is_needed = stop, bool(groups.full)
            for group in groups.others:
                size = keys.block_tokens(group)
                start, end = groups.span(group, local_tokens, stop)
                tiers = self._resident(keys, [group], start, end)
                is_needed = is_needed or start < end
                if len(tiers) < end - start:
                    lowered = min(lowered, (start + len(tiers)) * size // grain)
                for number, tier in enumerate(tiers, start):
                    block = number * size // grain
                    tiers_at[block] = _slowest(tier, tiers_at.get(block))
            if lowered == stop and is_needed:
                return stop, tiers_at
            stop = min(lowered, stop - 1)
        return min(stop, local_tokens // grain), {}

    def _resident(
        self, keys: RequestKeys, groups: Sequence[int], first: int, stop: int
    ) -> tuple[str, ...]:
        """The slowest tier of each block from `first` on that all shards of these groups have."""
        lists = [shard for group in groups for shard in keys.of(group, first, stop) if shard]
        try:
            matches = [self._store.match(shard).tiers for shard in lists]
        except KVDepotError as error:
            warn("the depot cannot be asked", error)
            self._counts["depot_errors:match"] += 1
            return ()
        if len(matches) <= 1:
            return matches[0] if matches else ()
        by_block = zip(*matches, strict=False)
        return tuple(min(tiers, key=_SLOWEST_FIRST.index) for tiers in by_block)


def _slowest(tier: str, other: str | None) -> str:
    return tier if other is None else min(tier, other, key=_SLOWEST_FIRST.index)
