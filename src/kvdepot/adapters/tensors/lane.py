"""One direction between a CUDA device and the host: two streams with staging buffers between them.

The first stream fills a buffer, the second drains it, and events keep them apart, so that the
kernels of one slice run while the copy engine moves another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import torch

BUFFERS: Final = 3
_BEFORE_THE_MODEL: Final = -1
"""Priority of the streams: their kernels are short, and the bus idles until they have run."""


@dataclass(slots=True)
class Buffer:
    """Staging memory on the device."""

    memory: torch.Tensor
    filled: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    drained: torch.cuda.Event = field(default_factory=torch.cuda.Event)


class Lane:
    """Two streams and the staging buffers that go round between them."""

    def __init__(self, device: torch.device, slice_bytes: int) -> None:
        self.fill, self.drain = _stream(device), _stream(device)
        self.lock = threading.RLock()
        self._turn = 0
        # Memory of the stream's own pool: no other stream can still be using it.
        with torch.cuda.stream(self.fill):
            self._buffers = [
                Buffer(torch.empty(slice_bytes, dtype=torch.uint8, device=device))
                for _ in range(BUFFERS)
            ]

    @contextmanager
    def use(self) -> Iterator[None]:
        """Give work to the lane, one thread at a time; after an exception nothing is under way."""
        with self.lock:
            try:
                yield
            except BaseException:
                self.synchronize()
                raise

    def next_buffer(self) -> Buffer:
        """The buffer that was used longest ago."""
        self._turn += 1
        return self._buffers[self._turn % BUFFERS]

    @contextmanager
    def filling(self, buffer: Buffer) -> Iterator[torch.Tensor]:
        """The fill stream is current, and comes to this when the buffer is free."""
        with torch.cuda.stream(self.fill):
            buffer.drained.wait()
            yield buffer.memory
            buffer.filled.record()

    @contextmanager
    def draining(self, buffer: Buffer) -> Iterator[torch.Tensor]:
        """The drain stream is current, and comes to this when the buffer is full."""
        with torch.cuda.stream(self.drain):
            buffer.filled.wait()
            yield buffer.memory
            buffer.drained.record()

    def synchronize(self) -> None:
        """Block until nothing is under way."""
        self.fill.synchronize()
        self.drain.synchronize()

    def close(self) -> None:
        """Wait, and give the staging memory back."""
        self.synchronize()
        self._buffers.clear()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=_BEFORE_THE_MODEL)  # type: ignore[no-untyped-call]
