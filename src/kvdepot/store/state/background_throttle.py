"""Background I/O takes what foreground reads leave."""

from typing import Final

FLASH_SHARE: Final = 0.05
HEAD_SHARE: Final = 0.01
"""Of a tier's time that background work may have while it is read from. Where there is a disk
head, every piece of work costs a reader two seeks."""
REST_S_MAX: Final = 5.0
PIECE_S: Final = 0.05
"""A read that comes during background work should not wait longer than that for it."""


def backoff_s(spent_s: float, share: float = FLASH_SHARE) -> float:
    """How long background work rests after a piece that took `spent_s` beside foreground reads."""
    return min(REST_S_MAX, spent_s * (1.0 - share) / share)


class ChunkSizer:
    """How much background work does in one go: what takes `seconds`, `most_bytes` at most."""

    def __init__(self, most_bytes: int, seconds: float = PIECE_S) -> None:
        self._most_bytes = most_bytes
        self._seconds = seconds
        self.nbytes = most_bytes

    def learn(self, nbytes: int, spent_s: float) -> None:
        """A piece of this size took so long."""
        fitting = int(nbytes / max(spent_s, 1e-6) * self._seconds)
        self.nbytes = max(1, min(self._most_bytes, fitting))
