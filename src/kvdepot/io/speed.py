"""How fast a drive is: as it was measured once, and as it reads compared with before.

The measured profile is kept with the drive, as a note in its log.
"""

import json
import threading
from dataclasses import asdict, dataclass, fields
from typing import Final

from kvdepot.core.clock import Clock
from kvdepot.core.json_object import parse_object

_WINDOW_S: Final = 0.2
"""A verdict is made of at least this much of a drive's time."""
_TRIAL_S: Final = 0.02
"""Or of this much, where the drive is on trial; less does no harm."""
_SLOW: Final = 8.0
"""So many times slower than it was, twice in a row, a drive is better left alone."""
_FORGET: Final = 0.995
"""What it once did counts a little less with every verdict."""

_LARGE_BYTES: Final = 1 << 20
"""What is asked for at once: with less a drive cannot show what it can do."""
_MOST: Final = 1 << 50
_END_OF_TIME: Final = 1 << 37
"""What a profile can say at most; a calendar has no later second than about this one."""
_KEEP: Final = 0.7
"""How much an earlier comparison with the profile counts beside the last one."""

LoadShape = tuple[int, int, int]
"""Reads that can be compared: bytes of one, bytes asked for at once, calls at once (as powers
of two)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Speeds of one drive with nothing else to do. 0: not known, it had no free segment."""

    read_bytes_per_s: int
    """Sequential."""
    write_bytes_per_s: int
    random_read_bytes_per_s: int
    """Pieces of `random_bytes` all over one segment."""
    random_write_bytes_per_s: int
    random_bytes: int
    read_latency_us: int
    """Of one page, alone; the median."""
    write_latency_us: int
    direct_io: bool
    emulated: bool
    """The drive does not exist: these are the speeds it is made to have."""
    measured_at_s: int
    """Of the calendar, since 1970."""

    def pack(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def parse(cls, text: bytes) -> "Profile | None":
        """None: it is of another version, and the drive is measured anew."""
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
        """Says no more of a drive than whether it is emulated."""
        return cls(
            read_bytes_per_s=0, write_bytes_per_s=0,
            random_read_bytes_per_s=0, random_write_bytes_per_s=0, random_bytes=0,
            read_latency_us=0, write_latency_us=0,
            direct_io=True, emulated=emulated, measured_at_s=0,
        )  # fmt: skip

    @property
    def is_measured(self) -> bool:
        return self.read_bytes_per_s > 0


class ThroughputMeter:
    """Counts what one drive reads while it is busy. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.running = 0
        """Calls that wait for reads of the drive now."""
        self._peak = 0
        self._began_s = 0.0
        self._busy_s = 0.0
        self._work_bytes = 0
        self._reads = 0
        self._calls = 0
        self._slow_in_a_row = 0
        self._best: dict[LoadShape, float] = {}
        self.bytes_per_s = 0.0
        self.slowdown = 1.0
        """Of the last verdict: how many times slower than it was."""
        self.profile: Profile | None = None
        """How fast it was when it was measured, if it was."""
        self.of_profile: float | None = None
        """What it reads lately where much is asked for, by what it read when it was measured."""
        self.queued_bytes = 0
        """Reads that were asked for and have not ended."""

    def begin(self, nbytes: int = 0, *, trial: bool = False) -> None:
        """Reads begin. `trial`: what was before does not count."""
        with self._lock:
            if trial and not self.running:
                self._begin_anew()
            self.queued_bytes += nbytes
            if not self.running:
                self._began_s = self._clock.now()
            self.running += 1
            self._peak = max(self._peak, self.running)

    def end(self, work_bytes: int, reads: int, asked: int = 0, *, trial: bool = False) -> bool:
        """Reads have ended. False: the drive has become slow.

        `asked`: what `begin` was told. `trial`: it was slow before, and is judged by this alone.
        """
        with self._lock:
            now_s = self._clock.now()
            self.running -= 1
            self.queued_bytes -= asked
            self._busy_s += now_s - self._began_s
            self._began_s = now_s
            self._work_bytes += work_bytes
            self._reads += reads
            self._calls += 1
            if self._busy_s < (_TRIAL_S if trial else _WINDOW_S) or not self._reads:
                return True
            self._slow_in_a_row = self._slow_in_a_row + 1 if self._is_slow(trial) else 0
            return self._slow_in_a_row < (1 if trial else 2)

    def _is_slow(self, trial: bool) -> bool:
        self.bytes_per_s = self._work_bytes / max(self._busy_s, 1e-9)
        sizes = (self._work_bytes // self._reads, self._work_bytes // self._calls, self._peak)
        self._compare(sizes[1])
        kind = (sizes[0].bit_length(), sizes[1].bit_length(), sizes[2].bit_length())
        best = self._best.get(kind, 0.0) * _FORGET
        usual = (
            max(best, 0.0 if trial else self._nearby(kind) / 2)
            or self._measured(sizes[1])
            or (trial and max(self._best.values(), default=0.0))
        )
        self.slowdown = max(1.0, usual / max(self.bytes_per_s, 1e-9))
        if best or self.slowdown <= _SLOW:
            self._best[kind] = max(best, self.bytes_per_s)
        self._begin_anew()
        return self.slowdown > _SLOW

    def _nearby(self, kind: LoadShape) -> float:
        """The best where reads and calls were about as large: the first reads of a kind that the
        drive has not had before may be slow already."""
        return max(
            (
                speed
                for other, speed in self._best.items()
                if other[2] == kind[2] and all(abs(other[at] - kind[at]) <= 1 for at in (0, 1))
            ),
            default=0.0,
        )

    def _begin_anew(self) -> None:
        self._busy_s, self._work_bytes, self._reads, self._calls = 0.0, 0, 0, 0
        self._peak = self.running

    def _measured(self, asked_bytes: int) -> float:
        """What the drive read when it was measured, where that can be compared."""
        if self.profile is None or asked_bytes < _LARGE_BYTES or not self.profile.direct_io:
            return 0.0
        return float(self.profile.read_bytes_per_s)

    def _compare(self, asked_bytes: int) -> None:
        measured = self._measured(asked_bytes)
        if measured:
            last = self.bytes_per_s / measured
            before = last if self.of_profile is None else self.of_profile
            self.of_profile = round(_KEEP * before + (1 - _KEEP) * last, 3)
