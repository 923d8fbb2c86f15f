"""Pages of SGLang's device pools as blocks of a depot. Knows its pools by their attributes only.

A block has a page's bytes layer by layer, in each layer the pieces of its buffers (K and V, a
latent, states), so that a layer is one range of the block. Blocks are leased and verified in memory
first; then they are copied to the device, some layers at a time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from kvdepot.adapters.sglang.pages import PoolPages
from kvdepot.adapters.tensors import OnboardTicket, Pieces, TensorMover
from kvdepot.adapters.tensors.kvtensors import DTYPES, Addresses, piece_size
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import Arrival, Depot, Lease
from kvdepot.core.layout import KVLayout
from kvdepot.errors import ModelError

_NO_WAIT_S: Final = 0.0
"""A page that waits for room holds on to the device's memory."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """Equal pieces of a page, which lie one after the other in its block."""

    start: int
    """Where the run begins in the block."""
    piece_bytes: int
    bases: Addresses
    """The address of each piece in the pool's row 0."""
    steps: Addresses
    """Bytes from a row to the next."""

    @property
    def stop(self) -> int:
        return self.start + len(self.bases) * self.piece_bytes

    def joined(self, other: "PageRun") -> "PageRun":
        bases = np.concatenate([self.bases, other.bases])
        steps = np.concatenate([self.steps, other.steps])
        return PageRun(self.start, self.piece_bytes, bases, steps)


class DevicePages(PoolPages):
    """Of a device pool, SGLang's DevicePoolEntry."""

    def __init__(self, depot: Depot, entry: Any, mover: TensorMover) -> None:
        super().__init__(depot, entry.page_size)
        self._entry = entry
        self._mover = mover
        self._tensors = tuple(entry.kv_buffer)
        self._runs = _runs(entry)
        """By layer, as SGLang counts them for loads; not all layers need be in this pool."""
        self._whole = _join([run for runs in self._runs.values() for run in runs])
        self.page_bytes = self._whole[-1].stop

    def identity(self) -> dict[str, str]:
        buffers = [
            f"{tuple(buffer.shape[1:])} {buffer.dtype}"
            for component in self._entry.components
            for buffer in component
        ]
        # Drafts have their layers beside the model's: which is where is part of the order.
        layers = sorted((layer, str(at)) for layer, at in self._entry.layer_mapping.items())
        pool = self._entry.device_pool
        return {
            "pool": type(pool).__name__,
            "order": "layers",
            "page_size": str(self.page_tokens),
            "layout": str(getattr(pool, "kv_cache_layout", None)),
            "buffers": str(buffers),
            "layers": str(layers),
        }

    def numbers(self) -> KVLayout | None:
        dtypes = {buffer.dtype for buffers in self._entry.components for buffer in buffers}
        dtype: Any = DTYPES.get(dtypes.pop(), "uint8") if len(dtypes) == 1 else "uint8"
        if dtype == "uint8":
            return None
        alike = len({self.layer_bytes(layer) for layer in self._runs}) == 1
        layers = len(self._runs) if alike else 1
        return KVLayout.opaque(self.page_bytes, self.page_tokens, layers, dtype=dtype)

    def layer_bytes(self, layer: int) -> int:
        """Of one page."""
        return sum(run.stop - run.start for run in self._runs.get(layer, ()))

    def store(self, keys: Sequence[BlockKey], indices: Any) -> list[bool]:
        """Take pages out of the pool; whether the depot has each of them now. Waits for no room."""
        rows = self._entry.prepare_locations(indices)

        @contextmanager
        def computed(at: int) -> Iterator[memoryview | None]:
            assert self._hits is not None
            with self._hits.auditor.scratch(keys[at]) as slot:
                view = slot.view(0)
                if view is not None:
                    gather([at], [view])
                yield view

        def gather(numbers: Sequence[int], views: Sequence[memoryview]) -> None:
            tickets = [
                self._mover.offload(
                    [self._pieces(run, rows[at]) for at in numbers],
                    [view[run.start : run.stop] for view in views],
                )
                for run in self._whole
            ]
            for ticket in tickets:
                ticket.wait()

        self._compare(keys, computed)
        return self._fill(keys, gather, _NO_WAIT_S)

    def lease(
        self, keys: Sequence[BlockKey], indices: Any, timeout_s: float
    ) -> "LeasedPages | None":
        """Pages that are in memory, verified, by the end of `timeout_s`; None where one is not.

        Those for which memory has no room are copied to the device at once.
        """
        rows = self._entry.prepare_locations(indices)
        views: dict[int, memoryview] = {}

        def collect(arrivals: list[Arrival]) -> None:
            passing = [one for one in arrivals if not one.lasting]
            for one in arrivals:
                views.pop(one.index, None)
            views.update((one.index, one.view) for one in arrivals if one.lasting)
            at = [rows[one.index] for one in passing]
            for ticket in self._onboard(self._whole, at, [one.view for one in passing]):
                ticket.synchronize()

        lease = self._depot.lease(keys)
        try:
            if len(lease) == len(keys) and all(
                lease.deliver(collect, beside=True, timeout_s=timeout_s)
            ):
                numbers = sorted(views)
                taken = [rows[at] for at in numbers], [views[at] for at in numbers]
                return LeasedPages(self, lease, *taken)
        except BaseException:
            lease.release()
            raise
        lease.release()
        return None

    def onboard(
        self, layers: Sequence[int], rows: Sequence[int], views: Sequence[memoryview]
    ) -> list[OnboardTicket]:
        """Copy these layers of pages into the pool. Layers that it lacks are none."""
        runs = _join([run for layer in layers for run in self._runs.get(layer, ())])
        return self._onboard(runs, rows, views)

    def _onboard(
        self, runs: Sequence[PageRun], rows: Sequence[int], views: Sequence[memoryview]
    ) -> list[OnboardTicket]:
        if not rows:
            return []
        return [
            self._mover.onboard(
                [view[run.start : run.stop] for view in views],
                [self._pieces(run, row) for row in rows],
                layers_per_step=1,
            )
            for run in runs
        ]

    def _pieces(self, run: PageRun, row: int) -> Pieces:
        addresses = (run.bases + run.steps * row)[None]
        return Pieces(addresses, run.piece_bytes, self._mover.device, self._tensors)


@dataclass(slots=True)
class LeasedPages:
    """Pages of one request in one pool: in memory, verified, and not yet on the device."""

    pages: DevicePages
    lease: Lease
    rows: list[int]
    views: list[memoryview]

    def release(self) -> None:
        """No more copies; the views are not to be used any more."""
        self.rows, self.views = [], []
        self.lease.release()


def _runs(entry: Any) -> dict[int, list[PageRun]]:
    """Where the pieces of each layer of a page lie, in the order of the block."""
    found: dict[int, list[PageRun]] = {}
    at = 0
    seen: set[tuple[int, int]] = set()
    for layer in sorted(entry.layer_mapping):
        mapped = entry.layer_mapping[layer]
        numbers = [mapped] if isinstance(mapped, int) else list(mapped)
        runs = []
        for which, component in enumerate(entry.components):
            for number in numbers:
                base, step, nbytes = entry.buffer_meta[which][number]
                _check_rows(entry, component[number], step, nbytes)
                size = piece_size([nbytes])
                bases = base + np.arange(nbytes // size, dtype=np.int64) * size
                runs.append(PageRun(at, size, bases, np.full(len(bases), step, np.int64)))
                at += nbytes
                seen.add((which, number))
        found[layer] = _join(runs)
    if len(seen) < sum(map(len, entry.components)):
        raise ModelError(f"SGLang's pool {entry.name} has buffers that belong to no layer")
    return found


def _check_rows(entry: Any, buffer: torch.Tensor, step: int, nbytes: int) -> None:
    """A page must be one stretch of memory."""
    row_bytes = buffer[0].nbytes
    if not buffer[0].is_contiguous() or (nbytes != row_bytes and step != row_bytes):
        raise ModelError(
            f"SGLang's pool {entry.name}: a page of shape {tuple(buffer.shape)} and strides "
            f"{buffer.stride()} is not in one piece"
        )


def _join(runs: Sequence[PageRun]) -> list[PageRun]:
    """Neighbours with pieces of one size become one run."""
    joined: list[PageRun] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and (last.stop, last.piece_bytes) == (run.start, run.piece_bytes):
            joined[-1] = last.joined(run)
        else:
            joined.append(run)
    return joined
