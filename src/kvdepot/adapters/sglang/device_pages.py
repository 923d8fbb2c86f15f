"""Pages of SGLang's device pools as blocks of a depot. Uses the attributes of the pools, not their
classes.

A block has a page's bytes layer by layer, and in each layer the pieces of its buffers (K and V, a
latent, states), so that a layer is one range of the block. Blocks are leased and verified in memory
first. Then they are copied to the device, some layers at a time.
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
from kvdepot.core.depot import Arrival, Lease
from kvdepot.core.layout import DType
from kvdepot.depot import Depot
from kvdepot.errors import ModelError

_NO_WAIT_S: Final = 0.0
"""A page that waits for room keeps the device's memory in use."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """Equal pieces of a page that follow each other in its block."""

    start: int
    """The first byte of the run in the block."""
    piece_bytes: int
    bases: Addresses
    """The address of each piece in the pool's row 0."""
    steps: Addresses
    """Bytes from one row to the next."""

    @property
    def stop(self) -> int:
        return self.start + len(self.bases) * self.piece_bytes


class DevicePages(PoolPages):
    """The pages of a device pool, SGLang's DevicePoolEntry."""

    def __init__(self, depot: Depot, entry: Any, mover: TensorMover) -> None:
        super().__init__(depot, entry.page_size)
        self._entry = entry
        self._mover = mover
        self._tensors = tuple(entry.kv_buffer)
        self._runs = _runs(entry)
        """Runs by layer, as SGLang numbers layers for loads, without layers not in this pool."""
        self._whole = _join([run for runs in self._runs.values() for run in runs])
        self.page_bytes = self._whole[-1].stop

    def identity(self) -> dict[str, str]:
        buffers = [
            f"{tuple(buffer.shape[1:])} {buffer.dtype}"
            for component in self._entry.components
            for buffer in component
        ]
        # The pool has layers of draft models too, so the mapping is a part of the order.
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

    def numbers(self) -> tuple[DType, int] | None:
        dtypes = {buffer.dtype for buffers in self._entry.components for buffer in buffers}
        dtype = DTYPES.get(dtypes.pop(), "uint8") if len(dtypes) == 1 else "uint8"
        if dtype == "uint8":
            return None
        alike = len({self.layer_bytes(layer) for layer in self._runs}) == 1
        return dtype, len(self._runs) if alike else 1

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one layer of one page."""
        return sum(run.stop - run.start for run in self._runs.get(layer, ()))

    def store(self, keys: Sequence[BlockKey], indices: Any) -> list[bool]:
        """Store pages of the pool. Returns for each whether the depot has it now. Does not wait for
        room."""
        rows = self._entry.prepare_locations(indices)

        def fill(pages: Sequence[int], views: Sequence[memoryview]) -> None:
            tickets = [
                self._mover.offload(
                    [self._pieces(run, rows[page]) for page in pages],
                    [view[run.start : run.stop] for view in views],
                )
                for run in self._whole
            ]
            for ticket in tickets:
                ticket.wait()

        @contextmanager
        def computed(page: int) -> Iterator[memoryview | None]:
            assert self._hits is not None
            with self._hits.scratch(keys[page]) as slot:
                view = slot.view(0)
                if view is not None:
                    fill([page], [view])
                yield view

        self._compare(keys, computed)
        return self._fill(keys, fill, _NO_WAIT_S)

    def lease(
        self, keys: Sequence[BlockKey], indices: Any, timeout_s: float
    ) -> "LeasedPages | None":
        """Bring pages to memory, verified, within `timeout_s`. None if a page is missing.

        Pages for which memory has no room are copied to the device at once.
        """
        rows = self._entry.prepare_locations(indices)
        views: dict[int, memoryview] = {}

        def collect(arrivals: list[Arrival]) -> None:
            for page in arrivals:
                views.pop(page.index, None)
                if page.lasting:
                    views[page.index] = page.view
            passing = [page for page in arrivals if not page.lasting]
            places = [rows[page.index] for page in passing]
            for ticket in self._onboard(self._whole, places, [page.view for page in passing]):
                ticket.synchronize()

        lease = self._depot.lease(keys)
        try:
            if len(lease) == len(keys) and all(
                lease.deliver(collect, verify_concurrently=True, timeout_s=timeout_s)
            ):
                pages = sorted(views)
                places = [rows[page] for page in pages]
                return LeasedPages(self, lease, places, [views[page] for page in pages])
        except BaseException:
            lease.release()
            raise
        lease.release()
        return None

    def onboard(
        self, layers: Sequence[int], rows: Sequence[int], views: Sequence[memoryview]
    ) -> list[OnboardTicket]:
        """Copy these layers of pages into the pool; layers without a part in it are skipped."""
        runs = _join([run for layer in layers for run in self._runs.get(layer, ())])
        return self._onboard(runs, rows, views)

    def _onboard(
        self, runs: Sequence[PageRun], rows: Sequence[int], views: Sequence[memoryview]
    ) -> list[OnboardTicket]:
        return [
            self._mover.onboard(
                [view[run.start : run.stop] for view in views],
                [self._pieces(run, row) for row in rows],
                layers_per_step=1,
            )
            for run in (runs if rows else ())
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
        """End the lease. The views must not be used any more."""
        self.rows, self.views = [], []
        self.lease.release()


def _runs(entry: Any) -> dict[int, list[PageRun]]:
    """The pieces of each layer of a page, in the order of the block. ModelError if a page has no
    contiguous memory."""
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
    row_bytes = buffer[0].nbytes
    if not buffer[0].is_contiguous() or (nbytes != row_bytes and step != row_bytes):
        raise ModelError(
            f"SGLang's pool {entry.name}: a page of shape {tuple(buffer.shape)} and strides "
            f"{buffer.stride()} is not contiguous"
        )


def _join(runs: Sequence[PageRun]) -> list[PageRun]:
    """Neighbours with pieces of one size become one run."""
    joined: list[PageRun] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and (last.stop, last.piece_bytes) == (run.start, run.piece_bytes):
            bases, steps = (
                np.concatenate(pair) for pair in ((last.bases, run.bases), (last.steps, run.steps))
            )
            joined[-1] = PageRun(last.start, run.piece_bytes, bases, steps)
        else:
            joined.append(run)
    return joined
