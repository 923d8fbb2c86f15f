"""Which blocks are worth their wear. Pure.

While a drive's bucket (core/endurance.py) is full everything may be written; as it empties, blocks
must promise more and more reuse.
"""

from typing import Final

PROMISING: Final = 0.5
"""A block with at least this chance of reuse does not wait for its second use."""


def price(level: float) -> float:
    """The chance of reuse that a write must promise when the bucket is so full, from 0 to 1.

    Nothing from half on; at a quarter as likely as not; near the end only what is certain.
    """
    return min(1.0, max(0.0, 1.0 - 2.0 * level))


def worth_wear(chance: float, level: float) -> bool:
    """Whether to write a block that leaves the bucket at `level`, below 0 where it has too little.

    `chance`: how likely it is asked for again while the tier would keep it.
    """
    return level >= 0.0 and chance >= price(level)
