"""The placeholder for a volume that cannot be opened. It is empty and down."""

from collections.abc import Callable, Sequence

import numpy as np

from kvdepot.core.metadata import MetaEntry
from kvdepot.core.volume import (
    NO_PLACE,
    Array,
    Contents,
    Ints,
    Priority,
    Purpose,
    SegmentTable,
    VolumeFacts,
    no_contents,
    segment_table,
)
from kvdepot.volumes.records import BlockingReads

_LOOK_S = 1.0


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

    def read(self, reads: Array, priority: Priority, timeout_s: float) -> BlockingReads:
        del priority
        return BlockingReads(reads, lambda place: None, timeout_s)

    def discard(self, places: Ints, payload_bytes: Ints) -> None:
        """Does nothing: it has no records."""

    def segments(self) -> SegmentTable:
        return segment_table(())

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
        """Does nothing: the store keeps the limits for the next volume."""

    def maintain(self, is_quiet: Callable[[], bool]) -> float:
        del is_quiet
        return _LOOK_S

    def close(self) -> None:
        """Does nothing: there are no files."""
