"""The keys of a request's blocks: from its tokens, and from what else its KV depends on.

Keys are our own, not vLLM's block hashes: these leave out model, dtype and layout. A LoRA adapter
has a namespace to itself. A cache salt comes before the first block, and the hashes of images and
the like before each block that they reach into, as if there were a block of them in the prompt;
such a block is only ever a parent, nothing is stored for it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from kvdepot.core.block import BlockKey
from kvdepot.core.keys import encode
from kvdepot.store.namespace_handle import Space

_DIGEST_BYTES: Final = 64
_WORD_BYTES: Final = 4


class Marked(Protocol):
    """The part of vLLM's Request that says what its KV depends on besides tokens."""

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def mm_features(self) -> Sequence[Any]: ...


class Chain:
    """The keys of one request's leading blocks, for each shard; grows with its tokens."""

    def __init__(
        self, spaces: Sequence[Space], salt: str | None = None, marks: Mapping[int, bytes] = {}
    ) -> None:
        self._spaces = spaces
        self._salt = encode(("salt", salt)) if salt else b""
        self._marks = marks
        self._keys: list[list[BlockKey]] = [[] for _ in spaces]
        self.block_tokens = spaces[0].layout.block_tokens

    def __len__(self) -> int:
        return len(self._keys[0])

    def grow(self, tokens: Sequence[int], blocks: int) -> None:
        """Have the keys of at least `blocks` blocks; `tokens` has all of theirs."""
        while len(self) < blocks:
            first = len(self)
            stops = [block for block in self._marks if first < block < blocks]
            stop = min(stops, default=blocks)
            part = tokens[first * self.block_tokens : stop * self.block_tokens]
            for keys, space in zip(self._keys, self._spaces, strict=True):
                parent = keys[-1] if keys else None
                keys += space.keys(part, parent=self._marked(space, first, parent))

    def keys(self, start: int, stop: int) -> tuple[tuple[BlockKey, ...], ...]:
        """For each shard the keys of blocks start <= i < stop."""
        return tuple(tuple(keys[start:stop]) for keys in self._keys)

    def _marked(self, space: Space, block: int, parent: BlockKey | None) -> BlockKey | None:
        """What the chain goes on from at this block."""
        mark = (self._salt if block == 0 else b"") + self._marks.get(block, b"")
        return space.keys(_words(mark, self.block_tokens), parent=parent)[0] if mark else parent


def chain_for(spaces: Sequence[Space], request: Marked) -> Chain:
    """The chain of a request, without keys yet."""
    block_tokens = spaces[0].layout.block_tokens
    return Chain(spaces, request.cache_salt, marks_of(request.mm_features, block_tokens))


def marks_of(features: Sequence[Any], block_tokens: int) -> dict[int, bytes]:
    """For each block that images and the like reach into: which, and where in it they begin."""
    marks: dict[int, bytes] = {}
    for feature in features:
        place = feature.mm_position
        last = place.offset + max(place.length, 1) - 1
        for block in range(place.offset // block_tokens, last // block_tokens + 1):
            where = place.offset - block * block_tokens
            mark = encode(("mm", str(feature.identifier), where))
            marks[block] = marks.get(block, b"") + mark
    return marks


def _words(mark: bytes, count: int) -> "np.ndarray[Any, np.dtype[np.uint32]]":
    """A block of numbers that stands for `mark`."""
    size = min(_DIGEST_BYTES, count * _WORD_BYTES)
    digest = hashlib.blake2b(mark, digest_size=size, person=b"kvdepot-mark-v1").digest()
    return np.resize(np.frombuffer(digest, "<u4"), count)
