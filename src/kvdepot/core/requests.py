"""The blocks of a call as arrays: a row for each block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BLOCK_DTYPE: Final = np.dtype(
    [
        ("key", "<u8", (4,)),
        ("payload_bytes", "<i8"),
        ("chunk_bytes", "<i8"),
        ("address", "<i8"),
        ("start", "<i8"),
        ("stop", "<i8"),
        ("producer", "<u8"),
    ]
)
"""One block of a call.

`address` is that of the caller's buffer for payload[start:stop]; 0 if the block is used in place.
`start` and `stop` need not be multiples of a chunk. `producer` is the number of the software that
computed an offered block (core.audit); 0 if unknown.
"""


class BlockSize(NamedTuple):
    """Size of the blocks of one namespace."""

    block_bytes: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks of a put; those of one prompt are given head first."""

    blocks: Array
    """Rows of BLOCK_DTYPE."""
    tokens: Sequence[bytes | memoryview] = ()
    """Token ids of each block, little-endian u32; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Blocks of a call that can be read in place now."""

    indices: Array
    """Their indices in the call."""
    addresses: Array
    """Addresses of their records."""
    is_lasting: Array
    """True if a record is valid until the lease ends; else it is until the sink returns."""
    is_verified: bool
    """True if this call has verified the checksums of the blocks."""
