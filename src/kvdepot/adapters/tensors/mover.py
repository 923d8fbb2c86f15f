"""Copying blocks between an engine's tensors and a store's memory: contract and host mover.

`open_mover` chooses by device: `HostMover` copies with native code without the interpreter lock,
`cuda.Mover` with the device's copy engine.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, Self

import numpy as np
import torch

from kvdepot import native
from kvdepot.adapters.tensors.kvtensors import Pieces, check_device, check_pairs, check_view
from kvdepot.errors import BadBufferError

_CPU: Final = torch.device("cpu")


class OffloadTicket(Protocol):
    """An offload under way."""

    def wait(self) -> None:
        """Block until every payload is complete. May be called again, and from any thread."""

    def wait_read(self) -> None:
        """Order the caller's current stream after the reading of the blocks, without blocking."""


class OnboardTicket(Protocol):
    """An onboard under way."""

    def wait_layer(self, layer: int) -> None:
        """Order the caller's current stream after this layer of all blocks, without blocking.

        `layer` counts from the first layer of the pieces given.
        """

    def synchronize(self) -> None:
        """Block until all layers are in place and the payloads are not read any more."""


class TensorMover(Protocol):
    """Copies blocks between an engine's tensors and the payloads of a store.

    A mistake of the caller (sizes, devices, views outside the memory) is a BadBufferError, and
    nothing has been moved then. All blocks of one call come from tensors of one kind, with the same
    number of layers and pieces. Threads may share a mover.
    """

    device: torch.device

    @abstractmethod
    def mark(self) -> Any:
        """This point of the caller's current stream, for `offload` in another thread; None where
        tensors are in host memory."""

    @abstractmethod
    def offload(
        self, pieces: Sequence[Pieces], views: Sequence[Any], *, after: Any = None
    ) -> OffloadTicket:
        """Copy each block into its view, as the caller's current stream leaves it, or as it was
        at the mark `after`.

        The views belong to the mover until `wait` of the ticket has returned, also when the caller
        no longer wants them. The tensors may be dropped, but not written on other streams.
        """

    @abstractmethod
    def onboard(
        self, views: Sequence[Any], pieces: Sequence[Pieces], *, layers_per_step: int | None = None
    ) -> OnboardTicket:
        """Copy each view into its block, layer by layer, after what the caller's current stream
        has been given so far.

        Layers arrive in order, `layers_per_step` at a time, by default so many that copies are
        large enough for the bus. The views must stay as they are until `synchronize` has returned.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for everything under way and let go of the memory. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_mover(
    memory: Callable[[], Sequence[memoryview]], device: torch.device | str
) -> TensorMover:
    """The mover for tensors on `device` and payloads inside `memory()`, a store's `memory`.

    For a CUDA device the memory is page-locked until `close`, which took 1.8 s for 8 GiB beside an
    H200. After a daemon's restart a store has other memory: the old is unlocked and the new locked,
    and blocks are refused meanwhile. See `cuda.Mover` for what it raises.
    """
    kind = torch.device(device)
    if kind.type == "cpu":
        return HostMover()
    if kind.type != "cuda":
        raise BadBufferError(f"tensors on {kind} cannot be moved, only on cpu and cuda")
    from kvdepot.adapters.tensors.cuda import Mover

    return Mover(memory, kind)


class Done:
    """Either ticket, for copies that are over when the call returns."""

    def wait(self) -> None: ...

    def wait_read(self) -> None: ...

    def wait_layer(self, layer: int) -> None: ...

    def synchronize(self) -> None: ...


class HostMover(TensorMover):
    """Tensors in host memory. Every call is synchronous."""

    device = _CPU

    def mark(self) -> None: ...

    def offload(self, pieces: Sequence[Pieces], views: Sequence[Any], *, after: Any = None) -> Done:
        return _copy(
            pieces, views, lambda records, view: native.gather(view, records), writable=True
        )

    def onboard(
        self, views: Sequence[Any], pieces: Sequence[Pieces], *, layers_per_step: int | None = None
    ) -> Done:
        return _copy(pieces, views, native.scatter, writable=False)

    def close(self) -> None:
        pass


def _copy(
    blocks: Sequence[Pieces],
    views: Sequence[Any],
    copy: Callable[[Any, Any], object],
    *,
    writable: bool,
) -> Done:
    check_pairs(blocks, views)
    for block, view in zip(blocks, views, strict=True):
        check_device(block, _CPU)
        check_view(block, view, writable=writable)
    for block, view in zip(blocks, views, strict=True):
        records = np.zeros(block.addresses.size, native.STRIDED_DTYPE)
        records["address"] = block.addresses.ravel()
        records["rows"] = 1
        records["row_bytes"] = block.piece_bytes
        copy(records, view)
    return Done()
