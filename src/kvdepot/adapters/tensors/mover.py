"""Copies of blocks between an engine's tensors and a depot's memory: the contract, and the mover
for tensors in host memory. `cuda.Mover` is the one for CUDA devices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, Self

import numpy as np
import torch

from kvdepot import native
from kvdepot.adapters.tensors.kvtensors import Pieces, check_payloads
from kvdepot.errors import BadBufferError

_CPU: Final = torch.device("cpu")


class OffloadTicket(Protocol):
    """An offload that was started."""

    def wait(self) -> None:
        """Block until every payload is complete. Any thread may call it, more than once."""

    def wait_read(self) -> None:
        """Make the caller's current stream wait until the blocks have been read. Does not block."""


class OnboardTicket(Protocol):
    """An onboard that was started."""

    def wait_layer(self, layer: int) -> None:
        """Make the caller's current stream wait for this layer of all blocks. Does not block.

        `layer` counts from the first layer of the pieces given.
        """

    def synchronize(self) -> None:
        """Block until all layers are in place and the payloads are not read any more."""


class TensorMover(Protocol):
    """Copies blocks between an engine's tensors and payloads in a depot's memory.

    A mistake of the caller (sizes, devices, views outside the memory) raises BadBufferError before
    anything is copied. All blocks of one call have the same number of layers and pieces. Threads
    may share a mover.
    """

    device: torch.device

    @abstractmethod
    def mark(self) -> Any:
        """The current point of the caller's stream, for `offload` in another thread. None if the
        tensors are in host memory."""

    @abstractmethod
    def offload(
        self, pieces: Sequence[Pieces], views: Sequence[Any], *, after: Any = None
    ) -> OffloadTicket:
        """Copy each block into its view, as of the caller's current stream, or as of the mark
        `after`.

        The mover uses the views until `wait` of the ticket has returned. The caller may drop the
        tensors, but must not write to them on other streams.
        """

    @abstractmethod
    def onboard(
        self, views: Sequence[Any], pieces: Sequence[Pieces], *, layers_per_step: int | None = None
    ) -> OnboardTicket:
        """Copy each view into its block, in the order of layers, after the work that the caller's
        current stream has so far.

        `layers_per_step` layers are copied together; by default as many as make a copy large enough
        for the bus. The views must not change until `synchronize` has returned.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for all copies and unlock the memory. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_mover(
    memory: Callable[[], Sequence[memoryview]], device: torch.device | str
) -> TensorMover:
    """The mover for tensors on `device` and payloads inside `memory()`, a depot's `memory`.

    For a CUDA device the memory is page-locked until `close`; 8 GiB took 1.8 s on a machine with an
    H200. After the restart of a daemon the new memory is locked instead; calls in between raise
    BadBufferError. `cuda.Mover` lists what else it raises.
    """
    kind = torch.device(device)
    if kind.type == "cpu":
        return HostMover()
    if kind.type != "cuda":
        raise BadBufferError(f"tensors on {kind} cannot be moved, only on cpu and cuda")
    from kvdepot.adapters.tensors.cuda import Mover

    return Mover(memory, kind)


class CompletedTicket:
    """A ticket for copies that ended before the call returned."""

    def wait(self) -> None: ...

    def wait_read(self) -> None: ...

    def wait_layer(self, layer: int) -> None: ...

    def synchronize(self) -> None: ...


class HostMover(TensorMover):
    """Tensors in host memory. Native code copies, without the interpreter lock, in the call."""

    device = _CPU

    def mark(self) -> None: ...

    def offload(
        self, pieces: Sequence[Pieces], views: Sequence[Any], *, after: Any = None
    ) -> CompletedTicket:
        check_payloads(pieces, views, _CPU, writable=True)
        for block, view in zip(pieces, views, strict=True):
            native.gather(view, _records(block))
        return CompletedTicket()

    def onboard(
        self, views: Sequence[Any], pieces: Sequence[Pieces], *, layers_per_step: int | None = None
    ) -> CompletedTicket:
        check_payloads(pieces, views, _CPU, writable=False)
        for block, view in zip(pieces, views, strict=True):
            native.scatter(_records(block), view)
        return CompletedTicket()

    def close(self) -> None:
        pass


def _records(block: Pieces) -> Any:
    """The pieces of a block as the native code takes them."""
    records = np.zeros(block.addresses.size, native.STRIDED_DTYPE)
    records["address"] = block.addresses.ravel()
    records["rows"] = 1
    records["row_bytes"] = block.piece_bytes
    return records
