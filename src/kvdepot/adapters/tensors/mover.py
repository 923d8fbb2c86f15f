"""What a mover promises, on whichever device the tensors are."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from kvdepot.adapters.tensors.host import HostMover
from kvdepot.adapters.tensors.pieces import Pieces
from kvdepot.errors import BadBufferError


class Ticket(Protocol):
    """An offload under way."""

    def wait(self) -> None:
        """Block until every payload is complete. May be called again, and from any thread."""
        ...

    def wait_read(self) -> None:
        """Whatever the caller's current stream does next comes after the blocks were read.

        Does not block the caller.
        """
        ...


class Arrivals(Protocol):
    """An onboard under way."""

    def wait_layer(self, layer: int) -> None:
        """Whatever the caller's current stream does next finds this layer of all blocks in place.

        `layer` counts from the first layer of the pieces given. Does not block the caller.
        """
        ...

    def synchronize(self) -> None:
        """Block until all layers are in place and the payloads are not read any more."""
        ...


class BlockMover(Protocol):
    """Carries blocks between an engine's tensors and the payloads of a store.

    A mistake of the caller (sizes, devices, views outside the memory) is a BadBufferError, and
    nothing has been moved then. All blocks of one call come from tensors of one kind, with the same
    number of layers and pieces. Threads may share a mover.
    """

    @property
    def device(self) -> torch.device: ...

    def offload(self, pieces: Sequence[Pieces], views: Sequence[Any]) -> Ticket:
        """Copy each block into its view, as the caller's current stream leaves it.

        The views belong to the mover until `wait` of the ticket has returned, also when the caller
        no longer wants them. The tensors may be dropped, but not written on other streams.
        """
        ...

    def onboard(
        self, views: Sequence[Any], pieces: Sequence[Pieces], *, layers_per_step: int | None = None
    ) -> Arrivals:
        """Copy each view into its block, layer by layer, after what the caller's current stream
        has been given so far.

        Layers arrive in order, `layers_per_step` at a time, by default so many that copies are
        large enough for the bus. The views must stay as they are until `synchronize` has returned.
        """
        ...

    def close(self) -> None:
        """Wait for everything under way and let go of the memory. May be called again."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_mover(memory: Sequence[memoryview], device: torch.device | str) -> BlockMover:
    """The mover for tensors on `device` and payloads inside `memory` (`store.memory`).

    For a CUDA device the memory is page-locked until `close`, which took 1.8 s for 8 GiB beside an
    H200; see `cuda.Mover` for what it raises.
    """
    kind = torch.device(device)
    if kind.type == "cpu":
        return HostMover()
    if kind.type != "cuda":
        raise BadBufferError(f"tensors on {kind} cannot be moved, only on cpu and cuda")
    from kvdepot.adapters.tensors.cuda import Mover

    return Mover(memory, kind)
