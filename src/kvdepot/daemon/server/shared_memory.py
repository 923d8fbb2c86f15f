"""The store's memory as its clients map it."""

import numpy as np

from kvdepot.core.requests import Array
from kvdepot.daemon.wire.messages import NOWHERE
from kvdepot.store.engine import Engine


class SharedMemory:
    """The memory of a store that is opened with `dram.shared`: where an address lies for clients.

    They map the arena, then the slower memory if there is one, as one area, and staging as another.
    """

    def __init__(self, engine: Engine) -> None:
        self._memories = engine.memories
        self.descriptors = [memory.fd for memory in self._memories]
        self.nbytes = [memory.nbytes for memory in self._memories]

    def is_prefaulted(self) -> bool:
        """Whether all memory has been touched, or will not be."""
        return all(memory.prefaulted(0.0) for memory in self._memories)

    def places(self, addresses: Array) -> tuple[Array, Array]:
        """The place of each address in its area, NOWHERE for 0; and whether that is staging."""
        places, staged = np.full(len(addresses), NOWHERE, np.int64), np.zeros(len(addresses), bool)
        before = 0
        for memory in self._memories:
            is_staging = memory is self._memories[-1]
            here = (addresses >= memory.address) & (addresses < memory.address + memory.nbytes)
            places[here] = addresses[here] - memory.address + (0 if is_staging else before)
            staged |= here & is_staging
            before += memory.nbytes
        return places, staged
