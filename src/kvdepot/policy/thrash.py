"""Whether a tier thrashes: it moves blocks in and out, and they are gone when they are wanted.

Pure; counts come in. A tier that thrashes should not be promoted into for every hit: what comes
in pushes out what would have been hit.
"""

from dataclasses import dataclass
from typing import Final

_FADE: Final = 0.5
_LATE_SHARE: Final = 0.5
_CALM_SHARE: Final = 0.25


@dataclass(slots=True)
class ThrashDetector:
    """Watches hits against reuses that came too late. Has two thresholds, so it does not flicker.

    `late` are misses for blocks that left the tier a while ago and are remembered as ghosts.
    """

    window_uses: int = 4096
    thrashing: bool = False
    _hits: float = 0.0
    _late: float = 0.0
    _uses: int = 0

    def saw(self, *, hits: int = 0, late: int = 0, other: int = 0) -> bool:
        """Blocks that were hit, that came too late, and that were never here. True: it thrashes."""
        self._hits += hits
        self._late += late
        self._uses += hits + late + other
        if self._uses >= self.window_uses:
            self._judge()
        return self.thrashing

    @property
    def late_share(self) -> float:
        """Of the reuses that a larger tier would have hit, the share that this one missed."""
        reuses = self._hits + self._late
        return self._late / reuses if reuses else 0.0

    def _judge(self) -> None:
        limit = _CALM_SHARE if self.thrashing else _LATE_SHARE
        self.thrashing = self.late_share > limit
        self._hits *= _FADE
        self._late *= _FADE
        self._uses = 0
