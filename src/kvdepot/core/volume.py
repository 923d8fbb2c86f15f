"""The interface of a volume: one directory, block device, bucket prefix or remote node.

A volume is one failure domain. It stores records (format.record) at places that it chooses, and
returns them verified. The store decides which records are appended and discarded.

- A **segment** is the unit that a volume frees at once: a file of a log, an object.
- A **place** is an integer: the segment (24 bits) and a page of 4 KiB in it (24 bits).
- A **location** is the number of a volume (15 bits) in front of a place. Only the store uses it.

Calls take and return numpy arrays, so that a call for n blocks is a fixed number of Python calls.
Faults of the medium are values: a record without room has the place NO_PLACE, a read error is
FAILED, wrong bytes are CORRUPT. Callers use the facts of a volume, never its type.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvdepot.core.clock import Clock, StampClock
from kvdepot.core.keys import Keys
from kvdepot.core.metadata import MetaEntry

TIER_NAMES: Final = ("dram", "ssd", "hdd", "cxl", "plugin", "object")
"""All possible tiers. Between processes a tier is an index in this tuple."""
VOLUMES_MAX: Final = 1 << 15
SEGMENTS_MAX: Final = 1 << 24
SEGMENT_SHIFT: Final = 24
VOLUME_SHIFT: Final = 48
NO_PLACE: Final = -1
Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]


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
    """The medium has returned an error, or is known to be down."""
    LATE = 3
    """The read did not end before its deadline. The medium may still write to the image."""


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
only the head is read, its key is compared, and `chunk_bytes` is ignored. After any other outcome
image and target are undefined.
"""


class Purpose(Enum):
    """The reason of an append. A volume reserves one segment for MOVE, so that a segment can always
    be reclaimed.
    """

    BLOCK = auto()
    MOVE = auto()
    """A block moved out of a segment that is about to be released."""


class Priority(IntEnum):
    """The kind of caller that waits for a read. A queue serves lower numbers first."""

    FOREGROUND = 0
    PREFETCH = 1
    BACKGROUND = 2


@dataclass(frozen=True, slots=True)
class WriteBudget:
    """The write budget of a volume with a daily limit."""

    bucket_bytes: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class VolumeFacts:
    """The state of a volume at one moment, known without I/O."""

    label: str
    up: bool = True
    """False after failures, until a trial succeeds."""
    takes_blocks: bool = True
    """It is up, may be written to, has room on its disk and is within its write budget."""
    may_write: bool = True
    """False if it was opened for reading, or `set_limits` has ended writing."""
    full: bool = False
    """The last write failed because the disk was full. Reads work."""
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
    """Bytes of the records in use."""
    held_bytes: int = 0
    """Bytes that the volume occupies on its medium."""
    segment_bytes: int = 0
    segments_max: int = 0
    spare_segments: int = 0
    """Segments that can be opened without releasing one."""
    surplus_segments: int = 0
    """Segments to release after the capacity was lowered."""
    room_bytes: int = 0
    """The largest record that `append` can store now without releasing a segment."""
    record_bytes_max: int = 0
    """The largest record that the volume can ever store."""
    writes: int = 0
    """Running appends."""
    read_bytes_per_s: float = 0.0
    """Measured; 0 if unknown."""
    queued_bytes: int = 0
    """Bytes of requested reads that have not ended."""
    contiguous_bytes: int = 0
    """Bytes of one prompt that should lie together; 0 if seeks cost nothing."""
    writers: int = 1
    """The useful number of concurrent appends."""
    is_remote: bool = False
    """It is behind a network or shared with other nodes: no put waits for it."""
    is_durable: bool = False
    """Synced records survive a power cut, without other nodes."""
    identity: bytes = b""
    """Identifies the volume on every machine; empty if unknown."""
    oldest_segment: int = 0
    """The lowest id of the segments that may be on the medium; 0: there is none."""
    may_hold: Callable[[Keys], Bools] | None = None
    """Returns True for keys of which a record may be on the medium, also one that is not in use or
    that damage has hidden: removals of other keys are not written to any volume. None: all keys."""
    budget: WriteBudget | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further values for `stats`, if `details` was set."""


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """The segments of a volume as arrays, oldest first."""

    segments: Ints
    """Their numbers, as in places."""
    ids: Ints
    """Ids: the stamps at which they were begun."""
    live_count: Ints
    """Records that were appended or recovered, and not discarded."""
    live_bytes: Ints
    sealed: Bools
    """True if no more records are appended and all writes have ended."""


def segment_table(rows: Iterable[tuple[int, int, int, int, bool]]) -> SegmentTable:
    """Make a table from rows of id, number, records in use, bytes in use and sealed."""
    ids, segments, live_count, live_bytes, sealed = (
        np.array(sorted(rows), np.int64).reshape(-1, 5).T
    )
    return SegmentTable(segments, ids, live_count, live_bytes, sealed.astype(bool))


@dataclass(frozen=True, slots=True)
class Contents:
    """The content of a volume, or its changes.

    The volume counts all these records as in use; the store discards those that it does not enter
    into its index.
    """

    words: Array
    """Keys of records, four u64 each; only the newest record of each key."""
    places: Ints
    payload_bytes: Ints
    stamps: Ints
    token: int
    """Argument for the next call of `contents`."""
    gone_words: Array = field(default_factory=lambda: np.zeros((0, 4), np.uint64))
    """Keys of records that other nodes have removed."""
    gone_places: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    metadata: Sequence[MetaEntry] = ()
    """Entries that are new since the last call; all entries in the first call."""


def no_contents(token: int = 0, metadata: Sequence[MetaEntry] = ()) -> Contents:
    empty = np.zeros(0, np.int64)
    words = np.zeros((0, 4), np.uint64)
    return Contents(words, empty, empty, empty, token, metadata=metadata)


class PendingRead(Protocol):
    """Reads under way. Their images and targets belong to the volume until `released`."""

    def when_done(self, call: Callable[[], None]) -> None:
        """Begin the reads if necessary, and call `call` once when `result` will not block.

        Any thread may call it, also before this returns or after the deadline. It may not be called
        at all after `result`.
        """

    def result(self) -> Outcomes:
        """Return an outcome for each record. Reads in this thread what was not begun. Blocks until
        the reads have ended or their deadline has passed; reads that have not ended are LATE.
        """

    def cancel(self) -> bool:
        """Cancel reads that have not begun. True: images and targets are free. False: the reads are
        running.
        """

    def released(self, timeout_s: float) -> bool:
        """Wait until nothing is written to images and targets any more, for `timeout_s` at most.
        False: it may still be.
        """


class Volume(Protocol):
    """Stores records. Thread-safe. Only the factory raises for a fault of the medium."""

    def facts(self, *, details: bool = False) -> VolumeFacts:
        """Return the present state. No I/O."""

    def append(self, records: Array, purpose: Purpose = Purpose.BLOCK) -> Ints:
        """Write records, an array of RECORD_DTYPE, and return their places; NO_PLACE for those
        without room and those whose write failed.

        Blocks until they are written; the images may be reused afterwards. When this returns a
        record is readable and counted as in use; it is durable after `sync`. The volume writes its
        segment id into the heads of the images. The caller must discard records that it does not
        enter into its index.
        """

    def read(self, reads: Array, priority: Priority, timeout_s: float) -> PendingRead:
        """Request reads of records, an array of READ_DTYPE, verified by their keys and checksums.

        Does not block. The reads begin with `when_done` or `result` at the latest.
        """

    def discard(self, places: Ints, payload_bytes: Ints) -> None:
        """Mark records as not in use. Their bytes stay until their segment is released."""

    def segments(self) -> SegmentTable:
        """Return all segments. No I/O."""

    def release(self, segment: int) -> bool:
        """Free a segment, after making earlier appends durable, because they may have moved its
        records. False: that failed, and nothing has changed.
        """

    def put_meta(self, entries: Sequence[MetaEntry]) -> bool:
        """Write metadata; durable after `sync`. A volume ignores kinds that it does not store.
        False: it is down; the caller must write the entries again when it is up.
        """

    def sync(self, timeout_s: float) -> bool:
        """Make all earlier records and metadata durable, as configured. Blocks for `timeout_s` at
        most. False: that failed, or was not done in time.
        """

    def contents(self, since: int | None, *, look: bool = False) -> Contents:
        """Return the content (`since` None), or the changes since the call that returned the token
        `since`. No I/O. `look`: read changes of other nodes soon, in the background.
        """

    def set_limits(self, capacity_bytes: int | None, *, may_write: bool) -> None:
        """Set the capacity (None: unchanged), and whether blocks may be written. A volume with
        capacity 0 deletes all its data and metadata when its segments are released.
        """

    def maintain(self, is_quiet: Callable[[], bool]) -> float:
        """Do background work for a short time: retry a volume that is down, detect a removed
        medium, delete surplus segments, measure speeds while `is_quiet`. Returns the seconds until
        the next call. Called by one thread.
        """

    def close(self) -> None:
        """Close all files and connections. May be called twice."""


class Change(Enum):
    """Changes that a volume reports to the store, from any thread and without a lock held."""

    STATE = auto()
    """The volume went down or works again."""
    CONTENTS = auto()
    """Other nodes have changed its content: see `Volume.contents`."""
    PUBLISHED = auto()
    """Changes of this node were published to other nodes."""


def _ignore(change: Change) -> None:
    """Ignore a change."""


@dataclass(frozen=True, slots=True)
class VolumeContext:
    """The arguments of a volume's factory."""

    clock: Clock
    wall: Clock
    """Time of day."""
    stamps: StampClock
    """Clock for stamps; a volume calls `observe` for stamps that it finds."""
    writable: bool = True
    capacity_bytes: int | None = None
    """The capacity after a resize; None: as configured."""
    on_change: Callable[[Change], None] = _ignore


OpenVolume = Callable[[VolumeContext], Volume]
"""Opens a volume. Raises KVDepotError, and then leaves nothing open."""
