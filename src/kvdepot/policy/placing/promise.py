"""How likely blocks are asked for again, learned from others of their kind. Pure.

A kind is how many times the session of a block has come back, and how often the block was asked
for itself. A sample of blocks is watched, each from when it was made or asked for until it is
asked for again, or until as much has come after it as the tier would hold.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

_TURNS_MAX: Final = 3
_USE_LEVELS: Final = 4
"""Never, once, two or three times, more often."""
_KINDS: Final = (_TURNS_MAX + 1) * _USE_LEVELS
_FADE: Final = 0.998
"""What an outcome is worth one outcome of its kind later."""
_FIRST_CHANCE: Final = 0.25
"""Before anything is known: three of four blocks of chats are never read again."""
_PRIOR: Final = 8.0
"""As many outcomes of a kind count as much as what is known of all."""
_WATCHED_MAX: Final = 1 << 14


def kind_of(turns: int, uses: int) -> int:
    """`turns`: how many times its session has come back; `uses`: how often it was asked for."""
    return min(turns, _TURNS_MAX) * _USE_LEVELS + min(uses.bit_length(), _USE_LEVELS - 1)


@dataclass(slots=True)
class _Outcomes:
    """Of blocks whose fate is known."""

    asked: float = 0.0
    seen: float = 0.0

    def add(self, *, asked: bool) -> None:
        self.asked = self.asked * _FADE + asked
        self.seen = self.seen * _FADE + 1.0

    def chance(self, prior: float) -> float:
        return (self.asked + _PRIOR * prior) / (self.seen + _PRIOR)


class Promise:
    """Learns for a tier of `capacity_bytes`."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._watched: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Digest to kind and bytes, oldest first."""
        self._watched_bytes = 0
        self._mask = 0
        self._kinds = [_Outcomes() for _ in range(_KINDS)]
        self._all = _Outcomes()

    def chance(self, kind: int) -> float:
        """How likely a block of this kind is asked for again while the tier would keep it."""
        return self._kinds[kind].chance(self._all.chance(_FIRST_CHANCE))

    def seen(self, digest: int, kind: int, nbytes: int) -> None:
        """A block was made or asked for, and is of this kind from now on."""
        if digest & self._mask:
            return
        before = self._watched.pop(digest, None)
        if before is not None:
            self._watched_bytes -= before[1]
            self._ended(before[0], asked=True)
        self._watched[digest] = (kind, nbytes)
        self._watched_bytes += nbytes
        while self._watched_bytes * (self._mask + 1) > self._capacity_bytes:
            _, (oldest, oldest_bytes) = self._watched.popitem(last=False)
            self._watched_bytes -= oldest_bytes
            self._ended(oldest, asked=False)
        if len(self._watched) > _WATCHED_MAX:
            self._watch_fewer()

    def _ended(self, kind: int, *, asked: bool) -> None:
        self._kinds[kind].add(asked=asked)
        self._all.add(asked=asked)

    def _watch_fewer(self) -> None:
        """Every second one, from now on."""
        self._mask = 2 * self._mask + 1
        for digest in [digest for digest in self._watched if digest & self._mask]:
            self._watched_bytes -= self._watched.pop(digest)[1]
