"""An engine's KV tensors, described by the names of their axes, and where each block lies in them.

A block is a table of equal pieces of memory, in payload order, for any strides. A run is the
longest stretch that is contiguous in a tensor and in the payload; a piece is the greatest common
divisor of the runs of all planes and layers. Only the block's first token, or its pages, change
from block to block: the rest (`Template`) is computed once.

The axes batch and page only select and are no part of the payload. "token" in an order stands for
page and token together, so a payload does not depend on how an engine cuts its pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvdepot import native
from kvdepot.core.layout import DType
from kvdepot.errors import BadBufferError, ConfigError

NAMES: Final = ("layer", "batch", "kv", "page", "token", "head", "dim")
PAYLOAD: Final = ("kv", "token", "head", "dim")
DEFAULT_ORDER: Final = "kv token head dim"


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
    """Shape (layers, pieces per layer); read row by row it is the order of the payload."""
    piece_bytes: int
    device: torch.device
    tensors: tuple[torch.Tensor, ...]
    """Whose memory it is; held so that the addresses stay good."""

    @property
    def layer_count(self) -> int:
        return int(self.addresses.shape[0])

    @property
    def layer_bytes(self) -> int:
        return int(self.addresses.shape[1]) * self.piece_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the payload that these pieces make up."""
        return int(self.addresses.size) * self.piece_bytes

    def layers(self, start: int, stop: int) -> Pieces:
        """Only the layers start <= i < stop: their payload is that range of the block's."""
        if not 0 <= start < stop <= self.layer_count:
            raise BadBufferError(f"{start}:{stop} is no range of {self.layer_count} layers")
        return replace(self, addresses=self.addresses[start:stop])


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
        payload = payload_order(order, ("kv", *self.axes) if planes else self.axes)
        at = payload.index("kv") if planes else 0
        self._outer, self._inner = payload[:at], payload[at + 1 :] if planes else payload
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
        tokens = self._sizes[0]["token"]
        if not 0 <= start < stop <= tokens:
            raise BadBufferError(f"{start}:{stop} is no range of {tokens} tokens")
        if not 0 <= batch < self._sizes[0].get("batch", 1):
            raise BadBufferError(f"batch {batch} is outside the tensors' batch axis")
        template = self._template(stop - start)
        addresses = template.start + template.rate * start
        if batch:
            addresses += template.batch_rate * batch
        return Pieces(addresses, template.piece_bytes, self.device, self.tensors)

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
        addresses = template.start + template.rate * where
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


def _check_planes(sizes: Sequence[Mapping[str, int]], outer: Sequence[str]) -> None:
    """Planes may differ in heads and dim, as long as the payload does not alternate over them."""
    for axis in {"batch", "page", "token", *outer} & set(sizes[0]):
        lengths = sorted({plane[axis] for plane in sizes})
        if len(lengths) > 1:
            raise BadBufferError(f"the tensors of a layer have {lengths} along {axis!r}")


def parse(setting: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """The names in `text`, each once and each among `known`; else a ConfigError for `setting`."""
    names = tuple(text.split())
    for name in names:
        if name not in known:
            raise ConfigError(setting, f"{name!r} is not one of {', '.join(known)}")
        if names.count(name) > 1:
            raise ConfigError(setting, f"{name!r} is named twice")
    return names


def tensor_axes(text: str, *, planes: bool) -> tuple[str, ...]:
    """The axes of one layer's tensor; with `planes` a tuple of tensors stands for the kv axis."""
    names = parse("axes", text, [name for name in NAMES if name != "layer"])
    for name in ("token", "dim"):
        if name not in names:
            raise ConfigError("axes", f"{name!r} is missing in {text!r}")
    if "batch" in names and "page" in names:
        raise ConfigError("axes", "pages belong to no batch: name one of batch and page")
    if planes and "kv" in names:
        raise ConfigError("axes", "a tuple of tensors is the kv axis: its tensors have none")
    return names


def payload_order(text: str, present: Sequence[str]) -> tuple[str, ...]:
    """The payload axes that are `present`, outermost first; page goes before its token."""
    names = parse("order", text, PAYLOAD)
    for name in present:
        if name in PAYLOAD and name not in names:
            raise ConfigError("order", f"{name!r} is missing in {text!r}")
    order = [name for name in names if name in present]
    if "page" in present:
        order.insert(order.index("token"), "page")
    return tuple(order)


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

    def run(self) -> tuple[int, tuple[str, ...]]:
        """Length in bytes of the contiguous end of the payload order, and the axes around it."""
        run, around = self.item_bytes, list(self.inner)
        while around and around[-1] != "page":
            size = self.sizes[around[-1]]
            if size > 1 and self.strides[around[-1]] != run:
                break
            run *= size
            around.pop()
        return run, tuple(around)

    def offsets(self, piece_bytes: int) -> Addresses:
        """Where the pieces lie, as (outer, pieces inside), with every page taken for page 0."""
        return self._grid(piece_bytes, {**self.strides, "page": 0}, piece_bytes)

    def ordinals(self, piece_bytes: int) -> Addresses:
        """Which of the block's pages each piece lies in."""
        return self._grid(piece_bytes, {"page": 1}, 0)

    def _grid(self, piece_bytes: int, strides: Mapping[str, int], piece_stride: int) -> Addresses:
        """All sums of one multiple of each stride, the last one running fastest."""
        run, around = self.run()
        steps = [(self.sizes[axis], strides.get(axis, 0)) for axis in (*self.outer, *around)]
        total = np.zeros(1, np.int64)
        for size, stride in (*steps, (run // piece_bytes, piece_stride)):
            total = (total[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
        return total.reshape(math.prod(self.sizes[axis] for axis in self.outer), -1)


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
    piece_bytes = piece_size([plane.run()[0] for kind in kinds for plane in kind])
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


def piece_size(runs: Sequence[int]) -> int:
    """The greatest size, within the limit, that divides all runs."""
    common = math.gcd(*runs)
    parts = -(-common // PIECE_BYTES_MAX)
    while common % parts:
        parts += 1
    return common // parts


def check_view(pieces: Pieces, view: Any, *, writable: bool) -> int:
    """The address of a payload that fits `pieces`; BadBufferError when it does not."""
    try:
        address, nbytes = native.address_of(view, writable)
    except (BufferError, TypeError, ValueError) as error:
        raise BadBufferError(f"no payload: {error}") from error
    if nbytes != pieces.nbytes:
        raise BadBufferError(f"the payload has {nbytes} bytes, the pieces {pieces.nbytes}")
    return address


def check_device(pieces: Pieces, device: torch.device) -> None:
    """BadBufferError when the pieces lie elsewhere: their addresses mean nothing here."""
    if pieces.device != device:
        raise BadBufferError(f"tensors on {pieces.device} cannot be moved by the mover of {device}")


def check_pairs(blocks: Sequence[Pieces], views: Sequence[Any]) -> None:
    """BadBufferError unless there is one view a block and all blocks are cut alike."""
    if len(blocks) != len(views):
        raise BadBufferError(f"{len(blocks)} blocks cannot go with {len(views)} payloads")
    cuts = {(block.addresses.shape, block.piece_bytes) for block in blocks}
    if len(cuts) > 1:
        raise BadBufferError("the blocks of one call must have the same layers and pieces")
