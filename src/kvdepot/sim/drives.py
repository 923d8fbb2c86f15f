"""Models of devices with queues. Pure.

Requests are served in the order of arrival. Reads go before writes, as in the store: writes use the
time that reads leave, and a read never waits for a write.
"""

from dataclasses import dataclass, field
from math import inf


@dataclass(frozen=True, slots=True)
class DriveSpeed:
    """One unit of a tier, and how many there are."""

    units: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float = 0.0
    """Added to each request; the units serve other requests meanwhile."""
    seek_s: float = 0.0
    """Time of a unit before each block."""
    backlog_s: float = inf
    """Writes that would wait longer than this are dropped."""


@dataclass(slots=True)
class Pipe:
    """A network or link that moves bytes one after the other."""

    bytes_per_s: float
    free_s: float = 0.0

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self.free_s - now_s)

    def push(self, now_s: float, nbytes: float) -> float:
        """Send bytes after those sent before. Returns the time when the last one arrives."""
        self.free_s = max(now_s, self.free_s) + nbytes / self.bytes_per_s
        return self.free_s


@dataclass(slots=True)
class SimulatedDrives:
    """The units of a tier with blocks spread over them in turn, behind pipes."""

    medium: DriveSpeed
    pipes: tuple[Pipe, ...] = ()
    read_busy_s: float = 0.0
    """Seconds of units spent on reads, and on writes."""
    write_busy_s: float = 0.0
    _free_s: list[float] = field(default_factory=list)
    _backlog_s: float = 0.0
    _looked_s: float = 0.0
    _turn: int = 0

    def __post_init__(self) -> None:
        self._free_s = [0.0] * self.medium.units

    def wait_s(self, now_s: float) -> float:
        """The wait of a read before its bytes move."""
        waits = sum(max(0.0, free_s - now_s) for free_s in self._free_s) / len(self._free_s)
        return max([waits, *(pipe.wait_s(now_s) for pipe in self.pipes)]) + self.medium.latency_s

    def block_s(self, block_bytes: float) -> float:
        """The time of one unit to read one block."""
        return self.medium.seek_s + block_bytes / self.medium.read_bytes_per_s

    def rate_bytes_per_s(self, block_bytes: float) -> float:
        """All units together, behind their pipes."""
        units = self.medium.units * block_bytes / self.block_s(block_bytes)
        return min([units, *(pipe.bytes_per_s for pipe in self.pipes)])

    def read(self, now_s: float, blocks: int, block_bytes: float) -> float:
        """Returns the time when the last block arrives; pipes work at the same time."""
        self._catch_up(now_s)
        block_s, count = self.block_s(block_bytes), self.medium.units
        done_s = now_s
        for step in range(min(blocks, count)):
            unit = (self._turn + step) % count
            share = (blocks - step + count - 1) // count
            self._free_s[unit] = max(now_s, self._free_s[unit]) + share * block_s
            done_s = max(done_s, self._free_s[unit])
        self._turn = (self._turn + blocks) % count
        self.read_busy_s += blocks * block_s
        for pipe in self.pipes:
            done_s = max(done_s, pipe.push(now_s, blocks * block_bytes))
        return done_s + self.medium.latency_s

    def write(self, now_s: float, blocks: int, block_bytes: float) -> int:
        """Queue blocks to be written in idle time. Returns the number of queued blocks."""
        self._catch_up(now_s)
        medium = self.medium
        each_s = (medium.seek_s + block_bytes / medium.write_bytes_per_s) / medium.units
        room_s = medium.backlog_s - self._backlog_s
        taken = blocks if room_s == inf else min(blocks, max(0, int(room_s / each_s)))
        self._backlog_s += taken * each_s
        return taken

    def backlog_s(self, now_s: float) -> float:
        """The time that the waiting writes take without reads."""
        self._catch_up(now_s)
        return self._backlog_s

    def _catch_up(self, now_s: float) -> None:
        """Writes use the time since the last call that reads left."""
        if self._backlog_s:
            looked_s = self._looked_s
            idle_s = sum(max(0.0, now_s - max(free, looked_s)) for free in self._free_s)
            written_s = min(self._backlog_s, idle_s / len(self._free_s))
            self._backlog_s -= written_s
            self.write_busy_s += written_s * len(self._free_s)
        self._looked_s = now_s
