"""Stands in for a volume that cannot be opened: holds nothing, and may be opened later."""

from collections.abc import Callable, Sequence

import numpy as np

from kvdepot.core.metadata import MetaEntry
from kvdepot.core.volume import (
    NO_PLACE,
    Array,
    Contents,
    Ints,
    Outcome,
    Outcomes,
    Priority,
    Purpose,
    SegmentTable,
    VolumeFacts,
    no_contents,
)

_LOOK_S = 1.0


class FailedRead:
    """Reads that fail at once. Implements core.volume.PendingRead."""

    def __init__(self, count: int) -> None:
        self._count = count

    def when_done(self, call: Callable[[], None]) -> None:
        call()

    def result(self) -> Outcomes:
        return np.full(self._count, Outcome.FAILED, np.uint8)

    def cancel(self) -> bool:
        return True

    def released(self, timeout_s: float) -> bool:
        del timeout_s
        return True


class AbsentVolume:
    """Implements core.volume.Volume."""

    def __init__(self, label: str, reason: str) -> None:
        self._facts = VolumeFacts(
            label, up=False, takes_blocks=False, lost=True, may_reopen=True, reason=reason, errors=1
        )

    def facts(self, *, details: bool = False) -> VolumeFacts:
        del details
        return self._facts

    def append(self, records: Array, purpose: Purpose = Purpose.BLOCK) -> Ints:
        del purpose
        return np.full(len(records), NO_PLACE, np.int64)

    def read(self, reads: Array, priority: Priority, timeout_s: float) -> FailedRead:
        del priority, timeout_s
        return FailedRead(len(reads))

    def discard(self, places: Ints, payload_bytes: Ints) -> None:
        """There is nothing."""

    def segments(self) -> SegmentTable:
        empty = np.zeros(0, np.int64)
        return SegmentTable(empty, empty, empty, empty, np.zeros(0, bool))

    def release(self, segment: int) -> bool:
        del segment
        return False

    def put_meta(self, entries: Sequence[MetaEntry]) -> bool:
        del entries
        return False

    def sync(self, timeout_s: float) -> bool:
        del timeout_s
        return False

    def contents(self, since: int | None, *, look: bool = False) -> Contents:
        del look
        return no_contents(since or 0)

    def set_limits(self, capacity_bytes: int | None, *, may_write: bool) -> None:
        """The store keeps the limits for the volume that comes."""

    def maintain(self, is_quiet: Callable[[], bool]) -> float:
        del is_quiet
        return _LOOK_S

    def close(self) -> None:
        """Nothing is open."""
