"""Tensors on a CUDA device: the copy engine crosses the bus, from the pages themselves if it can.

A copy of a rectangle takes one page in all layers, with no kernel beside the engine's: where layers
lie evenly and pages are large, this is the way. Else a slice of many pieces is packed in a staging
buffer by kernels, which takes microseconds, and crosses the bus in one copy for each block; a
kernel that reads host memory itself would occupy multiprocessors for the whole transfer.
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
    check_device,
    check_pairs,
    check_view,
)
from kvdepot.adapters.tensors.mover import Done, OffloadTicket, OnboardTicket, TensorMover
from kvdepot.adapters.tensors.pagelock import FollowedMemory, LockedMemory, PageLockError

SLICE_BYTES: Final = 32 << 20
_GROUP_SLICES: Final = 8
_LOOK_S: Final = 50e-6
_LOOK_LAZILY_S: Final = 500e-6
"""Nothing waits for an offload, and each look takes the interpreter lock from the engine."""
BUFFERS: Final = 3
_STREAM_PRIORITY: Final = -1
"""Before the model's: their kernels are short, and the bus idles until they have run.

Kernels beside the engine's stream, of whatever priority, leave an H200 with decode steps 3.5 %
longer until another process has used the device; rectangles do not.
"""
_TO_DEVICE: Final = 1
_TO_HOST: Final = 2
"""Kinds of cudaMemcpy2DAsync."""


@dataclass(frozen=True, slots=True)
class CudaOffloadTicket:
    """An offload under way; see `OffloadTicket`."""

    device: torch.device
    read: torch.cuda.Event
    done: torch.cuda.Event

    def wait(self) -> None:
        _sleep_until(self.done, _LOOK_LAZILY_S)

    def wait_read(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.read)


@dataclass(frozen=True, slots=True)
class CudaOnboardTicket:
    """An onboard under way; see `OnboardTicket`."""

    device: torch.device
    events: Sequence[torch.cuda.Event]
    layers_per_step: int

    def wait_layer(self, layer: int) -> None:
        step = self.events[layer // self.layers_per_step]
        torch.cuda.current_stream(self.device).wait_event(step)

    def synchronize(self) -> None:
        _sleep_until(self.events[-1])


@dataclass(slots=True)
class StagingBuffer:
    """Staging memory on the device."""

    memory: torch.Tensor
    filled: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    drained: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class CopyPipeline:
    """One direction between the device and the host: two streams with staging buffers between them.

    The first stream fills a buffer, the second drains it, and events keep them apart, so that the
    kernels of one slice run while the copy engine moves another.
    """

    def __init__(self, device: torch.device, slice_bytes: int) -> None:
        self.fill, self.drain = _stream(device), _stream(device)
        self.lock = threading.RLock()
        self._turn = 0
        # Memory of the stream's own pool: no other stream can still be using it.
        with torch.cuda.stream(self.fill):
            self._buffers = [
                StagingBuffer(torch.empty(slice_bytes, dtype=torch.uint8, device=device))
                for _ in range(BUFFERS)
            ]

    @contextmanager
    def use(self) -> Iterator[None]:
        """Give work, one thread at a time; after an exception nothing is under way."""
        with self.lock:
            try:
                yield
            except BaseException:
                self.synchronize()
                raise

    def next_buffer(self) -> StagingBuffer:
        """The buffer that was used longest ago."""
        self._turn += 1
        return self._buffers[self._turn % BUFFERS]

    @contextmanager
    def filling(self, buffer: StagingBuffer) -> Iterator[torch.Tensor]:
        """The fill stream is current, and comes to this when the buffer is free."""
        with torch.cuda.stream(self.fill):
            buffer.drained.wait()
            yield buffer.memory
            buffer.filled.record()

    @contextmanager
    def draining(self, buffer: StagingBuffer) -> Iterator[torch.Tensor]:
        """The drain stream is current, and comes to this when the buffer is full."""
        with torch.cuda.stream(self.drain):
            buffer.filled.wait()
            yield buffer.memory
            buffer.drained.record()

    def synchronize(self) -> None:
        self.fill.synchronize()
        self.drain.synchronize()

    def close(self) -> None:
        self.synchronize()
        self._buffers.clear()


class Mover(TensorMover):
    """Moves blocks between the tensors on one device and page-locked payloads; see `TensorMover`.

    `memory()` names the payloads' memory, and is followed where that becomes other memory: until it
    is locked every call is a BadBufferError. Holds two times three staging buffers of `slice_bytes`
    on the device. Raises PageLockError when the driver refuses memory, ExtraMissingError without
    triton, and torch's own errors for what fails on the device.
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
        # Tensors say which of the devices they are on; "cuda" alone has no index.
        index: int | None = torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._slice_bytes = max(slice_bytes, PIECE_BYTES_MAX)
        # What a caller's inference mode creates could not be written outside of it.
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
            return Done()
        ready = after or self.mark()
        places = _places(pieces, views, self.device, writable=True)
        pipe = self._down
        with torch.cuda.device(self.device), pipe.use():
            hosts = self._hosts(pieces, places)
            rectangles = self._rectangles(pieces, places)
            if rectangles is not None:
                _keep_until_done(pieces, pipe.drain)
                pipe.drain.wait_event(ready)
                self._copy(slices.turned(rectangles), _TO_HOST, pipe.drain)
                done = _recorded(pipe.drain)
                return CudaOffloadTicket(self.device, done, done)
            _keep_until_done(pieces, pipe.fill)
            pipe.fill.wait_event(ready)
            # Some blocks at a time: the bus starts on the first ones while the rest is prepared.
            group = max(1, _GROUP_SLICES * self._slice_bytes // pieces[0].nbytes)
            for start in range(0, len(pieces), group):
                self._offload(pieces[start : start + group], hosts[start : start + group])
            return CudaOffloadTicket(self.device, _recorded(pipe.fill), _recorded(pipe.drain))

    def _offload(self, pieces: Sequence[Pieces], hosts: Sequence[torch.Tensor]) -> None:
        pipe, shape = self._down, slices.BatchShape.of(pieces)
        table, words = self._table(slices.address_table(pieces), shape, pipe.fill)
        (step,) = slices.steps(shape, shape.layers, self._slice_bytes)
        for part in step.slices:
            buffer = pipe.next_buffer()
            with pipe.filling(buffer) as staging:
                self._kernels.gather(table, staging, words, part)
            with pipe.draining(buffer) as staging:
                for host, packed in _sides(part, hosts, staging):
                    host.copy_(packed, non_blocking=True)

    def onboard(
        self, views: Sequence[Any], pieces: Sequence[Pieces], *, layers_per_step: int | None = None
    ) -> OnboardTicket:
        if not pieces and not views:
            return Done()
        ready = self.mark()
        places = _places(pieces, views, self.device, writable=False)
        pipe, shape = self._up, slices.BatchShape.of(pieces)
        layers = slices.choose_layers_per_step(shape, layers_per_step)
        with pipe.use():
            hosts = self._hosts(pieces, places)
            events = self._onboard_rectangles(pieces, places, layers, ready)
            if events:
                return CudaOnboardTicket(self.device, events, layers)
            _keep_until_done(pieces, pipe.drain)
            pipe.drain.wait_event(ready)
            for step in slices.steps(shape, layers, self._slice_bytes):
                addresses = slices.address_table(pieces, step.layers)
                # On the fill stream: it would wait behind that stream's copies otherwise.
                table, words = self._table(addresses, shape, pipe.fill)
                table.record_stream(pipe.drain)
                for part in step.slices:
                    buffer = pipe.next_buffer()
                    with pipe.filling(buffer) as staging:
                        for host, packed in _sides(part, hosts, staging):
                            packed.copy_(host, non_blocking=True)
                    with pipe.draining(buffer) as staging:
                        self._kernels.scatter(table, staging, words, part)
                events.append(_recorded(pipe.drain))
            return CudaOnboardTicket(self.device, events, layers)

    def _onboard_rectangles(
        self, pieces: Sequence[Pieces], places: Sequence[int], layers: int, ready: torch.cuda.Event
    ) -> list[torch.cuda.Event]:
        """An event for each step of so many layers; none where it cannot be done."""
        steps = []
        for start in range(0, pieces[0].layer_count, layers):
            step = self._rectangles(pieces, places, slice(start, start + layers))
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
        self, pieces: Sequence[Pieces], places: Sequence[int], layers: slice = slice(None)
    ) -> slices.Rectangles | None:
        """Of all blocks; None where one has to go through staging buffers."""
        found: list[slices.Rectangles] = []
        for block, place in zip(pieces, places, strict=True):
            some = slices.rectangles(block, place, layers) if self._copy_rectangle else None
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
        """Nothing is under way, and nothing is given."""
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

    def _hosts(self, blocks: Sequence[Pieces], places: Sequence[int]) -> list[torch.Tensor]:
        """The payloads as tensors; BadBufferError if one is not in the page-locked memory."""
        pairs = zip(blocks, places, strict=True)
        return [self._memory.tensor(address, block.nbytes) for block, address in pairs]

    def _table(
        self, addresses: Addresses, shape: slices.BatchShape, stream: torch.cuda.Stream
    ) -> tuple[torch.Tensor, slices.Tile]:
        """The addresses on the device, and how their pieces are cut. They must come from
        page-locked memory: a copy from elsewhere would block the caller until the stream comes
        to it."""
        pinned = torch.from_numpy(addresses).pin_memory()
        with torch.cuda.stream(stream):
            table = pinned.to(self.device, non_blocking=True)
        return table, slices.choose_tile(addresses, shape.piece_bytes)

    def _compile(self) -> None:
        """Run both kernels once, as they are for large pieces, rather than in the first request."""
        pipe = self._up
        place = pipe.next_buffer().memory[: slices.TILE_BYTES]
        addresses = np.array([place.data_ptr()], np.int64)
        table, words = self._table(
            addresses, slices.BatchShape(1, 1, 1, slices.TILE_BYTES), pipe.drain
        )
        part = slices.StagingSlice(first=0, count=1, ranges=())
        with torch.cuda.stream(pipe.drain):
            staging = pipe.next_buffer().memory
            self._kernels.gather(table, staging, words, part)
            self._kernels.scatter(table, staging, words, part)
        pipe.synchronize()


def _places(
    blocks: Sequence[Pieces], views: Sequence[Any], device: torch.device, *, writable: bool
) -> list[int]:
    """The addresses of the payloads; every mistake of the caller is found here."""
    check_pairs(blocks, views)
    for block in blocks:
        check_device(block, device)
    pairs = zip(blocks, views, strict=True)
    return [check_view(block, view, writable=writable) for block, view in pairs]


def _copy_rectangle_address() -> int:
    """Of the runtime's cudaMemcpy2DAsync; 0 where there is none, as on ROCm."""
    with suppress(OSError, AttributeError):
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
        return ctypes.cast(runtime.cudaMemcpy2DAsync, ctypes.c_void_p).value or 0
    return 0


def _locked(memory: Sequence[memoryview], device: torch.device) -> LockedMemory:
    try:
        with torch.cuda.device(device):
            return LockedMemory(memory, torch.cuda.cudart())  # type: ignore[no-untyped-call]
    except PageLockError:
        # The runtime reports the code of a refused call again at the next launch: let it do so.
        with suppress(RuntimeError):
            torch.empty(1, device=device).fill_(1)
        raise


def _keep_until_done(blocks: Sequence[Pieces], stream: torch.cuda.Stream) -> None:
    """Memory of tensors that are dropped meanwhile is not given to others before the stream is
    past this call."""
    for tensors in {id(block.tensors): block.tensors for block in blocks}.values():
        for tensor in tensors:
            tensor.record_stream(stream)


def _sides(
    part: slices.StagingSlice, hosts: Sequence[torch.Tensor], staging: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each range of a slice, in the payload and in the staging buffer."""
    payloads = (hosts[one.block].narrow(0, one.payload_at, one.nbytes) for one in part.ranges)
    packed = (staging.narrow(0, one.staging_at, one.nbytes) for one in part.ranges)
    return list(zip(payloads, packed, strict=True))


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=_STREAM_PRIORITY)  # type: ignore[no-untyped-call]


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def _sleep_until(event: torch.cuda.Event, look_s: float = _LOOK_S) -> None:
    """Look now and then: the driver's own waiting spins, or wakes up milliseconds late."""
    while not event.query():  # type: ignore[no-untyped-call]
        time.sleep(look_s)
