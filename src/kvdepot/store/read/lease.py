"""Protection of blocks while they are in use, as a scope."""

from collections.abc import Callable
from dataclasses import replace

from kvdepot.core.block import BlockKey, Got
from kvdepot.core.depot import Arrival, Lease, Sink
from kvdepot.errors import LeaseError

Deliver = Callable[[list[BlockKey], Sink, bool | None, float | None], list[Got]]


class StoreLease(Lease):
    """A lease on blocks of a store in this process."""

    def __init__(
        self,
        keys: list[BlockKey],
        rows: list[int],
        release: Callable[[list[int]], None],
        view: Callable[[int], memoryview | None],
        deliver: Deliver,
    ) -> None:
        self.keys = keys
        self._rows = rows
        self._end = release
        self._view = view
        self._deliver = deliver

    def view(self, index: int) -> memoryview | None:
        if self._released:
            raise LeaseError("the lease was released")
        return self._view(self._rows[index])

    def deliver(
        self,
        sink: Sink,
        *,
        start: int = 0,
        stop: int | None = None,
        verify: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[Got]:
        if self._released:
            raise LeaseError("the lease was released")
        part = range(len(self.keys))[start:stop]

        def shifted(arrivals: list[Arrival]) -> None:
            sink([replace(arrival, index=part[arrival.index]) for arrival in arrivals])

        keys = self.keys[part.start : part.stop]
        return self._deliver(keys, shifted if part.start else sink, verify, timeout_s)

    def _release(self) -> None:
        self._end(self._rows)
