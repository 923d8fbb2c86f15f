"""Which drive gets the next run of blocks: in proportion to the drives' speeds.

A drive's account grows by the bytes of its runs, divided by its speed relative to the others. The
drive with the lowest account, its queue included, is next. So drives of speeds 1 and 3 get 1 and 3
of 4 runs, a prompt lies on them in that proportion, and reading it keeps both busy to the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DriveLoad:
    """One drive that could take a run."""

    drive: int
    bytes_per_s: float
    """0: not known."""
    queued_bytes: int = 0


@dataclass(slots=True)
class Shares:
    """The accounts of one tier's drives."""

    _spent: dict[int, float] = field(default_factory=dict)
    _floor: float = 0.0
    """The lowest account: a drive that was away does not get everything when it is back."""

    def next(self, lanes: Sequence[DriveLoad]) -> int | None:
        """The drive that gets the next run; None where there is none."""
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
        """Of what waits, how much falls to this drive."""
        weights = _weights(lanes)
        return weights.get(drive, 1.0) / max(sum(weights.values()), 1.0)

    def _of(self, drive: int) -> float:
        return max(self._floor, self._spent.get(drive, 0.0))


def are_uneven(lanes: Sequence[DriveLoad], ratio: float) -> bool:
    """Whether the speeds of all are known, and one is `ratio` times another."""
    speeds = [lane.bytes_per_s for lane in lanes]
    return len(speeds) > 1 and min(speeds) > 0 and max(speeds) >= ratio * min(speeds)


def _weights(lanes: Sequence[DriveLoad]) -> dict[int, float]:
    """Speeds against the average; all the same where one is not known."""
    speeds = [lane.bytes_per_s for lane in lanes]
    if not speeds or min(speeds) <= 0:
        return {lane.drive: 1.0 for lane in lanes}
    mean = sum(speeds) / len(speeds)
    return {lane.drive: lane.bytes_per_s / mean for lane in lanes}
