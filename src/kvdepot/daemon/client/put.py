"""Puts through the daemon: it reserves slots, this process fills and checksums them, the daemon
seals them. With a `RemoteReservation` the caller fills the slots.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvdepot.core.block import PutResult
from kvdepot.core.depot import Reservation
from kvdepot.core.requests import Array, Offer
from kvdepot.daemon.client.connections import (
    Connections,
    DaemonAwayError,
    Link,
    address_in,
    batches,
    expect,
    payload_in,
)
from kvdepot.daemon.wire import frames
from kvdepot.daemon.wire.frames import KEYS_MAX, Flag, Frame, FrameKind
from kvdepot.errors import LeaseError
from kvdepot.format.copy_ops import checksum_slot
from kvdepot.format.record import fill_producer, fill_tokens, record_sizes
from kvdepot.native import copy_in

_WAVE_BYTES: Final = 64 << 20


class RemotePutter:
    """Serves `put` over one connection, in waves. The seal of one wave and the reservation of the
    next are sent together.
    """

    def __init__(self, connections: Connections, link: Link, timeout_s: float) -> None:
        self._connections = connections
        self._link = link
        self._deadline = time.monotonic() + timeout_s
        self._limit_s = timeout_s + connections.call_s
        self._sealing: int | None = None

    def store(self, offer: Offer, outcomes: list[PutResult]) -> None:
        """Append an outcome for each block. On DaemonAwayError only those appended so far hold."""
        settled: list[PutResult] = []
        while len(outcomes) + len(settled) < len(offer.blocks):
            wave = _wave(offer, len(outcomes) + len(settled))
            serial = self._reserve(wave.blocks)
            self._sealed(outcomes, settled)
            frame = expect(self._link.answer(serial, self._limit_s), FrameKind.RESERVED)
            settled = self._fill(frame, wave)
        self._sealed(outcomes, settled)

    def _reserve(self, blocks: Array) -> int:
        head = frames.Seconds(max(0.0, self._deadline - time.monotonic()))
        return self._link.send(FrameKind.RESERVE, head.body() + blocks["key"].tobytes())

    def _sealed(self, outcomes: list[PutResult], settled: list[PutResult]) -> None:
        """Wait until the last wave is sealed, then append its outcomes."""
        if self._sealing is not None:
            expect(self._link.answer(self._sealing, self._limit_s), FrameKind.NUMBER)
            self._sealing = None
        outcomes += settled
        settled.clear()

    def _fill(self, frame: Frame, wave: Offer) -> list[PutResult]:
        """Fill the slots of a wave. Returns the outcomes of the blocks that the daemon tried."""
        number, answers, slots = _reserved_of(frame, len(wave.blocks))
        if slots:
            blocks, arena = wave.blocks[list(slots)], self._connections.arena
            places = zip(slots.values(), blocks["payload_bytes"].tolist(), strict=True)
            copy_in(blocks, np.array([address_in(arena, *place) for place in places]))
            flags = _fill_heads(self._connections, wave, slots)
            body = frames.with_table(number, np.array(list(slots), "<u4"))
            self._sealing = self._link.send(FrameKind.SEAL, body, flags)
        return answers


@dataclass(frozen=True, slots=True)
class ReservedBatch:
    """The part of a reservation that fits in one frame."""

    number: int
    """The daemon's number of it."""
    start: int
    slots: dict[int, int]
    """Location of each slot by its index, counted from `start`."""


class RemoteReservation(Reservation):
    """Slots of a daemon's store. If the daemon ends before `seal`, the filled blocks are lost and
    their outcomes become THROTTLED.
    """

    def __init__(
        self,
        connections: Connections | None,
        offer: Offer,
        outcomes: list[PutResult],
        batches: list[ReservedBatch],
    ) -> None:
        self.outcomes = outcomes
        self._connections = connections
        self._offer = offer
        self._sizes = offer.blocks["payload_bytes"].tolist()
        self._batches = batches
        self._open = {
            batch.start + index: location
            for batch in batches
            for index, location in batch.slots.items()
        }
        self._over = False

    def view(self, index: int) -> memoryview | None:
        location = self._open.get(index)
        if location is None or self._connections is None:
            return None
        try:
            return payload_in(self._connections.arena, location, self._sizes[index])
        except DaemonAwayError:
            return None

    def seal(self, indices: Iterable[int] | None = None) -> None:
        chosen = sorted(self._open if indices is None else indices)
        if any(index not in self._open for index in chosen):
            raise LeaseError("a slot was sealed that is not reserved")
        connections = self._connections
        if connections is None or not chosen:
            return
        filled = {index: self._open.pop(index) for index in chosen}
        try:
            for index, location in filled.items():
                size, chunk = self._sizes[index], int(self._offer.blocks["chunk_bytes"][index])
                address_in(connections.arena, location, size)
                checksum_slot(connections.arena.view[location:], size, chunk)
            flags = _fill_heads(connections, self._offer, filled)
            with connections.link() as link:
                for batch in self._batches:
                    mine = [at - batch.start for at in chosen if at - batch.start in batch.slots]
                    if mine:
                        body = frames.with_table(batch.number, np.array(mine, "<u4"))
                        link.number(FrameKind.SEAL, body, connections.call_s, flags)
            connections.count_stored(len(chosen))
        except DaemonAwayError:
            connections.count_away()
            for index in chosen:
                self.outcomes[index] = PutResult.THROTTLED

    def close(self) -> None:
        if self._over:
            return
        self._over = True
        if self._connections is None:
            return
        for batch in self._batches:
            if any(batch.start + index in self._open for index in batch.slots):
                self._connections.tell(FrameKind.ABANDON, frames.Number(batch.number).body())
        self._open.clear()
        self._connections.leave()


def reserve(
    connections: Connections, link: Link, blocks: Array, timeout_s: float
) -> tuple[list[PutResult], list[ReservedBatch]]:
    """Reserve slots. Returns an outcome for each block; those after the first frame without room
    are THROTTLED.
    """
    outcomes: list[PutResult] = []
    found: list[ReservedBatch] = []
    for part in batches(blocks):
        body = frames.Seconds(timeout_s if not outcomes else 0.0).body()
        body += blocks["key"][part.start : part.stop].tobytes()
        frame = link.call(FrameKind.RESERVE, body, timeout_s + connections.call_s, Flag.PAD)
        number, answers, slots = _reserved_of(expect(frame, FrameKind.RESERVED), len(part))
        outcomes += answers
        if slots:
            found.append(ReservedBatch(number, part.start, slots))
        if PutResult.THROTTLED in answers:
            break
    return outcomes + [PutResult.THROTTLED] * (len(blocks) - len(outcomes)), found


def _fill_heads(connections: Connections, offer: Offer, filled: Mapping[int, int]) -> int:
    """Write token ids and producers of blocks into their slots, by index. Returns the flags of
    SEAL.
    """
    flags = 0
    view = connections.arena.view
    if offer.tokens:
        flags |= Flag.TOKENS
        for index, location in filled.items():
            block = offer.blocks[index]
            sizes = int(block["payload_bytes"]), int(block["chunk_bytes"])
            fill_tokens(view[location:], *sizes, offer.tokens[index])
    if offer.blocks["producer"].any():
        flags |= Flag.PRODUCER
        for index, location in filled.items():
            fill_producer(view[location:], int(offer.blocks["producer"][index]))
    return flags


def _reserved_of(frame: Frame, count: int) -> tuple[int, list[PutResult], dict[int, int]]:
    """Parse a RESERVED frame: its number, the outcomes, and the slots by index."""
    number, rows = frames.table(frame.body, frames.SLOT_DTYPE)
    codes = rows["outcome"].tolist()
    if not 0 < len(codes) <= count or max(codes) >= len(frames.PUTS):
        raise DaemonAwayError("malformed outcomes")
    answers = [frames.PUTS[code] for code in codes]
    places = rows["location"].tolist()
    slots = {at: places[at] for at, answer in enumerate(answers) if answer is PutResult.STORED}
    return number, answers, slots


def _wave(offer: Offer, start: int) -> Offer:
    """The blocks from `start` on that are reserved and sealed together."""
    blocks = offer.blocks[start : start + KEYS_MAX]
    before = np.cumsum(record_sizes(blocks["payload_bytes"])) - record_sizes(
        blocks["payload_bytes"]
    )
    count = int((before < _WAVE_BYTES).sum())
    return Offer(blocks[:count], offer.tokens[start : start + count])
