"""Made-up users who come back to conversations that grow: some often, most hardly ever. Seeded."""

from dataclasses import dataclass
from typing import Final

import numpy as np

_FIRST_BLOCKS: Final = (2, 9)
_TURN_BLOCKS: Final = (1, 4)
_BLOCKS_MAX: Final = 32
"""Then the user begins a new conversation."""
_SHARED_BLOCKS: Final = 2
"""A system prompt, the same for everybody."""


@dataclass(frozen=True, slots=True)
class Habit:
    """Who comes back how often."""

    name: str
    exponent: float
    """The user of rank n comes with a weight of n to the power of this, negative."""
    strangers: float = 0.0
    """The share of requests by users who come once and never again."""


HABITS: Final = (Habit("zipf", 1.0), Habit("flat", 0.6), Habit("strangers", 1.0, 0.5))


@dataclass(frozen=True, slots=True)
class Visit:
    """One request: a conversation, how long it was, and how long it is with this turn."""

    conversation: int
    before_blocks: int
    after_blocks: int


def visits(habit: Habit, users: int, requests: int, seed: int) -> list[Visit]:
    """Everybody once, in any order; then as the habit says."""
    draw = np.random.default_rng(seed)
    weights = np.arange(1.0, users + 1) ** -habit.exponent
    first = draw.permutation(users)
    later = draw.choice(users, requests, p=weights / weights.sum())
    strange = draw.random(requests) < habit.strangers
    found: list[Visit] = []
    open_now: dict[int, tuple[int, int]] = {}
    conversations = 0
    for user in [*first.tolist(), *np.where(strange, -1, later).tolist()]:
        conversation, blocks = open_now.get(user, (conversations, 0))
        if user < 0 or not blocks or blocks >= _BLOCKS_MAX:
            conversation, blocks = conversations, 0
            conversations += 1
        grown = int(draw.integers(*(_TURN_BLOCKS if blocks else _FIRST_BLOCKS)))
        before = blocks or _SHARED_BLOCKS
        found.append(Visit(conversation, before, before + grown))
        open_now[user] = (conversation, before + grown)
    return found


def tokens(conversation: int, blocks: int, block_tokens: int) -> list[int]:
    """Of a conversation: those of the system prompt, then its own."""
    shared = _SHARED_BLOCKS * block_tokens
    own = range(blocks * block_tokens - shared)
    return [*range(shared), conversation + 1, *own][: blocks * block_tokens]


def living_blocks(found: list[Visit]) -> int:
    """Blocks of every conversation as long as it is in the end."""
    longest: dict[int, int] = {}
    for visit in found:
        longest[visit.conversation] = visit.after_blocks
    return sum(longest.values()) - _SHARED_BLOCKS * (len(longest) - 1)
