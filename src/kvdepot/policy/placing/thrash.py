"""Whether a tier thrashes: it moves blocks in and out, and they are gone when they are wanted.

Pure. What is promoted into such a tier only pushes out what would have been hit, so little is
promoted until it has calmed down. Where new blocks are what pushes others out, that would not help.
"""

from typing import Final

from kvdepot.policy.eviction.ghosts import Ghosts

_GHOSTS_PER_BLOCK: Final = 1.5
"""A reuse is late, not new, as long as no more blocks have left since than this, for each one in
the tier."""
_WINDOW_USES: Final = 1024
"""At least; as many as half the tier's blocks, where these are more."""
_FADE: Final = 0.5
_LATE_SHARE: Final = 0.5
_CALM_SHARE: Final = 0.25
"""Two thresholds, so that it does not flicker."""
_SAMPLED: Final = 16
"""While it thrashes, one prompt of so many is promoted: who is hot may have changed."""


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
        """A block was read from the tier."""
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
        self._hits, self._late = self._hits * _FADE, self._late * _FADE
        self._from_below, self._new = self._from_below * _FADE, self._new * _FADE
        self._uses = 0
        self._windows += 1
