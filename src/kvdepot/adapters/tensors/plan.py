"""In which slices a batch of blocks passes through a device's staging buffers.

A step is a range of layers of all blocks; a slice is what one kernel and one staging buffer take at
a time: whole ranges of several blocks, or a part of one. Only numbers here, no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from kvdepot.adapters.tensors.pieces import Addresses, Pieces
from kvdepot.errors import ConfigError

COPY_BYTES_MIN: Final = 8 << 20
"""Below this a copy over the bus costs noticeably more than its bytes: 3 µs on an H200."""

_ALL: Final = slice(None)


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes that are contiguous in one block's payload and in the staging buffer."""

    block: int
    payload_at: int
    staging_at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Entries first <= i < first + count of the step's table, and their place in payloads."""

    first: int
    count: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A range of layers of all blocks."""

    layers: slice
    slices: list[Slice]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a batch of equal blocks looks like."""

    blocks: int
    layers: int
    layer_pieces: int
    piece_bytes: int

    @classmethod
    def of(cls, blocks: Sequence[Pieces]) -> Shape:
        layers, layer_pieces = blocks[0].addresses.shape
        return cls(len(blocks), layers, layer_pieces, blocks[0].piece_bytes)


def choose_layers_per_step(shape: Shape, asked: int | None) -> int:
    """As asked, by default so many that the copy of a block's step is worth its overhead."""
    if asked is not None:
        if asked < 1:
            raise ConfigError("layers_per_step", f"must be at least 1, got {asked}")
        return min(asked, shape.layers)
    layer_bytes = shape.layer_pieces * shape.piece_bytes
    return min(shape.layers, -(-COPY_BYTES_MIN // layer_bytes))


def address_table(blocks: Sequence[Pieces], layers: slice = _ALL) -> Addresses:
    """The addresses of these layers of all blocks, block by block: what the slices of a step are
    parts of."""
    return np.stack([block.addresses[layers] for block in blocks]).ravel()


@lru_cache(maxsize=16)
def steps(shape: Shape, layers_per_step: int, slice_bytes: int) -> tuple[Step, ...]:
    """All layers, in order."""
    found = []
    for layer in range(0, shape.layers, layers_per_step):
        layers = min(layers_per_step, shape.layers - layer)
        start = layer * shape.layer_pieces
        slices = _slices(shape, start, layers * shape.layer_pieces, slice_bytes)
        found.append(Step(slice(layer, layer + layers), slices))
    return tuple(found)


def _slices(shape: Shape, start: int, count: int, slice_bytes: int) -> list[Slice]:
    """`count` pieces from `start` on of every block."""
    room = slice_bytes // shape.piece_bytes
    if count <= room:
        together = room // count
        groups = [(at, min(at + together, shape.blocks)) for at in range(0, shape.blocks, together)]
        parts = [(0, count)]
    else:
        groups = [(block, block + 1) for block in range(shape.blocks)]
        length = -(-count // -(-count // room))
        parts = [(at, min(at + length, count)) for at in range(0, count, length)]
    return [
        _slice(shape, range(*group), range(start + at, start + stop), group[0] * count + at)
        for group in groups
        for at, stop in parts
    ]


def _slice(shape: Shape, blocks: range, pieces: range, first: int) -> Slice:
    """The same pieces of some blocks."""
    nbytes = len(pieces) * shape.piece_bytes
    segments = tuple(
        Segment(block, pieces.start * shape.piece_bytes, number * nbytes, nbytes)
        for number, block in enumerate(blocks)
    )
    return Slice(first, len(blocks) * len(pieces), segments)
