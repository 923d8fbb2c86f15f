"""Protection of blocks while they are in use, as a scope."""

from collections.abc import Callable
from dataclasses import replace

from kvdepot.core.block import BlockKey, Got
from kvdepot.errors import LeaseError
from kvdepot.store.read.request import Arrival, Sink
from kvdepot.store.read.scopes import LeaseScope

Deliver = Callable[[list[BlockKey], Sink, bool | None, float | None], list[Got]]


class Lease(LeaseScope):
    """The leading blocks of a prompt, protected from eviction until `release` or the end of `with`.

    `len(lease)` is how many blocks were resident; `keys` are theirs; `view(i)` is the payload of
    block i in place, read-only, if it is in memory; `deliver` brings blocks there from disk. Views
    must not be used after release.
    """

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
        self._release = release
        self._view = view
        self._deliver = deliver

    def view(self, index: int) -> memoryview | None:
        """Payload of one leased block where it lies in memory; None if it is on disk only."""
        if self._over:
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
        """Onboard without a copy: hand leased blocks, start <= i < stop, to `sink` where they lie.

        `sink` gets lists of Arrivals, in this thread, as blocks come: those in memory first, then
        what is read from disk, verified. One answer for each block asked for; a block with a false
        answer was not handed over. Returns after `timeout_s` (default ssd.read_timeout) plus the
        sink's own time. `verify` says whether blocks in memory are verified too (default
        dram.verify). What the sink raises is passed on; the lease goes on.
        """
        if self._over:
            raise LeaseError("the lease was released")
        part = range(len(self.keys))[start:stop]

        def shifted(arrivals: list[Arrival]) -> None:
            sink([replace(arrival, index=part[arrival.index]) for arrival in arrivals])

        keys = self.keys[part.start : part.stop]
        return self._deliver(keys, shifted if part.start else sink, verify, timeout_s)

    def release(self) -> None:
        """Give up the protection. A second call is an error."""
        if self._over:
            raise LeaseError("the lease was released already")
        self._over = True
        self._release(self._rows)
