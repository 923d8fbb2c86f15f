"""Measures the speed of a drive in short steps: other users of the drive wait for one step at most.

Reads and writes use the same code as blocks (Files), in one extent: a free segment, or for reads
only a full one. The written bytes are not valid records.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any, Final

from kvdepot.core.json_object import parse_object
from kvdepot.format.record import PAGE
from kvdepot.io.files import Files, aligned, io_ops
from kvdepot.native import READ, WRITE, address_of

_MOST: Final = 1 << 50
_END_OF_TIME: Final = 1 << 37
"""Largest valid time in a profile."""
_UNIT: Final = 256 << 10
BENCHMARK_BYTES_MIN: Final = _UNIT
_MEMORY_BYTES: Final = 4 << 20
_REGION_MAX: Final = 256 << 20
"""Most bytes of the extent that are used. At most twice this is written."""
_JUMP: Final = 0.6180339887
"""Distance between random reads as a fraction of the region: far apart, and never repeated."""
_STALL_S: Final = 2.0
_LATENCIES: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Speeds of an idle drive. 0: unknown, because it had no free segment."""

    read_bytes_per_s: int
    """Speed of sequential reads."""
    write_bytes_per_s: int
    random_read_bytes_per_s: int
    """Speed of random reads of `random_bytes`."""
    random_write_bytes_per_s: int
    random_bytes: int
    read_latency_us: int
    """Median latency of reading one page."""
    write_latency_us: int
    direct_io: bool
    emulated: bool
    """True if the drive is emulated with these speeds."""
    measured_at_s: int
    """Seconds since 1970."""

    def pack(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def parse(cls, text: bytes) -> "Profile | None":
        """Parse a profile; None if it has another version: the drive is then measured again."""
        try:
            found = cls(**parse_object(text))
        except (TypeError, ValueError):
            return None
        numbers = [getattr(found, field.name) for field in fields(cls)]
        if not all(type(number) in (int, bool) and 0 <= number < _MOST for number in numbers):
            return None
        return found if found.measured_at_s < _END_OF_TIME else None

    @classmethod
    def unmeasured(cls, *, emulated: bool) -> "Profile":
        """A profile without speeds. It only says if a drive is emulated."""
        nothing: dict[str, Any] = {one.name: 0 for one in fields(cls)}
        return cls(**{**nothing, "direct_io": True, "emulated": emulated})

    @property
    def is_measured(self) -> bool:
        return self.read_bytes_per_s > 0


@dataclass(frozen=True, slots=True)
class BenchmarkLimits:
    """Longest time to measure each of four speeds, and longest step."""

    speed_s: float = 0.2
    step_s: float = 0.004
    at_once_max: int = 64


FLASH: Final = BenchmarkLimits()
HEAD: Final = BenchmarkLimits(speed_s=0.6, step_s=0.02, at_once_max=16)
"""Limits for hard drives, which need longer and gain nothing from a long queue."""


@dataclass(slots=True)
class BenchmarkSeries:
    """Steps that measure one speed or latency."""

    opcode: int
    kind: str
    """sequential, random or latency."""
    limits: BenchmarkLimits
    at_once: int = 1
    turn: int = 0
    samples: list[tuple[int, int, float]] = field(default_factory=list)
    """Units at once, bytes and seconds of each step."""

    @property
    def unit_bytes(self) -> int:
        return PAGE if self.kind == "latency" else _UNIT

    def is_done(self, region_bytes: int) -> bool:
        spent_s = sum(seconds for *_, seconds in self.samples)
        moved = sum(nbytes for _, nbytes, _ in self.samples)
        enough = _LATENCIES * PAGE if self.kind == "latency" else region_bytes
        return bool(self.samples) and (spent_s >= self.limits.speed_s or moved >= enough)

    def offsets(self, region_bytes: int) -> list[int]:
        units = max(1, region_bytes // self.unit_bytes)
        numbers = range(self.turn, self.turn + self.at_once)
        self.turn += self.at_once
        if self.kind == "sequential":
            return [number % units * self.unit_bytes for number in numbers]
        return [int(number * _JUMP % 1.0 * units) * self.unit_bytes for number in numbers]

    def add(self, nbytes: int, seconds: float, region_bytes: int) -> None:
        """Record a step, and double the next one while steps are short."""
        self.samples.append((self.at_once, nbytes, seconds))
        room = min(self.limits.at_once_max, region_bytes // self.unit_bytes)
        quick = 2 * seconds <= self.limits.step_s and 2 * self.at_once <= room
        if quick and self.kind != "latency":
            self.at_once *= 2

    def bytes_per_s(self) -> int:
        """The speed of the largest steps; the first ones are too small for a fast drive."""
        most = max((at_once for at_once, *_ in self.samples), default=0)
        large = [sample for sample in self.samples if sample[0] == most]
        total_s = sum(seconds for *_, seconds in large)
        return int(sum(nbytes for _, nbytes, _ in large) / total_s) if total_s else 0

    def latency_us(self) -> int:
        return int(1e6 * median(seconds for *_, seconds in self.samples)) if self.samples else 0


class VolumeBenchmark:
    """Measures one extent: call `step` until `done`."""

    def __init__(
        self, files: Files, place: tuple[int, int, int], limits: BenchmarkLimits, *, writes: bool
    ) -> None:
        """`place`: descriptor, offset, and bytes, at least `BENCHMARK_BYTES_MIN`."""
        self._files = files
        self._fd, self._base, nbytes = place
        self._region_bytes = max(_UNIT, min(nbytes, _REGION_MAX) // _UNIT * _UNIT)
        self._memory = aligned(_MEMORY_BYTES)
        self._memory[:] = os.urandom(_MEMORY_BYTES)
        self._series = {
            (opcode, kind): BenchmarkSeries(opcode, kind, limits)
            for opcode in ((WRITE, READ) if writes else (READ,))
            for kind in ("sequential", "random", "latency")
        }
        self._last: BenchmarkSeries | None = None
        self.written_bytes = 0

    @property
    def done(self) -> bool:
        return self._next() is None

    def step(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Measure one step. Raises OSError if the drive fails or times out."""
        series = self._next()
        if series is None:
            return
        offsets = series.offsets(self._region_bytes)
        ops = io_ops(len(offsets))
        ops["fd"], ops["opcode"], ops["nbytes"] = self._fd, series.opcode, series.unit_bytes
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
        nbytes = int(ops["nbytes"].sum())
        self.written_bytes += nbytes * (series.opcode == WRITE)
        series.add(nbytes, seconds, self._region_bytes)
        self._last = series

    def discard(self) -> None:
        """Discard the last step, because the drive was used meanwhile."""
        if self._last is not None and self._last.samples:
            self._last.samples.pop()

    def profile(self, *, direct_io: bool, emulated: bool) -> Profile:
        def series(opcode: int, kind: str) -> BenchmarkSeries:
            return self._series.get((opcode, kind)) or BenchmarkSeries(opcode, kind, FLASH)

        return Profile(
            read_bytes_per_s=series(READ, "sequential").bytes_per_s(),
            write_bytes_per_s=series(WRITE, "sequential").bytes_per_s(),
            random_read_bytes_per_s=series(READ, "random").bytes_per_s(),
            random_write_bytes_per_s=series(WRITE, "random").bytes_per_s(),
            random_bytes=_UNIT,
            read_latency_us=series(READ, "latency").latency_us(),
            write_latency_us=series(WRITE, "latency").latency_us(),
            direct_io=direct_io,
            emulated=emulated,
            measured_at_s=int(time.time()),
        )

    def _next(self) -> BenchmarkSeries | None:
        left = (one for one in self._series.values() if not one.is_done(self._region_bytes))
        return next(left, None)
