"""Offloading in place: slots in memory that the caller fills itself."""

from collections.abc import Callable, Iterable, Sequence

from kvdepot.core.block import Put
from kvdepot.core.depot import Reservation
from kvdepot.errors import LeaseError
from kvdepot.store.write.put import Offer, Putter


class StoreReservation(Reservation):
    """Slots of a store in this process."""

    def __init__(
        self,
        putter: Putter,
        offers: Sequence[Offer],
        outcomes: list[Put],
        done: Callable[[], None],
    ) -> None:
        self.outcomes = outcomes
        self._putter = putter
        self._open = {
            index: offer
            for index, (offer, outcome) in enumerate(zip(offers, outcomes, strict=True))
            if outcome is Put.STORED
        }
        self._done = done
        self._over = False

    def view(self, index: int) -> memoryview | None:
        offer = self._open.get(index)
        return None if offer is None else self._putter.payload(offer)

    def seal(self, indices: Iterable[int] | None = None) -> None:
        chosen = sorted(self._open if indices is None else indices)
        if any(index not in self._open for index in chosen):
            raise LeaseError("a slot was sealed that is not reserved")
        self._putter.finish([self._open.pop(index) for index in chosen])

    def close(self) -> None:
        if self._over:
            return
        self._over = True
        self._putter.abandon(list(self._open.values()))
        self._open.clear()
        self._done()
