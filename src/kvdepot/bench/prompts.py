"""Prompts to fill a store with: keys of fresh random tokens, and blocks of random bytes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np

from kvdepot.bench.raw import Bytes, filled, pieces
from kvdepot.core.block import BlockKey, GetResult
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.layout import KVLayout
from kvdepot.depot import Depot
from kvdepot.errors import StateError
from kvdepot.store.store import Store

BLOCK_TOKENS: Final = 256
WAIT_S: Final = 600.0
"""Timeout of measured calls: a slow medium gives a low figure, not an error."""
_LAYERS: Final = 32
_VOCABULARY: Final = 1 << 17
_CHAIN_BLOCKS: Final = 512
_NOWHERE: Final = 0xFFFFFF << 32
"""A location in a segment that is never used."""


def layout_for(block_bytes: int) -> KVLayout:
    """Blocks of this size, with the number of layers of a model of 8 billion weights."""
    layers = _LAYERS if block_bytes % _LAYERS == 0 else 1
    return KVLayout.opaque(block_bytes, BLOCK_TOKENS, layers)


@dataclass(slots=True)
class Prompts:
    """Makes different prompts of `blocks` blocks each."""

    space: NamespaceHandle
    blocks: int
    sources: list[Bytes]
    """The bytes of one prompt, used for all."""
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(20261115))

    def reseed(self, seed: int) -> None:
        """Make other prompts than another seed or process makes."""
        self.rng = np.random.default_rng(seed)

    def fresh(self, count: int) -> list[list[BlockKey]]:
        tokens = self.blocks * BLOCK_TOKENS
        return [
            self.space.keys(self.rng.integers(0, _VOCABULARY, tokens, dtype=np.uint32))
            for _ in range(count)
        ]


def prompts_for(store: Depot, block_bytes: int, batch_bytes: int) -> Prompts:
    """Prompts of `batch_bytes`, at least one block."""
    blocks = max(1, batch_bytes // block_bytes)
    space = store.namespace(model=f"bench-{block_bytes}", layout=layout_for(block_bytes))
    return Prompts(space, blocks, pieces(filled(blocks * block_bytes), block_bytes))


@dataclass(slots=True)
class StoreUnderTest:
    """Each call moves `set_bytes`, in `count` prompts."""

    store: Depot
    prompts: Prompts
    count: int
    targets: list[Bytes]
    current: list[list[BlockKey]] = field(default_factory=list)
    """The set put last."""

    @classmethod
    def of(cls, store: Depot, block_bytes: int, batch_bytes: int, set_bytes: int) -> Self:
        """Sets of about `set_bytes`, in prompts of about `batch_bytes`."""
        prompts = prompts_for(store, block_bytes, batch_bytes)
        prompt_bytes = prompts.blocks * block_bytes
        targets = pieces(filled(prompt_bytes, seed=1), block_bytes)
        return cls(store, prompts, max(1, set_bytes // prompt_bytes), targets)

    @property
    def set_bytes(self) -> int:
        return self.count * self.prompts.blocks * self.prompts.space.block_bytes


def check_tier(answers: Sequence[GetResult], tier: str) -> None:
    """StateError unless all blocks came from `tier`."""
    others = {answer.tier or answer.reason for answer in answers} - {tier}
    if others:
        raise StateError(f"blocks came from {sorted(others)} instead of {tier}")


class FlushedStore(StoreUnderTest):
    """A store whose sets are written below memory."""

    def verify(self) -> None:
        """StateError unless the last prompt that was read is what was put."""
        for source, target in zip(self.prompts.sources, self.targets, strict=True):
            if not np.array_equal(source, target):
                raise StateError("a get has delivered wrong bytes")

    def put_set(self) -> float:
        """Put new prompts and flush."""
        fresh = self.prompts.fresh(self.count)
        started = time.perf_counter()
        for keys in fresh:
            if not all(self.store.put_many(keys, self.prompts.sources, timeout_s=WAIT_S)):
                raise StateError("a put was refused although there is room")
        if not self.store.flush(WAIT_S):
            raise StateError("flush did not write all blocks")
        taken = time.perf_counter() - started
        self.current = fresh
        return taken


def fill_index(store: Store, space: NamespaceHandle, count: int, seed: int = 1) -> None:
    """Add `count` made-up blocks, in prompts of 512, to the index of an open store.

    Lookups find them, but they are in no segment, so that they cannot be read or reclaimed. Never
    check such a store.
    """
    if count <= 0:
        return
    words = np.random.default_rng(seed).integers(1, 1 << 63, (count, 4), dtype=np.uint64)
    words[:, 0] = np.frombuffer(space.tag, np.uint64)[0]
    words[1:, 1] = words[:-1, 2]
    words[::_CHAIN_BLOCKS, 1] = 0
    sizes = np.full(count, space.block_bytes, dtype=np.int64)
    state = store.inspect().state
    with state.lock:
        state.catalog.recover(words, sizes, np.full(count, _NOWHERE, dtype=np.int64))
