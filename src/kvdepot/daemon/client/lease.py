"""A lease on blocks of a daemon's store."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvdepot.core.block import ANSWERS, BlockKey, GetResult
from kvdepot.core.depot import Arrival, Lease, Sink
from kvdepot.core.keys import Keys
from kvdepot.daemon.client.connections import (
    AWAY,
    CORRUPT,
    Connections,
    DaemonAwayError,
    Link,
    answers_of,
    arrivals_of,
    batches,
    expect,
    keys_of,
    payload_in,
)
from kvdepot.daemon.wire import frames
from kvdepot.daemon.wire.frames import Flag, Frame, FrameKind
from kvdepot.depot import Namespaces
from kvdepot.errors import LeaseError
from kvdepot.format.record import holds_key


@dataclass(slots=True)
class LeasedBatch:
    """The part of a lease that fits in one frame."""

    number: int
    """The daemon's number of it."""
    start: int
    places: Any
    """Rows of frames.PLACE_DTYPE."""

    @property
    def stop(self) -> int:
        return self.start + len(self.places)


class RemoteLease(Lease):
    """A lease that ends without an error when the daemon ends.

    `view` then returns None and `deliver` answers with misses. Views that are held stay readable.
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
        if part.places[position - part.start]["location"] == frames.NOWHERE:
            self._look_again(connections, part)
        place = part.places[position - part.start]
        if place["location"] == frames.NOWHERE:
            return None
        where, nbytes = int(place["location"]), int(place["nbytes"])
        try:
            return payload_in(connections.arena, where, nbytes).toreadonly()
        except DaemonAwayError:
            return None

    def deliver(
        self,
        sink: Sink,
        *,
        start: int = 0,
        stop: int | None = None,
        verify_concurrently: bool = False,
        timeout_s: float | None = None,
    ) -> list[GetResult]:
        """If the daemon ends during the call, all answers are false, even for delivered blocks."""
        self._check()
        asked = range(len(self.keys))[start:stop]
        blocks = self._namespaces.blocks(self.keys[asked.start : asked.stop])
        sizes = blocks["payload_bytes"].tolist()
        answers = np.full(len(asked), AWAY, np.uint8)
        connections = self._connections
        if connections is None:
            return [ANSWERS[AWAY]] * len(asked)
        if timeout_s is None:
            timeout_s = connections.welcome.read_timeout_s
        deadline = time.monotonic() + timeout_s
        wrong: set[int] = set()

        def hand_over(frame: Frame, first: int, count: int) -> None:
            arrivals = []
            lasting = not frame.flags & Flag.LENT
            for location, index, staged in arrivals_of(frame, count)[1].tolist():
                memory = connections.staging if staged else connections.arena
                at = first - asked.start + index
                view = payload_in(memory, location, sizes[at]).toreadonly()
                if not holds_key(memory.view, location, self.keys[first + index]):
                    wrong.add(at)
                    continue
                arrivals.append(Arrival(first + index, view, lasting))
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
                    body = frames.Deliver(part.number, *span, verify_concurrently, left_s).body()
                    serial = link.send(FrameKind.DELIVER, body)
                    take = partial(hand_over, first=first, count=last - first)
                    frame = _receive(link, serial, left_s + connections.call_s, take)
                    found = answers_of(frame, last - first)[1]
                    answers[first - asked.start : last - asked.start] = found
                    connections.check_intact()
        except DaemonAwayError:
            connections.count_away()
            return [ANSWERS[AWAY]] * len(asked)
        answers[list(wrong)] = CORRUPT
        return [ANSWERS[code] for code in answers.tolist()]

    def _release(self) -> None:
        if self._connections is not None:
            numbers = np.array([part.number for part in self._parts if part.number], "<u8")
            if len(numbers):
                self._connections.tell(FrameKind.RELEASE, numbers.tobytes())
            self._connections.leave()

    def _look_again(self, connections: Connections, part: LeasedBatch) -> None:
        try:
            with connections.link() as link:
                body = frames.Number(part.number).body()
                frame = link.call(FrameKind.WHERE, body, connections.call_s)
                part.places = _places_of(frame, len(part.places))
        except DaemonAwayError:
            connections.count_away()

    def _check(self) -> None:
        if self._released:
            raise LeaseError("the lease was released")
        self._check_open()


def lease_blocks(connections: Connections, link: Link, keys: Keys) -> list[LeasedBatch]:
    found = []
    for part in batches(keys):
        frame = link.call(FrameKind.LEASE, keys_of(keys, part), connections.call_s)
        number, rows = frames.table(expect(frame, FrameKind.LEASED).body, frames.PLACE_DTYPE)
        if len(rows) > len(part):
            raise DaemonAwayError("more blocks than were requested")
        if len(rows):
            found.append(LeasedBatch(number, part.start, rows))
        if len(rows) < len(part):
            break
    return found


def _receive(link: Link, serial: int, limit_s: float, take: Callable[[Frame], object]) -> Frame:
    """Pass ARRIVED frames to `take` until the frame that ends the answer, and return that."""
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
    rows = frames.table(frame.body, frames.PLACE_DTYPE)[1]
    if frame.kind is not FrameKind.LEASED or len(rows) != count:
        raise DaemonAwayError("malformed places")
    return rows
