"""KVTensors: addresses of common layouts, and mistakes that are found before anything is copied.

Any axes, strides, pages and orders: tests/property/test_tensors.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvdepot.adapters.tensors import KVTensors
from kvdepot.adapters.tensors.kvtensors import Layer
from kvdepot.errors import BadBufferError, ConfigError

PAGES, PAGE, HEADS, DIM = 5, 4, 2, 8


def paged(layers: int = 2) -> list[torch.Tensor]:
    shape = (PAGES, PAGE, HEADS, DIM)
    size = PAGES * PAGE * HEADS * DIM
    numbers = torch.arange(layers * size, dtype=torch.float32)
    return [*numbers.reshape(layers, *shape)]


def contiguous(tokens: int = 12, batch: int = 3) -> list[Layer]:
    keys = torch.arange(batch * HEADS * tokens * DIM, dtype=torch.float32)
    keys = keys.reshape(batch, HEADS, tokens, DIM)
    return [(keys, keys + 1e5), (keys + 2e5, keys + 3e5)]


def test_long_runs_are_divided() -> None:
    layers = [torch.zeros(1, 3 << 20, 1, dtype=torch.float32)]
    pieces = KVTensors(layers, "batch token dim").span(0, 3 << 20)
    assert pieces.piece_bytes == 4 << 20
    assert pieces.addresses.shape == (1, 3)


def test_tokens_of_a_head_are_one_piece_if_the_order_is_that_of_the_tensors() -> None:
    tensors = KVTensors(contiguous(), "batch head token dim", order="head token dim")
    pieces = tensors.span(4, 9, batch=1)
    assert pieces.piece_bytes == 5 * DIM * 4
    assert pieces.addresses.shape == (2, 2 * HEADS)


def test_an_axis_of_length_one_does_not_cut_a_piece() -> None:
    one_head = torch.zeros(12 * DIM).as_strided((1, 1, 12, DIM), (999, 77, DIM, 1))
    tensors = KVTensors([(one_head, one_head)], "batch head token dim")
    assert tensors.span(2, 10).piece_bytes == 8 * DIM * 4


@pytest.mark.parametrize(
    ("axes", "order", "reason"),
    [
        ("page token heads dim", "token head dim", "'heads' is not one of"),
        ("page token token dim", "token head dim", "'token' is named twice"),
        ("page batch head dim", "token head dim", "'token' is missing"),
        ("page token head batch", "token head dim", "'dim' is missing"),
        ("batch page token dim", "token head dim", "both batch and page"),
        ("page token head dim", "token dim", "'head' is missing"),
        ("page token head dim", "page token head dim", "'page' is not one of"),
    ],
)
def test_wrong_names_are_refused(axes: str, order: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        KVTensors(paged(), axes, order=order)


def changed(change: Callable[[torch.Tensor], Any]) -> list[Layer]:
    first, second = paged()
    return [first, change(second)]


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([], "at least one"),
        ([()], "at least one"),
        (changed(lambda tensor: (tensor, tensor)), "same number of tensors"),
        (changed(lambda tensor: tensor.half()), "layer 1: torch.float16"),
        (changed(lambda tensor: tensor.to("meta")), "layer 1: .* on meta"),
        (changed(lambda tensor: tensor[1:]), "layer 1: shape"),
        (changed(lambda tensor: tensor[0]), "layer 1: shape"),
        ([tensor[0] for tensor in paged()], "does not have the axes"),
        ([tensor.to("meta") for tensor in paged()], "only on cpu and cuda"),
        ([tensor[:0] for tensor in paged()], "empty"),
        ([tensor[:, :, :1].expand(-1, -1, 3, -1) for tensor in paged()], "expanded"),
        ([tensor.to_sparse() for tensor in paged()], "no plain memory"),
        ([(tensor, tensor[:4]) for tensor in paged()], "lengths .* of 'page'"),
        ([(tensor, tensor[:, :3]) for tensor in paged()], "lengths .* of 'token'"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(layers: list[Layer], reason: str) -> None:
    with pytest.raises(BadBufferError, match=reason):
        KVTensors(layers, "page token head dim")


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([], "at least one"),
        ([[1]], "at least one"),
        ([1.0], "whole number"),
        ([0, PAGES], "of 5 pages"),
        ([-1], "of 5 pages"),
    ],
)
def test_wrong_pages_are_refused(ids: list[int], reason: str) -> None:
    with pytest.raises(BadBufferError, match=reason):
        KVTensors(paged(), "page token head dim").pages(ids)


@pytest.mark.parametrize(
    ("start", "stop", "batch"),
    [(-1, 4, 0), (4, 4, 0), (5, 4, 0), (0, 13, 0), (0, 4, 3), (0, 4, -1)],
)
def test_wrong_spans_are_refused(start: int, stop: int, batch: int) -> None:
    with pytest.raises(BadBufferError):
        KVTensors(contiguous(), "batch head token dim").span(start, stop, batch)


def test_pages_and_spans_are_not_mixed_up() -> None:
    with pytest.raises(BadBufferError, match="have pages"):
        KVTensors(paged(), "page token head dim").span(0, 4)
    with pytest.raises(BadBufferError, match="no pages"):
        KVTensors(contiguous(), "batch head token dim").pages([0])


def test_wrong_ranges_of_layers_are_refused() -> None:
    pieces = KVTensors(paged(), "page token head dim").pages([0])
    for start, stop in ((-1, 1), (1, 1), (0, 3)):
        with pytest.raises(BadBufferError):
            pieces.layers(start, stop)
