"""Numbers of segments and records: each is given out once, over all drives of a tier."""

import threading
from typing import Final

_EPOCH_BITS: Final = 30
"""For what is numbered in one epoch. What goes beyond takes numbers of epochs that are over before
the store is opened again."""
_EPOCHS_FROM_S: Final = 1_767_225_600
"""The beginning of 2026."""
EPOCH_S: Final = 0.125


class Numbers:
    """Segment ids and record sequences of a tier: each is given out once, and they rise.

    Each time a tier is opened for writing is an epoch, and they begin anew far above those before.
    An epoch is named by the time of day: drives that were used apart cannot tell each other how far
    their numbers had come, and a removal must cover what was written before it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segment_id = 1
        self._sequence = 1
        self.epoch = 0

    def begin_epoch(self, last: int, now_s: float) -> None:
        """`last` is the highest epoch that a drive knows of; `now_s` is in seconds since 1970."""
        with self._lock:
            used = max(last, self._segment_id >> _EPOCH_BITS, self._sequence >> _EPOCH_BITS)
            self.epoch = max(used + 1, int((now_s - _EPOCHS_FROM_S) / EPOCH_S))
            self._segment_id = max(self._segment_id, self.epoch << _EPOCH_BITS)
            self._sequence = max(self._sequence, self.epoch << _EPOCH_BITS)

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
