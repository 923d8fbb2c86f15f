"""Pages of SGLang's memory as blocks of a depot. Uses the methods of its pools, not their classes.

A host pool names the pieces of a page (K and V, or those of each layer), which are gathered into a
block and scattered from it in place. Or it copies pages to flat tensors, one each. The two orders
of bytes may differ, so the order is a part of the namespace. Device pools are in `device_pages`.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np
import torch

from kvdepot.adapters.audit import AuditedHits
from kvdepot.adapters.block_writes import Fill, store_blocks
from kvdepot.adapters.sglang.config import HiCacheSettings
from kvdepot.adapters.sglang.identity import KV, PageIdentity
from kvdepot.adapters.sglang.loaded_weights import LOG, WEIGHTS
from kvdepot.adapters.tensors.kvtensors import DTYPES
from kvdepot.config.settings import AuditConfig
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import Arrival, NamespaceHandle
from kvdepot.core.layout import DType, KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.depot import Depot

_SHAPE: Final = (
    "layout", "dtype", "page_size", "layer_num", "head_num", "head_dim", "kv_cache_dim",
    "kv_lora_rank", "qk_rope_head_dim", "start_layer", "end_layer", "num_mamba_layers",
    "conv_state_shapes", "temporal_state_shape", "conv_dtype", "temporal_dtype",
    "storage_format_tag",
)  # fmt: skip
_BUSY_S: Final = 1.0


class PoolPages:
    """The pages of one of SGLang's pools in the depot."""

    page_bytes: int

    def __init__(self, depot: Depot, page_tokens: int) -> None:
        self._depot = depot
        self.page_tokens = page_tokens
        self._lock = threading.Lock()
        self._space: NamespaceHandle | None = None
        self._weights = ""
        """The name of the weights in `_space`."""
        self._hits: AuditedHits | None = None
        self._compared_as: KVLayout | None = None
        self._hit_s = 0.0

    def identity(self) -> dict[str, str]:
        """The facts that the bytes of a page depend on."""
        raise NotImplementedError

    def numbers(self) -> tuple[DType, int] | None:
        """The dtype of a page, and its equal layers, for audits. None: it has no numbers."""
        raise NotImplementedError

    def register(self, fields: Mapping[str, Any]) -> None:
        """Register the namespace. `fields` are those of Namespace, but for the layout."""
        layout = KVLayout.opaque(self.page_bytes, self.page_tokens)
        self._space = self._depot.namespace(Namespace(layout=layout, **fields))

    def ready(
        self, identity: PageIdentity, settings: HiCacheSettings, pool: str, rank: str = ""
    ) -> bool:
        """Returns True if the pages may be used: it is known which weights SGLang has loaded.
        `rank`: for a pool that is divided although the KV is not."""
        with self._lock:
            weights = WEIGHTS.name_of(identity.known_weights(settings))
            if not weights:
                return False
            if weights != self._weights:
                self._weights = weights
                shape = {**self.identity(), **({"rank": rank} if rank else {})}
                self.register(identity.namespace(settings, weights, pool, shape))
                config = settings.audit if pool == KV else AuditConfig()
                self.audit(config, f"{identity.producer}, pool {pool}")
        return True

    @property
    def space(self) -> NamespaceHandle:
        assert self._space is not None, "the namespace is not registered"
        return self._space

    def audit(self, config: AuditConfig, producer: str) -> None:
        """Name the producer of the pages, and audit hits if the pages have numbers. The namespace
        must be registered."""
        self.space.made_by(self._depot.audits.producer(producer))
        numbers = self.numbers()
        if numbers is not None and config.share:
            dtype, layers = numbers
            self._compared_as = KVLayout.opaque(
                self.page_bytes, self.page_tokens, layers, dtype=dtype
            )
            self._hits = AuditedHits(self._depot, config, producer, LOG)

    def served_pages(self, keys: Sequence[BlockKey]) -> int:
        """The number of a hit's pages to offer to SGLang. SGLang does not show its load: hits
        within a second of each other count as load."""
        before_s, self._hit_s = self._hit_s, time.monotonic()
        if self._hits is None:
            return len(keys)
        return self._hits.served_blocks(keys, busy=self._hit_s - before_s < _BUSY_S)

    def keys(
        self, hashes: Sequence[str], before: str | None = None, *, chained: bool = False
    ) -> list[BlockKey]:
        """The keys of the pages that SGLang names by `hashes`. With `chained` each key names the
        page before it; `before` is the page before the first."""
        parents = [before, *hashes[:-1]] if chained else [None] * len(hashes)
        return [
            self.space.hashed_key(name.encode(), None if parent is None else parent.encode())
            for name, parent in zip(hashes, parents, strict=True)
        ]

    def _compare(
        self, keys: Sequence[BlockKey], page: Callable[[int], AbstractContextManager[Any]]
    ) -> None:
        """Audit the pages that SGLang has computed again. `page` returns the bytes of one, or
        None."""
        if self._hits is None or self._compared_as is None:
            return
        for index, key in enumerate(keys):
            if self._hits.take_expected(key):
                with page(index) as computed:
                    if computed is not None:
                        self._hits.check(key, computed, self._compared_as)

    def _fill(
        self, keys: Sequence[BlockKey], fill: Fill, timeout_s: float | None = None
    ) -> list[bool]:
        """Store pages. Returns for each whether the depot has it now."""
        results = store_blocks(self._depot, self.space, keys, fill, timeout_s=timeout_s)
        return [bool(put) for put in results]


def usable_lengths(there: Sequence[int], tail: int | None) -> AbstractSet[int]:
    """The lengths of a prefix, in pages, that a pool can continue from. `there`: for each page
    whether the depot has it. Only the last `tail` pages are needed; None: all of them."""
    lengths = range(1, len(there) + 1)
    return {length for length in lengths if all(there[max(0, length - (tail or length)) : length])}


def raw(tensor: Any) -> Any:
    """The bytes of a contiguous tensor in host memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


class HostPages(PoolPages):
    """The pages of a host pool."""

    def __init__(self, depot: Depot, pool: Any, *, pieces: bool) -> None:
        """`pieces`: gather pages in place if the pool names their pieces."""
        super().__init__(depot, int(getattr(pool, "page_size", 1) or 1))
        self._pool = pool
        sizes: list[int] = []
        if pieces:
            try:
                _, sizes = pool.get_page_buffer_meta(torch.arange(self.page_tokens))
            except (AttributeError, NotImplementedError, ValueError):
                sizes = []
        self.pieces = len(sizes) > 0
        self.page_bytes = sum(sizes) or len(raw(pool.get_dummy_flat_data_page()))

    def identity(self) -> dict[str, str]:
        shape = {name: str(getattr(self._pool, name, None)) for name in _SHAPE}
        order = "pieces" if self.pieces else "flat"
        return {**shape, "pool": type(self._pool).__name__, "order": order}

    def numbers(self) -> tuple[DType, int] | None:
        # One layer: the order of layers depends on the pool's layout.
        dtype = DTYPES.get(getattr(self._pool, "dtype", torch.uint8), "uint8")
        return None if dtype == "uint8" else (dtype, 1)

    def store(self, keys: Sequence[BlockKey], indices: Any) -> list[bool]:
        """Store pages of the pool. Returns for each whether the depot has it now."""
        if not self.pieces:
            starts = indices[:: self.page_tokens].tolist()
            flat = [self._pool.get_data_page(start, flat=True).contiguous() for start in starts]
            return self.put(keys, flat)
        places = self._places(indices, len(keys))

        def fill(pages: Sequence[int], views: Sequence[memoryview]) -> None:
            for page, view in zip(pages, views, strict=True):
                _copy(places[page], view, into_block=True)

        def gathered(page: int) -> AbstractContextManager[Any]:
            block = bytearray(self.page_bytes)
            _copy(places[page], memoryview(block), into_block=True)
            return nullcontext(block)

        self._compare(keys, gathered)
        return self._fill(keys, fill)

    def load(self, keys: Sequence[BlockKey], indices: Any, timeout_s: float) -> list[bool]:
        """Load pages into the pool. Returns for each whether it is there; a page that is not has
        undefined content."""
        if not self.pieces:
            targets = [self._pool.get_dummy_flat_data_page() for _ in keys]
            found = self.get(keys, targets, timeout_s)
            starts = indices[:: self.page_tokens].tolist()
            for start, target, there in zip(starts, targets, found, strict=True):
                if there:
                    self._pool.set_from_flat_data_page(start, target)
            return found
        places = self._places(indices, len(keys))

        def scatter(arrivals: list[Arrival]) -> None:
            for page in arrivals:
                _copy(places[page.index], page.view, into_block=False)

        with self._depot.lease(keys) as lease:
            answers = lease.deliver(scatter, timeout_s=timeout_s) if len(lease) else []
        return [bool(answer) for answer in answers] + [False] * (len(keys) - len(answers))

    def put(self, keys: Sequence[BlockKey], tensors: Sequence[Any]) -> list[bool]:
        """Store flat pages."""
        self._compare(keys, lambda page: nullcontext(raw(tensors[page])))
        return [bool(put) for put in self._depot.put_many(keys, list(map(raw, tensors)))]

    def get(self, keys: Sequence[BlockKey], tensors: Sequence[Any], timeout_s: float) -> list[bool]:
        """Fill flat pages."""
        answers = self._depot.get_many(keys, list(map(raw, tensors)), timeout_s=timeout_s)
        return [bool(answer) for answer in answers]

    def _places(self, indices: Any, pages: int) -> list[list[tuple[int, int]]]:
        """Address and size of each page's pieces, in order."""
        pointers, sizes = self._pool.get_page_buffer_meta(indices)
        pieces = list(zip(pointers, sizes, strict=True))
        per_page = len(pieces) // pages if pages else 0
        places = [pieces[page * per_page : (page + 1) * per_page] for page in range(pages)]
        for place in places:
            if sum(size for _, size in place) != self.page_bytes:
                raise ValueError(f"SGLang's pool has {len(pieces)} pieces for {pages} pages")
        return places


def _copy(pieces: Sequence[tuple[int, int]], block: memoryview, *, into_block: bool) -> None:
    place = int(np.frombuffer(block, np.uint8).ctypes.data)
    for address, size in pieces:
        source, target = (address, place) if into_block else (place, address)
        ctypes.memmove(target, source, size)
        place += size
