"""Copies of blocks between places in memory, verified or checksummed in the same pass.

Whole batches of a call are copied by native.copy_in and native.copy_out.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.core.requests import Array
from kvdepot.format.record import HEAD_BYTES, TABLE_OFFSET, chunk_count
from kvdepot.native import TRANSFER_DTYPE, chunk_checksums, transfer

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_WORDS: Final = TRANSFER_DTYPE.itemsize // 8


def transfers(rows: Sequence[tuple[Any, ...]], threads: int = 1) -> npt.NDArray[Any]:
    """Run a batch of native.TRANSFER_DTYPE rows; returns their results."""
    words = np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * _WORDS)
    transfer(words, threads)
    return words[::_WORDS]


def spans(blocks: Array) -> tuple[Ints, Ints, Bools]:
    """Extend the wanted ranges to whole chunks. Returns start, stop, and True if unchanged."""
    start, stop, chunk = blocks["start"], blocks["stop"], blocks["chunk_bytes"]
    first = start // chunk * chunk
    last = np.minimum(-(-stop // chunk) * chunk, blocks["payload_bytes"])
    return first, last, (first == start) & (last == stop)


def checksum_slot(image: memoryview, payload_bytes: int, chunk_bytes: int) -> None:
    """Write the checksums of a payload that was filled in place. `image` begins with the slot."""
    end = TABLE_OFFSET + 8 * chunk_count(payload_bytes, chunk_bytes)
    payload = image[HEAD_BYTES : HEAD_BYTES + payload_bytes]
    chunk_checksums(payload, chunk_bytes, image[TABLE_OFFSET:end])
