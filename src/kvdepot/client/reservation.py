"""Slots of a daemon's store that the caller fills itself."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvdepot.client.connections import Session
from kvdepot.client.get import payload_in
from kvdepot.client.link import DaemonAwayError
from kvdepot.codec.record import HEAD_BYTES, TABLE_OFFSET, chunk_count
from kvdepot.core.block import Put
from kvdepot.core.depot import Reservation
from kvdepot.errors import LeaseError
from kvdepot.native import chunk_checksums
from kvdepot.store.write.put import NewBlock
from kvdepot.wire import messages
from kvdepot.wire.frames import FrameKind


@dataclass(frozen=True, slots=True)
class Batch:
    """As many slots of a reservation as fit in a frame."""

    number: int
    """What the daemon calls it."""
    start: int
    slots: dict[int, int]
    """Index, counted from `start`, to the slot's place."""


class RemoteReservation(Reservation):
    """Slots of a daemon's store. When the daemon is gone before `seal`, what was filled is lost:
    its outcomes become THROTTLED.
    """

    def __init__(
        self,
        session: Session | None,
        offers: Sequence[NewBlock],
        outcomes: list[Put],
        batches: list[Batch],
        away: tuple[float, Callable[[], None]],
    ) -> None:
        self.outcomes = outcomes
        self._session = session
        self._offers = offers
        self._batches = batches
        self._call_s, self._count_away = away
        self._open = {
            batch.start + index: location
            for batch in batches
            for index, location in batch.slots.items()
        }
        self._over = False

    def view(self, index: int) -> memoryview | None:
        location = self._open.get(index)
        if location is None or self._session is None:
            return None
        return payload_in(self._session.arena, location, self._offers[index].payload_bytes)

    def seal(self, indices: Iterable[int] | None = None) -> None:
        chosen = sorted(self._open if indices is None else indices)
        if any(index not in self._open for index in chosen):
            raise LeaseError("a slot was sealed that is not reserved")
        session = self._session
        if session is None or not chosen:
            return
        for index in chosen:
            self._checksum(session, index)
        for index in chosen:
            del self._open[index]
        try:
            self._seal(session, chosen)
        except DaemonAwayError:
            self._count_away()
            for index in chosen:
                self.outcomes[index] = Put.THROTTLED

    def close(self) -> None:
        if self._over:
            return
        self._over = True
        if self._session is None:
            return
        for batch in self._batches:
            if any(batch.start + index in self._open for index in batch.slots):
                self._session.tell(FrameKind.ABANDON, messages.Number(batch.number).body())
        self._open.clear()
        self._session.leave()

    def _checksum(self, session: Session, index: int) -> None:
        offer, location = self._offers[index], self._open[index]
        payload = payload_in(session.arena, location, offer.payload_bytes)
        chunks = chunk_count(offer.payload_bytes, offer.chunk_bytes)
        head = session.arena.view[location : location + HEAD_BYTES]
        table = head[TABLE_OFFSET : TABLE_OFFSET + 8 * chunks]
        chunk_checksums(payload, offer.chunk_bytes, table)

    def _seal(self, session: Session, chosen: list[int]) -> None:
        with session.link() as link:
            for batch in self._batches:
                mine = [at - batch.start for at in chosen if at - batch.start in batch.slots]
                if mine:
                    body = messages.with_table(batch.number, np.array(mine, "<u4"))
                    link.number(FrameKind.SEAL, body, self._call_s)
