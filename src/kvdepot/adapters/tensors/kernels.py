"""Gather and scatter on the device: pieces anywhere in its memory, packed in a staging buffer.

The speed of the device's memory limits both; a slice takes microseconds. The pieces are copied in
the widest words that all of them allow. Needs triton.
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


# `first` and `count` differ in every call: one compiled kernel serves all values.
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


def gather(table: torch.Tensor, tile: Tile, part: StagingSlice, staging: torch.Tensor) -> None:
    """Pack the pieces of `part` of the address `table` into `staging`, on the current stream."""
    _launch(_gather, table, tile, part, staging)


def scatter(table: torch.Tensor, tile: Tile, part: StagingSlice, staging: torch.Tensor) -> None:
    """Unpack `staging` into the pieces of `part`, on the current stream."""
    _launch(_scatter, table, tile, part, staging)


def _launch(
    kernel: Any, table: torch.Tensor, tile: Tile, part: StagingSlice, staging: torch.Tensor
) -> None:
    words = staging.view(_WORDS[tile.word_bytes])
    sizes = {"ALIGN": tile.align, "COLUMNS": tile.columns}
    kernel[tile.grid(part.count)](table, words, part.first, part.count, tile.words, **sizes)
