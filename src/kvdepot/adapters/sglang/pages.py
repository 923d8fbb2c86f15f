"""Pages of SGLang's memory as blocks of a depot. Knows its pools by their methods only.

A host pool tells where the pieces of a page lie (K and V, or those of each layer): they are
gathered into a block and scattered from it in place. Or it hands pages over flat, one tensor each.
The two orders of bytes may differ, so they are part of the namespace. Pools of a device are in
`device_pages`.
"""

import ctypes
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np
import torch

from kvdepot.adapters.audit import AuditedHits
from kvdepot.adapters.sglang.config import HiCacheSettings
from kvdepot.adapters.sglang.identity import PageIdentity
from kvdepot.adapters.sglang.loaded_weights import WEIGHTS
from kvdepot.adapters.tensors.kvtensors import DTYPES
from kvdepot.config.settings import AuditConfig
from kvdepot.core.block import BlockKey, PutResult
from kvdepot.core.depot import Arrival, Depot, NamespaceHandle
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace

_SHAPE: Final = (
    "layout", "dtype", "page_size", "layer_num", "head_num", "head_dim", "kv_cache_dim",
    "kv_lora_rank", "qk_rope_head_dim", "start_layer", "end_layer", "num_mamba_layers",
    "conv_state_shapes", "temporal_state_shape", "conv_dtype", "temporal_dtype",
    "storage_format_tag",
)  # fmt: skip
_WAVE_BYTES: Final = 64 << 20
_BUSY_S: Final = 1.0


def raw(tensor: Any) -> Any:
    """The bytes of a contiguous tensor in host memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


class PoolPages:
    """One of SGLang's pools, and its pages in the depot."""

    page_bytes: int

    def __init__(self, depot: Depot, page_tokens: int) -> None:
        self._depot = depot
        self.page_tokens = page_tokens
        self._space: NamespaceHandle | None = None
        self._hits: AuditedHits | None = None
        self._compared_as: KVLayout | None = None
        self._hit_s = 0.0

    def identity(self) -> dict[str, str]:
        """What the bytes of a page depend on."""
        raise NotImplementedError

    def numbers(self) -> KVLayout | None:
        """How the numbers of a page are read; None where they cannot be."""
        raise NotImplementedError

    def register(self, fields: Mapping[str, Any]) -> None:
        """Its namespace: `fields` are those of Namespace, but for the layout."""
        layout = KVLayout.opaque(self.page_bytes, self.page_tokens)
        self._space = self._depot.register(Namespace(layout=layout, **fields))

    def ready(
        self, identity: PageIdentity, settings: HiCacheSettings, pool: str, rank: str = ""
    ) -> bool:
        """Whether its namespace is known; not as long as the weights are being read, and not after
        SGLang has changed them. `rank` of a pool that is divided where the KV is not."""
        if WEIGHTS.changed_by:
            return False
        if self._space is None:
            weights = identity.known_weights(settings)
            if not weights:
                return False
            shape = {**self.identity(), **({"rank": rank} if rank else {})}
            self.register(identity.namespace(settings, weights, pool, shape))
        return True

    @property
    def space(self) -> NamespaceHandle:
        assert self._space is not None, "its namespace is not known"
        return self._space

    def audit(self, config: AuditConfig, producer: str, log: logging.Logger) -> None:
        """Have hits of this pool computed again, as `config` says; where its numbers can be read.
        Its namespace is known."""
        self.space.made_by(self._depot.audits.producer(producer))
        self._compared_as = self.numbers()
        if self._compared_as is not None and config.share:
            self._hits = AuditedHits(self._depot, config, producer, log)

    def served(self, keys: Sequence[BlockKey]) -> int:
        """How many pages of a hit to tell SGLang of. It does not say how busy it is: hits within a
        second of one another count as load."""
        before_s, self._hit_s = self._hit_s, time.monotonic()
        if self._hits is None:
            return len(keys)
        return self._hits.served(keys, busy=self._hit_s - before_s < _BUSY_S)

    def _compare(
        self, keys: Sequence[BlockKey], page: Callable[[int], AbstractContextManager[Any]]
    ) -> None:
        """Compare those of the pages that SGLang has computed again. `page` gives the bytes of one,
        or None."""
        if self._hits is None or self._compared_as is None:
            return
        for at, key in enumerate(keys):
            if self._hits.auditor.expected(key):
                with page(at) as computed:
                    if computed is not None:
                        self._hits.auditor.check(key, computed, self._compared_as)

    def keys(self, hashes: Sequence[str], before: str | None, *, chained: bool) -> list[BlockKey]:
        """Of pages that SGLang names by `hashes`; `before` names the one before them."""
        parents = [before, *hashes[:-1]] if chained else [None] * len(hashes)
        return [
            self.space.hashed_key(one.encode(), None if parent is None else parent.encode())
            for one, parent in zip(hashes, parents, strict=True)
        ]

    def _fill(
        self,
        keys: Sequence[BlockKey],
        copy: Callable[[Sequence[int], Sequence[memoryview]], None],
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Store pages, some at a time: `copy` gets the numbers of those that are new, and a view to
        fill for each. Whether the depot has each of them now."""
        done: list[bool] = []
        wave = max(1, _WAVE_BYTES // self.page_bytes)
        while len(done) < len(keys):
            first = len(done)
            with self._depot.reserve(keys[first : first + wave], timeout_s=timeout_s) as slots:
                views = {
                    at: view
                    for at, put in enumerate(slots.outcomes)
                    if put is PutResult.STORED and (view := slots.view(at)) is not None
                }
                copy([first + at for at in views], list(views.values()))
                slots.seal(views)
                served = [bool(put) for put in slots.outcomes if put is not PutResult.THROTTLED]
            if not served:
                break
            done += served
        return done + [False] * (len(keys) - len(done))


def usable_lengths(there: Sequence[int], tail: int | None) -> AbstractSet[int]:
    """Lengths of a prefix, in pages, that a pool can go on from. `there` says of each page whether
    the depot has it; only the last `tail` pages are needed, all of them where it is None."""
    lengths = range(1, len(there) + 1)
    if tail is None:
        missing = next((at for at, one in enumerate(there) if not one), len(there))
        return set(lengths[:missing])
    return {length for length in lengths if all(there[max(0, length - tail) : length])}


class HostPages(PoolPages):
    """Of a host pool."""

    def __init__(self, depot: Depot, pool: Any, *, pieces: bool) -> None:
        """`pieces`: pages are gathered from where they lie, if the pool tells that; else flat."""
        super().__init__(depot, int(getattr(pool, "page_size", 1) or 1))
        self._pool = pool
        sizes = self._piece_sizes() if pieces else []
        self.pieces = bool(sizes)
        self.page_bytes = sum(sizes) or len(raw(pool.get_dummy_flat_data_page()))

    def identity(self) -> dict[str, str]:
        """What the bytes of a page depend on."""
        shape = {name: str(getattr(self._pool, name, None)) for name in _SHAPE}
        order = "pieces" if self.pieces else "flat"
        return {**shape, "pool": type(self._pool).__name__, "order": order}

    def numbers(self) -> KVLayout | None:
        """Layers together: their order differs by layout."""
        dtype: Any = DTYPES.get(getattr(self._pool, "dtype", torch.uint8), "uint8")
        if dtype == "uint8":
            return None
        return KVLayout.opaque(self.page_bytes, self.page_tokens, dtype=dtype)

    def store(self, keys: Sequence[BlockKey], indices: Any) -> list[bool]:
        """Take pages out of the pool; whether the depot has each of them now."""
        if not self.pieces:
            flat = [
                self._pool.get_data_page(at, flat=True).contiguous() for at in self._at(indices)
            ]
            return self.put(keys, flat)
        places = self._places(indices, len(keys))

        def gather(numbers: Sequence[int], views: Sequence[memoryview]) -> None:
            for at, view in zip(numbers, views, strict=True):
                _copy(places[at], _address(view), into_block=True)

        def gathered(at: int) -> AbstractContextManager[Any]:
            page = np.zeros(self.page_bytes, np.uint8)
            _copy(places[at], int(page.ctypes.data), into_block=True)
            return nullcontext(page)

        self._compare(keys, gathered)
        return self._fill(keys, gather)

    def load(self, keys: Sequence[BlockKey], indices: Any, timeout_s: float) -> list[bool]:
        """Bring pages into the pool; whether each of them is there. Those that are not are
        undefined."""
        if not self.pieces:
            targets = [self._pool.get_dummy_flat_data_page() for _ in keys]
            found = self.get(keys, targets, timeout_s)
            for at, target, there in zip(self._at(indices), targets, found, strict=True):
                if there:
                    self._pool.set_from_flat_data_page(at, target)
            return found
        places = self._places(indices, len(keys))

        def scatter(arrivals: list[Arrival]) -> None:
            for one in arrivals:
                _copy(places[one.index], _address(one.view), into_block=False)

        with self._depot.lease(keys) as lease:
            answers = lease.deliver(scatter, timeout_s=timeout_s) if len(lease) else []
        return [bool(got) for got in answers] + [False] * (len(keys) - len(answers))

    def put(self, keys: Sequence[BlockKey], tensors: Sequence[Any]) -> list[bool]:
        """Store flat pages."""
        self._compare(keys, lambda at: nullcontext(raw(tensors[at])))
        return [bool(put) for put in self._depot.put_many(keys, [raw(one) for one in tensors])]

    def get(self, keys: Sequence[BlockKey], tensors: Sequence[Any], timeout_s: float) -> list[bool]:
        """Fill flat pages."""
        targets = [raw(one) for one in tensors]
        return [bool(got) for got in self._depot.get_many(keys, targets, timeout_s=timeout_s)]

    def _piece_sizes(self) -> list[int]:
        """Of the first page; none where the pool does not tell where its pages lie."""
        try:
            _, sizes = self._pool.get_page_buffer_meta(torch.arange(self.page_tokens))
        except (AttributeError, NotImplementedError, ValueError):
            return []
        return list(sizes)

    def _at(self, indices: Any) -> list[int]:
        """Where each page begins in the pool."""
        first: list[int] = indices[:: self.page_tokens].tolist()
        return first

    def _places(self, indices: Any, pages: int) -> list[list[tuple[int, int]]]:
        """Address and size of each page's pieces, in order."""
        pointers, sizes = self._pool.get_page_buffer_meta(indices)
        found = list(zip(pointers, sizes, strict=True))
        per_page = len(found) // pages if pages else 0
        places = [found[at * per_page : (at + 1) * per_page] for at in range(pages)]
        for page in places:
            if sum(size for _, size in page) != self.page_bytes:
                raise ValueError(f"SGLang's pool tells of {len(found)} pieces for {pages} pages")
        return places


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _copy(pieces: Sequence[tuple[int, int]], block: int, *, into_block: bool) -> None:
    for address, size in pieces:
        source, target = (address, block) if into_block else (block, address)
        ctypes.memmove(target, source, size)
        block += size
