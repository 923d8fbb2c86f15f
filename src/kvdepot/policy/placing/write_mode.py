"""Which tiers a block in memory is written to, and whether reading it brings it up again."""

from collections.abc import Sequence
from enum import Enum


class WriteMode(Enum):
    """How a file tier gets its blocks from the tier above it."""

    BACK = "write-back"
    """When the tier above makes room. The first file tier: soon after a block was put."""
    THROUGH = "write-through"
    """As soon as the tier above has them. The first file tier: before a put returns."""
    SELECTIVE = "write-through-selective"
    """As soon as they are asked for a second time, or at once if they are likely to be."""
    PASS = "pass-through"
    """Directly, past the tiers above, which blocks read from here do not enter either."""


def targets(modes: Sequence[WriteMode], *, touched: bool) -> list[int]:
    """The file tiers, numbered fastest first, that a block in memory is written to.

    `modes` are the tiers' own; `touched`: it was asked for since it was put, or is likely to be.
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
    """The file tiers that a block enters when it is read from tier `number`."""
    above: list[int] = []
    for lower in range(number, 0, -1):
        if modes[lower] is WriteMode.PASS:
            break
        above.append(lower - 1)
    return above
