"""Which blocks get a second copy: in a slower tier, or on a second drive of the same. Pure."""

from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class MirrorFacts:
    """What the choice depends on, a value for each block."""

    prompt_tokens: npt.NDArray[np.int64]
    """Of the longest prompt that goes through it."""
    below: Bools
    """A slower tier has it too."""
    closed: Bools
    """It belongs to sessions that have ended."""


def worth_mirroring(facts: MirrorFacts, least_tokens: int) -> Bools:
    """Which blocks get a second place in their tier.

    Prefill grows with the square of a prompt, and a lost head loses all that continues it: so every
    block of a long prompt, heads too. A block that a slower tier has is safe already, and one whose
    session has ended is not worth it.
    """
    worth: Bools = (facts.prompt_tokens >= least_tokens) & ~facts.below & ~facts.closed
    return worth


@dataclass(frozen=True, slots=True)
class PlaceFacts:
    """One of the drives that a block can be read from."""

    works: bool
    queued_bytes: int
    """What it has to read until then, this block included."""
    slowdown: float = 1.0
    """How many times slower than usual it is."""
    running_on: bool = False
    """The block before this one in the prompt is read from there."""


def nearer(places: Sequence[PlaceFacts], slack_bytes: int) -> int:
    """Index of the place to read from: where it will be read soonest.

    A prompt that lies in one piece is left in one piece, as long as that drive has no more than
    `slack_bytes` more to do than the other. Of equals the first.
    """
    return min(range(len(places)), key=lambda index: _cost(places[index], slack_bytes))


def _cost(place: PlaceFacts, slack_bytes: int) -> tuple[bool, float]:
    ahead = place.queued_bytes + (0 if place.running_on else slack_bytes)
    return not place.works, ahead * place.slowdown
