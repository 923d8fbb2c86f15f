"""An engine's KV tensors, described by the names of their axes, and the addresses of each block.

A block is a table of equal pieces of memory in the order of its payload. A run is the longest
stretch that is contiguous in the tensor and in the payload; the size of a piece is the greatest
common divisor of all runs. Blocks of one size differ only in the place of their first token, or in
their pages, so the rest of the table is computed once (`Template`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvdepot import native
from kvdepot.core.layout import DType
from kvdepot.errors import BadBufferError, ConfigError

AXES: Final = ("batch", "page", "token", "head", "dim")
PIECE_BYTES_MAX: Final = 4 << 20
"""Longer runs are divided, so that every piece fits into a device's staging buffers."""
Addresses = npt.NDArray[np.int64]
DTYPES: Final[dict[torch.dtype, DType]] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.int8: "int8",
    torch.uint8: "uint8",
}
Layer = torch.Tensor | tuple[torch.Tensor, ...]
_DEVICES: Final = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The bytes of one block, or of some of its layers, as pieces of `piece_bytes` each."""

    addresses: Addresses
    """Shape (layers, pieces per layer). Row after row it has the order of the payload."""
    piece_bytes: int
    device: torch.device
    tensors: tuple[torch.Tensor, ...]
    """The owners of the memory. They keep the addresses valid."""

    @property
    def layer_count(self) -> int:
        return int(self.addresses.shape[0])

    @property
    def layer_bytes(self) -> int:
        return int(self.addresses.shape[1]) * self.piece_bytes

    @property
    def nbytes(self) -> int:
        return int(self.addresses.size) * self.piece_bytes

    def layers(self, start: int, stop: int) -> Pieces:
        """The layers start <= i < stop. Their payload is that range of the block's payload."""
        if not 0 <= start < stop <= self.layer_count:
            raise BadBufferError(f"invalid layers {start}:{stop} of {self.layer_count}")
        return replace(self, addresses=self.addresses[start:stop])


@dataclass(frozen=True, slots=True)
class Template:
    """The pieces of all blocks of one size: `start + step * place + batch_step * batch`."""

    piece_bytes: int
    start: Addresses
    """(layers, pieces): the addresses of a block at token 0, or with all pages at page 0."""
    step: Addresses
    """(layers, pieces): bytes from one token, or one page, to the next."""
    batch_step: Addresses
    page: Addresses
    """(pieces,): the index, within the block, of the page of each piece."""


class KVTensors:
    """The KV cache of some layers. `span` and `pages` give the addresses of its blocks.

    `layers` has for each layer one tensor, or a tuple of tensors (K and V) that may differ in heads
    and dim. `axes` names the axes of each tensor, such as "page token head dim". A payload has the
    layers one after the other, in each layer the tensors, and in each tensor the axes in `order`.
    It depends on the contents and on `order` alone, not on strides or pages. The object holds the
    tensors; they must not be resized or freed while blocks of them are moved.
    """

    def __init__(
        self, layers: Sequence[Layer], axes: str, *, order: str = "token head dim"
    ) -> None:
        rows = [layer if isinstance(layer, tuple) else (layer,) for layer in layers]
        self.axes = _axis_names("axes", axes, AXES)
        _check_tensors(rows, self.axes)
        self._order = _payload_order(order, self.axes)
        self.tensors = tuple(tensor for row in rows for tensor in row)
        self.device = self.tensors[0].device
        self.layer_count = len(rows)
        self._item_bytes = self.tensors[0].element_size()
        self._sizes = [dict(zip(self.axes, tensor.shape, strict=True)) for tensor in rows[0]]
        self._bases = [[tensor.data_ptr() for tensor in row] for row in rows]
        self._strides = [
            [tuple(step * self._item_bytes for step in tensor.stride()) for tensor in row]
            for row in rows
        ]
        self._counted = "page" if "page" in self.axes else "token"
        self._latest: tuple[int, Template] | None = None

    @property
    def page_tokens(self) -> int | None:
        """Tokens in a page; None for tensors without pages."""
        return self._sizes[0]["token"] if "page" in self.axes else None

    def span(self, start: int, stop: int, batch: int = 0) -> Pieces:
        """The block of the tokens start <= i < stop of tensors without pages."""
        if self.page_tokens is not None:
            raise BadBufferError("the tensors have pages: use pages(), not span()")
        tokens = self._sizes[0]["token"]
        if not 0 <= start < stop <= tokens:
            raise BadBufferError(f"invalid tokens {start}:{stop} of {tokens}")
        if not 0 <= batch < self._sizes[0].get("batch", 1):
            raise BadBufferError(f"invalid batch {batch} (the batch axis is shorter)")
        template = self._template(stop - start)
        addresses = template.start + template.step * start + template.batch_step * batch
        return Pieces(addresses, template.piece_bytes, self.device, self.tensors)

    def pages(self, page_ids: Any) -> Pieces:
        """The block whose tokens lie in these pages, in this order."""
        if self.page_tokens is None:
            raise BadBufferError("the tensors have no pages: use span(), not pages()")
        ids = np.asarray(page_ids)
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise BadBufferError("page ids must be a sequence of at least one whole number")
        count = self._sizes[0]["page"]
        if int(ids.min()) < 0 or int(ids.max()) >= count:
            raise BadBufferError(f"invalid page ids {ids.min()} to {ids.max()} of {count} pages")
        template = self._template(ids.size)
        addresses = template.start + template.step * ids.astype(np.int64)[template.page]
        return Pieces(addresses, template.piece_bytes, self.device, self.tensors)

    def _template(self, count: int) -> Template:
        """The template for blocks of `count` tokens or pages. The latest one is kept."""
        if self._latest is None or self._latest[0] != count:
            self._latest = count, self._new_template(count)
        return self._latest[1]

    def _new_template(self, count: int) -> Template:
        sizes = [{**tensor, self._counted: count} for tensor in self._sizes]
        # Most layers have the same strides: each kind of tensor is computed once.
        kinds = {kind for row in self._strides for kind in enumerate(row)}
        runs = {
            (plane, strides): self._run(sizes[plane], dict(zip(self.axes, strides, strict=True)))
            for plane, strides in kinds
        }
        piece_bytes = piece_size(nbytes for nbytes, _ in runs.values())
        tables: dict[tuple[int, tuple[int, ...]], Addresses] = {}
        for (plane, strides), (nbytes, outer) in runs.items():
            steps = dict(zip(self.axes, strides, strict=True))
            lengths = [(axis, sizes[plane][axis]) for axis in outer]
            lengths.append(("piece", nbytes // piece_bytes))
            offsets = _offsets(lengths, {**steps, "page": 0, "piece": piece_bytes})
            pages = _offsets(lengths, {"page": 1})
            step = np.full_like(offsets, steps[self._counted])
            batch_step = np.full_like(offsets, steps.get("batch", 0))
            tables[plane, strides] = np.stack([offsets, step, batch_step, pages])
        rows = []
        for bases, row in zip(self._bases, self._strides, strict=True):
            parts = [tables[kind].copy() for kind in enumerate(row)]
            for base, part in zip(bases, parts, strict=True):
                part[0] += base
            rows.append(np.concatenate(parts, axis=1))
        whole = np.stack(rows)
        return Template(piece_bytes, whole[:, 0], whole[:, 1], whole[:, 2], whole[0, 3])

    def _run(
        self, sizes: Mapping[str, int], strides: Mapping[str, int]
    ) -> tuple[int, tuple[str, ...]]:
        """Bytes of a run, and the axes of the payload around it."""
        nbytes, outer = self._item_bytes, list(self._order)
        while outer and outer[-1] != "page":
            size = sizes[outer[-1]]
            if size > 1 and strides[outer[-1]] != nbytes:
                break
            nbytes *= size
            outer.pop()
        return nbytes, tuple(outer)


def _offsets(lengths: Sequence[tuple[str, int]], steps: Mapping[str, int]) -> Addresses:
    """All sums of one multiple of each axis's step. The last axis changes fastest."""
    total = np.zeros(1, np.int64)
    for axis, length in lengths:
        part = np.arange(length, dtype=np.int64) * steps.get(axis, 0)
        total = (total[:, None] + part).ravel()
    return total


def piece_size(runs: Iterable[int]) -> int:
    """The greatest size, PIECE_BYTES_MAX at most, that divides all runs."""
    common = math.gcd(*runs)
    parts = -(-common // PIECE_BYTES_MAX)
    while common % parts:
        parts += 1
    return common // parts


def _axis_names(setting: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(text.split())
    for name in names:
        if name not in known:
            raise ConfigError(setting, f"{name!r} is not one of {', '.join(known)}")
        if names.count(name) > 1:
            raise ConfigError(setting, f"{name!r} is named twice")
    for name in ("token", "dim"):
        if name not in names:
            raise ConfigError(setting, f"{name!r} is missing in {text!r}")
    if "batch" in names and "page" in names:
        raise ConfigError(setting, f"{text!r} has both batch and page")
    return names


def _payload_order(text: str, present: Sequence[str]) -> list[str]:
    """The axes of a payload that are `present`, outermost first. A page goes before its tokens."""
    names = _axis_names("order", text, ("token", "head", "dim"))
    if "head" in present and "head" not in names:
        raise ConfigError("order", f"'head' is missing in {text!r}")
    order = [name for name in names if name in present]
    if "page" in present:
        order.insert(order.index("token"), "page")
    return order


def _check_tensors(rows: Sequence[Sequence[torch.Tensor]], axes: Sequence[str]) -> None:
    """Raise BadBufferError unless all tensors have one dtype and device, a tensor has one shape in
    all layers, and every element has an address of its own."""
    if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
        raise BadBufferError("every layer must have the same number of tensors, at least one")
    first = rows[0][0]
    if first.device.type not in _DEVICES:
        raise BadBufferError(f"tensors on {first.device} cannot be moved, only on cpu and cuda")
    for number, row in enumerate(rows):
        for tensor, model in zip(row, rows[0], strict=True):
            shape, reason = tuple(tensor.shape), ""
            if (tensor.dtype, tensor.device) != (first.dtype, first.device):
                reason = f"{tensor.dtype} on {tensor.device}, not {first.dtype} on {first.device}"
            elif tensor.shape != model.shape:
                reason = f"shape {shape}, not {tuple(model.shape)} as in layer 0"
            elif tensor.layout != torch.strided:
                reason = f"a {tensor.layout} tensor has no plain memory"
            elif tensor.dim() != len(axes):
                reason = f"{shape} does not have the axes {' '.join(axes)}"
            elif not tensor.numel():
                reason = f"{shape} is empty"
            elif any(
                size > 1 and not step
                for size, step in zip(tensor.shape, tensor.stride(), strict=True)
            ):
                reason = "an expanded tensor has several elements at one address"
            if reason:
                raise BadBufferError(f"layer {number}: {reason}")
    for at, axis in enumerate(axes):
        lengths = sorted({tensor.shape[at] for tensor in rows[0]})
        if axis not in ("head", "dim") and len(lengths) > 1:
            raise BadBufferError(f"the tensors of a layer have the lengths {lengths} of {axis!r}")


def check_payloads(
    blocks: Sequence[Pieces], views: Sequence[Any], device: torch.device, *, writable: bool
) -> list[int]:
    """The addresses of the payloads. Raises BadBufferError for every mistake of the caller: blocks
    that are not alike, other devices, views of another length or without write access."""
    if len(blocks) != len(views):
        raise BadBufferError(f"{len(blocks)} blocks do not fit {len(views)} payloads")
    if len({(block.addresses.shape, block.piece_bytes) for block in blocks}) > 1:
        raise BadBufferError("the blocks of one call must have the same layers and pieces")
    addresses = []
    for block, view in zip(blocks, views, strict=True):
        if block.device != device:
            raise BadBufferError(f"a mover of {device} cannot move tensors on {block.device}")
        try:
            address, nbytes = native.address_of(view, writable)
        except (BufferError, TypeError, ValueError) as error:
            raise BadBufferError(f"no payload: {error}") from error
        if nbytes != block.nbytes:
            raise BadBufferError(f"the payload has {nbytes} bytes, the block {block.nbytes}")
        addresses.append(address)
    return addresses
