"""Offloading through the daemon: it reserves slots, we fill and checksum them, it seals them."""

import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvdepot.client.connections import Session
from kvdepot.client.get import address_in
from kvdepot.client.link import DaemonAwayError, Link, expect
from kvdepot.codec.record import HEAD_BYTES, TABLE_OFFSET, record_bytes
from kvdepot.core.block import Put
from kvdepot.native import FILL
from kvdepot.store.write.put import NewBlock
from kvdepot.tiers.memory.copy_ops import transfers
from kvdepot.wire import messages
from kvdepot.wire.frames import KEYS_MAX, Frame, FrameKind

_WAVE_BYTES: Final = 64 << 20


class Putter:
    """Serves `put` over one connection.

    Offers go in waves; the seal of one and the reservation of the next travel together.
    """

    def __init__(self, session: Session, link: Link, timeout_s: float, call_s: float) -> None:
        self._session = session
        self._link = link
        self._deadline = time.monotonic() + timeout_s
        self._limit_s = timeout_s + call_s
        self._sealing: int | None = None

    def store(self, offers: Sequence[NewBlock], outcomes: list[Put]) -> None:
        """Append an outcome for each offer.

        DaemonAwayError: those that are there hold, nothing can be said of the others.
        """
        settled: list[Put] = []
        while len(outcomes) + len(settled) < len(offers):
            wave = _wave(offers, len(outcomes) + len(settled))
            serial = self._reserve(wave)
            self._sealed(outcomes, settled)
            frame = expect(self._link.answer(serial, self._limit_s), FrameKind.RESERVED)
            settled = self._fill(frame, wave)
        self._sealed(outcomes, settled)

    def _reserve(self, wave: Sequence[NewBlock]) -> int:
        head = messages.Seconds(max(0.0, self._deadline - time.monotonic()))
        keys = b"".join([offer.key for offer in wave])
        return self._link.send(FrameKind.RESERVE, head.body() + keys)

    def _sealed(self, outcomes: list[Put], settled: list[Put]) -> None:
        """Wait until the last wave is sealed; its outcomes hold from then on."""
        if self._sealing is not None:
            expect(self._link.answer(self._sealing, self._limit_s), FrameKind.NUMBER)
            self._sealing = None
        outcomes += settled
        settled.clear()

    def _fill(self, frame: Frame, wave: Sequence[NewBlock]) -> list[Put]:
        """Fill the slots that a wave got. Returns the outcomes of those that were tried."""
        number, answers, slots = reserved_of(frame, len(wave))
        ops = []
        for index, location in slots.items():
            offer = wave[index]
            slot = address_in(self._session.arena, location, offer.payload_bytes)
            source, size = offer.source, offer.payload_bytes
            table = slot + TABLE_OFFSET
            ops.append((0, source, slot + HEAD_BYTES, size, offer.chunk_bytes, table, FILL))
        if ops:
            transfers(ops)
            body = messages.with_table(number, np.array(list(slots), "<u4"))
            self._sealing = self._link.send(FrameKind.SEAL, body)
        return answers


def reserved_of(frame: Frame, count: int) -> tuple[int, list[Put], dict[int, int]]:
    """What RESERVED says: a number, the outcomes, and the slots by index."""
    number, rows = messages.table(frame.body, messages.SLOT_DTYPE)
    codes = rows["outcome"].tolist()
    if not 0 < len(codes) <= count or max(codes) >= len(messages.PUTS):
        raise DaemonAwayError("outcomes that make no sense")
    answers = [messages.PUTS[code] for code in codes]
    slots = {
        index: location
        for index, (location, answer) in enumerate(
            zip(rows["location"].tolist(), answers, strict=True)
        )
        if answer is Put.STORED
    }
    return number, answers, slots


def _wave(offers: Sequence[NewBlock], start: int) -> Sequence[NewBlock]:
    total, stop = 0, start
    while stop < len(offers) and stop - start < KEYS_MAX and total < _WAVE_BYTES:
        total += record_bytes(offers[stop].payload_bytes)
        stop += 1
    return offers[start:stop]
