"""Slices, steps and tiles of the CUDA mover, carried out with plain bytes in place of a device."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvdepot import native
from kvdepot.adapters.tensors import HostMover, KVTensors, Pieces, slices
from kvdepot.errors import ConfigError
from kvdepot.native.fallback import CopyRectangle

LAYERS, PAGES, PAGE, DIM = 5, 24, 3, 4


def blocks_of(layers: list[torch.Tensor], count: int) -> list[Pieces]:
    tensors = KVTensors([(keys, values) for keys, values in layers], "page token dim")
    return [tensors.pages([2 * number + 1, 2 * number]) for number in range(count)]


def cache(start: int) -> list[torch.Tensor]:
    size = 2 * PAGES * PAGE * DIM
    values = torch.arange(start, start + LAYERS * size, dtype=torch.int16)
    return [*values.reshape(LAYERS, 2, PAGES, PAGE, DIM)]


def payloads(blocks: list[Pieces]) -> list[bytearray]:
    found = [bytearray(block.nbytes) for block in blocks]
    HOST.offload(blocks, found)
    return found


HOST = HostMover()
counts = st.integers(1, 7)
slice_pieces = st.integers(1, 100)


@given(count=counts, room=slice_pieces)
def test_offload_by_slices_fills_every_payload(count: int, room: int) -> None:
    blocks = blocks_of(cache(0), count)
    shape = slices.BatchShape.of(blocks)
    table = slices.address_table(blocks)
    found = [bytearray(block.nbytes) for block in blocks]
    (only,) = slices.steps(shape, shape.layers, room * shape.piece_bytes)
    for part in only.slices:
        staging = b"".join(
            ctypes.string_at(address, shape.piece_bytes)
            for address in table[part.first : part.first + part.count].tolist()
        )
        assert len(staging) <= room * shape.piece_bytes
        for staged in part.ranges:
            packed = staging[staged.staging_at : staged.staging_at + staged.nbytes]
            found[staged.block][staged.payload_at : staged.payload_at + staged.nbytes] = packed
    assert found == payloads(blocks)


@given(count=counts, room=slice_pieces, layers_per_step=st.integers(1, LAYERS))
def test_onboard_by_steps_brings_layers_in_order(
    count: int, room: int, layers_per_step: int
) -> None:
    source, target = cache(0), [torch.zeros_like(layer) for layer in cache(0)]
    sent, blocks = payloads(blocks_of(source, count)), blocks_of(target, count)
    shape = slices.BatchShape.of(blocks)
    for number, step in enumerate(slices.steps(shape, layers_per_step, room * shape.piece_bytes)):
        table = slices.address_table(blocks, step.layers)
        for part in step.slices:
            staging = bytearray(part.count * shape.piece_bytes)
            for staged in part.ranges:
                payload = memoryview(sent[staged.block])
                content = payload[staged.payload_at : staged.payload_at + staged.nbytes]
                staging[staged.staging_at : staged.staging_at + staged.nbytes] = content
            for entry, address in enumerate(table[part.first : part.first + part.count].tolist()):
                piece = bytes(staging[entry * shape.piece_bytes : (entry + 1) * shape.piece_bytes])
                ctypes.memmove(address, piece, len(piece))
        arrived = min((number + 1) * layers_per_step, LAYERS)
        assert payloads(layers_of(blocks, 0, arrived)) == payloads(
            layers_of(blocks_of(source, count), 0, arrived)
        )
        if arrived < LAYERS:
            assert not any(map(any, payloads(layers_of(blocks, arrived, LAYERS)))), "too early"


def layers_of(blocks: list[Pieces], start: int, stop: int) -> list[Pieces]:
    return [block.layers(start, stop) for block in blocks]


def test_small_blocks_share_a_slice_and_large_ones_are_cut_evenly() -> None:
    small = slices.BatchShape(blocks=5, layers=1, layer_pieces=4, piece_bytes=16)
    (step,) = slices.steps(small, 1, slice_bytes=8 * 16)
    assert [len(part.ranges) for part in step.slices] == [2, 2, 1]
    large = slices.BatchShape(blocks=1, layers=1, layer_pieces=9, piece_bytes=16)
    (step,) = slices.steps(large, 1, slice_bytes=8 * 16)
    assert [part.count for part in step.slices] == [5, 4]


@pytest.mark.parametrize(
    ("layer_bytes", "layers", "expected"),
    [(1 << 20, 32, 8), (9 << 20, 32, 1), (1000, 30, 30), ((8 << 20) - 16, 8, 2)],
)
def test_a_step_is_worth_a_copy(layer_bytes: int, layers: int, expected: int) -> None:
    shape = slices.BatchShape(1, layers, layer_bytes // 8, 8)
    assert slices.choose_layers_per_step(shape, None) == expected


def test_layers_per_step_as_asked() -> None:
    shape = slices.BatchShape(1, 3, 1, 8)
    assert slices.choose_layers_per_step(shape, 2) == 2
    assert slices.choose_layers_per_step(shape, 99) == 3
    with pytest.raises(ConfigError, match="layers_per_step"):
        slices.choose_layers_per_step(shape, 0)


@given(
    addresses=st.lists(st.integers(1, 1 << 46), min_size=1, max_size=5),
    scale=st.sampled_from([1, 2, 4, 8, 16, 32]),
    pieces=st.integers(1, 5000),
    count=st.integers(1, 3000),
)
def test_words_fit_all_addresses_and_programs_cover_all_pieces(
    addresses: list[int], scale: int, pieces: int, count: int
) -> None:
    table = np.array(addresses, np.int64) * scale
    chosen = slices.choose_tile(table, pieces * scale)
    assert chosen.align >= min(scale, 16)
    assert not (table % chosen.align).any()
    assert chosen.word_bytes == min(chosen.align, 8)
    assert chosen.words * chosen.word_bytes == pieces * scale
    assert chosen.rows * chosen.columns * chosen.word_bytes == slices.TILE_BYTES
    for number in (chosen.rows, chosen.columns):
        assert number & (number - 1) == 0, "triton needs powers of two"
    down, across = chosen.grid(count)
    assert (down - 1) * chosen.rows < count <= down * chosen.rows
    assert (across - 1) * chosen.columns < chosen.words <= across * chosen.columns


@pytest.mark.parametrize(("start", "stop"), [(0, 16), (8, 16), (0, 8)])
def test_rectangles_fill_pages_and_payloads(start: int, stop: int) -> None:
    """Pages 4 and 5 follow each other and cross together; 9 and 8 do not."""
    layers, target = rows_of_pages(16), rows_of_pages(16, filled=False)
    part = slice(start, stop)
    for pages in ([2, 4, 5], [9, 8, 0]):
        block = KVTensors(layers, "page token dim").pages(pages)
        other = KVTensors(target, "page token dim").pages(pages)
        payload = payloads([block])[0]
        found = slices.rectangles(other, native.address_of(payload)[0], part)
        assert found is not None
        assert found["width"].tolist() == [ROW, 2 * ROW] if 4 in pages else [ROW] * 3
        assert native.copy_rectangles(COPY_ROWS_AT, found, 1, 7) == 0
        after = payloads([other])[0]
        first, last = start * block.layer_bytes, stop * block.layer_bytes
        assert after[first:last] == payload[first:last]
        empty = bytearray(len(payload))
        there = slices.rectangles(block, native.address_of(empty)[0], part, to_device=False)
        assert there is not None
        assert native.copy_rectangles(COPY_ROWS_AT, there, 1, 7) == 0
        assert empty[first:last] == payload[first:last]
        assert not any(after[:first]) and not any(after[last:])


def test_no_rectangles_where_kernels_are_better() -> None:
    even = rows_of_pages(16)
    uneven = [*even[:5], *even[6:]]
    short = [layer[:, :8].contiguous() for layer in even]
    backwards = even[::-1]
    for layers, part in (
        (uneven, slice(None)),
        (short, slice(None)),
        (backwards, slice(None)),
        (even, slice(0, 2)),
    ):
        block = KVTensors(layers, "page token dim").pages([1, 3])
        assert slices.rectangles(block, 0, part) is None
    assert slices.rectangles(KVTensors(even, "page token dim").pages([1, 3]), 0) is not None


ROW = slices.ROW_BYTES_MIN


def rows_of_pages(layers: int, *, filled: bool = True) -> list[torch.Tensor]:
    """Layers that lie evenly in one piece of memory, ten pages each."""
    whole = torch.zeros(layers, 10, 16, ROW // 16, dtype=torch.uint8)
    if filled:
        whole.random_(1, 256)
    return [*whole]


def copy_rows(*rectangle: int) -> int:
    """What the device's cudaMemcpy2DAsync does, with memory of this process."""
    target, target_pitch, source, source_pitch, width, height, kind, stream = rectangle
    assert (kind, stream) == (1, 7)
    for row in range(height):
        ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
    return 0


COPY_ROWS = CopyRectangle(copy_rows)
COPY_ROWS_AT = ctypes.cast(COPY_ROWS, ctypes.c_void_p).value or 0
