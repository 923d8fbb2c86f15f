"""`bench store`, lookups: how long a hit takes to match and lease, whatever the index's size."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvdepot.bench.bars import DEGRADATION, KEYS_US, MATCH_LEASE_US
from kvdepot.bench.prompts import BLOCK_TOKENS, fill_index, prompts_for
from kvdepot.bench.raw import MIB
from kvdepot.bench.rounds import Figure, Latency, Result, percentile
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import Depot, Lease
from kvdepot.errors import StateError
from kvdepot.store.open import open_store

HIT_BLOCKS: Final = 512
_PAYLOAD_BYTES: Final = 4096
_ROUND_CALLS: Final = 20


@dataclass(frozen=True, slots=True)
class IndexedPrompt:
    """A store with an index of a certain size, and a prompt that is in it."""

    store: Depot
    keys: list[BlockKey]

    def match(self) -> object:
        return self.store.match(self.keys)

    def match_and_lease(self) -> object:
        """What an engine does before it loads a prefix; ending the lease comes later."""
        found = self.store.match(self.keys)
        lease = self.store.lease(self.keys)
        if len(found) != len(self.keys) or len(lease) != len(self.keys):
            raise StateError("a prompt that was put is not matched")
        return lease


@contextmanager
def hit_among(index_blocks: int) -> Iterator[IndexedPrompt]:
    with open_store(dram=32 * MIB) as store:
        prompts = prompts_for(store, _PAYLOAD_BYTES, HIT_BLOCKS * _PAYLOAD_BYTES)
        fill_index(store, prompts.space, index_blocks - HIT_BLOCKS)
        (keys,) = prompts.fresh(1)
        if not all(store.put_many(keys, prompts.sources)):
            raise StateError("a put was refused although there is room")
        yield IndexedPrompt(store, keys)


def measure_lookups(indexes: Sequence[int], rounds: int) -> list[Result]:
    """Each size in turn, many times over; the last one's speed against the first one's."""
    with ExitStack() as scope:
        hits = {count: scope.enter_context(hit_among(count)) for count in indexes}
        taken: dict[int, list[list[float]]] = {count: [] for count in indexes}
        matched: dict[int, list[float]] = {count: [] for count in indexes}
        for number in range(rounds + 1):
            for count, hit in hits.items():
                matched[count] += _times(hit.match, 1 if number else 3)
                batch = _times(hit.match_and_lease, _ROUND_CALLS)
                if number:
                    taken[count].append(batch)
    results: list[Result] = []
    for count in indexes:
        results.append(_latency(f"match {HIT_BLOCKS} blocks", count, matched[count][3:], None))
        calls = [call for batch in taken[count] for call in batch]
        results.append(_latency(f"match+lease {HIT_BLOCKS} blocks", count, calls, MATCH_LEASE_US))
    return [*results, _degradation(taken[indexes[0]], taken[indexes[-1]], indexes[-1])]


def measure_keys(calls: int) -> list[Result]:
    with open_store(dram=32 * MIB) as store:
        space = prompts_for(store, _PAYLOAD_BYTES, _PAYLOAD_BYTES).space
        tokens = np.random.default_rng(2).integers(
            0, 1 << 17, HIT_BLOCKS * BLOCK_TOKENS, dtype=np.uint32
        )
        taken = _times(lambda: space.keys(tokens), calls)
    return [_latency(f"keys of {len(tokens)} tokens", 0, taken, KEYS_US)]


def _times(call: Callable[[], object], count: int) -> list[float]:
    taken = []
    for _ in range(count):
        started = time.perf_counter()
        answer = call()
        taken.append(time.perf_counter() - started)
        if isinstance(answer, Lease):
            answer.release()
    return taken


def _latency(op: str, index_blocks: int, taken: Sequence[float], bar_us: float | None) -> Latency:
    p50, p99 = (percentile(taken, share) * 1e6 for share in (0.5, 0.99))
    return Latency(op, index_blocks, p50, p99, len(taken), bar_us)


def _degradation(
    few: Sequence[Sequence[float]], many: Sequence[Sequence[float]], large: int
) -> Figure:
    """Of each round the median, small index over large."""
    ratios = [percentile(a, 0.5) / percentile(b, 0.5) for a, b in zip(few, many, strict=True)]
    what = f"match+lease speed, {large} blocks of few"
    middle = percentile(ratios, 0.5)
    return Figure(what, middle, "×", min(ratios), max(ratios), DEGRADATION, bar_is_least=True)
