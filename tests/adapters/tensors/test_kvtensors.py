"""KVTensors: the caller's mistakes are found before anything is copied; common layouts by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvdepot.adapters.tensors import HostMover, KVTensors, Pieces
from kvdepot.errors import BadBufferError, ConfigError

PAGES, PAGE, HEADS, DIM = 5, 4, 2, 8


def paged(layers: int = 2) -> list[torch.Tensor]:
    shape = (2, PAGES, PAGE, HEADS, DIM)
    size = 2 * PAGES * PAGE * HEADS * DIM
    return [
        torch.arange(layer * size, (layer + 1) * size, dtype=torch.float32).reshape(shape)
        for layer in range(layers)
    ]


def contiguous(tokens: int = 12, batch: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    keys = torch.arange(batch * HEADS * tokens * DIM, dtype=torch.float32)
    keys = keys.reshape(batch, HEADS, tokens, DIM)
    return [(keys, keys + 1e5), (keys + 2e5, keys + 3e5)]


def gathered(pieces: Pieces) -> torch.Tensor:
    payload = bytearray(pieces.nbytes)
    HostMover().offload([pieces], [payload])
    return torch.frombuffer(payload, dtype=torch.float32)


def test_pages_as_vllm_lays_them_out() -> None:
    layers = paged()
    expected = torch.cat([layer[:, [3, 1]].reshape(-1) for layer in layers])
    apart = KVTensors(layers, "kv page token head dim").pages([3, 1])
    assert torch.equal(gathered(apart), expected)
    turned = [layer.transpose(0, 1).contiguous() for layer in layers]
    assert torch.equal(
        gathered(KVTensors(turned, "page kv token head dim").pages([3, 1])), expected
    )
    packed = torch.stack(turned, dim=1)
    together = KVTensors.packed(packed, "page layer kv token head dim")
    assert torch.equal(gathered(together.pages([3, 1])), expected)
    assert together.layer_count == 2
    assert together.page_tokens == PAGE


def test_a_span_of_one_sequence_of_a_batch() -> None:
    layers = contiguous()
    pieces = KVTensors(layers, "batch head token dim").span(4, 9, batch=2)
    expected = [plane[2, :, 4:9].transpose(0, 1).reshape(-1) for layer in layers for plane in layer]
    assert torch.equal(gathered(pieces), torch.cat(expected))


def test_tokens_of_a_head_are_one_piece_when_the_order_says_so() -> None:
    tensors = KVTensors(contiguous(), "batch head token dim", order="kv head token dim")
    pieces = tensors.span(4, 9, batch=1)
    assert pieces.piece_bytes == 5 * DIM * 4
    assert pieces.addresses.shape == (2, 2 * HEADS)
    expected = [plane[1, :, 4:9].reshape(-1) for layer in contiguous() for plane in layer]
    assert torch.equal(gathered(pieces), torch.cat(expected))


def test_latent_pages_have_neither_kv_nor_heads() -> None:
    layers = [torch.arange(PAGES * PAGE * DIM, dtype=torch.float32).reshape(PAGES, PAGE, DIM)]
    pieces = KVTensors(layers, "page token dim").pages([4, 0])
    assert torch.equal(gathered(pieces), layers[0][[4, 0]].reshape(-1))


def test_long_runs_are_divided() -> None:
    layers = [torch.zeros(1, 3 << 20, 1, dtype=torch.float32)]
    pieces = KVTensors(layers, "batch token dim").span(0, 3 << 20)
    assert pieces.piece_bytes == 4 << 20
    assert pieces.addresses.shape == (1, 3)


def test_an_axis_of_one_does_not_cut_a_piece() -> None:
    one_head = torch.zeros(12 * DIM).as_strided((1, 1, 12, DIM), (999, 77, DIM, 1))
    tensors = KVTensors([(one_head, one_head)], "batch head token dim")
    assert tensors.span(2, 10).piece_bytes == 8 * DIM * 4


def test_layers_may_have_strides_of_their_own() -> None:
    keys = contiguous()[0][0]
    turned = keys.transpose(1, 2).contiguous().transpose(1, 2)
    pieces = KVTensors([(keys, turned), (turned, keys)], "batch head token dim").span(1, 5)
    plane = keys[0, :, 1:5].transpose(0, 1).reshape(-1)
    assert torch.equal(gathered(pieces), plane.repeat(4))


@pytest.mark.parametrize(
    ("axes", "order", "reason"),
    [
        ("kv page token heads dim", "kv token head dim", "'heads' is not one of"),
        ("kv page token token dim", "kv token head dim", "'token' is named twice"),
        ("kv page batch head dim", "kv token head dim", "'token' is missing"),
        ("kv page token head batch", "kv token head dim", "'dim' is missing"),
        ("batch page token head dim", "kv token head dim", "pages belong to no batch"),
        ("layer page token head dim", "kv token head dim", "'layer' is not one of"),
        ("kv page token head dim", "kv token dim", "'head' is missing"),
        ("kv page token head dim", "token head dim", "'kv' is missing"),
        ("kv page token head dim", "kv page token head dim", "'page' is not one of"),
    ],
)
def test_wrong_names_are_refused(axes: str, order: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        KVTensors(paged(), axes, order=order)


def test_a_tuple_is_the_kv_axis() -> None:
    with pytest.raises(ConfigError, match="tuple"):
        KVTensors([(tensor, tensor) for tensor in paged()], "kv page token head dim")


def test_packed_tensors_need_a_layer_axis() -> None:
    with pytest.raises(ConfigError, match="'layer' is missing"):
        KVTensors.packed(paged()[0], "kv page token head dim")
    with pytest.raises(BadBufferError, match="axes"):
        KVTensors.packed(paged()[0], "layer kv page token head dim")


def other(change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    first, second = paged()
    return [first, change(second)]


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([], "no layers"),
        ([()], "no tensors"),
        (other(lambda tensor: tensor.half()), "layer 1: torch.float16"),
        (other(lambda tensor: tensor.to("meta")), "layer 1: .* on meta"),
        (other(lambda tensor: tensor[:, 1:]), "layer 1: shape"),
        (other(lambda tensor: tensor[0]), "layer 1: shape"),
        ([tensor[0] for tensor in paged()], "has not the axes"),
        ([tensor.to("meta") for tensor in paged()], "only on cpu and cuda"),
        ([tensor[:, :0] for tensor in paged()], "empty"),
        ([tensor[:, :, :, :1].expand(-1, -1, -1, 3, -1) for tensor in paged()], "expanded"),
        ([tensor.to_sparse() for tensor in paged()], "no plain memory"),
        ([paged()[0], (paged()[0],)], "same number of tensors"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(
    layers: list[torch.Tensor], reason: str
) -> None:
    with pytest.raises(BadBufferError, match=reason):
        KVTensors(layers, "kv page token head dim")


def test_planes_must_agree_on_what_the_payload_alternates_over() -> None:
    keys = torch.zeros(1, 4, 6, 8)
    few_heads, short = torch.zeros(1, 2, 6, 8), torch.zeros(1, 4, 5, 8)
    KVTensors([(keys, few_heads)], "batch head token dim")
    with pytest.raises(BadBufferError, match="'head'"):
        KVTensors([(keys, few_heads)], "batch head token dim", order="head kv token dim")
    with pytest.raises(BadBufferError, match="'token'"):
        KVTensors([(keys, short)], "batch head token dim")


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
        KVTensors(paged(), "kv page token head dim").pages(ids)


@pytest.mark.parametrize(
    ("start", "stop", "batch"),
    [(-1, 4, 0), (4, 4, 0), (5, 4, 0), (0, 13, 0), (0, 4, 3), (0, 4, -1)],
)
def test_wrong_spans_are_refused(start: int, stop: int, batch: int) -> None:
    with pytest.raises(BadBufferError):
        KVTensors(contiguous(), "batch head token dim").span(start, stop, batch)


def test_pages_and_spans_are_not_mixed_up() -> None:
    with pytest.raises(BadBufferError, match="have pages"):
        KVTensors(paged(), "kv page token head dim").span(0, 4)
    with pytest.raises(BadBufferError, match="no pages"):
        KVTensors(contiguous(), "batch head token dim").pages([0])


def test_a_range_of_layers_that_is_none_is_refused() -> None:
    pieces = KVTensors(paged(), "kv page token head dim").pages([0])
    for start, stop in ((-1, 1), (1, 1), (0, 3)):
        with pytest.raises(BadBufferError):
            pieces.layers(start, stop)


def test_blocks_of_different_sizes_follow_each_other() -> None:
    tensors = KVTensors(paged(), "kv page token head dim")
    for ids in ([1], [1, 2], [4], [3, 2]):
        expected = torch.cat([layer[:, ids].reshape(-1) for layer in paged()])
        assert torch.equal(gathered(tensors.pages(ids)), expected)
