"""Measuring a drive, a piece at a time: another user of the drive waits for one piece at most.

Reads and writes go the way that blocks go (Files), into one extent that holds nothing: a segment
that is free, or for reads alone one that is full. Nothing that is written here looks like a record.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from kvdepot.format.record import PAGE
from kvdepot.io.files import Files, aligned, io_ops
from kvdepot.io.speed import Profile
from kvdepot.native import READ, WRITE, address_of

_UNIT: Final = 256 << 10
SURVEY_BYTES_MIN: Final = _UNIT
_MEMORY_BYTES: Final = 4 << 20
_REGION_MAX: Final = 256 << 20
"""Of the extent that is used: no more bytes are written than twice this."""
_JUMP: Final = 0.6180339887
"""Of a region, from one place to the next: never near, and never twice the same."""
_STALL_S: Final = 2.0
_LATENCIES: Final = 24


@dataclass(frozen=True, slots=True)
class SurveyLimits:
    """How long measuring may take: each of four speeds, and each piece."""

    speed_s: float = 0.2
    piece_s: float = 0.004
    at_once_max: int = 64


FLASH: Final = SurveyLimits()
HEAD: Final = SurveyLimits(speed_s=0.6, piece_s=0.02, at_once_max=16)
"""A drive with a head needs longer, and gains nothing from a long queue."""


@dataclass(slots=True)
class SurveyPart:
    """One of the things that are measured."""

    opcode: int
    unit_bytes: int
    jumping: bool
    limit_s: float
    at_once_max: int
    at_once: int = 1
    turn: int = 0
    samples: list[tuple[int, int, float]] = field(default_factory=list)
    """Units at once, bytes and seconds of each piece."""

    def is_done(self, region_bytes: int) -> bool:
        spent_s = sum(seconds for *_, seconds in self.samples)
        if self.at_once_max == 1:
            return len(self.samples) >= _LATENCIES or spent_s >= self.limit_s
        moved = sum(nbytes for _, nbytes, _ in self.samples)
        return bool(self.samples) and (spent_s >= self.limit_s or moved >= region_bytes)

    def offsets(self, region_bytes: int) -> list[int]:
        units = max(1, region_bytes // self.unit_bytes)
        numbers = range(self.turn, self.turn + self.at_once)
        self.turn += self.at_once
        if self.jumping:
            return [int(number * _JUMP % 1.0 * units) * self.unit_bytes for number in numbers]
        return [number % units * self.unit_bytes for number in numbers]

    def bytes_per_s(self) -> int:
        """By the largest pieces: the first ones are too small for a fast drive."""
        most = max((at_once for at_once, *_ in self.samples), default=0)
        large = [sample for sample in self.samples if sample[0] == most]
        total_s = sum(seconds for *_, seconds in large)
        return int(sum(nbytes for _, nbytes, _ in large) / total_s) if total_s else 0

    def latency_us(self) -> int:
        return int(1e6 * median(seconds for *_, seconds in self.samples)) if self.samples else 0


class VolumeBenchmark:
    """Measures one extent: call `step` until `done`."""

    def __init__(
        self, files: Files, place: tuple[int, int, int], limits: SurveyLimits, *, writes: bool
    ) -> None:
        """`place`: descriptor, offset, and how many bytes are ours, at least `SURVEY_BYTES_MIN`."""
        self._files = files
        self._fd, self._base, nbytes = place
        self._region_bytes = max(_UNIT, min(nbytes, _REGION_MAX) // _UNIT * _UNIT)
        self._piece_s = limits.piece_s
        self._memory = aligned(_MEMORY_BYTES)
        self._memory[:] = os.urandom(_MEMORY_BYTES)
        self._parts = {
            (opcode, kind): _part(opcode, kind, limits)
            for opcode in ((WRITE, READ) if writes else (READ,))
            for kind in ("sequential", "random", "latency")
        }
        self._last: SurveyPart | None = None
        self.written_bytes = 0

    @property
    def done(self) -> bool:
        return self._next() is None

    def step(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Measure one piece. Raises OSError where the drive fails, or does not answer."""
        part = self._next()
        if part is None:
            return
        offsets = part.offsets(self._region_bytes)
        ops = io_ops(len(offsets))
        ops["fd"], ops["opcode"], ops["nbytes"] = self._fd, part.opcode, part.unit_bytes
        ops["offset"] = [self._base + offset for offset in offsets]
        start = address_of(self._memory)[0]
        ops["address"] = [start + n * _UNIT % _MEMORY_BYTES for n in range(len(offsets))]
        started_s = now()
        pending = self._files.run(ops, _STALL_S)
        seconds = max(1e-9, now() - started_s)
        if pending is not None:
            self._files.keep(pending, ops, self._memory)
        failed = next((-code for code in ops["result"].tolist() if code), 0)
        if failed:
            raise OSError(failed, os.strerror(failed))
        self.written_bytes += int(ops["nbytes"].sum()) * (part.opcode == WRITE)
        part.samples.append((part.at_once, int(ops["nbytes"].sum()), seconds))
        self._last = part
        self._grow(part, seconds)

    def discard(self) -> None:
        """Forget the last piece: the drive was used meanwhile."""
        if self._last is not None and self._last.samples:
            self._last.samples.pop()

    def profile(self, *, direct_io: bool, emulated: bool) -> Profile:
        def speed(opcode: int, kind: str) -> int:
            found = self._parts.get((opcode, kind))
            return found.bytes_per_s() if found else 0

        def latency(opcode: int) -> int:
            found = self._parts.get((opcode, "latency"))
            return found.latency_us() if found else 0

        return Profile(
            read_bytes_per_s=speed(READ, "sequential"),
            write_bytes_per_s=speed(WRITE, "sequential"),
            random_read_bytes_per_s=speed(READ, "random"),
            random_write_bytes_per_s=speed(WRITE, "random"),
            random_bytes=_UNIT,
            read_latency_us=latency(READ),
            write_latency_us=latency(WRITE),
            direct_io=direct_io,
            emulated=emulated,
            measured_at_s=int(time.time()),
        )

    def _next(self) -> SurveyPart | None:
        left = (part for part in self._parts.values() if not part.is_done(self._region_bytes))
        return next(left, None)

    def _grow(self, part: SurveyPart, seconds: float) -> None:
        """Ask for more at once as long as that is quickly done."""
        room = min(part.at_once_max, self._region_bytes // part.unit_bytes)
        if 2 * seconds <= self._piece_s and 2 * part.at_once <= room:
            part.at_once *= 2


def _part(opcode: int, kind: str, limits: SurveyLimits) -> SurveyPart:
    if kind == "latency":
        return SurveyPart(opcode, PAGE, True, limits.speed_s, at_once_max=1)
    return SurveyPart(opcode, _UNIT, kind == "random", limits.speed_s, limits.at_once_max)
