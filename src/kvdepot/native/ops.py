"""The records that cross into native code: one numpy structured array is one batch."""

from __future__ import annotations

from typing import Final

import numpy as np

COPY: Final = 0
FILL: Final = 1
VERIFY: Final = 2

READ: Final = 0
WRITE: Final = 1
SYNC: Final = 2

# A head is at most this long; `used` in a head may not exceed it.
HEAD_BYTES: Final = 4096
# Where a head says how many of its bytes are in use (little-endian u32), and the least it may say.
HEAD_USED_AT: Final = 64
HEAD_USED_MIN: Final = 64


def _record(*fields: tuple[str, str]) -> np.dtype[np.void]:
    return np.dtype(list(fields))


def _unsigned(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, "<u8") for name in names)


TRANSFER_DTYPE: Final = _record(
    ("result", "<i8"), *_unsigned("source", "target", "nbytes", "chunk_bytes", "table", "mode")
)
"""`source` to `target` (0: no copy); `mode` COPY, FILL or VERIFY of `table`, one u64 a chunk."""

STRIDED_DTYPE: Final = _record(*_unsigned("address", "rows", "row_bytes"), ("stride", "<i8"))
"""`rows` rows of `row_bytes`, the next one `stride` bytes after the start of the last."""

RECTANGLE_DTYPE: Final = _record(
    *_unsigned("target", "target_pitch", "source", "source_pitch", "width", "height")
)
"""`height` rows of `width` bytes, the next one a pitch after the start of the last."""

IO_DTYPE: Final = _record(
    ("result", "<i8"),
    ("fd", "<i8"),
    *_unsigned("opcode", "offset", "address", "nbytes"),
    *_unsigned("head_offset", "head_address", "head_bytes"),
    *_unsigned("expect_address", "expect_bytes", "head_check"),
    *_unsigned("table", "payload_address", "payload_bytes", "chunk_bytes", "copy_target"),
)
"""One READ, WRITE or SYNC. Fields from `head_offset` on are for reads only; see `IoEngine.run`."""
