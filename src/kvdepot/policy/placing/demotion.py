"""Choice of the blocks that are copied to a slower tier. Pure."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class DemotionFacts:
    """Facts for the choice, one value for each block."""

    below: Bools
    """The block is in the slower tier or being written to it."""
    hits: npt.NDArray[np.int64]
    """Number of requests for the block."""
    continues: Bools
    """Its parent is resident."""
    continued: Bools
    """A child of it is resident."""
    closed: Bools
    """Its session is closed, and no other session shares it."""


def worth_demoting(facts: DemotionFacts) -> Bools:
    """True for each block to copy to the slower tier.

    All that are not there yet, except blocks of closed sessions and prompts of one block that were
    not requested again: these cost a seek and save the prefill of one block at most.
    """
    alone = ~facts.continues & ~facts.continued & (facts.hits == 0)
    worth: Bools = ~facts.below & ~alone & ~facts.closed
    return worth
