"""The mover of host memory, and which mover a device gets."""

from __future__ import annotations

import sys

import pytest
import torch

from kvdepot.adapters.tensors import HostMover, KVTensors, Pieces, open_mover
from kvdepot.errors import BadBufferError, ExtraMissingError

LAYERS, PAGES, PAGE, DIM = 3, 6, 4, 16


def cache(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (PAGES, PAGE, DIM)
    return [
        torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for _ in range(LAYERS)
    ]


def block(layers: list[torch.Tensor], ids: list[int]) -> Pieces:
    return KVTensors(layers, "page token dim").pages(ids)


def test_nothing_is_copied_when_one_of_the_payloads_does_not_fit(seed: int) -> None:
    layers = cache(seed)
    blocks = [block(layers, [0]), block(layers, [1])]
    good, short = bytearray(blocks[0].nbytes), bytearray(blocks[0].nbytes - 1)
    with pytest.raises(BadBufferError, match="bytes"):
        HostMover().offload(blocks, [good, short])
    assert not any(good)
    before = [layer.clone() for layer in layers]
    with pytest.raises(BadBufferError, match="bytes"):
        HostMover().onboard([good, short], blocks)
    assert all(torch.equal(a, b) for a, b in zip(before, layers, strict=True))


def test_payloads_that_cannot_be_used_are_refused(seed: int) -> None:
    pieces = block(cache(seed), [0])
    size = pieces.nbytes
    for payload in (bytes(size), memoryview(bytearray(2 * size))[::2], object()):
        with pytest.raises(BadBufferError):
            HostMover().offload([pieces], [payload])
    with pytest.raises(BadBufferError):
        HostMover().onboard([bytes(size + 1)], [pieces])


def test_one_payload_for_each_block_and_all_blocks_alike(seed: int) -> None:
    layers = cache(seed)
    one, two = block(layers, [0]), block(layers, [0, 1])
    with pytest.raises(BadBufferError, match="1 blocks do not fit 0"):
        HostMover().offload([one], [])
    with pytest.raises(BadBufferError, match="same layers"):
        HostMover().offload([one, two], [bytearray(one.nbytes), bytearray(two.nbytes)])


def test_addresses_of_another_device_are_never_touched(seed: int) -> None:
    here = block(cache(seed), [0])
    there = Pieces(here.addresses, here.piece_bytes, torch.device("cuda:0"), here.tensors)
    with pytest.raises(BadBufferError, match="cuda:0"):
        HostMover().offload([there], [bytearray(there.nbytes)])
    with pytest.raises(BadBufferError, match="cuda:0"):
        HostMover().onboard([bytes(there.nbytes)], [there])


def test_no_blocks_are_no_work() -> None:
    HostMover().offload([], []).wait()
    HostMover().onboard([], []).synchronize()


def test_a_device_of_another_kind_has_no_mover() -> None:
    with pytest.raises(BadBufferError, match="meta"):
        open_mover(lambda: [], "meta")


def test_without_triton_the_hint_names_its_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kvdepot.adapters.tensors.kernels", raising=False)
    with pytest.raises(ExtraMissingError, match="triton is not installed") as caught:
        open_mover(lambda: [], "cuda:0")
    assert "torch" in caught.value.hint
