"""Copying blocks between places in memory, verified where asked."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.format.record import HEAD_BYTES, TABLE_OFFSET, chunk_count
from kvdepot.native import COPY, FILL, TRANSFER_DTYPE, VERIFY, chunk_checksums, transfer

_WORDS: Final = TRANSFER_DTYPE.itemsize // 8


def transfers(rows: Sequence[tuple[Any, ...]], threads: int = 1) -> npt.NDArray[Any]:
    """Run a batch of native.TRANSFER_DTYPE rows; returns their results."""
    words = np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * _WORDS)
    transfer(words, threads)
    return words[::_WORDS]


def read_op(slot: int, target: int, start: int, stop: int, chunk_bytes: int) -> tuple[int, ...]:
    """A verified copy of whole chunks of the payload out of the slot at address `slot`.

    Target 0: verify only.
    """
    table = slot + TABLE_OFFSET + 8 * (start // chunk_bytes)
    return (0, slot + HEAD_BYTES + start, target, stop - start, chunk_bytes, table, VERIFY)


def verified_ops(
    slot: int, target: int, span: tuple[int, int], payload_bytes: int, chunk_bytes: int
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """What verifies and copies a range of the payload that need not end at borders of chunks.

    Such a range is verified as whole chunks, and copied by a second operation.
    """
    start, stop = span
    first = start // chunk_bytes * chunk_bytes
    last = min(-(-stop // chunk_bytes) * chunk_bytes, payload_bytes)
    if (first, last) == span:
        return read_op(slot, target, start, stop, chunk_bytes), None
    copy = copy_op(slot, target, start, stop) if target else None
    return read_op(slot, 0, first, last, chunk_bytes), copy


def copy_op(slot: int, target: int, start: int, stop: int) -> tuple[int, ...]:
    """A plain copy of a range of the payload out of the slot at address `slot`."""
    return (0, slot + HEAD_BYTES + start, target, stop - start, 0, 0, COPY)


def fill_op(slot: int, source: int, payload_bytes: int, chunk_bytes: int) -> tuple[int, ...]:
    """A copy of a payload into the slot at address `slot`, checksummed in the same pass."""
    target, table = slot + HEAD_BYTES, slot + TABLE_OFFSET
    return (0, source, target, payload_bytes, chunk_bytes, table, FILL)


def checksum_slot(image: memoryview, payload_bytes: int, chunk_bytes: int) -> None:
    """Checksum a payload that was filled in place; `image` begins with the slot."""
    end = TABLE_OFFSET + 8 * chunk_count(payload_bytes, chunk_bytes)
    payload = image[HEAD_BYTES : HEAD_BYTES + payload_bytes]
    chunk_checksums(payload, chunk_bytes, image[TABLE_OFFSET:end])
