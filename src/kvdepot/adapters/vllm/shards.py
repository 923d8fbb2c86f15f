"""The KV heads in a worker's pages, and how blocks of workers with other heads are read.

Tensor parallelism gives each worker an equal part of the KV heads. Blocks are named by that part,
"shard `rank` of `size`", and not by the number of workers: with more workers than heads several
workers have the same shard, and latent attention, which each worker has whole, is one shard at
every size. Pages in which the heads are separate can be filled from blocks of another size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from kvdepot.adapters.tensors import KVTensors

_PACKED_AXES: Final = 4
"""A layer's cache as pages, heads, tokens, K and V."""
_SPLIT_AXES: Final = 5
"""A layer's cache as pages, K and V, tokens, heads, elements."""
_TOKENS: Final = 2
"""The axis of tokens, in both."""


@dataclass(frozen=True, slots=True)
class HeadAxis:
    """Heads in a page: rows of heads with equal bytes, without gaps."""

    heads: int
    """Heads of the model, in all shards."""
    rows: int
    """Rows of one page in one layer."""
    head_bytes: int
    """Bytes of one head in one row."""
    item_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerShard:
    """The part of each block that a worker has."""

    rank: int
    size: int
    axis: HeadAxis | None = None
    """None: blocks of another size cannot be read."""
    whole: bool = False
    """Each worker has the whole block, at every size."""

    def heads_of(self, size: int) -> int:
        """Heads of a shard if there are `size`."""
        return self.axis.heads // size if self.axis is not None else 0

    @property
    def heads(self) -> range:
        """This worker's heads."""
        count = self.heads_of(self.size)
        return range(self.rank * count, (self.rank + 1) * count)


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Heads of a block that another shard has saved, and where they go in this worker's pages."""

    rank: int
    """The shard that has saved the block."""
    block_heads: int
    first: int
    """The first head in the block."""
    target: int
    """The first head in the page."""
    count: int


def other_sizes(shards: Sequence[WorkerShard]) -> list[int]:
    """The numbers of shards, other than their own, whose blocks can be read with these, one of each
    KV group. Empty if one group's cannot."""
    cut = [each for each in shards if each.axis is not None]
    if not cut or any(each.axis is None and not each.whole for each in shards):
        return []
    if len({(each.heads_of(1), each.size) for each in cut}) > 1:
        return []
    heads = cut[0].heads_of(1)
    return [size for size in range(1, heads + 1) if heads % size == 0 and size != cut[0].size]


def parts_of(shard: WorkerShard, size: int) -> list[HeadPart]:
    """The blocks of `size` shards, and the heads in them, that make up one block of this worker."""
    count, own = shard.heads_of(size), shard.heads
    parts = []
    for rank in range(own.start // count, -(-own.stop // count)):
        start, stop = max(own.start, rank * count), min(own.stop, (rank + 1) * count)
        parts.append(HeadPart(rank, count, start - rank * count, start - own.start, stop - start))
    return parts


def fill_heads(
    tensors: KVTensors, axis: HeadAxis, view: memoryview, pages: Sequence[int], part: HeadPart
) -> None:
    """Copy a part of another shard's block into pages: into the last pages of the block, if fewer.
    On a CUDA device the copies are on the current stream. `view` may be reused on return."""
    shape = (tensors.layer_count, -1, axis.rows, part.block_heads, axis.head_bytes)
    block = np.frombuffer(view, np.uint8).reshape(shape)
    source = block[:, -len(pages) :, :, part.first : part.first + part.count]
    ids = torch.tensor(pages, device=tensors.device)
    for layer, tensor in enumerate(tensors.tensors):
        heads = (tensor.shape[0], axis.rows, -1, axis.head_bytes)
        target = tensor.view(torch.uint8).view(heads)[:, :, part.target : part.target + part.count]
        target.index_copy_(0, ids, torch.from_numpy(np.array(source[layer])).to(tensors.device))


def find_shard(
    engine: Any, layout: str, spec: Any, cache: torch.Tensor, place: tuple[int, int, int]
) -> tuple[WorkerShard, str]:
    """The shard of a worker of `engine`, and why blocks of other sizes cannot be read; empty if
    they can. `spec` is vLLM's spec of a layer, `cache` that layer's pages, `layout` vLLM's name of
    their order; `place` is the worker's rank, the number of ranks, and the pages of `cache`."""
    rank, ranks, pages = place
    bases = [base.__name__ for base in type(spec).__mro__]
    if getattr(spec, "max_tp_shards", None) == 1 or "MLAAttentionSpec" in bases:
        return WorkerShard(0, 1, whole=True), ""
    local = int(getattr(spec, "num_kv_heads", 0))
    total = _total_heads(engine)
    if not local:
        return WorkerShard(rank, ranks), f"{type(spec).__name__} is not divided by head"
    if not total or local != max(1, total // ranks) or max(total, ranks) % min(total, ranks):
        return WorkerShard(rank, ranks), "how its heads are divided is not known"
    size = min(ranks, total)
    rank //= ranks // size
    axis = _head_axis(cache, pages, (total, local), int(spec.block_size), layout)
    if axis is None or getattr(spec, "state_content_bytes", None) is not None:
        return WorkerShard(rank, size), f"pages of shape {tuple(cache.shape[1:])} cannot be cut"
    return WorkerShard(rank, size, axis), ""


def _total_heads(engine: Any) -> int:
    """KV heads of each of the model's layers; 0 if layers may differ, or it is not known."""
    model = engine.model_config
    arch: Any = getattr(model, "model_arch_config", None)
    has_drafts = getattr(engine, "speculative_config", None) is not None
    if has_drafts or not hasattr(arch, "per_layer_overrides"):
        return 0
    differ = any("total_num_kv_heads" in layer for layer in arch.per_layer_overrides or ())
    if differ or hasattr(model.hf_config, "block_configs"):
        return 0
    return int(model.get_total_num_kv_heads())


def _head_axis(
    cache: torch.Tensor, pages: int, heads: tuple[int, int], page_tokens: int, layout: str
) -> HeadAxis | None:
    """The position of the heads in each of `pages`; `heads` are the model's and the worker's. None
    if it is not certain."""
    total, local = heads
    shape, strides = tuple(cache.shape), cache.stride()
    parts = shape[0] // pages
    tokens = page_tokens // parts
    if len(shape) == _PACKED_AXES and shape[1:3] == (local, tokens):
        axis = 1
    elif len(shape) == _SPLIT_AXES and shape[1:4] == (2, tokens, local):
        axis = 3
    else:
        return None
    name = layout.rpartition(".")[2]
    if not {"H", "N"} <= set(name):
        return None
    is_head_first = name.index("H") < name.index("N")
    order = sorted(range(1, len(shape)), key=lambda each: (-strides[each], -shape[each]))
    if local == 1 or tokens == 1:  # strides of such an axis have no meaning
        order.remove(axis)
        order.insert(order.index(_TOKENS) + (not is_head_first), axis)
    if (order.index(axis) < order.index(_TOKENS)) != is_head_first:
        return None
    step = 1
    for each in reversed([*([0] if parts > 1 else []), *order]):
        if shape[each] > 1 and strides[each] != step:
            return None
        step *= shape[each]
    inner = order[order.index(axis) + 1 :]
    outer = [each for each in order if each != axis and each not in inner]
    item = cache.element_size()
    rows = parts * int(np.prod([shape[each] for each in outer], dtype=np.int64))
    size = item * int(np.prod([shape[each] for each in inner], dtype=np.int64))
    return HeadAxis(total, rows, size, item)
