"""Whose turn it is among the drives of a tier, by their measured speed and what waits for them."""

from collections import Counter
from typing import Final

from kvdepot.policy.placing.drive_shares import DriveLoad, Shares, are_uneven
from kvdepot.tiers.log.drive import Drive
from kvdepot.tiers.log.tier import SegmentTier

_UNEVEN: Final = 1.25
"""Drives that differ by less count as alike."""


class Turns:
    """Of one tier. Guarded by the stock's lock."""

    def __init__(self, tier: SegmentTier) -> None:
        self._tier = tier
        self._shares = Shares()
        self._writing: Counter[int] = Counter()
        """Bytes under way to each drive."""
        self.passed_s = 0.0
        """When a turn was last taken."""

    def next(self) -> int | None:
        """The drive that gets the next run; None where no drive works."""
        return self._shares.next(self._lanes())

    def take(self, drive: int, nbytes: int, now_s: float) -> None:
        """A drive takes a run; `done` says when it has it."""
        self._shares.take(drive, nbytes, self._lanes())
        self._writing[drive] += nbytes
        self.passed_s = now_s

    def done(self, drive: int, nbytes: int) -> None:
        """A run that a drive has taken is written, or given up."""
        self._writing[drive] -= nbytes

    def part(self, drive: int) -> float:
        """Of what waits for the tier, how much falls to this drive."""
        return self._shares.part(drive, self._lanes())

    def are_uneven(self) -> bool:
        """Whether some drives are known to be faster than others."""
        return are_uneven(self._lanes(), _UNEVEN)

    def _lanes(self) -> list[DriveLoad]:
        return [
            DriveLoad(index, _speed(drive), self._writing[index] + drive.gauge.queued_bytes)
            for index, drive in enumerate(self._tier.drives)
            if drive.breaker.closed and not (drive.lost or drive.draining or drive.wear.spent)
        ]


def _speed(drive: Drive) -> float:
    """What it reads: blocks are written once, and read while somebody waits."""
    profile = drive.gauge.profile
    return profile.read_bytes_per_s if profile is not None and profile.direct_io else 0.0
