"""Numbers of segments and records: each is given out once, over all drives of a tier."""

import threading
from typing import Final

_EPOCH_SEGMENTS: Final = 32
_EPOCH_RECORDS: Final = 40
"""Bits for what is numbered in one epoch."""


class Numbers:
    """Segment ids and record sequences of a tier: each is given out once, and they rise.

    Each time a tier is opened for writing is an epoch, and they begin anew far above those before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segment_id = 1
        self._sequence = 1
        self.epoch = 0

    def begin_epoch(self, last: int) -> None:
        """`last` is the highest epoch that a drive knows of."""
        with self._lock:
            self.epoch = max(last, self._segment_id >> _EPOCH_SEGMENTS) + 1
            self._segment_id = max(self._segment_id, self.epoch << _EPOCH_SEGMENTS)
            self._sequence = max(self._sequence, self.epoch << _EPOCH_RECORDS)

    def raise_to(self, segment_id: int, sequence: int) -> None:
        with self._lock:
            self._segment_id = max(self._segment_id, segment_id + 1)
            self._sequence = max(self._sequence, sequence + 1)

    def segment_id(self) -> int:
        with self._lock:
            self._segment_id += 1
            return self._segment_id - 1

    def sequence(self) -> int:
        return self.sequences(1)

    def sequences(self, count: int) -> int:
        """The first of so many in a row."""
        with self._lock:
            self._sequence += count
            return self._sequence - count
