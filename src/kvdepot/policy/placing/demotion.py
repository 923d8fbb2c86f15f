"""Which blocks are copied to a slower tier. Pure."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class DemotionFacts:
    """What the choice depends on, a value for each block."""

    below: Bools
    """It is in the slower tier already, or on its way."""
    hits: npt.NDArray[np.int64]
    """How often it was asked for."""
    continues: Bools
    """It continues a block that is there."""
    continued: Bools
    """Another block continues it."""
    closed: Bools
    """Its session is closed, and no other session shares it."""


def worth_demoting(facts: DemotionFacts) -> Bools:
    """Which blocks are copied down.

    All that are not there yet, except blocks of closed sessions and prompts of one block that were
    not asked for again: these cost a seek and save no more than one block of prefill.
    """
    alone = ~facts.continues & ~facts.continued & (facts.hits == 0)
    worth: Bools = ~facts.below & ~alone & ~facts.closed
    return worth
