"""Copying blocks between places in memory, verified where asked."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.codec.record import HEAD_BYTES, TABLE_OFFSET
from kvdepot.core.tier import Load
from kvdepot.native import TRANSFER_DTYPE, VERIFY, transfer

_WORDS: Final = TRANSFER_DTYPE.itemsize // 8


def transfers(rows: Sequence[tuple[Any, ...]]) -> npt.NDArray[Any]:
    """Run a batch of native.TRANSFER_DTYPE rows; returns their results."""
    words = np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * _WORDS)
    transfer(words)
    return words[::_WORDS]


def read_op(slot: int, load: Load, target: int) -> tuple[Any, ...]:
    """A verified copy of a load's range out of the slot at address `slot`; 0 = verify only."""
    table = slot + TABLE_OFFSET + 8 * (load.start // load.chunk_bytes)
    source = slot + HEAD_BYTES + load.start
    return (0, source, target, load.stop - load.start, load.chunk_bytes, table, VERIFY)
