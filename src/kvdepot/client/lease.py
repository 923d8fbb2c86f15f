"""A lease on blocks of a daemon's store."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.client.connections import Session
from kvdepot.client.get import AWAY, answers_of, arrivals_of, payload_in
from kvdepot.client.link import DaemonAwayError, Link
from kvdepot.core.block import BlockKey, Got
from kvdepot.core.depot import Arrival, Lease, Sink
from kvdepot.errors import LeaseError
from kvdepot.store.namespaces import Namespaces
from kvdepot.wire import messages
from kvdepot.wire.frames import Flag, Frame, FrameKind

_AS_CONFIGURED: Final = 2


@dataclass(slots=True)
class Part:
    """As many blocks of a lease as fit in a frame."""

    number: int
    """What the daemon calls it."""
    start: int
    places: Any
    """Rows of messages.PLACE_DTYPE."""

    @property
    def stop(self) -> int:
        return self.start + len(self.places)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a lease needs of the store that gave it."""

    spaces: Namespaces
    call_s: float
    read_timeout_s: float
    check_open: Callable[[], None]
    count_away: Callable[[], None]


class RemoteLease(Lease):
    """When the daemon is gone the lease is over, without an error: nothing is in view, what is to
    be delivered is a miss, and views that are held stay readable.
    """

    def __init__(
        self, keys: list[BlockKey], parts: list[Part], session: Session | None, terms: Terms
    ) -> None:
        self.keys = keys
        self._parts = parts
        self._session = session
        self._terms = terms

    def view(self, index: int) -> memoryview | None:
        self._check()
        position = range(len(self.keys))[index]
        session = self._session
        if session is None or session.over:
            return None
        part = next(part for part in self._parts if part.start <= position < part.stop)
        place = part.places[position - part.start]
        if place["location"] == messages.NOWHERE:
            self._look_again(session, part)
            place = part.places[position - part.start]
        if place["location"] == messages.NOWHERE:
            return None
        where, nbytes = int(place["location"]), int(place["nbytes"])
        return payload_in(session.arena, where, nbytes).toreadonly()

    def deliver(
        self,
        sink: Sink,
        *,
        start: int = 0,
        stop: int | None = None,
        verify: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[Got]:
        """If the daemon goes meanwhile all answers are false, also for blocks
        that were handed over.
        """
        self._check()
        asked = range(len(self.keys))[start:stop]
        self._terms.spaces.whole_reads(self.keys[asked.start : asked.stop])
        answers = [AWAY] * len(asked)
        session = self._session
        if session is None:
            return answers
        if timeout_s is None:
            timeout_s = self._terms.read_timeout_s
        courier = Courier(self, session, sink, verify, timeout_s)
        try:
            with session.link() as link:
                for part in self._parts:
                    first, last = max(part.start, asked.start), min(part.stop, asked.stop)
                    if first < last:
                        found = courier.deliver(link, part, range(first, last))
                        answers[first - asked.start : last - asked.start] = found
        except DaemonAwayError:
            self._terms.count_away()
            answers = [AWAY] * len(asked)
        return answers

    def _release(self) -> None:
        if self._session is not None:
            self._session.release([part.number for part in self._parts])
            self._session.leave()

    def block_bytes(self, index: int) -> int:
        """Length of a block's payload."""
        return self._terms.spaces.of(self.keys[index]).block_bytes

    @property
    def call_s(self) -> float:
        return self._terms.call_s

    def _look_again(self, session: Session, part: Part) -> None:
        try:
            with session.link() as link:
                body = messages.Number(part.number).body()
                frame = link.call(FrameKind.WHERE, body, self._terms.call_s)
                part.places = places_of(frame, len(part.places))
        except DaemonAwayError:
            self._terms.count_away()

    def _check(self) -> None:
        if self._released:
            raise LeaseError("the lease was released")
        self._terms.check_open()


class Courier:
    """Hands arriving blocks to the caller's sink."""

    def __init__(
        self,
        lease: RemoteLease,
        session: Session,
        sink: Sink,
        verify: bool | None,
        timeout_s: float,
    ) -> None:
        self._lease = lease
        self._session = session
        self._sink = sink
        self._verify = _AS_CONFIGURED if verify is None else int(verify)
        self._timeout_s = timeout_s

    def deliver(self, link: Link, part: Part, asked: range) -> list[Got]:
        """Blocks of one part."""
        start, stop = asked.start - part.start, asked.stop - part.start
        body = messages.Deliver(part.number, start, stop, self._verify, self._timeout_s).body()
        serial = link.send(FrameKind.DELIVER, body)
        try:
            frame = self._receive(link, serial, lambda arrived: self._hand_over(arrived, asked))
        except DaemonAwayError:
            raise
        except BaseException:
            # The sink has raised: hear the daemon out, so that the connection can be used again.
            if link.is_open():
                self._receive(link, serial, bool)
            raise
        answers = answers_of(frame, len(asked))[1]
        if not self._session.is_intact():
            raise DaemonAwayError("the daemon went while its blocks were read")
        return answers

    def _receive(self, link: Link, serial: int, take: Callable[[Frame], object]) -> Frame:
        """Take what arrives, until the frame that ends it."""
        limit_s = self._timeout_s + self._lease.call_s
        while (frame := link.answer(serial, limit_s)).kind is FrameKind.ARRIVED:
            lent = frame.flags & Flag.LENT
            try:
                take(frame)
            finally:
                if lent:
                    link.follow_up(serial, FrameKind.TAKEN)
        return frame

    def _hand_over(self, frame: Frame, asked: range) -> None:
        arrivals = []
        for location, index, staged in arrivals_of(frame, len(asked))[1].tolist():
            memory = self._session.staging if staged else self._session.arena
            nbytes = self._lease.block_bytes(asked[index])
            view = payload_in(memory, location, nbytes).toreadonly()
            arrivals.append(Arrival(asked[index], view, not staged))
        self._sink(arrivals)


def places_of(frame: Frame, count: int) -> Any:
    """What LEASED says of `count` blocks."""
    rows = messages.table(frame.body, messages.PLACE_DTYPE)[1]
    if frame.kind is not FrameKind.LEASED or len(rows) != count:
        raise DaemonAwayError("places that make no sense")
    return rows
