"""Offloading in place: slots in memory that the caller fills itself."""

from collections.abc import Callable, Iterable, Sequence

from kvdepot.core.block import Put
from kvdepot.errors import LeaseError
from kvdepot.store.read.scopes import ReservationScope
from kvdepot.store.write.put import Offer, Putter


class Reservation(ReservationScope):
    """Slots for new blocks, until `close` or the end of `with`: what is not sealed is given back.

    `outcomes` has one answer for each key: STORED blocks have a slot to fill (`view`) and become
    blocks of the store with `seal`; all others need nothing. THROTTLED ones did not fit beside
    those before them: seal these, then reserve again. Not thread-safe.
    """

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
        """The payload of a slot, to be filled; None where there is none. Not to be used after
        `seal` or `close`.
        """
        offer = self._open.get(index)
        return None if offer is None else self._putter.payload(offer)

    def seal(self, indices: Iterable[int] | None = None) -> None:
        """These slots, or all, are filled: checksum them, make them blocks, queue them for disk.

        Head first; a block is worth nothing without those before it.
        """
        chosen = sorted(self._open if indices is None else indices)
        if any(index not in self._open for index in chosen):
            raise LeaseError("a slot was sealed that is not reserved")
        self._putter.finish([self._open.pop(index) for index in chosen])

    def close(self) -> None:
        """Give back the slots that were not sealed. May be called twice."""
        if self._over:
            return
        self._over = True
        self._putter.abandon(list(self._open.values()))
        self._open.clear()
        self._done()
