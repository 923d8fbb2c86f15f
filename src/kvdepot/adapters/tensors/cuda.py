"""Tensors on a CUDA device: the copy engine moves blocks over the bus, from the pages if possible.

A copy of a rectangle takes one page in all layers, without a kernel. It is used if layers are
evenly spaced and pages are large. Otherwise kernels pack a slice of many pieces into a staging
buffer, which takes microseconds, and one copy for each block crosses the bus. A kernel that reads
host memory would occupy multiprocessors for the whole transfer.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from kvdepot import native
from kvdepot.adapters.tensors import slices
from kvdepot.adapters.tensors.kvtensors import (
    PIECE_BYTES_MAX,
    Addresses,
    Pieces,
    check_payloads,
)
from kvdepot.adapters.tensors.mover import (
    CompletedTicket,
    OffloadTicket,
    OnboardTicket,
    TensorMover,
)
from kvdepot.adapters.tensors.pagelock import FollowedMemory, LockedMemory, PageLockError

SLICE_BYTES: Final = 32 << 20
_GROUP_SLICES: Final = 8
_ONBOARD_LOOK_S: Final = 50e-6
_OFFLOAD_LOOK_S: Final = 500e-6
"""The engine does not wait for an offload, and each look takes the interpreter lock from it."""
BUFFERS: Final = 3
_STREAM_PRIORITY: Final = -1
"""Higher than the model's stream, because the kernels are short and the bus waits for them.

Kernels concurrent with the engine's stream, of any priority, make decode steps on an H200 3.5 %
longer until another process has used the device; rectangles do not.
"""
_TO_DEVICE: Final = 1
_TO_HOST: Final = 2
"""Kinds of cudaMemcpy2DAsync."""


@dataclass(frozen=True, slots=True)
class CudaOffloadTicket:
    device: torch.device
    read: torch.cuda.Event
    done: torch.cuda.Event

    def wait(self) -> None:
        _sleep_until(self.done, _OFFLOAD_LOOK_S)

    def wait_read(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.read)


@dataclass(frozen=True, slots=True)
class CudaOnboardTicket:
    device: torch.device
    events: Sequence[torch.cuda.Event]
    layers_per_step: int

    def wait_layer(self, layer: int) -> None:
        step = self.events[layer // self.layers_per_step]
        torch.cuda.current_stream(self.device).wait_event(step)

    def synchronize(self) -> None:
        _sleep_until(self.events[-1], _ONBOARD_LOOK_S)


@dataclass(slots=True)
class StagingBuffer:
    """Staging memory on the device."""

    memory: torch.Tensor
    filled: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    drained: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class CopyPipeline:
    """One direction between the device and the host: two streams with staging buffers between them.

    The first stream fills a buffer, the second drains it, and events keep them apart. So the
    kernels of one slice run while the copy engine moves another.
    """

    def __init__(self, device: torch.device, slice_bytes: int) -> None:
        self.fill, self.drain = _stream(device), _stream(device)
        self.lock = threading.RLock()
        self._used = 0
        # Memory of this stream's own pool: no other stream can still use it.
        with torch.cuda.stream(self.fill):
            self._buffers = [
                StagingBuffer(torch.empty(slice_bytes, dtype=torch.uint8, device=device))
                for _ in range(BUFFERS)
            ]

    @contextmanager
    def use(self) -> Iterator[None]:
        """One thread at a time submits work. After an exception no work is left."""
        with self.lock:
            try:
                yield
            except BaseException:
                self.synchronize()
                raise

    def stage(
        self, fill: Callable[[torch.Tensor], None], drain: Callable[[torch.Tensor], None]
    ) -> None:
        """Call `fill` on the first stream and `drain` on the second, with the least recently used
        buffer. On the device `fill` waits until the buffer is free, `drain` until it is full."""
        self._used += 1
        buffer = self._buffers[self._used % BUFFERS]
        with torch.cuda.stream(self.fill):
            buffer.drained.wait()
            fill(buffer.memory)
            buffer.filled.record()
        with torch.cuda.stream(self.drain):
            buffer.filled.wait()
            drain(buffer.memory)
            buffer.drained.record()

    def synchronize(self) -> None:
        self.fill.synchronize()
        self.drain.synchronize()

    def close(self) -> None:
        self.synchronize()
        self._buffers.clear()


class Mover(TensorMover):
    """Moves blocks between the tensors on one device and page-locked payloads; see `TensorMover`.

    `memory()` returns the payloads' memory; see `FollowedMemory` for memory that changes. The mover
    holds twice three staging buffers of `slice_bytes` on the device. Raises PageLockError if the
    driver refuses memory, ExtraMissingError without triton, and torch's errors if the device fails.
    """

    def __init__(
        self,
        memory: Callable[[], Sequence[memoryview]],
        device: torch.device | str,
        *,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        from kvdepot.adapters.tensors import kernels

        self._kernels = kernels
        # Tensors name the index of their device; the device "cuda" has no index.
        index: int | None = torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._slice_bytes = max(slice_bytes, PIECE_BYTES_MAX)
        # Tensors that are created in the caller's inference mode cannot be written outside of it.
        with torch.inference_mode(mode=False):
            self._down = CopyPipeline(self.device, self._slice_bytes)
            self._up = CopyPipeline(self.device, self._slice_bytes)
            self._compile()
            lock = partial(_locked, device=self.device)
            self._memory = FollowedMemory(memory, lock, self._paused)
        self._copy_rectangle = _copy_rectangle_address()

    def mark(self) -> torch.cuda.Event:
        return _recorded(torch.cuda.current_stream(self.device))

    def offload(
        self, pieces: Sequence[Pieces], views: Sequence[Any], *, after: Any = None
    ) -> OffloadTicket:
        if not pieces and not views:
            return CompletedTicket()
        ready = after or self.mark()
        addresses = check_payloads(pieces, views, self.device, writable=True)
        pipe = self._down
        with torch.cuda.device(self.device), pipe.use():
            hosts = self._hosts(pieces, addresses)
            rectangles = self._rectangles(pieces, addresses, to_device=False)
            if rectangles is not None:
                _keep_until_done(pieces, pipe.drain)
                pipe.drain.wait_event(ready)
                self._copy(rectangles, _TO_HOST, pipe.drain)
                done = _recorded(pipe.drain)
                return CudaOffloadTicket(self.device, done, done)
            _keep_until_done(pieces, pipe.fill)
            pipe.fill.wait_event(ready)
            # Some blocks at a time: the bus starts on the first ones while the rest is prepared.
            group = max(1, _GROUP_SLICES * self._slice_bytes // pieces[0].nbytes)
            for start in range(0, len(pieces), group):
                self._pack(pieces[start : start + group], hosts[start : start + group])
            return CudaOffloadTicket(self.device, _recorded(pipe.fill), _recorded(pipe.drain))

    def _pack(self, pieces: Sequence[Pieces], hosts: Sequence[torch.Tensor]) -> None:
        """Offload blocks through staging buffers."""
        pipe, shape = self._down, slices.BatchShape.of(pieces)
        table, tile = self._table(slices.address_table(pieces), shape.piece_bytes, pipe.fill)
        (step,) = slices.steps(shape, shape.layers, self._slice_bytes)
        for part in step.slices:
            pipe.stage(
                partial(self._kernels.gather, table, tile, part),
                partial(_copy_sides, part, hosts, to_device=False),
            )

    def onboard(
        self, views: Sequence[Any], pieces: Sequence[Pieces], *, layers_per_step: int | None = None
    ) -> OnboardTicket:
        if not pieces and not views:
            return CompletedTicket()
        ready = self.mark()
        addresses = check_payloads(pieces, views, self.device, writable=False)
        pipe, shape = self._up, slices.BatchShape.of(pieces)
        layers = slices.choose_layers_per_step(shape, layers_per_step)
        with pipe.use():
            hosts = self._hosts(pieces, addresses)
            events = self._onboard_rectangles(pieces, addresses, layers, ready)
            if events:
                return CudaOnboardTicket(self.device, events, layers)
            _keep_until_done(pieces, pipe.drain)
            pipe.drain.wait_event(ready)
            for step in slices.steps(shape, layers, self._slice_bytes):
                entries = slices.address_table(pieces, step.layers)
                # On the fill stream: on the drain stream it would wait behind that stream's copies.
                table, tile = self._table(entries, shape.piece_bytes, pipe.fill)
                table.record_stream(pipe.drain)
                for part in step.slices:
                    pipe.stage(
                        partial(_copy_sides, part, hosts, to_device=True),
                        partial(self._kernels.scatter, table, tile, part),
                    )
                events.append(_recorded(pipe.drain))
            return CudaOnboardTicket(self.device, events, layers)

    def _onboard_rectangles(
        self, pieces: Sequence[Pieces], addresses: Sequence[int], layers: int, ready: Any
    ) -> list[torch.cuda.Event]:
        """One event for each step of `layers` layers. Empty if a step has no rectangles."""
        steps = []
        for start in range(0, pieces[0].layer_count, layers):
            step = self._rectangles(pieces, addresses, slice(start, start + layers))
            if step is None:
                return []
            steps.append(step)
        stream = self._up.fill
        _keep_until_done(pieces, stream)
        stream.wait_event(ready)
        events = []
        for step in steps:
            self._copy(step, _TO_DEVICE, stream)
            events.append(_recorded(stream))
        return events

    def _rectangles(
        self,
        pieces: Sequence[Pieces],
        addresses: Sequence[int],
        layers: slice = slice(None),
        *,
        to_device: bool = True,
    ) -> slices.Rectangles | None:
        """The rectangles of all blocks. None if one block needs staging buffers."""
        found: list[slices.Rectangles] = []
        for block, address in zip(pieces, addresses, strict=True):
            some = None
            if self._copy_rectangle:
                some = slices.rectangles(block, address, layers, to_device=to_device)
            if some is None:
                return None
            found.append(some)
        return np.concatenate(found)

    def _copy(self, rectangles: slices.Rectangles, kind: int, stream: torch.cuda.Stream) -> None:
        with torch.cuda.device(self.device):
            code = native.copy_rectangles(
                self._copy_rectangle, rectangles, kind, stream.cuda_stream
            )
        if code:
            raise RuntimeError(f"the device refused a copy: CUDA error {code}")

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """No copy is in progress, and none starts."""
        with self._down.lock, self._up.lock:
            self._down.synchronize()
            self._up.synchronize()
            yield

    def close(self) -> None:
        self._memory.stop()
        with self._down.lock, self._up.lock:
            self._down.close()
            self._up.close()
            self._memory.close()

    def _hosts(self, blocks: Sequence[Pieces], addresses: Sequence[int]) -> list[torch.Tensor]:
        """The payloads as tensors. BadBufferError if one is not in the page-locked memory."""
        pairs = zip(blocks, addresses, strict=True)
        return [self._memory.tensor(address, block.nbytes) for block, address in pairs]

    def _table(
        self, entries: Addresses, piece_bytes: int, stream: torch.cuda.Stream
    ) -> tuple[torch.Tensor, slices.Tile]:
        """The addresses on the device, and the tile for their pieces. They are copied from
        page-locked memory: a copy from other memory would block until the stream comes to it."""
        pinned = torch.from_numpy(entries).pin_memory()
        with torch.cuda.stream(stream):
            table = pinned.to(self.device, non_blocking=True)
        return table, slices.choose_tile(entries, piece_bytes)

    def _compile(self) -> None:
        """Run both kernels once, as for large pieces, so that the first request does not wait."""
        place = torch.empty(slices.TILE_BYTES, dtype=torch.uint8, device=self.device)
        entries = np.array([place.data_ptr()], np.int64)
        table, tile = self._table(entries, slices.TILE_BYTES, self._up.fill)
        part = slices.StagingSlice(first=0, count=1, ranges=())
        self._up.stage(
            partial(self._kernels.gather, table, tile, part),
            partial(self._kernels.scatter, table, tile, part),
        )
        self._up.synchronize()


def _copy_rectangle_address() -> int:
    """The address of the runtime's cudaMemcpy2DAsync. 0 if there is none, as on ROCm."""
    with suppress(OSError, AttributeError):
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
        return ctypes.cast(runtime.cudaMemcpy2DAsync, ctypes.c_void_p).value or 0
    return 0


def _locked(memory: Sequence[memoryview], device: torch.device) -> LockedMemory:
    try:
        with torch.cuda.device(device):
            return LockedMemory(memory, torch.cuda.cudart())  # type: ignore[no-untyped-call]
    except PageLockError:
        # The runtime reports the code of a refused call once more, at the next launch: do one here.
        with suppress(RuntimeError):
            torch.empty(1, device=device).fill_(1)
        raise


def _keep_until_done(blocks: Sequence[Pieces], stream: torch.cuda.Stream) -> None:
    """Keep memory of tensors that are dropped from others until the stream is past this call."""
    for tensors in {id(block.tensors): block.tensors for block in blocks}.values():
        for tensor in tensors:
            tensor.record_stream(stream)


def _copy_sides(
    part: slices.StagingSlice,
    hosts: Sequence[torch.Tensor],
    staging: torch.Tensor,
    *,
    to_device: bool,
) -> None:
    """Copy each range of a slice between the payload and the staging buffer."""
    for staged in part.ranges:
        payload = hosts[staged.block].narrow(0, staged.payload_at, staged.nbytes)
        packed = staging.narrow(0, staged.staging_at, staged.nbytes)
        target, source = (packed, payload) if to_device else (payload, packed)
        target.copy_(source, non_blocking=True)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=_STREAM_PRIORITY)  # type: ignore[no-untyped-call]


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _sleep_until(event: torch.cuda.Event, look_s: float) -> None:
    """Look every `look_s` seconds: the driver's own waiting spins or wakes up late."""
    while not event.query():  # type: ignore[no-untyped-call]
        time.sleep(look_s)
