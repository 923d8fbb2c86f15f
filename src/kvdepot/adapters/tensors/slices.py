"""The plan of a copy between a device and payloads: rectangles, or slices of staging buffers.

A rectangle is one copy of the copy engine: pieces of a block that follow each other, in all layers.
Where layers are not evenly spaced or pieces are short, kernels pack slices into staging buffers.
A step is a range of layers of all blocks. A slice is the work of one kernel and one staging buffer:
whole ranges of several blocks, or a part of one. A tile is what one program of a kernel copies.
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
"""The start of a copy takes 3 µs on an H200, which matters for smaller copies."""
TILE_BYTES: Final = 8192
"""128 threads, four loads of 16 bytes each."""
ROW_BYTES_MIN: Final = 64 << 10
"""Shorter rows of a rectangle waste the bus. On an H200: 51 GB/s with 64 KiB, 44 with 32 KiB, 35
with 16 KiB; 53 through staging buffers, 55 in one piece."""
RECTANGLE_BYTES_MIN: Final = 512 << 10
"""The processor starts a copy in 9 µs, the time of the bus for these bytes."""
PITCH_MAX: Final = (1 << 31) - 1
"""The limit of an H200. With a larger pitch it copies row by row: 17 GB/s."""
_ALIGN_MAX: Final = 16
_WORD_MAX: Final = 8
_ALL: Final = slice(None)


def rectangles(
    block: Pieces, payload: int, layers: slice = _ALL, *, to_device: bool = True
) -> Rectangles | None:
    """These layers of a block, with its payload at address `payload`, as rectangles. None if the
    pieces form no rectangles, or only small ones."""
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
    device, host = ("target", "source") if to_device else ("source", "target")
    found = np.empty(len(starts), native.RECTANGLE_DTYPE)
    found[device], found[f"{device}_pitch"] = first[starts], pitch
    found[host] = payload + (layers.start or 0) * block.layer_bytes + starts * piece_bytes
    found[f"{host}_pitch"] = block.layer_bytes
    found["width"], found["height"] = widths, height
    return found


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
    layers: slice
    slices: list[StagingSlice]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The shape of a batch of equal blocks."""

    blocks: int
    layers: int
    layer_pieces: int
    piece_bytes: int

    @classmethod
    def of(cls, blocks: Sequence[Pieces]) -> BatchShape:
        layers, layer_pieces = blocks[0].addresses.shape
        return cls(len(blocks), layers, layer_pieces, blocks[0].piece_bytes)


def choose_layers_per_step(shape: BatchShape, asked: int | None) -> int:
    """`asked`, or as many layers as make the copy of a block's step worth its start."""
    if asked is not None:
        if asked < 1:
            raise ConfigError("layers_per_step", f"must be at least 1, got {asked}")
        return min(asked, shape.layers)
    return min(shape.layers, -(-COPY_BYTES_MIN // (shape.layer_pieces * shape.piece_bytes)))


def address_table(blocks: Sequence[Pieces], layers: slice = _ALL) -> Addresses:
    """The addresses of these layers of all blocks, block by block. The slices of a step are parts
    of this table."""
    return np.stack([block.addresses[layers] for block in blocks]).ravel()


@lru_cache(maxsize=16)
def steps(shape: BatchShape, layers_per_step: int, slice_bytes: int) -> tuple[LayerStep, ...]:
    """All layers, in order."""
    found = []
    for layer in range(0, shape.layers, layers_per_step):
        stop = min(layer + layers_per_step, shape.layers)
        pieces = range(layer * shape.layer_pieces, stop * shape.layer_pieces)
        found.append(LayerStep(slice(layer, stop), _slices(shape, pieces, slice_bytes)))
    return tuple(found)


def _slices(shape: BatchShape, pieces: range, slice_bytes: int) -> list[StagingSlice]:
    """These pieces of every block."""
    room, count = slice_bytes // shape.piece_bytes, len(pieces)
    # Either several whole blocks fit into a slice, or a block is cut into equal parts.
    together = max(1, room // count)
    length = -(-count // -(-count // room))
    found = []
    for block in range(0, shape.blocks, together):
        blocks = range(block, min(block + together, shape.blocks))
        for at in range(0, count, length):
            part = pieces[at : at + length]
            nbytes = len(part) * shape.piece_bytes
            ranges = tuple(
                StagedRange(number, part.start * shape.piece_bytes, place * nbytes, nbytes)
                for place, number in enumerate(blocks)
            )
            found.append(StagingSlice(block * count + at, len(blocks) * len(part), ranges))
    return found


@dataclass(frozen=True, slots=True)
class Tile:
    """One program copies `columns` words of each of `rows` pieces."""

    align: int
    """A power of two up to 16 that divides all addresses."""
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
