"""A payload depends on what the tensors hold and on the order, never on where they hold it.

Random contents are placed by plain torch indexing into tensors of random axes, strides, pages and
offsets; the payload is compared with one made from the contents alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.adapters.tensors import HostMover, KVTensors, Pieces
from kvdepot.adapters.tensors.kvtensors import Layer

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
POISON = 0xEE


@dataclass(frozen=True)
class Contents:
    """What some layers hold of some tokens: for each plane a tensor (layer, token, head, dim)."""

    planes: list[torch.Tensor]
    has_heads: bool

    @property
    def layers(self) -> int:
        return self.planes[0].shape[0]

    @property
    def tokens(self) -> int:
        return self.planes[0].shape[1]

    def payload(self, order: Sequence[str]) -> bytes:
        axes = [("token", "head", "dim").index(axis) for axis in order]
        return b"".join(
            raw(plane[layer].permute(axes)) for layer in range(self.layers) for plane in self.planes
        )


@dataclass(frozen=True)
class Cache:
    """Tensors somewhere inside a storage, and which part of them a block is."""

    storage: torch.Tensor
    tensors: KVTensors
    pieces: Pieces


def raw(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def random_contents(draw: st.DrawFn) -> Contents:
    dtype = draw(st.sampled_from(DTYPES))
    layers, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 24))
    kind = draw(st.sampled_from(["alike", "differing", "latent"]))
    shapes = [(draw(st.integers(1, 3)), draw(st.integers(1, 9))) for _ in range(2)]
    if kind == "alike":
        shapes = [shapes[0]] * 2
    elif kind == "latent":
        shapes = [(1, shapes[0][1])]
    generator = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    planes = []
    for heads, dim in shapes:
        nbytes = layers * tokens * heads * dim * dtype.itemsize
        values = torch.from_numpy(generator.integers(0, 256, nbytes, dtype=np.uint8)).view(dtype)
        planes.append(values.reshape(layers, tokens, heads, dim))
    return Contents(planes, has_heads=kind != "latent")


class Shelf:
    """Hands out tensors of any strides inside one storage."""

    def __init__(self, draw: st.DrawFn, dtype: torch.dtype) -> None:
        self.draw, self.dtype = draw, dtype
        self.used = 0
        self.wanted: list[tuple[list[int], list[int], int]] = []

    def reserve(self, sizes: Sequence[int], strides: Sequence[int]) -> int:
        """Room for a tensor; the number to `take` it by."""
        offset = self.used + self.draw(st.integers(0, 3))
        length = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        self.used = offset + length
        self.wanted.append(([*sizes], [*strides], offset))
        return len(self.wanted) - 1

    def reserve_all(self, shapes: list[list[int]], layers: int) -> list[list[int]]:
        """Room for tensors of these shapes in each layer, with the same strides or others."""
        alike = self.draw(st.booleans())
        first = [self.strides(shape) for shape in shapes]
        found = []
        for _ in range(layers):
            strides = first if alike else [self.strides(shape) for shape in shapes]
            pairs = zip(shapes, strides, strict=True)
            found.append([self.reserve(shape, steps) for shape, steps in pairs])
        return found

    def strides(self, sizes: Sequence[int]) -> list[int]:
        """Axes in any order in memory, with or without gaps."""
        found, step = [0] * len(sizes), 1
        gaps = self.draw(st.booleans())
        for axis in self.draw(st.permutations(range(len(sizes)))):
            step += self.draw(st.integers(0, 3)) if gaps else 0
            found[axis] = step
            step *= sizes[axis]
        return found

    def storage(self, fill: int) -> torch.Tensor:
        size = self.used * self.dtype.itemsize
        return torch.full((size,), fill, dtype=torch.uint8).view(self.dtype)

    def take(self, storage: torch.Tensor, number: int) -> torch.Tensor:
        return storage.as_strided(*self.wanted[number])


@dataclass(frozen=True)
class Place:
    """A layout that can hold given contents; `cache` makes one with all bytes the same."""

    shelf: Shelf
    axes: str
    numbers: list[list[int]]
    order: str
    pages: list[int] | None
    first: int
    batch: int

    def cache(self, fill: int) -> Cache:
        storage = self.shelf.storage(fill)
        rows = [[self.shelf.take(storage, number) for number in row] for row in self.numbers]
        alone = len(rows[0]) == 1
        layers: list[Layer] = [row[0] if alone else tuple(row) for row in rows]
        tensors = KVTensors(layers, self.axes, order=self.order)
        return Cache(storage, tensors, self.pieces(tensors, rows))

    def pieces(self, tensors: KVTensors, rows: list[list[torch.Tensor]]) -> Pieces:
        """The block; one more token follows it in contiguous tensors."""
        if self.pages is not None:
            return tensors.pages(self.pages)
        tokens = rows[0][0].shape[self.axes.split().index("token")]
        return tensors.span(self.first, tokens - 1, self.batch)


def random_place(draw: st.DrawFn, contents: Contents, order: str) -> Place:
    """Any layout for these contents, with pages or without."""
    sizes: dict[str, int] = {"token": contents.tokens, "dim": 0}
    pages, first, batch = None, 0, 0
    if draw(st.booleans()):
        page = draw(st.sampled_from([n for n in range(1, 17) if contents.tokens % n == 0]))
        needed = contents.tokens // page
        sizes |= {"page": needed + draw(st.integers(0, 3)), "token": page}
        pages = draw(st.permutations(range(sizes["page"])))[:needed]
    else:
        first = draw(st.integers(0, 3))
        sizes["token"] += first + 1
        if draw(st.booleans()):
            sizes["batch"] = draw(st.integers(1, 3))
            batch = draw(st.integers(0, sizes["batch"] - 1))
    if contents.has_heads:
        sizes["head"] = 0
    axes = draw(st.permutations(list(sizes)))
    shapes = [
        [{**sizes, "head": plane.shape[2], "dim": plane.shape[3]}[axis] for axis in axes]
        for plane in contents.planes
    ]
    shelf = Shelf(draw, contents.planes[0].dtype)
    numbers = shelf.reserve_all(shapes, contents.layers)
    return Place(shelf, " ".join(axes), numbers, order, pages, first, batch)


def put(contents: Contents, place: Place, cache: Cache) -> None:
    """Place the contents by plain indexing of torch tensors."""
    axes = place.axes.split()
    for layer, numbers in enumerate(place.numbers):
        for number, plane in zip(numbers, contents.planes, strict=True):
            tensor = place.shelf.take(cache.storage, number)
            for token in range(contents.tokens):
                spot = tensor
                names = [*axes]
                for axis, index in where(place, tensor, axes, token).items():
                    spot = spot.select(names.index(axis), index)
                    names.remove(axis)
                value = plane[layer, token] if contents.has_heads else plane[layer, token, 0]
                target = spot.permute(
                    [names.index(axis) for axis in ("head", "dim") if axis in names]
                )
                target.copy_(value)


def where(place: Place, tensor: torch.Tensor, axes: list[str], token: int) -> dict[str, int]:
    if place.pages is None:
        found = {"token": place.first + token}
        return {**found, "batch": place.batch} if "batch" in axes else found
    page_tokens = tensor.shape[axes.index("token")]
    return {"page": place.pages[token // page_tokens], "token": token % page_tokens}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Contents, list[str], Place, Place]:
    contents = random_contents(draw)
    order = draw(st.permutations(["token", "head", "dim"]))
    places = [random_place(draw, contents, " ".join(order)) for _ in range(2)]
    return contents, order, places[0], places[1]


@given(cases())
def test_payload_is_that_of_the_contents(case: tuple[Contents, list[str], Place, Place]) -> None:
    contents, order, place, _ = case
    cache = place.cache(POISON)
    put(contents, place, cache)
    payload = bytearray(cache.pieces.nbytes)
    HostMover().offload([cache.pieces], [payload])
    assert bytes(payload) == contents.payload(order)
    assert cache.pieces.nbytes == cache.pieces.layer_bytes * contents.layers


@given(cases())
def test_scatter_into_any_other_layout_is_the_inverse(
    case: tuple[Contents, list[str], Place, Place],
) -> None:
    contents, order, _, place = case
    payload = contents.payload(order)
    cache, expected = place.cache(POISON), place.cache(POISON)
    HostMover().onboard([payload], [cache.pieces])
    put(contents, place, expected)
    assert raw(cache.storage) == raw(expected.storage), "and nothing else was touched"


@given(cases(), st.data())
def test_a_range_of_layers_is_that_range_of_the_payload(
    case: tuple[Contents, list[str], Place, Place], data: st.DataObject
) -> None:
    contents, order, place, _ = case
    cache = place.cache(POISON)
    put(contents, place, cache)
    start = data.draw(st.integers(0, contents.layers - 1))
    stop = data.draw(st.integers(start + 1, contents.layers))
    some = cache.pieces.layers(start, stop)
    payload = bytearray(some.nbytes)
    HostMover().offload([some], [payload])
    layer_bytes = cache.pieces.layer_bytes
    assert bytes(payload) == contents.payload(order)[start * layer_bytes : stop * layer_bytes]


@given(
    sizes=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    tokens=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
)
def test_pieces_are_as_long_as_the_memory_allows(
    sizes: list[int], tokens: int, dtype: torch.dtype
) -> None:
    layers, heads, dim = sizes
    caches = [tuple(torch.zeros(2, 3, tokens, heads, dim, dtype=dtype)) for _ in range(layers)]
    pieces = KVTensors(caches, "page token head dim").pages([2, 0])
    assert pieces.piece_bytes == tokens * heads * dim * dtype.itemsize
    assert pieces.addresses.shape == (layers, 4)


def test_latent_attention_as_transformers_expands_it() -> None:
    keys, values = torch.zeros(1, 16, 300, 192), torch.zeros(1, 16, 300, 128)
    tensors = KVTensors([(keys, values)], "batch head token dim", order="head token dim")
    pieces = tensors.span(0, 256)
    assert pieces.piece_bytes == math.gcd(192, 128) * 256 * 4
    assert pieces.nbytes == 256 * 16 * (192 + 128) * 4
