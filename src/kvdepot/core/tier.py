"""What a store needs of a tier below memory, and what a plug-in implements.

A tier keeps record images (format.record) at places that it chooses, and gives them back verified.
It never decides what to keep: the store picks what is appended, discarded and moved.

- A **drive** is a part of a tier with its own room and health: a directory, a block device. A tier
  that has only one part has one drive, number 0.
- A **segment** is what a drive frees as one: a file of a log, an object, a file with one block.
- A **location** is one integer: drive (7 bits), segment (24 bits), page in the segment (32 bits).

Faults of the medium are values: no room is None, a read error is FAILED, wrong bytes are CORRUPT.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvdepot.core.block import BlockKey
from kvdepot.core.metadata import Metadata, MetaEntry, Tombstone

TIER_NAMES: Final = ("dram", "ssd", "hdd", "cxl", "plugin", "object")
"""Every tier there may be. Between processes a tier is its place in here."""
DRIVES_MAX: Final = 127
SEGMENTS_MAX: Final = 1 << 24
_DRIVE_SHIFT: Final = 56
SEGMENT_SHIFT: Final = 32
Array = npt.NDArray[Any]


def pack_location(drive: int, segment: int, page: int) -> int:
    return drive << _DRIVE_SHIFT | segment << SEGMENT_SHIFT | page


def drive_of(location: int) -> int:
    return location >> _DRIVE_SHIFT


def segment_of(location: int) -> int:
    return location >> SEGMENT_SHIFT & SEGMENTS_MAX - 1


def page_of(location: int) -> int:
    return location & (1 << SEGMENT_SHIFT) - 1


class Outcome(Enum):
    """What became of one load."""

    OK = "ok"
    CORRUPT = "corrupt"
    """The bytes there are not the ones that were stored: never served."""
    FAILED = "failed"
    """The medium returned an error, or is known to be down."""
    LATE = "late"
    """Not finished by the deadline; the medium may still write into the image (see Pending)."""


@dataclass(slots=True)
class Load:
    """One block, or a range of its payload, wanted from a tier.

    `image` has room for the whole record; afterwards it holds the head and payload[start:stop] at
    their places in the record. If `copy_to` is an address, the same range is copied there too.
    `start` is a multiple of `chunk_bytes`; `stop` is one too, or the payload's end. After anything
    but OK both are undefined.
    """

    key: BlockKey
    location: int
    payload_bytes: int
    chunk_bytes: int
    image: memoryview
    copy_to: int
    start: int
    stop: int


class Pending(Protocol):
    """Work that outlived its deadline. The images it was given are busy until `wait` is True."""

    def wait(self, timeout_s: float) -> bool:
        """True once nothing is in flight any more. Blocks for `timeout_s` at most."""


Loaded = tuple[list[Outcome], Pending | None]
"""An outcome for each load. Pending is not None exactly when some outcome is LATE."""


class Purpose(Enum):
    """Why a record is appended. A drive keeps room back so that segments can always be reclaimed:
    blocks may not take its last spare segment, moved blocks may.
    """

    BLOCK = auto()
    MOVE = auto()
    """A block on its way out of a segment that is reclaimed."""


@dataclass(frozen=True, slots=True)
class MetaWritten:
    """How many drives have taken metadata, of how many that should have it."""

    have: int
    should: int


@dataclass(frozen=True, slots=True)
class DriveFacts:
    """One drive as it is now."""

    label: str
    up: bool
    """It works, as far as is known."""
    takes_blocks: bool
    """It is up, not draining, lost or full, and has not spent its budget of writes."""
    full: bool = False
    """Its disk had no room for what was written last; it can be read."""
    lost: bool = False
    """Its medium was taken away; its blocks are gone until it is mounted again."""
    draining: bool = False
    """No block is written to it any more."""
    retired: bool = False
    """It holds nothing, and is used no more."""
    retry_in_s: float = 0.0
    """How long it is still left alone after a failure."""
    segment_bytes: int = 0
    segments_max: int = 0
    spare_segments: int = 0
    """Segments that can be opened without reclaiming one."""
    record_bytes_max: int = 0
    read_bytes_per_s: float = 0.0
    """Measured; 0 where it is not known."""
    queued_bytes: int = 0
    """Reads that were asked for and have not come."""


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A segment that can be reclaimed: it is full, and all of its blocks are counted."""

    slot: int
    segment_id: int
    """Rises with age: the lowest is the oldest."""
    live_bytes: int = 0
    live_count: int = 0


@dataclass(frozen=True, slots=True)
class Contents:
    """Blocks that a tier holds, as arrays, oldest first, each key once."""

    words: Array
    """Keys, four u64 each."""
    locations: Array
    payload_bytes: Array
    stamps: Array
    """When each was put."""


NO_CONTENTS: Final = Contents(
    np.zeros((0, 4), np.uint64), *(np.zeros(0, np.int64) for _ in range(3))
)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier holds.

    `used_bytes` counts whole records; `held_bytes` what it takes of its medium.
    """

    capacity_bytes: int
    used_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a tier (or one drive of it) can be used now, and why not."""

    ok: bool
    reason: str = ""
    errors: int = 0
    retry_in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WriteBudget:
    """What the drives of a tier may still write, where writes are limited."""

    bucket_bytes: int
    left_bytes: int


class Tier(Protocol):
    """Keeps blocks below memory. Thread-safe. No method raises for a fault of the medium."""

    name: str
    writable: bool

    def append(
        self,
        drive: int,
        images: Sequence[memoryview],
        purpose: Purpose = Purpose.BLOCK,
    ) -> list[int | None]:
        """Write record images to one drive. Blocks. The images may be reused afterwards.

        Returns a location each, None where there was no room or the medium failed. Sets the segment
        id in the images' heads. What was appended counts as written but not entered until `count`.
        """

    def load(self, loads: Sequence[Load], timeout_s: float) -> Loaded:
        """Read and verify key and checksums. Blocks until done or `timeout_s` has passed."""

    def read_records(
        self, keys: Sequence[BlockKey], locations: Sequence[int], images: Sequence[memoryview]
    ) -> list[bool]:
        """Read whole records into images, verified. Blocks until the medium answers."""

    def count(self, location: int, payload_bytes: int) -> None:
        """An appended block is in use from now on."""

    def discard(self, locations: Sequence[int], payload_bytes: Sequence[int]) -> None:
        """Blocks are out of use. Their bytes die with their segment."""

    def put_meta(self, entries: Sequence[MetaEntry], sync_s: float | None = None) -> MetaWritten:
        """Record entries on every drive; a drive that is down gets them when it works again. With
        `sync_s` a drive counts once it has them durably, within that time.
        """

    def metadata(self) -> Metadata:
        """What all drives know together. A copy."""

    def has_room(self, drive: int, nbytes: int) -> bool:
        """Whether a block of this record size finds room without reclaiming a segment."""

    def segments(self, drive: int, *, reclaimable: bool = True) -> list[SegmentInfo]:
        """The segments that can be reclaimed, oldest first; or all, also those being written."""

    def has_unentered(self, drive: int) -> bool:
        """Whether blocks were appended, or are being, that `count` has not been told of."""

    def release(self, drive: int, slot: int) -> bool:
        """Free a segment whose blocks were moved or discarded. What was written elsewhere in their
        place is durable before; False: it could not be made so, and nothing has changed.
        """

    def take_contents(self) -> Contents:
        """What was found when the tier was opened, once; afterwards it is forgotten."""

    def drive_count(self) -> int:
        """Drives are numbered from 0; a drive that is gone keeps its number."""

    def drive(self, drive: int) -> DriveFacts:
        """One drive as it is now."""

    def is_up(self, drive: int | None = None) -> bool:
        """Whether a drive, or every drive, works as far as is known. Cheap."""

    def write_budget(self) -> WriteBudget | None:
        """What may still be written; None: there is no limit."""

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Make everything appended so far durable, as configured. False: it could not be."""

    def usage(self) -> Usage:
        """What is held now."""

    def health(self) -> Health:
        """Whether the medium works."""

    def describe_drives(self) -> list[dict[str, Any]]:
        """Every drive in plain values, for `stats`."""

    def close(self) -> None:
        """Release everything. May be called twice."""


class Reading(Protocol):
    """Loads under way."""

    def result(self) -> Loaded:
        """What came of them. Blocks until they are done or their deadline has passed."""


@runtime_checkable
class QueuesReads(Protocol):
    """A tier that has its own queue of reads: no thread of the store waits for them."""

    def submit(self, loads: Sequence[Load], timeout_s: float, done: Callable[[], None]) -> Reading:
        """Begin to load. `done` is called at most once, from any thread, when the answer is there.

        It may come after the deadline, or never once `result` was called: do not wait for it
        longer than `timeout_s`. `result` then returns at once, with LATE.
        """


@dataclass(frozen=True, slots=True)
class Changes:
    """What other nodes have done to a tier that several share."""

    come: Contents
    gone_words: Array
    """Keys of records that are gone, four u64 each."""
    gone_locations: Array
    removed: Sequence[Tombstone] = ()
    """Removals of other nodes."""


@runtime_checkable
class SharesContents(Protocol):
    """A tier that several stores write to: its contents change while it is open."""

    def take_changes(self) -> Changes | None:
        """What has changed since the last call, or since `take_contents`. No I/O."""

    def request_refresh(self) -> None:
        """Something may have changed: look soon, in the background, and not at the next turn."""

    def when_published(self, tell: Callable[[], None]) -> None:
        """Call `tell`, which does not block, after each change that other stores can see now."""


@runtime_checkable
class KeepsTokens(Protocol):
    """A tier that can tell the token ids of its blocks without reading the blocks."""

    def read_tokens(self, keys: Sequence[BlockKey], locations: Sequence[int]) -> list[bytes]:
        """Token ids of blocks, little-endian u32; empty where they are not known, or the record at
        that place is not the block's. Blocks until the medium answers.
        """


@runtime_checkable
class KeepsProducers(Protocol):
    """A tier that can tell what computed its blocks without reading the blocks."""

    def read_producers(self, keys: Sequence[BlockKey], locations: Sequence[int]) -> list[int]:
        """Producers of blocks; 0 where they are not known, or the record at that place is not the
        block's. Blocks until the medium answers.
        """


@runtime_checkable
class ChangesDrives(Protocol):
    """A tier whose drives come, go and are looked after while it is open."""

    def index_of(self, path: Path) -> int:
        """The number of the drive at `path`, or ConfigError."""

    def add(self, path: Path) -> int:
        """Use one more drive, which must be empty. Returns its number, or ConfigError."""

    def start_drain(self, drive: int) -> None:
        """Write no more blocks to a drive."""

    def end_drain(self, drive: int) -> None:
        """Write blocks to a drive again: it stays."""

    def retire(self, drive: int) -> bool:
        """Give everything of an empty drive back, and close it. False: no other drive has taken its
        metadata, and nothing has changed.
        """

    def resize(self, drive: int, segments_max: int) -> None:
        """Let a drive have more or fewer segments; those that are too many go with `trim`."""

    def trim(self, drive: int) -> bool:
        """Give back free segments that are too many. False: there are still too many."""

    def probe(self, drive: int) -> None:
        """Try a drive whose pause after a failure is over; notice one that was taken away."""

    def remount(self, drive: int, forget: Callable[[], None]) -> Contents | None:
        """Open a lost drive again. `forget` is called before its old locations become invalid.
        None: not yet. Raises KVDepotError and OSError.
        """

    def measure(self, is_quiet: Callable[[], bool]) -> float:
        """Measure drives that were never measured, a little at a time while `is_quiet`. Returns in
        how many seconds to call again.
        """

    def stop_measuring(self) -> None:
        """Give back what a drive has lent for measuring."""
