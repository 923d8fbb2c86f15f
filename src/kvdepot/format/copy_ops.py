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
from kvdepot.native import COPY, TRANSFER_DTYPE, VERIFY, chunk_checksums, transfer

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_WORDS: Final = TRANSFER_DTYPE.itemsize // 8


def transfers(rows: Sequence[tuple[Any, ...]], threads: int = 1) -> npt.NDArray[Any]:
    """Run a batch of native.TRANSFER_DTYPE rows; returns their results."""
    words = np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * _WORDS)
    transfer(words, threads)
    return words[::_WORDS]


def read_op(slot: int, target: int, start: int, stop: int, chunk_bytes: int) -> tuple[int, ...]:
    """An operation that verifies whole chunks of the payload of the slot at address `slot`, and
    copies them to `target` unless that is 0.
    """
    table = slot + TABLE_OFFSET + 8 * (start // chunk_bytes)
    return (0, slot + HEAD_BYTES + start, target, stop - start, chunk_bytes, table, VERIFY)


def spans(blocks: Array) -> tuple[Ints, Ints, Bools]:
    """Extend the wanted ranges to whole chunks. Returns start, stop, and True if unchanged."""
    start, stop, chunk = blocks["start"], blocks["stop"], blocks["chunk_bytes"]
    first = start // chunk * chunk
    last = np.minimum(-(-stop // chunk) * chunk, blocks["payload_bytes"])
    return first, last, (first == start) & (last == stop)


def copy_op(slot: int, target: int, start: int, stop: int) -> tuple[int, ...]:
    """An operation that copies a range of the payload of the slot at address `slot`."""
    return (0, slot + HEAD_BYTES + start, target, stop - start, 0, 0, COPY)


def checksum_slot(image: memoryview, payload_bytes: int, chunk_bytes: int) -> None:
    """Write the checksums of a payload that was filled in place. `image` begins with the slot."""
    end = TABLE_OFFSET + 8 * chunk_count(payload_bytes, chunk_bytes)
    payload = image[HEAD_BYTES : HEAD_BYTES + payload_bytes]
    chunk_checksums(payload, chunk_bytes, image[TABLE_OFFSET:end])
