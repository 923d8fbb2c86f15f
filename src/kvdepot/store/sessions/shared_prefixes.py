"""Which prefixes sessions share: system prompts, documents, tools.

A prefix is the longest one that its sessions have in common. One session may have several: what all
have in common, and behind it what some do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvdepot.store.sessions.session_table import PACKED_BYTES, Prompt

_BYTES_MAX: Final = 16 << 20
"""Of prompts that are compared."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Blocks that several sessions of one namespace begin with."""

    tag: bytes
    packed: bytes
    """Their keys, as those of a Prompt."""
    sessions: int
    told_s: float
    """When one of the sessions was told of last."""

    def __len__(self) -> int:
        return len(self.packed) // PACKED_BYTES


PREFIX_ORDERS: Final[dict[str, Callable[[SharedPrefix], float]]] = {
    "busy": lambda one: -(one.sessions - 1) * len(one),
    "cold": lambda one: one.told_s,
}
"""In which shared prefixes are listed: by blocks that need not be there twice, or by last use."""


def shared_prefixes(tag: bytes, prompts: Sequence[Prompt]) -> list[SharedPrefix]:
    """Of the sessions of one namespace; those that come first, as far as they are not too many."""
    chosen, nbytes = [], 0
    for prompt in prompts:
        nbytes += len(prompt.packed)
        if nbytes > _BYTES_MAX:
            break
        chosen.append(prompt)
    chosen.sort(key=lambda prompt: prompt.packed)
    found: list[SharedPrefix] = []
    open_at: list[tuple[int, int]] = []
    """Prefixes that the last prompt has: how many blocks, and the first prompt that has them."""
    for at in range(1, len(chosen) + 1):
        common = _common(chosen[at - 1].packed, chosen[at].packed) if at < len(chosen) else 0
        first = at - 1
        while open_at and open_at[-1][0] > common:
            blocks, first = open_at.pop()
            told_s = max(prompt.told_s for prompt in chosen[first:at])
            packed = chosen[first].packed[: blocks * PACKED_BYTES]
            found.append(SharedPrefix(tag, packed, at - first, told_s))
        if common and (not open_at or open_at[-1][0] < common):
            open_at.append((common, first))
    return found


def _common(one: bytes, other: bytes) -> int:
    """Leading blocks that two prompts share. A key stands for all before it too."""
    low, high = 0, min(len(one), len(other)) // PACKED_BYTES
    while low < high:
        middle = (low + high) // 2
        end = slice(middle * PACKED_BYTES, (middle + 1) * PACKED_BYTES)
        if one[end] == other[end]:
            low = middle + 1
        else:
            high = middle
    return low
