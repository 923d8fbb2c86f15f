"""Numbers that a store gives out once: the names of segments and the order of records."""

import threading


class Numbers:
    """Segment ids and record sequences, unique in a store and growing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segment_id = 1
        self._sequence = 1

    def raise_to(self, segment_id: int, sequence: int) -> None:
        with self._lock:
            self._segment_id = max(self._segment_id, segment_id + 1)
            self._sequence = max(self._sequence, sequence + 1)

    def segment_id(self) -> int:
        with self._lock:
            self._segment_id += 1
            return self._segment_id - 1

    def sequence(self) -> int:
        with self._lock:
            self._sequence += 1
            return self._sequence - 1
