"""Pages are copied as they lie in memory, for any order of the tensor's axes."""

from collections.abc import Sequence
from itertools import permutations

import pytest

pytest.importorskip("torch")

import torch

from kvdepot.adapters.tensors import HostMover
from kvdepot.adapters.vllm.page_transfer import in_memory_order, page_tensors
from kvdepot.errors import ModelError

PAGES, HEADS, TOKENS, WIDTH = 5, 3, 4, 8


def cache(order: Sequence[int]) -> torch.Tensor:
    """A KV cache of vLLM's logical shape whose axes lie in memory in another order."""
    shape = [PAGES, HEADS, TOKENS, WIDTH]
    laid = torch.arange(PAGES * HEADS * TOKENS * WIDTH, dtype=torch.float32)
    return laid.reshape([shape[axis] for axis in order]).permute(
        [list(order).index(axis) for axis in range(4)]
    )


@pytest.mark.parametrize("inner", list(permutations((1, 2, 3))))
def test_a_page_comes_out_as_it_lies(inner: tuple[int, ...]) -> None:
    tensor = cache((0, *inner))
    ((_, tensors),) = page_tensors({"a": tensor}, ["a"], PAGES)
    payload = bytearray(tensors.pages([2]).nbytes)
    HostMover().offload([tensors.pages([2])], [payload])
    size = HEADS * TOKENS * WIDTH
    flat = tensor.as_strided([PAGES * size], [1])
    assert bytes(payload) == flat[2 * size : 3 * size].numpy().tobytes()
    assert tensors.pages([2]).piece_bytes == size * 4


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_every_layout_goes_out_and_in(order: tuple[int, ...]) -> None:
    source, target = cache(order), torch.zeros_like(cache(order))
    assert source.shape == (PAGES, HEADS, TOKENS, WIDTH)
    ours, theirs = (page_tensors({"a": one}, ["a"], PAGES)[0][1] for one in (source, target))
    payload = bytearray(ours.pages([3, 1]).nbytes)
    HostMover().offload([ours.pages([3, 1])], [payload])
    HostMover().onboard([payload], [theirs.pages([0, 4])])
    assert torch.equal(target[0], source[3])
    assert torch.equal(target[4], source[1])
    assert not target[1:4].any()


def test_padding_between_pages_is_left_alone() -> None:
    padded = torch.zeros(PAGES, 2 * TOKENS * WIDTH)
    tensor = padded.as_strided([PAGES, 1, TOKENS, WIDTH], [2 * TOKENS * WIDTH, WIDTH, WIDTH, 1])
    ((_, tensors),) = page_tensors({"a": tensor}, ["a"], PAGES)
    HostMover().onboard([b"\x01" * (TOKENS * WIDTH * 4)], [tensors.pages([1])])
    assert padded[1, : TOKENS * WIDTH].any()
    assert not padded[1, TOKENS * WIDTH :].any()


def test_layers_of_one_shape_are_together() -> None:
    """As latent attention and the cache of its indexer, which share vLLM's blocks."""
    good = cache((0, 1, 2, 3))
    caches = {"a": good, "b": good[:, :1], "c": good.clone()}
    found = page_tensors(caches, ["a", "b", "c"], PAGES)
    assert [names for names, _ in found] == [("a", "c"), ("b",)]


def test_blocks_that_the_backend_divides_are_whole_again() -> None:
    whole = cache((0, 1, 2, 3))
    parts = whole.reshape(PAGES * 3, 1, TOKENS, WIDTH)
    ((_, tensors),) = page_tensors({"a": parts}, ["a"], PAGES)
    payload = bytearray(tensors.pages([2]).nbytes)
    HostMover().offload([tensors.pages([2])], [payload])
    assert bytes(payload) == whole[2].numpy().tobytes()


def test_a_cache_without_pages_is_refused() -> None:
    good = cache((0, 1, 2, 3))
    with pytest.raises(ModelError, match="not a tensor"):
        page_tensors({"a": [good]}, ["a"], PAGES)
    with pytest.raises(ModelError, match="does not begin with"):
        page_tensors({"a": good}, ["a"], PAGES + 1)
    gaps = torch.zeros(2, 4, 4, 4, 4)[:, ::2, ::2, ::2, ::2]
    with pytest.raises(ModelError, match="contiguous pages"):
        in_memory_order(gaps)
