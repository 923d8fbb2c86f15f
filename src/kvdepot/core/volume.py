"""The interface of a volume: one directory, block device, bucket prefix or remote node.

A volume is one failure domain. It keeps records (format.record) at places that it chooses, returns
them verified, and never decides what to keep: the store picks what is appended and discarded.

- A **segment** is the unit that a volume frees at once: a file of a log, an object.
- A **place** is an integer: the segment (24 bits) and a page of 4 KiB in it (24 bits).
- A **location** is the number of a volume (15 bits) in front of a place. Only the store uses it.

Calls take and return numpy arrays, so that a call for n blocks is a fixed number of Python calls.
Faults of the medium are values: a record without room has the place NO_PLACE, a read error is
FAILED, wrong bytes are CORRUPT. Volumes differ by their facts; no caller asks for their type.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvdepot.core.clock import Clock, StampClock
from kvdepot.core.metadata import MetaEntry

TIER_NAMES: Final = ("dram", "ssd", "hdd", "cxl", "plugin", "object")
"""Every tier there may be. Between processes a tier is its index in this tuple."""
VOLUMES_MAX: Final = 1 << 15
SEGMENTS_MAX: Final = 1 << 24
SEGMENT_SHIFT: Final = 24
VOLUME_SHIFT: Final = 48
NO_PLACE: Final = -1
Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


def pack_place(segment: int, page: int) -> int:
    return segment << SEGMENT_SHIFT | page


def volume_of(location: int) -> int:
    return location >> VOLUME_SHIFT


def place_of(location: int) -> int:
    return location & (1 << VOLUME_SHIFT) - 1


def segment_of(location: int) -> int:
    """The segment of a location or a place."""
    return location >> SEGMENT_SHIFT & SEGMENTS_MAX - 1


def page_of(location: int) -> int:
    """The page of a location or a place."""
    return location & (1 << SEGMENT_SHIFT) - 1


class Outcome(IntEnum):
    """Result of reading one record."""

    OK = 0
    CORRUPT = 1
    """The bytes are not the ones that were stored. They are never served."""
    FAILED = 2
    """The medium returned an error, or is known to be down."""
    LATE = 3
    """The read had not ended at its deadline. The medium may still write into the image."""


Outcomes = npt.NDArray[np.uint8]
"""One Outcome for each record of a batch."""

RECORD_DTYPE: Final = np.dtype(
    [("key", "<u8", (4,)), ("image", "<i8"), ("payload_bytes", "<i8"), ("stamp", "<i8")]
)
"""A record to be appended. `image` is the address of the whole record, page-aligned."""

READ_DTYPE: Final = np.dtype(
    [
        ("key", "<u8", (4,)),
        ("place", "<i8"),
        ("payload_bytes", "<i8"),
        ("chunk_bytes", "<i8"),
        ("image", "<i8"),
        ("target", "<i8"),
        ("start", "<i8"),
        ("stop", "<i8"),
    ]
)
"""A record to be read, or a range of its payload.

`image` is the address of memory for the whole record. After OK it holds the head and
payload[start:stop] at their offsets in the record; with a `target` that range is copied there too.
`start` is a multiple of `chunk_bytes`; `stop` is one too, or the end of the payload. With `stop` 0
only the head is read, its key is compared, and `chunk_bytes` does not matter. After any other
outcome image and target are undefined.
"""


class Purpose(Enum):
    """The reason of an append. A volume reserves one segment for MOVE, so that a segment can always
    be reclaimed.
    """

    BLOCK = auto()
    MOVE = auto()
    """A block that leaves a segment which is about to be released."""


class Priority(IntEnum):
    """The caller that waits for a read. A volume with a queue serves lower numbers first."""

    FOREGROUND = 0
    PREFETCH = 1
    BACKGROUND = 2


@dataclass(frozen=True, slots=True)
class WriteBudget:
    """Bytes that may still be written to a volume with a daily limit."""

    bucket_bytes: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class VolumeFacts:
    """The state of a volume at one moment. No I/O is needed to know it."""

    label: str
    up: bool = True
    """False after failures, until a trial succeeds."""
    takes_blocks: bool = True
    """It is up, may be written to, has room on its disk and is within its write budget."""
    may_write: bool = True
    """False if it was opened for reading, or `set_limits` has ended writing."""
    full: bool = False
    """The last write found no room on the disk. Reads work."""
    lost: bool = False
    """The medium was removed. The store closes this volume and opens a new one."""
    may_reopen: bool = False
    """The medium of a lost volume seems to be back."""
    reason: str = ""
    """The reason if it is not up."""
    errors: int = 0
    retry_in_s: float = 0.0
    """Time until the next trial of a volume that is down."""
    capacity_bytes: int = 0
    used_bytes: int = 0
    """Whole records of blocks in use."""
    held_bytes: int = 0
    """Bytes that the volume occupies on its medium."""
    segment_bytes: int = 0
    segments_max: int = 0
    spare_segments: int = 0
    """Segments that can be opened without releasing one."""
    surplus_segments: int = 0
    """Segments above the capacity, after it was lowered; release as many."""
    room_bytes: int = 0
    """The largest record that `append` takes now without a released segment."""
    record_bytes_max: int = 0
    """The largest record that it can ever take."""
    writes: int = 0
    """Appends under way."""
    read_bytes_per_s: float = 0.0
    """Measured; 0 if unknown."""
    queued_bytes: int = 0
    """Reads that were requested and have not ended."""
    contiguous_bytes: int = 0
    """Bytes of one prompt that should lie together; 0 if seeks cost nothing."""
    writers: int = 1
    """The useful number of concurrent appends."""
    is_remote: bool = False
    """It lies behind a network or is shared with other nodes: no put waits for it."""
    is_durable: bool = False
    """Synced records survive a power cut, without other nodes."""
    identity: bytes = b""
    """Names the volume wherever it is attached; empty if it has no name."""
    oldest_segment: int = 0
    """The lowest id of a segment that may still be on the medium; 0: there is none."""
    budget: WriteBudget | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    """More values for `stats`, if `details` was given."""


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """The segments of a volume as arrays, oldest first."""

    segments: Ints
    """Their numbers, as in places."""
    ids: Ints
    """Stamps of their beginnings: these rise with age."""
    live_count: Ints
    """Records appended or found, and not discarded."""
    live_bytes: Ints
    sealed: npt.NDArray[np.bool_]
    """No more records are appended to it, and all of its writes have ended."""


def segment_table(rows: Iterable[tuple[int, int, int, int, bool]]) -> SegmentTable:
    """Segments given as id, number, records and bytes in use, and whether it is sealed."""
    ids, segments, live_count, live_bytes, sealed = (
        np.array(sorted(rows), np.int64).reshape(-1, 5).T
    )
    return SegmentTable(segments, ids, live_count, live_bytes, sealed.astype(bool))


@dataclass(frozen=True, slots=True)
class Contents:
    """The content of a volume, or its changes.

    The volume counts all records in here as in use; the store discards those that it does not
    enter.
    """

    words: Array
    """Keys of records, four u64 each. Of several records with one key the newest is in here."""
    places: Ints
    payload_bytes: Ints
    stamps: Ints
    token: int
    """Give this to the next call."""
    gone_words: Array = field(default_factory=lambda: np.zeros((0, 4), np.uint64))
    """Keys of records that other nodes have removed."""
    gone_places: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    metadata: Sequence[MetaEntry] = ()
    """Entries that are new since the last call; at first all."""


def no_contents(token: int = 0, metadata: Sequence[MetaEntry] = ()) -> Contents:
    empty = np.zeros(0, np.int64)
    words = np.zeros((0, 4), np.uint64)
    return Contents(words, empty, empty, empty, token, metadata=metadata)


class PendingRead(Protocol):
    """Reads under way. Their images and targets belong to the volume until `released`."""

    def when_done(self, call: Callable[[], None]) -> None:
        """Begin, if that has not happened, and call `call` once when `result` returns at once: from
        any thread, perhaps before this returns. It may come after the deadline, or never once
        `result` was called.
        """

    def result(self) -> Outcomes:
        """An outcome for each record. Reads in this thread what was not begun. Blocks until the
        reads have ended or their deadline has passed; what has not ended is LATE.
        """

    def cancel(self) -> bool:
        """True: the reads had not begun and never will; images and targets are free. False: they
        are under way.
        """

    def released(self, timeout_s: float) -> bool:
        """True once nothing is written to images and targets any more. Blocks for `timeout_s` at
        most.
        """


class Volume(Protocol):
    """Keeps records. Thread-safe. No method but the factory raises for a fault of the medium."""

    def facts(self, *, details: bool = False) -> VolumeFacts:
        """The state of the volume now."""

    def append(self, records: Array, purpose: Purpose = Purpose.BLOCK) -> Ints:
        """Write records, an array of RECORD_DTYPE, and return their places, NO_PLACE for those that
        found no room or were not written.

        Blocks until they are written; the images may be reused afterwards. A record is readable and
        counted as in use when this returns, and durable after `sync`. The volume writes its segment
        id into the heads of the images. The caller discards what it does not enter.
        """

    def read(self, reads: Array, priority: Priority, timeout_s: float) -> PendingRead:
        """Read records, an array of READ_DTYPE, and verify their keys and checksums.

        Does not block. The reads begin at the latest with `when_done` or `result`.
        """

    def discard(self, places: Ints, payload_bytes: Ints) -> None:
        """Records are out of use. Their bytes stay until their segment is released."""

    def segments(self) -> SegmentTable:
        """All segments."""

    def release(self, segment: int) -> bool:
        """Free a segment. Earlier appends are made durable before, because they may have moved its
        records. False: that failed, and nothing has changed.
        """

    def put_meta(self, entries: Sequence[MetaEntry]) -> bool:
        """Record metadata; durable after `sync`. A volume ignores kinds that it cannot keep. False:
        it is down; give the entries again when it is up.
        """

    def sync(self, timeout_s: float) -> bool:
        """Make everything appended and recorded so far durable, as configured. False: it could not
        be, or not in time.
        """

    def contents(self, since: int | None, *, look: bool = False) -> Contents:
        """The content of the volume (`since` None), or the changes since the call that returned the
        token `since`. No I/O. `look`: read the changes of other nodes soon, in the background.
        """

    def set_limits(self, capacity_bytes: int | None, *, may_write: bool) -> None:
        """Change the capacity (None: leave it), and whether blocks are written. A volume with
        capacity 0 gives back all its room and metadata once its segments are released.
        """

    def maintain(self, is_quiet: Callable[[], bool]) -> float:
        """Do background work for a short time: try a volume that is down, notice a medium that was
        removed, give back surplus segments, measure speeds while `is_quiet`. Returns the seconds
        until the next call. One thread calls it.
        """

    def close(self) -> None:
        """Release everything. May be called twice."""


class Change(Enum):
    """Changes that a volume reports to the store, from any thread and without a lock held."""

    STATE = auto()
    """The volume went down or works again."""
    CONTENTS = auto()
    """Other nodes have changed its content: see `Volume.contents`."""
    PUBLISHED = auto()
    """Other nodes can see the changes of this node now."""


def _ignore(change: Change) -> None:
    """Ignore a change."""


@dataclass(frozen=True, slots=True)
class VolumeContext:
    """The arguments of a volume's factory."""

    clock: Clock
    wall: Clock
    """Time of day."""
    stamps: StampClock
    """The order of puts and removals; a volume observes the stamps that it finds."""
    writable: bool = True
    capacity_bytes: int | None = None
    """The capacity, if the volume was resized since the configuration was read."""
    on_change: Callable[[Change], None] = _ignore


OpenVolume = Callable[[VolumeContext], Volume]
"""Opens a volume. Raises KVDepotError; then nothing stays open."""
