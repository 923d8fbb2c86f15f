"""Leases and reservations of a store in this process."""

from collections.abc import Callable, Iterable, Sequence

from kvdepot.core.block import ANSWERS, GetResult, PutResult
from kvdepot.core.depot import Arrival, Lease, Reservation, Sink
from kvdepot.core.keys import as_keys
from kvdepot.core.requests import Arrived
from kvdepot.depot import Namespaces
from kvdepot.errors import LeaseError
from kvdepot.store.engine import Caller, Engine
from kvdepot.store.state.state import BlockLease
from kvdepot.store.write.put import NewBlock


class StoreLease(Lease):
    """A lease on blocks of a store in this process."""

    def __init__(
        self,
        engine: Engine,
        caller: Caller,
        namespaces: Namespaces,
        lease: BlockLease,
    ) -> None:
        self.keys = as_keys(lease.words)
        self._engine = engine
        self._caller = caller
        self._namespaces = namespaces
        self._lease = lease

    def view(self, index: int) -> memoryview | None:
        self._check()
        address, nbytes = (column[index] for column in self._lease.places())
        if not address:
            return None
        return self._engine.payload(int(address), int(nbytes)).toreadonly()

    def deliver(
        self,
        sink: Sink,
        *,
        start: int = 0,
        stop: int | None = None,
        verify_concurrently: bool = False,
        timeout_s: float | None = None,
    ) -> list[GetResult]:
        self._check()
        part = range(len(self.keys))[start:stop]
        blocks = self._namespaces.blocks(self.keys[part.start : part.stop])
        if timeout_s is None:
            timeout_s = self._engine.state.config.read_timeout
        sizes, payload = blocks["payload_bytes"], self._engine.payload

        def hand_over(arrived: Arrived) -> None:
            rows = zip(
                arrived.indices.tolist(),
                arrived.addresses.tolist(),
                arrived.is_lasting.tolist(),
                sizes[arrived.indices].tolist(),
                strict=True,
            )
            sink(
                [
                    Arrival(part[index], payload(address, nbytes).toreadonly(), lasting)
                    for index, address, lasting, nbytes in rows
                ]
            )

        codes = self._engine.deliver(
            self._caller,
            self._lease,
            blocks,
            timeout_s,
            hand_over,
            first=part.start,
            verify_concurrently=verify_concurrently,
        )
        return [ANSWERS[code] for code in codes]

    def _release(self) -> None:
        self._lease.release()

    def _check(self) -> None:
        if self._released:
            raise LeaseError("the lease was released")


class StoreReservation(Reservation):
    """Slots of a store in this process."""

    def __init__(
        self,
        engine: Engine,
        caller: Caller,
        slots: Sequence[NewBlock | None],
        outcomes: list[PutResult],
        done: Callable[[], None],
    ) -> None:
        """`done` is called once, by `close`."""
        self.outcomes = outcomes
        self._engine = engine
        self._caller = caller
        self._open = {index: slot for index, slot in enumerate(slots) if slot is not None}
        self._done = done
        self._is_over = False

    def view(self, index: int) -> memoryview | None:
        slot = self._open.get(index)
        if slot is None:
            return None
        return self._engine.payload(self._engine.address_of(slot), slot.payload_bytes)

    def seal(self, indices: Iterable[int] | None = None) -> None:
        chosen = sorted(self._open if indices is None else indices)
        if any(index not in self._open for index in chosen):
            raise LeaseError("a slot was sealed that is not reserved")
        self._engine.seal(self._caller, [self._open.pop(index) for index in chosen])

    def close(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._engine.abandon(self._caller, list(self._open.values()))
        self._open.clear()
        self._done()
