"""An engine's KV tensors, described by the names of their axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from kvdepot.adapters.tensors.axes import DEFAULT_ORDER, NAMES, parse, payload_order, tensor_axes
from kvdepot.adapters.tensors.pieces import Addresses, Pieces
from kvdepot.adapters.tensors.template import Plane, Template, build
from kvdepot.errors import BadBufferError, ConfigError

Layer = torch.Tensor | tuple[torch.Tensor, ...]

_DEVICES: Final = ("cpu", "cuda")


class KVTensors:
    """The KV cache of some layers, and where each block of it lies.

    `layers` has for each layer one tensor, or a tuple of them that stands for the kv axis and whose
    members may differ in heads and dim. `axes` names the axes of each tensor ("kv page token head
    dim"), `order` those of one layer's payload; names that the tensors lack are left out of it. The
    payload depends on the contents and `order` alone, not on axes, strides or pages. The tensors
    must not be resized or freed while blocks of them are moved; they are held here.
    """

    def __init__(self, layers: Sequence[Layer], axes: str, *, order: str = DEFAULT_ORDER) -> None:
        rows = _rows(layers)
        planes = isinstance(layers[0], tuple)
        self.axes = tensor_axes(axes, planes=planes)
        self.tensors = tuple(tensor for row in rows for tensor in row)
        _check_alike(rows, self.axes)
        self.device = self.tensors[0].device
        self.layer_count = len(rows)
        self._item_bytes = self.tensors[0].element_size()
        self._sizes = [dict(zip(self.axes, tensor.shape, strict=True)) for tensor in rows[0]]
        names = ("kv", *self.axes) if planes else self.axes
        self._outer, self._inner = _around_planes(payload_order(order, names), planes=planes)
        _check_planes(self._sizes, self._outer)
        self._bases: Addresses = np.array([[t.data_ptr() for t in row] for row in rows], np.int64)
        strides = [tuple(tensor.stride() for tensor in row) for row in rows]
        self._kinds = list(dict.fromkeys(strides))
        self._kind_of = np.array([self._kinds.index(each) for each in strides], np.intp)
        self._last: tuple[int, Template] | None = None

    @classmethod
    def packed(cls, tensor: torch.Tensor, axes: str, *, order: str = DEFAULT_ORDER) -> KVTensors:
        """One tensor that holds all layers, with "layer" among its axes."""
        names = parse("axes", axes, NAMES)
        if "layer" not in names:
            raise ConfigError("axes", f"'layer' is missing in {axes!r}")
        if tensor.dim() != len(names):
            raise BadBufferError(f"{tuple(tensor.shape)} are not the axes {axes!r}")
        rest = " ".join(name for name in names if name != "layer")
        return cls(tensor.unbind(names.index("layer")), rest, order=order)

    @property
    def page_tokens(self) -> int | None:
        """Tokens in a page; None for contiguous tensors."""
        return self._sizes[0]["token"] if "page" in self.axes else None

    def span(self, start: int, stop: int, batch: int = 0) -> Pieces:
        """The block of tokens start <= i < stop of a contiguous cache."""
        if self.page_tokens is not None:
            raise BadBufferError("these tensors have pages: name the block's pages, not a span")
        _check_range(start, stop, self._sizes[0]["token"])
        if not 0 <= batch < self._sizes[0].get("batch", 1):
            raise BadBufferError(f"batch {batch} is outside the tensors' batch axis")
        template = self._template(stop - start)
        addresses = template.start + template.rate * start
        if batch:
            addresses += template.batch_rate * batch
        return self._pieces(addresses, template)

    def pages(self, page_ids: Any) -> Pieces:
        """The block whose tokens lie in these pages, in this order."""
        if self.page_tokens is None:
            raise BadBufferError("these tensors have no pages: name a span of tokens")
        ids = np.asarray(page_ids)
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise BadBufferError("page ids must be a sequence of at least one whole number")
        count = self._sizes[0]["page"]
        if int(ids.min()) < 0 or int(ids.max()) >= count:
            raise BadBufferError(f"page ids go from {ids.min()} to {ids.max()}, of {count} pages")
        template = self._template(ids.size)
        where = ids.astype(np.int64)[template.ordinal]
        return self._pieces(template.start + template.rate * where, template)

    def _pieces(self, addresses: Addresses, template: Template) -> Pieces:
        return Pieces(addresses, template.piece_bytes, self.device, self.tensors)

    def _template(self, count: int) -> Template:
        """For blocks of `count` tokens, or pages. The last one is kept: blocks are alike."""
        last = self._last
        if last is None or last[0] != count:
            kinds = [self._planes(kind, count) for kind in self._kinds]
            last = self._last = (count, build(kinds, self._kind_of, self._bases))
        return last[1]

    def _planes(self, kind: Sequence[Sequence[int]], count: int) -> list[Plane]:
        counted = "page" if "page" in self.axes else "token"
        return [
            Plane(
                sizes={**sizes, counted: count},
                strides=dict(zip(self.axes, (n * self._item_bytes for n in strides), strict=True)),
                outer=self._outer,
                inner=self._inner,
                item_bytes=self._item_bytes,
            )
            for sizes, strides in zip(self._sizes, kind, strict=True)
        ]


def _rows(layers: Sequence[Layer]) -> list[tuple[torch.Tensor, ...]]:
    """Each layer as a tuple of tensors."""
    if not layers:
        raise BadBufferError("there are no layers")
    rows = [layer if isinstance(layer, tuple) else (layer,) for layer in layers]
    if len({len(layer) if isinstance(layer, tuple) else -1 for layer in layers}) > 1:
        raise BadBufferError("every layer must have the same number of tensors")
    if not rows[0]:
        raise BadBufferError("the layers have no tensors")
    return rows


def _check_alike(rows: Sequence[Sequence[torch.Tensor]], axes: Sequence[str]) -> None:
    """All tensors must have one dtype and device, and a plane one shape in all layers."""
    first = rows[0][0]
    if first.device.type not in _DEVICES:
        raise BadBufferError(f"tensors on {first.device} cannot be moved, only on cpu and cuda")
    for number, row in enumerate(rows):
        for tensor, model in zip(row, rows[0], strict=True):
            where = f"layer {number}: "
            if (tensor.dtype, tensor.device) != (first.dtype, first.device):
                kinds = f"{tensor.dtype} on {tensor.device}, not {first.dtype} on {first.device}"
                raise BadBufferError(where + kinds)
            if tensor.shape != model.shape:
                shapes = f"shape {tuple(tensor.shape)}, not {tuple(model.shape)} as in layer 0"
                raise BadBufferError(where + shapes)
            _check_memory(tensor, axes, where)


def _check_memory(tensor: torch.Tensor, axes: Sequence[str], where: str) -> None:
    """Every element must have its own place in plain memory."""
    if tensor.layout != torch.strided:
        raise BadBufferError(f"{where}a {tensor.layout} tensor has no plain memory")
    if tensor.dim() != len(axes):
        raise BadBufferError(f"{where}{tuple(tensor.shape)} has not the axes {' '.join(axes)}")
    if not tensor.numel():
        raise BadBufferError(f"{where}{tuple(tensor.shape)} is empty")
    if any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise BadBufferError(f"{where}an expanded tensor keeps several elements in one place")


def _around_planes(
    order: tuple[str, ...], *, planes: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes outside and inside the planes: with one plane all are inside, kv among them."""
    at = order.index("kv") if planes else 0
    return order[:at], order[at + 1 :] if planes else order


def _check_planes(sizes: Sequence[Mapping[str, int]], outer: Sequence[str]) -> None:
    """Planes may differ in heads and dim, as long as the payload does not alternate over them."""
    for axis in {"batch", "page", "token", *outer} & set(sizes[0]):
        lengths = sorted({plane[axis] for plane in sizes})
        if len(lengths) > 1:
            raise BadBufferError(f"the tensors of a layer have {lengths} along {axis!r}")


def _check_range(start: int, stop: int, tokens: int) -> None:
    if not 0 <= start < stop <= tokens:
        raise BadBufferError(f"{start}:{stop} is no range of {tokens} tokens")
