"""Block keys, copy states and result types.

The states of a block's copy in one tier. Any other transition is a bug and raises StateError:

    ABSENT --reserve--> FILLING --seal--> READY --drop--> ABSENT
                           |
                           +--abandon--> ABSENT

FILLING is invisible to lookups. A copy that failed its checksum is dropped (quarantined) the
same way as one that was evicted; only the counter differs.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final, NewType

from kvdepot.errors import StateError

BlockKey = NewType("BlockKey", bytes)
"""Content address of one block, 32 bytes: namespace tag (8), link to the parent (8), digest (16).

The link is the first half of the parent's digest, or zeros for the first block of a prompt. So a
key contains its place in the prefix tree.
"""

KEY_BYTES: Final = 32
TAG_BYTES: Final = 8
LINK_BYTES: Final = 8


class CopyState(IntEnum):
    """State of one block's copy in one tier."""

    ABSENT = 0
    FILLING = 1
    READY = 2


ALLOWED: Final = frozenset(
    {
        (CopyState.ABSENT, CopyState.FILLING),
        (CopyState.FILLING, CopyState.READY),
        (CopyState.FILLING, CopyState.ABSENT),
        (CopyState.READY, CopyState.ABSENT),
    }
)


def check_transition(old: int, new: CopyState) -> None:
    """Raise StateError unless a copy may go from `old` to `new`."""
    if (old, new) not in ALLOWED:
        raise StateError(f"a block's copy cannot go from {CopyState(old).name} to {new.name}")


class PutResult(Enum):
    """Result of a put. True if the block is in the store afterwards."""

    STORED = "stored"
    PRESENT = "present"
    THROTTLED = "throttled"
    REFUSED = "refused"

    def __bool__(self) -> bool:
        return self in (PutResult.STORED, PutResult.PRESENT)


@dataclass(frozen=True, slots=True)
class GetResult:
    """Result of a read. True if the buffer holds the block; `tier` is its source.

    After a miss the content of the buffer is undefined, and `reason` is absent, corrupt, failed or
    late.
    """

    tier: str | None
    reason: str = ""

    def __bool__(self) -> bool:
        return self.tier is not None


MISS: Final = GetResult(None, "absent")
ANSWERS: Final = (
    GetResult("dram"),
    GetResult("ssd"),
    MISS,
    *(GetResult(None, reason) for reason in ("corrupt", "failed", "late", "busy")),
    GetResult("hdd"),
    GetResult("cxl"),
    GetResult("plugin"),
    GetResult("object"),
)
"""All results of a read. Between processes a result is an index in this tuple."""
