"""How the kernels cut pieces: into words as wide as their addresses allow, many to a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvdepot.adapters.tensors.pieces import Addresses

TILE_BYTES: Final = 8192
"""What one program copies: 128 threads, four loads of 16 bytes each."""

_ALIGN_MAX: Final = 16
_WORD_MAX: Final = 8


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


def choose(table: Addresses, piece_bytes: int) -> Tile:
    """The widest words for pieces of this length at these addresses."""
    bits = int(np.bitwise_or.reduce(table)) | piece_bytes | _ALIGN_MAX
    align = bits & -bits
    word_bytes = min(align, _WORD_MAX)
    words = piece_bytes // word_bytes
    across = TILE_BYTES // word_bytes
    columns = min(across, 1 << (words - 1).bit_length())
    return Tile(align, word_bytes, words, across // columns, columns)
