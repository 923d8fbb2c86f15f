"""Gather and scatter on the device: pieces anywhere in its memory, packed in a staging buffer.

Both are bound by the device's memory and run for microseconds a slice. The pieces are copied in the
widest words that all of them allow. Needs triton.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from kvdepot.adapters.tensors.slices import TILE_BYTES, StagingSlice, Tile
from kvdepot.errors import ExtraMissingError

try:
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
except ImportError as error:
    missing = ExtraMissingError("hf", "triton")
    missing.hint = "triton comes with the CUDA builds of torch for Linux"
    raise missing from error

TILE_BITS = tl.constexpr(TILE_BYTES * 8)
_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# Counts and positions differ from call to call: compiled once for all of them.
@triton.jit(do_not_specialize=["first", "count"])  # type: ignore[misc, untyped-decorator, unused-ignore]
def _gather(  # type: ignore[no-untyped-def]
    table, staging, first, count, words, ALIGN: tl.constexpr, COLUMNS: tl.constexpr
):
    ROWS: tl.constexpr = TILE_BITS // staging.dtype.element_ty.primitive_bitwidth // COLUMNS
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    kept = (rows < count)[:, None] & (cols < words)[None, :]
    address = tl.load(table + first + rows, mask=rows < count, other=0)
    piece = tl.multiple_of(address.to(staging.dtype), [ALIGN])
    packed = staging + rows.to(tl.int64)[:, None] * words + cols[None, :]
    tl.store(packed, tl.load(piece[:, None] + cols[None, :], mask=kept), mask=kept)


@triton.jit(do_not_specialize=["first", "count"])  # type: ignore[misc, untyped-decorator, unused-ignore]
def _scatter(  # type: ignore[no-untyped-def]
    table, staging, first, count, words, ALIGN: tl.constexpr, COLUMNS: tl.constexpr
):
    ROWS: tl.constexpr = TILE_BITS // staging.dtype.element_ty.primitive_bitwidth // COLUMNS
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    kept = (rows < count)[:, None] & (cols < words)[None, :]
    address = tl.load(table + first + rows, mask=rows < count, other=0)
    piece = tl.multiple_of(address.to(staging.dtype), [ALIGN])
    packed = staging + rows.to(tl.int64)[:, None] * words + cols[None, :]
    tl.store(piece[:, None] + cols[None, :], tl.load(packed, mask=kept), mask=kept)


def gather(table: torch.Tensor, staging: torch.Tensor, tile: Tile, part: StagingSlice) -> None:
    """Pack the pieces of `part` of the address `table` into `staging`, on the current stream."""
    _launch(_gather, table, staging, tile, part)


def scatter(table: torch.Tensor, staging: torch.Tensor, tile: Tile, part: StagingSlice) -> None:
    """The inverse of `gather`."""
    _launch(_scatter, table, staging, tile, part)


def _launch(
    kernel: Any, table: torch.Tensor, staging: torch.Tensor, tile: Tile, part: StagingSlice
) -> None:
    kernel[tile.grid(part.count)](
        table,
        staging.view(_WORDS[tile.word_bytes]),
        part.first,
        part.count,
        tile.words,
        ALIGN=tile.align,
        COLUMNS=tile.columns,
    )
