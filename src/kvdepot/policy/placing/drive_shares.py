"""Distributes runs of blocks over the drives of a tier in proportion to their speeds.

A drive's account grows by the bytes of its runs, divided by its speed relative to the others. The
drive with the lowest account, its queue included, is next. So drives of speeds 1 and 3 get 1 and 3
of 4 runs, a prompt lies on them in that proportion, and reading it keeps both busy to the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DriveLoad:
    """A candidate drive for a run."""

    drive: int
    bytes_per_s: float
    """0 if unknown."""
    queued_bytes: int = 0


@dataclass(slots=True)
class Shares:
    """The accounts of one tier's drives."""

    _spent: dict[int, float] = field(default_factory=dict)
    _floor: float = 0.0
    """The lowest account, so that a drive that returns does not get all runs."""

    def next(self, lanes: Sequence[DriveLoad]) -> int | None:
        """The drive for the next run; None without drives."""
        if not lanes:
            return None
        weights = _weights(lanes)

        def busy(lane: DriveLoad) -> tuple[float, float]:
            weight = weights[lane.drive]
            return self._of(lane.drive) + lane.queued_bytes / weight, -weight

        return min(lanes, key=busy).drive

    def take(self, drive: int, nbytes: int, lanes: Sequence[DriveLoad]) -> None:
        self._floor = max(self._floor, min((self._of(lane.drive) for lane in lanes), default=0.0))
        self._spent[drive] = self._of(drive) + nbytes / _weights(lanes).get(drive, 1.0)

    def part(self, drive: int, lanes: Sequence[DriveLoad]) -> float:
        """The share of the queued bytes for this drive, 0 to 1."""
        weights = _weights(lanes)
        return weights.get(drive, 1.0) / max(sum(weights.values()), 1.0)

    def _of(self, drive: int) -> float:
        return max(self._floor, self._spent.get(drive, 0.0))


def are_uneven(lanes: Sequence[DriveLoad], ratio: float) -> bool:
    """True if all speeds are known and the highest is at least `ratio` times the lowest."""
    speeds = [lane.bytes_per_s for lane in lanes]
    return len(speeds) > 1 and min(speeds) > 0 and max(speeds) >= ratio * min(speeds)


def _weights(lanes: Sequence[DriveLoad]) -> dict[int, float]:
    """Speeds relative to their mean; 1 for all if one is unknown."""
    speeds = [lane.bytes_per_s for lane in lanes]
    if not speeds or min(speeds) <= 0:
        return {lane.drive: 1.0 for lane in lanes}
    mean = sum(speeds) / len(speeds)
    return {lane.drive: lane.bytes_per_s / mean for lane in lanes}
