"""What of a tier that makes room is worth a place in the slower tier below it."""

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
    """Its session will not come back, and nobody else's has it."""


def worth_demoting(facts: DemotionFacts) -> Bools:
    """Which blocks are copied down.

    All that are not there yet, but for prompts of one block that nobody has asked for again: these
    would cost a seek and save no more than one block of prefill. Nor is what belongs to closed
    sessions.
    """
    alone = ~facts.continues & ~facts.continued & (facts.hits == 0)
    worth: Bools = ~facts.below & ~alone & ~facts.closed
    return worth
