"""Protection of blocks while they are in use, as a scope."""

from dataclasses import replace

from kvdepot.core.block import BlockKey, GetResult
from kvdepot.core.depot import Arrival, Lease, Sink
from kvdepot.errors import LeaseError
from kvdepot.format.record import HEAD_BYTES
from kvdepot.store.namespaces import Namespaces
from kvdepot.store.read.reader import Reader
from kvdepot.store.state.state import StoreState


class StoreLease(Lease):
    """A lease on blocks of a store in this process."""

    def __init__(
        self,
        state: StoreState,
        reader: Reader,
        namespaces: Namespaces,
        keys: list[BlockKey],
        rows: list[int],
    ) -> None:
        """`rows` are leased already."""
        self.keys = keys
        self._state = state
        self._reader = reader
        self._namespaces = namespaces
        self._rows = rows

    def view(self, index: int) -> memoryview | None:
        self._check()
        state, row = self._state, self._rows[index]
        with state.lock:
            state.check_open()
            memory = state.memory_of(row)
            if memory is None:
                return None
            end = HEAD_BYTES + state.catalog.nbytes[row]
            return memory.image(row)[HEAD_BYTES:end].toreadonly()

    def deliver(
        self,
        sink: Sink,
        *,
        start: int = 0,
        stop: int | None = None,
        beside: bool = False,
        timeout_s: float | None = None,
    ) -> list[GetResult]:
        self._check()
        part = range(len(self.keys))[start:stop]

        def shifted(arrivals: list[Arrival]) -> None:
            sink([replace(arrival, index=part[arrival.index]) for arrival in arrivals])

        reads = self._namespaces.whole_reads(self.keys[part.start : part.stop])
        if timeout_s is None:
            timeout_s = self._state.config.read_timeout
        with self._state.using():
            if not reads:
                return []
            target = shifted if part.start else sink
            return self._reader.fetch(
                reads, timeout_s, sink=target, beside=beside, counts_as_use=False
            )

    def _release(self) -> None:
        self._state.release(self._rows)

    def _check(self) -> None:
        if self._released:
            raise LeaseError("the lease was released")
