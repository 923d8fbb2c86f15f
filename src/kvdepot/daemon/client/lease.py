"""A lease on blocks of a daemon's store."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvdepot.core.block import BlockKey, GetResult
from kvdepot.core.depot import Arrival, Lease, Sink
from kvdepot.daemon.client.connections import Connections, DaemonAwayError, Link, expect
from kvdepot.daemon.client.get import (
    AWAY,
    CORRUPT,
    answers_of,
    arrivals_of,
    batches,
    keys_of,
    payload_in,
)
from kvdepot.daemon.wire import messages
from kvdepot.daemon.wire.frames import Flag, Frame, FrameKind
from kvdepot.errors import LeaseError
from kvdepot.format.record import holds_key
from kvdepot.format.requests import Namespaces


@dataclass(slots=True)
class LeasedBatch:
    """As many blocks of a lease as fit in a frame."""

    number: int
    """What the daemon calls it."""
    start: int
    places: Any
    """Rows of messages.PLACE_DTYPE."""

    @property
    def stop(self) -> int:
        return self.start + len(self.places)


class RemoteLease(Lease):
    """When the daemon is gone the lease is over, without an error: nothing is in view, what is to
    be delivered is a miss, and views that are held stay readable.
    """

    def __init__(
        self,
        keys: list[BlockKey],
        parts: list[LeasedBatch],
        connections: Connections | None,
        namespaces: Namespaces,
        check_open: Callable[[], None],
    ) -> None:
        self.keys = keys
        self._parts = parts
        self._connections = connections
        self._namespaces = namespaces
        self._check_open = check_open

    def view(self, index: int) -> memoryview | None:
        self._check()
        position = range(len(self.keys))[index]
        connections = self._connections
        if connections is None or connections.over:
            return None
        part = next(part for part in self._parts if part.start <= position < part.stop)
        if part.places[position - part.start]["location"] == messages.NOWHERE:
            self._look_again(connections, part)
        place = part.places[position - part.start]
        if place["location"] == messages.NOWHERE:
            return None
        where, nbytes = int(place["location"]), int(place["nbytes"])
        return payload_in(connections.arena, where, nbytes).toreadonly()

    def deliver(
        self,
        sink: Sink,
        *,
        start: int = 0,
        stop: int | None = None,
        beside: bool = False,
        timeout_s: float | None = None,
    ) -> list[GetResult]:
        """If the daemon goes meanwhile all answers are false, also those for delivered blocks."""
        self._check()
        asked = range(len(self.keys))[start:stop]
        blocks = self._namespaces.blocks(self.keys[asked.start : asked.stop])
        sizes = blocks["payload_bytes"].tolist()
        answers = [AWAY] * len(asked)
        connections = self._connections
        if connections is None:
            return answers
        if timeout_s is None:
            timeout_s = connections.welcome.read_timeout_s
        deadline = time.monotonic() + timeout_s
        wrong: set[int] = set()

        def hand_over(frame: Frame, first: int, count: int) -> None:
            arrivals = []
            for location, index, staged in arrivals_of(frame, count)[1].tolist():
                memory = connections.staging if staged else connections.arena
                at = first - asked.start + index
                view = payload_in(memory, location, sizes[at]).toreadonly()
                if not holds_key(memory.view, location, self.keys[first + index]):
                    wrong.add(at)
                    continue
                arrivals.append(Arrival(first + index, view, not staged))
            if arrivals:
                sink(arrivals)

        try:
            with connections.link() as link:
                for part in self._parts:
                    first, last = max(part.start, asked.start), min(part.stop, asked.stop)
                    if first >= last:
                        continue
                    span = (first - part.start, last - part.start)
                    left_s = max(0.0, deadline - time.monotonic())
                    body = messages.Deliver(part.number, *span, beside, left_s).body()
                    serial = link.send(FrameKind.DELIVER, body)
                    take = partial(hand_over, first=first, count=last - first)
                    frame = _receive(link, serial, left_s + connections.call_s, take)
                    found = answers_of(frame, last - first)[1]
                    answers[first - asked.start : last - asked.start] = found
                    connections.check_intact()
        except DaemonAwayError:
            connections.count_away()
            return [AWAY] * len(asked)
        return [CORRUPT if at in wrong else answer for at, answer in enumerate(answers)]

    def _release(self) -> None:
        if self._connections is not None:
            numbers = np.array([part.number for part in self._parts if part.number], "<u8")
            if len(numbers):
                self._connections.tell(FrameKind.RELEASE, numbers.tobytes())
            self._connections.leave()

    def _look_again(self, connections: Connections, part: LeasedBatch) -> None:
        try:
            with connections.link() as link:
                body = messages.Number(part.number).body()
                frame = link.call(FrameKind.WHERE, body, connections.call_s)
                part.places = _places_of(frame, len(part.places))
        except DaemonAwayError:
            connections.count_away()

    def _check(self) -> None:
        if self._released:
            raise LeaseError("the lease was released")
        self._check_open()


def lease_blocks(
    connections: Connections, link: Link, keys: Sequence[BlockKey]
) -> list[LeasedBatch]:
    found = []
    for part in batches(keys):
        frame = link.call(FrameKind.LEASE, keys_of(keys, part), connections.call_s)
        number, rows = messages.table(expect(frame, FrameKind.LEASED).body, messages.PLACE_DTYPE)
        if len(rows) > len(part):
            raise DaemonAwayError("more blocks than were asked for")
        if len(rows):
            found.append(LeasedBatch(number, part.start, rows))
        if len(rows) < len(part):
            break
    return found


def _receive(link: Link, serial: int, limit_s: float, take: Callable[[Frame], object]) -> Frame:
    """Take what arrives, until the frame that ends it."""
    try:
        while (frame := link.answer(serial, limit_s)).kind is FrameKind.ARRIVED:
            lent = frame.flags & Flag.LENT
            try:
                take(frame)
            finally:
                if lent:
                    link.follow_up(serial, FrameKind.TAKEN)
    except DaemonAwayError:
        raise
    except BaseException:
        # The sink has raised: receive the rest, so that the connection can be used again.
        if take is not bool and link.is_open():
            _receive(link, serial, limit_s, bool)
        raise
    return frame


def _places_of(frame: Frame, count: int) -> Any:
    rows = messages.table(frame.body, messages.PLACE_DTYPE)[1]
    if frame.kind is not FrameKind.LEASED or len(rows) != count:
        raise DaemonAwayError("places that make no sense")
    return rows
