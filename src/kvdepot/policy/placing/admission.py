"""Admission of blocks to a tier, by chance of reuse, drive wear and thrashing. Pure.

While a drive's bucket of writes (core/endurance.py) is full, all blocks may be written; as it
empties, blocks need a higher chance of reuse. A tier thrashes when promoted blocks evict blocks
that would have been hit. Few blocks are then promoted until it is calm. That does not help if new
blocks cause the evictions.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from kvdepot.policy.eviction.ghosts import Ghosts

_TURNS_MAX: Final = 3
_USE_LEVELS: Final = 4
"""Classes of use counts: 0, 1, 2 to 3, more."""
_KINDS: Final = (_TURNS_MAX + 1) * _USE_LEVELS
_OUTCOME_FADE: Final = 0.998
"""The factor by which an outcome's weight falls with each newer one of its kind."""
_FIRST_CHANCE: Final = 0.25
"""The assumed chance: three of four blocks of chats are never read again."""
_PRIOR: Final = 8.0
"""The weight of the average of all kinds, in outcomes."""
_WATCHED_MAX: Final = 1 << 14

PROMISING: Final = 0.5
"""A block with at least this chance of reuse does not wait for its second use."""

_GHOSTS_PER_BLOCK: Final = 1.5
"""A reuse counts as late if at most this many evictions per block of the tier have happened since
the block left."""
_WINDOW_USES: Final = 1024
"""The shortest window, in uses; half the tier's blocks if these are more."""
_WINDOW_FADE: Final = 0.5
_LATE_SHARE: Final = 0.5
_CALM_SHARE: Final = 0.25
"""Thrashing starts above _LATE_SHARE and ends below _CALM_SHARE (hysteresis)."""
_SAMPLED: Final = 16
"""While a tier thrashes, one in this many prompts is promoted: the hot set may have changed."""


def kind_of(turns: int, uses: int) -> int:
    """The kind of a block whose session came back `turns` times and that had `uses` requests."""
    return min(turns, _TURNS_MAX) * _USE_LEVELS + min(uses.bit_length(), _USE_LEVELS - 1)


@dataclass(slots=True)
class _Outcomes:
    """Counts of blocks that were requested again or evicted before."""

    asked: float = 0.0
    seen: float = 0.0

    def add(self, *, asked: bool) -> None:
        self.asked = self.asked * _OUTCOME_FADE + asked
        self.seen = self.seen * _OUTCOME_FADE + 1.0

    def chance(self, prior: float) -> float:
        return (self.asked + _PRIOR * prior) / (self.seen + _PRIOR)


class ReuseChance:
    """Learns the chance that a block is requested again while a tier of `capacity_bytes` keeps it.

    The kind of a block is the number of times its session has come back, and the number of its own
    requests. A sample of blocks is watched, each from its put or request until the next request, or
    until as many bytes have come after it as the tier holds.
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
        """Record that a block was put or requested; `kind` is its new kind."""
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
            self._mask = 2 * self._mask + 1  # halves the sample
            for dropped in [each for each in self._watched if each & self._mask]:
                self._watched_bytes -= self._watched.pop(dropped)[1]

    def _ended(self, kind: int, *, asked: bool) -> None:
        self._kinds[kind].add(asked=asked)
        self._all.add(asked=asked)


def worth_wear(chance: float, level: float) -> bool:
    """True if a block with this chance of reuse should be written.

    `level`: the level of the bucket after the write, up to 1; negative if the bucket has too
    little. The chance must be 1 if the bucket is empty then, 0.5 at a quarter, 0 from a half on.
    """
    return level >= 0.0 and chance >= 1.0 - 2.0 * level


class ThrashDetector:
    """Compares hits with late reuses: requests for blocks that the tier has evicted."""

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
        """The share of reuses that this tier missed and a larger one would have hit."""
        reuses = self._hits + self._late
        return self._late / reuses if reuses else 0.0

    def left(self, digest: int, blocks: int) -> None:
        """A block was evicted; `blocks` are in the tier."""
        self._blocks = blocks
        self._ghosts.fit(blocks)
        self._departures += 1
        self._ghosts.remember(digest, self._departures, 0)

    def hit(self) -> None:
        self._hits += 1
        self._passed()

    def missed(self, digest: int) -> None:
        """A block was read from a lower tier and could be promoted."""
        self._from_below += 1
        self._wanted(digest)

    def made(self, digest: int) -> None:
        """A block was put; the tier may have had it before."""
        self._new += 1
        self._wanted(digest)

    def promotes(self, sample: int) -> bool:
        """True if a prompt may be promoted into the tier; `sample`: a byte of its key."""
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
