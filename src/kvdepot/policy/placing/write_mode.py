"""Write modes: the tiers that a block in memory is written to, and promotion after a read."""

from collections.abc import Sequence
from enum import Enum


class WriteMode(Enum):
    """The time at which blocks are written to a file tier."""

    BACK = "write-back"
    """On eviction from the tier above; in the first file tier, soon after the put."""
    THROUGH = "write-through"
    """Together with the tier above; in the first file tier, before the put returns."""
    SELECTIVE = "write-through-selective"
    """On the second request, or at once if a reuse is likely."""
    PASS = "pass-through"
    """Directly from memory. The file tiers above get neither these writes nor promoted reads."""


def targets(modes: Sequence[WriteMode], *, touched: bool) -> list[int]:
    """The file tiers, numbered fastest first, that a block in memory is written to.

    `modes`: the mode of each tier. `touched`: the block was requested since its put, or is likely
    to be.
    """
    chosen: list[int] = []
    for number, mode in enumerate(modes):
        if mode is WriteMode.PASS:
            chosen = [number]
        elif (
            mode is WriteMode.THROUGH
            or (mode is WriteMode.BACK and number == 0)
            or (mode is WriteMode.SELECTIVE and touched)
        ):
            chosen.append(number)
    return chosen


def promotes(modes: Sequence[WriteMode], number: int) -> list[int]:
    """The file tiers that a block is copied to when it is read from tier `number`."""
    above: list[int] = []
    for lower in range(number, 0, -1):
        if modes[lower] is WriteMode.PASS:
            break
        above.append(lower - 1)
    return above
