"""How a block's payload falls apart into pieces of memory, for any strides.

A run is the longest stretch that is contiguous in a tensor and in the payload. Pieces have one
size, so they are the greatest common divisor of the runs of all planes and layers. Only where a
block begins, or which pages it has, changes from block to block: the rest is worked out once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdepot.adapters.tensors.pieces import Addresses

PIECE_BYTES_MAX: Final = 4 << 20
"""Longer runs are divided, so that every piece fits into a device's staging buffers."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One layer's tensor: all of the layer, or only K, or only V."""

    sizes: Mapping[str, int]
    """Length of each axis within one block."""

    strides: Mapping[str, int]
    """Bytes from one element to the next, for each axis."""

    outer: tuple[str, ...]
    """Payload axes around the planes, outermost first."""

    inner: tuple[str, ...]
    """Payload axes inside this plane."""

    item_bytes: int

    @property
    def run_bytes(self) -> int:
        """Length of the contiguous end of the payload order."""
        return self._run()[0]

    def offsets(self, piece_bytes: int) -> Addresses:
        """Where the pieces lie, as (outer, pieces inside), with every page taken for page 0."""
        run, around = self._run()
        steps = [(self.sizes[axis], self._stride(axis)) for axis in (*self.outer, *around)]
        return self._by_outer(_grid([*steps, (run // piece_bytes, piece_bytes)]))

    def ordinals(self, piece_bytes: int) -> Addresses:
        """Which of the block's pages each piece lies in."""
        run, around = self._run()
        steps = [(self.sizes[axis], int(axis == "page")) for axis in (*self.outer, *around)]
        return self._by_outer(_grid([*steps, (run // piece_bytes, 0)]))

    def _run(self) -> tuple[int, tuple[str, ...]]:
        run, around = self.item_bytes, list(self.inner)
        while around and around[-1] != "page":
            size = self.sizes[around[-1]]
            if size > 1 and self.strides[around[-1]] != run:
                break
            run *= size
            around.pop()
        return run, tuple(around)

    def _stride(self, axis: str) -> int:
        return 0 if axis == "page" else self.strides[axis]

    def _by_outer(self, flat: Addresses) -> Addresses:
        return flat.reshape(math.prod(self.sizes[axis] for axis in self.outer), -1)


@dataclass(frozen=True, slots=True)
class Template:
    """The pieces of any block of one size, at `start + rate * where + batch_rate * batch`."""

    piece_bytes: int

    start: Addresses
    """(layers, pieces): the addresses of a block at token 0 of batch 0, or all on page 0."""

    rate: Addresses
    """(layers, pieces): bytes from a token, or a page, to the next."""

    batch_rate: Addresses
    """(layers, pieces): bytes from one sequence of the batch to the next."""

    ordinal: Addresses
    """(pieces,): which of the block's pages; all 0 where there are none."""


def build(
    kinds: Sequence[Sequence[Plane]], kind_of: npt.NDArray[np.intp], bases: Addresses
) -> Template:
    """`kinds` are the different sets of planes, `kind_of` says which of them each layer has, and
    `bases[i, j]` is the address of plane j in layer i."""
    planes = kinds[0]
    piece_bytes = _piece_bytes([plane.run_bytes for kind in kinds for plane in kind])
    rows = np.stack([_row(kind, piece_bytes) for kind in kinds])[kind_of]
    parts = [plane.ordinals(piece_bytes) for plane in planes]
    return Template(
        piece_bytes=piece_bytes,
        start=bases[:, _spread(parts, range(len(planes)))] + rows[:, 0],
        rate=rows[:, 1],
        batch_rate=rows[:, 2],
        ordinal=np.concatenate(parts, axis=1).ravel(),
    )


def _row(kind: Sequence[Plane], piece_bytes: int) -> Addresses:
    """Offset, rate and batch rate of each piece of a layer."""
    parts = [plane.offsets(piece_bytes) for plane in kind]
    moving = "page" if "page" in kind[0].strides else "token"
    rates = [plane.strides[moving] for plane in kind]
    batch_rates = [plane.strides.get("batch", 0) for plane in kind]
    offsets = np.concatenate(parts, axis=1).ravel()
    return np.stack([offsets, _spread(parts, rates), _spread(parts, batch_rates)])


def _spread(parts: Sequence[Addresses], values: Sequence[int]) -> Addresses:
    """Each plane's value, once for each of its pieces."""
    pairs = zip(parts, values, strict=True)
    filled = [np.full(part.shape, value, np.int64) for part, value in pairs]
    return np.concatenate(filled, axis=1).ravel()


def _grid(steps: Sequence[tuple[int, int]]) -> Addresses:
    """All sums of one multiple each of the strides, the last one running fastest."""
    total = np.zeros(1, np.int64)
    for size, stride in steps:
        total = (total[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    return total


def _piece_bytes(runs: Sequence[int]) -> int:
    """The greatest size, within the limit, that divides all runs."""
    common = math.gcd(*runs)
    parts = -(-common // PIECE_BYTES_MAX)
    while common % parts:
        parts += 1
    return common // parts
