"""How a batch of blocks crosses the bus: as rectangles, or through staging buffers. Only numbers.

A rectangle is what the copy engine takes at a time from the pages themselves: pieces of a block
that follow each other, in all layers. Where layers do not lie evenly or pieces are short, kernels
pack slices in staging buffers.
A step is a range of layers of all blocks. A slice is what one kernel and one staging buffer take at
a time: whole ranges of several blocks, or a part of one. A tile is what one program of a kernel
copies: words as wide as the addresses of the pieces allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdepot import native
from kvdepot.adapters.tensors.kvtensors import Addresses, Pieces
from kvdepot.errors import ConfigError

Rectangles = npt.NDArray[np.void]

COPY_BYTES_MIN: Final = 8 << 20
"""Below this a copy over the bus costs noticeably more than its bytes: 3 µs on an H200."""
TILE_BYTES: Final = 8192
"""What one program copies: 128 threads, four loads of 16 bytes each."""
ROW_BYTES_MIN: Final = 64 << 10
"""Shorter rows of a rectangle waste the bus: 51 GB/s with 64 KiB on an H200, 44 with 32 KiB, 35
with 16 KiB; 53 through staging buffers, 55 in one piece."""
RECTANGLE_BYTES_MIN: Final = 512 << 10
"""Starting a copy takes the processor 9 µs: as long as the bus needs for so much."""
PITCH_MAX: Final = (1 << 31) - 1
"""Of an H200. A larger one is taken, row by row: 17 GB/s."""
_ALIGN_MAX: Final = 16
_WORD_MAX: Final = 8
_ALL: Final = slice(None)


def rectangles(block: Pieces, payload: int, layers: slice = _ALL) -> Rectangles | None:
    """These layers of a block as rectangles: their place on the device, and in the payload at this
    address. None: they are not worth it, or none.

    The fields are those of a copy to the device; see `turned`.
    """
    addresses, piece_bytes = block.addresses[layers], block.piece_bytes
    height, count = addresses.shape
    pitch = int(addresses[1, 0] - addresses[0, 0]) if height > 1 else PITCH_MAX
    if piece_bytes < ROW_BYTES_MIN or not 0 < pitch <= PITCH_MAX:
        return None
    if height > 1 and not (np.diff(addresses, axis=0) == pitch).all():
        return None
    first = addresses[0]
    starts = np.flatnonzero(np.diff(first, prepend=first[0] - 2 * piece_bytes) != piece_bytes)
    widths = np.diff(starts, append=count) * piece_bytes
    if int(widths.max()) > pitch or int(widths.min()) * height < RECTANGLE_BYTES_MIN:
        return None
    found = np.empty(len(starts), native.RECTANGLE_DTYPE)
    at = payload + (layers.start or 0) * block.layer_bytes
    found["target"], found["target_pitch"] = first[starts], pitch
    found["source"], found["source_pitch"] = at + starts * piece_bytes, block.layer_bytes
    found["width"], found["height"] = widths, height
    return found


def turned(rectangles: Rectangles) -> Rectangles:
    """The same rectangles, copied the other way."""
    back = rectangles.copy()
    for end in ("", "_pitch"):
        back[f"target{end}"] = rectangles[f"source{end}"]
        back[f"source{end}"] = rectangles[f"target{end}"]
    return back


@dataclass(frozen=True, slots=True)
class StagedRange:
    """Bytes that are contiguous in one block's payload and in the staging buffer."""

    block: int
    payload_at: int
    staging_at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StagingSlice:
    """Entries first <= i < first + count of the step's table, and their place in payloads."""

    first: int
    count: int
    ranges: tuple[StagedRange, ...]


@dataclass(frozen=True, slots=True)
class LayerStep:
    """A range of layers of all blocks."""

    layers: slice
    slices: list[StagingSlice]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What a batch of equal blocks looks like."""

    blocks: int
    layers: int
    layer_pieces: int
    piece_bytes: int

    @classmethod
    def of(cls, blocks: Sequence[Pieces]) -> BatchShape:
        layers, layer_pieces = blocks[0].addresses.shape
        return cls(len(blocks), layers, layer_pieces, blocks[0].piece_bytes)


def choose_layers_per_step(shape: BatchShape, asked: int | None) -> int:
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
def steps(shape: BatchShape, layers_per_step: int, slice_bytes: int) -> tuple[LayerStep, ...]:
    """All layers, in order."""
    found = []
    for layer in range(0, shape.layers, layers_per_step):
        layers = min(layers_per_step, shape.layers - layer)
        start = layer * shape.layer_pieces
        slices = _slices(shape, start, layers * shape.layer_pieces, slice_bytes)
        found.append(LayerStep(slice(layer, layer + layers), slices))
    return tuple(found)


def _slices(shape: BatchShape, start: int, count: int, slice_bytes: int) -> list[StagingSlice]:
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


def _slice(shape: BatchShape, blocks: range, pieces: range, first: int) -> StagingSlice:
    nbytes = len(pieces) * shape.piece_bytes
    ranges = tuple(
        StagedRange(block, pieces.start * shape.piece_bytes, number * nbytes, nbytes)
        for number, block in enumerate(blocks)
    )
    return StagingSlice(first, len(blocks) * len(pieces), ranges)


@dataclass(frozen=True, slots=True)
class Tile:
    """One program copies `columns` words of each of `rows` pieces."""

    align: int
    """Bytes that all addresses are a multiple of: a power of two up to 16."""
    word_bytes: int
    words: int
    """Words in a piece."""
    rows: int
    columns: int

    def grid(self, count: int) -> tuple[int, int]:
        """Programs for `count` pieces."""
        return -(-count // self.rows), -(-self.words // self.columns)


def choose_tile(table: Addresses, piece_bytes: int) -> Tile:
    """The widest words for pieces of this length at these addresses."""
    bits = int(np.bitwise_or.reduce(table)) | piece_bytes | _ALIGN_MAX
    align = bits & -bits
    word_bytes = min(align, _WORD_MAX)
    words = piece_bytes // word_bytes
    across = TILE_BYTES // word_bytes
    columns = min(across, 1 << (words - 1).bit_length())
    return Tile(align, word_bytes, words, across // columns, columns)
