"""Blocks that a caller asks for or offers, as arrays: one row for each block."""

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
`start` and `stop` need not be at borders of chunks. `producer` says what computed a block that is
offered (core.audit); 0 if that is not known.
"""


class BlockSize(NamedTuple):
    """Size of the blocks of one namespace."""

    block_bytes: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks that a caller offers, those of one prompt head first."""

    blocks: Array
    """Rows of BLOCK_DTYPE."""
    tokens: Sequence[bytes | memoryview] = ()
    """Token ids of each block, little-endian u32; empty if they are not known."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Blocks of a call that can be read in place now."""

    indices: Array
    """Their places in the call."""
    addresses: Array
    """Addresses of their records."""
    is_lasting: Array
    """True if a record stays until the lease ends; else it stays until the sink returns."""
    is_verified: bool
    """True if the blocks were compared with their checksums in this call."""
