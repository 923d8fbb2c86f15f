"""Slows down background I/O while foreground reads are running."""

from typing import Final

FLASH_SHARE: Final = 0.05
HEAD_SHARE: Final = 0.01
"""Share of a hard-drive tier's time for background work while calls read from it. Each step costs
a reader two seeks."""
REST_S_MAX: Final = 5.0
PIECE_S: Final = 0.05
"""Intended duration of a step of background work, which a new read may have to wait for."""


def backoff_s(spent_s: float, share: float = FLASH_SHARE) -> float:
    """Return the pause of background work after a step of `spent_s` during foreground reads."""
    return min(REST_S_MAX, spent_s * (1.0 - share) / share)


class ChunkSizer:
    """The size of a step of background work that takes `seconds`, at most `most_bytes`."""

    def __init__(self, most_bytes: int, seconds: float = PIECE_S) -> None:
        self._most_bytes = most_bytes
        self._seconds = seconds
        self.nbytes = most_bytes

    def learn(self, nbytes: int, spent_s: float) -> None:
        """Record that a step of `nbytes` took `spent_s`."""
        fitting = int(nbytes / max(spent_s, 1e-6) * self._seconds)
        self.nbytes = max(1, min(self._most_bytes, fitting))
