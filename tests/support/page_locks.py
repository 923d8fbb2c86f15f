"""Stand-ins for a CUDA device that page-locks a store's memory: no CUDA is needed."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from kvdepot.adapters.tensors import HostMover
from kvdepot.adapters.tensors.pagelock import FollowedMemory, LockedMemory
from kvdepot.native import address_of

REFUSED = 2


class CardsDriver:
    """Stands in for the CUDA runtime: keeps a list, and refuses ranges longer than `most` bytes."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.most = most
        self.locked: dict[int, int] = {}
        self.most_locked = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if nbytes > self.most or address in self.locked:
            return REFUSED
        self.locked[address] = nbytes
        self.most_locked = max(self.most_locked, sum(self.locked.values()))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return f"refused with {error}"


class CudaStandIn(HostMover):
    """Copies in host memory as `cuda.Mover` does between host and device: payloads must lie in
    memory that is locked, with a stand-in for the runtime's register call."""

    device = torch.device("cuda")

    def __init__(self, memory: Callable[[], Sequence[memoryview]]) -> None:
        self.driver = CardsDriver()
        lock = lambda views: LockedMemory(views, self.driver)  # noqa: E731
        self.memory = FollowedMemory(memory, lock, nullcontext, look_s=0.01)

    def mark(self) -> Any:
        return "now"

    def offload(self, pieces: Sequence[Any], views: Sequence[Any], *, after: Any = None) -> Any:
        self._check(views)
        return super().offload(pieces, views)

    def onboard(self, views: Sequence[Any], pieces: Sequence[Any], **more: Any) -> Any:
        self._check(views)
        return super().onboard(views, pieces, **more)

    def close(self) -> None:
        self.memory.stop()
        self.memory.close()

    def _check(self, views: Sequence[Any]) -> None:
        for view in views:
            self.memory.tensor(*address_of(view))
