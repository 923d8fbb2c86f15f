"""The interface every storage tier implements, and the words it answers with.

A tier is physical: it keeps record images (see codec.record) at places it chooses, and gives
them back verified. What to keep and what to drop is decided above it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from kvdepot.core.block import BlockKey

TIER_NAMES: Final = ("dram", "ssd", "hdd", "cxl")
"""Every tier there may be. Between processes a tier is its place in here."""


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


@dataclass(frozen=True, slots=True)
class Found:
    """One block that a tier holds when it is opened."""

    key: BlockKey
    location: int
    payload_bytes: int


class Pending(Protocol):
    """Work that outlived its deadline. The images it was given are busy until `wait` is True."""

    def wait(self, timeout_s: float) -> bool:
        """True once nothing is in flight any more. Blocks for `timeout_s` at most."""


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


class Tier(Protocol):
    """One medium that holds blocks. Thread-safe. No method raises for a fault of the medium."""

    name: str

    def store(self, images: Sequence[memoryview]) -> list[int | None]:
        """Keep copies of record images; the caller may reuse them afterwards.

        Returns a location each, None where there was no room or the medium failed. A location is
        valid until it is discarded. May set the segment id and sequence in the images' heads.
        Blocks.
        """

    def load(self, loads: Sequence[Load], timeout_s: float) -> tuple[list[Outcome], Pending | None]:
        """Read and verify. Blocks until all are done or `timeout_s` has passed.

        Pending is not None exactly when some outcome is LATE.
        """

    def discard(self, locations: Sequence[int], payload_bytes: Sequence[int]) -> None:
        """Forget blocks of these sizes; their room is used again.

        Unknown locations are a caller's bug.
        """

    def scan(self) -> Iterator[Found]:
        """What was found when the tier was opened, each key once. Volatile tiers find nothing."""

    def flush(self) -> bool:
        """Make everything stored so far as durable as the tier can. False: it could not."""

    def usage(self) -> Usage:
        """What is held now."""

    def health(self) -> Health:
        """Whether the medium works."""

    def close(self) -> None:
        """Release everything. May be called twice."""
