"""Which blocks may enter a tier: the chance of reuse, the drive's wear, and thrashing. Pure.

While a drive's bucket of writes (core/endurance.py) is full everything may be written; as it
empties, blocks need a higher and higher chance of reuse. A tier thrashes when it moves blocks in
and out and they are gone when they are wanted: a block that is promoted into it pushes out another
that would have been hit, so few are promoted until it is calm. That does not help where new blocks
push others out.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from kvdepot.policy.eviction.ghosts import Ghosts

_TURNS_MAX: Final = 3
_USE_LEVELS: Final = 4
"""Never, once, two or three times, more often."""
_KINDS: Final = (_TURNS_MAX + 1) * _USE_LEVELS
_OUTCOME_FADE: Final = 0.998
"""What an outcome is worth one outcome of its kind later."""
_FIRST_CHANCE: Final = 0.25
"""Before anything is known: three of four blocks of chats are never read again."""
_PRIOR: Final = 8.0
"""So many outcomes of a kind count as much as the average of all kinds."""
_WATCHED_MAX: Final = 1 << 14

PROMISING: Final = 0.5
"""A block with at least this chance of reuse does not wait for its second use."""

_GHOSTS_PER_BLOCK: Final = 1.5
"""A reuse is late, not new, as long as no more blocks have left since than this, for each one in
the tier."""
_WINDOW_USES: Final = 1024
"""At least; as many as half the tier's blocks, where these are more."""
_WINDOW_FADE: Final = 0.5
_LATE_SHARE: Final = 0.5
_CALM_SHARE: Final = 0.25
"""Two thresholds, so that it does not flicker."""
_SAMPLED: Final = 16
"""While it thrashes, one prompt of so many is promoted: the hot set may have changed."""


def kind_of(turns: int, uses: int) -> int:
    """`turns`: how many times its session has come back; `uses`: how often it was asked for."""
    return min(turns, _TURNS_MAX) * _USE_LEVELS + min(uses.bit_length(), _USE_LEVELS - 1)


@dataclass(slots=True)
class _Outcomes:
    """Of blocks that were asked for again, or left without."""

    asked: float = 0.0
    seen: float = 0.0

    def add(self, *, asked: bool) -> None:
        self.asked = self.asked * _OUTCOME_FADE + asked
        self.seen = self.seen * _OUTCOME_FADE + 1.0

    def chance(self, prior: float) -> float:
        return (self.asked + _PRIOR * prior) / (self.seen + _PRIOR)


class ReuseChance:
    """Learns how likely blocks are asked for again while a tier of `capacity_bytes` keeps them.

    A kind is how many times the session of a block has come back, and how often the block was asked
    for itself. A sample of blocks is watched, each from when it was made or asked for until it is
    asked for again, or until as many bytes have come after it as the tier holds.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._watched: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Digest to kind and bytes, oldest first."""
        self._watched_bytes = 0
        self._mask = 0
        self._kinds = [_Outcomes() for _ in range(_KINDS)]
        self._all = _Outcomes()

    def chance(self, kind: int) -> float:
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
            self._mask = 2 * self._mask + 1  # every second one, from now on
            for one in [one for one in self._watched if one & self._mask]:
                self._watched_bytes -= self._watched.pop(one)[1]

    def _ended(self, kind: int, *, asked: bool) -> None:
        self._kinds[kind].add(asked=asked)
        self._all.add(asked=asked)


def price(level: float) -> float:
    """The chance of reuse that a block needs to be written when the bucket is so full, 0 to 1.

    0 from half full on; 0.5 at a quarter; 1 when the bucket is empty.
    """
    return min(1.0, max(0.0, 1.0 - 2.0 * level))


def worth_wear(chance: float, level: float) -> bool:
    """Whether to write a block that leaves the bucket at `level`, below 0 where it has too little.

    `chance`: how likely it is asked for again while the tier would keep it.
    """
    return level >= 0.0 and chance >= price(level)


class ThrashDetector:
    """Watches hits against reuses that came too late: of blocks that had left the tier before."""

    def __init__(self, window_uses: int = _WINDOW_USES) -> None:
        self.thrashing = False
        self._window_uses_min = window_uses
        self._ghosts = Ghosts(_GHOSTS_PER_BLOCK)
        self._blocks = 0
        self._departures = 0
        self._hits = self._late = 0.0
        self._from_below = self._new = 0.0
        self._uses = 0
        self._windows = 0

    @property
    def late_share(self) -> float:
        """Of the reuses that a larger tier would have hit, the share that this one missed."""
        reuses = self._hits + self._late
        return self._late / reuses if reuses else 0.0

    def left(self, digest: int, blocks: int) -> None:
        """A block made room; so many are in the tier."""
        self._blocks = blocks
        self._ghosts.fit(blocks)
        self._departures += 1
        self._ghosts.remember(digest, self._departures, 0)

    def hit(self) -> None:
        self._hits += 1
        self._passed()

    def missed(self, digest: int) -> None:
        """A block was read from below, and could be promoted into the tier."""
        self._from_below += 1
        self._wanted(digest)

    def made(self, digest: int) -> None:
        """A block was made, anew if the tier once had it."""
        self._new += 1
        self._wanted(digest)

    def promotes(self, sample: int) -> bool:
        """Whether a prompt may be promoted into the tier; `sample` is a byte of its own."""
        return not self.thrashing or (sample + self._windows) % _SAMPLED == 0

    def _wanted(self, digest: int) -> None:
        ghost = self._ghosts.recall(digest)
        if ghost is not None:
            self._late += self._departures - ghost.stamp <= _GHOSTS_PER_BLOCK * self._blocks
        self._passed()

    def _passed(self) -> None:
        self._uses += 1
        if self._uses < max(self._window_uses_min, self._blocks // 2):
            return
        limit = _CALM_SHARE if self.thrashing else _LATE_SHARE
        self.thrashing = self.late_share > limit and self._from_below >= self._new
        self._hits, self._late = self._hits * _WINDOW_FADE, self._late * _WINDOW_FADE
        self._from_below, self._new = self._from_below * _WINDOW_FADE, self._new * _WINDOW_FADE
        self._uses = 0
        self._windows += 1
