"""Blocks in memory: record images in arena slots.

The store fills and reads slots in place, under its own lock, through `arena`; the Tier methods are
the same thing for everybody else.
"""

import errno
import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.codec.record import HEAD_BYTES, TABLE_OFFSET, parse_own
from kvdepot.core.tier import Found, Health, Load, Outcome, Pending, Usage
from kvdepot.native import COPY, TRANSFER_DTYPE, VERIFY, address_of, transfer
from kvdepot.tiers.memory.arena import Arena

_SOMEBODY: Final = 0
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


class DramTier:
    """The `dram` tier. Implements core.tier.Tier."""

    name = "dram"

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._lock = threading.Lock()
        self._closed = False

    def store(self, images: Sequence[memoryview]) -> list[int | None]:
        with self._lock:
            locations = [self.arena.allocate(len(image), _SOMEBODY) for image in images]
        rows = [
            (0, address_of(image)[0], self.arena.address + location, len(image), 0, 0, COPY)
            for image, location in zip(images, locations, strict=True)
            if location is not None
        ]
        transfers(rows)
        return locations

    def load(self, loads: Sequence[Load], timeout_s: float) -> tuple[list[Outcome], Pending | None]:
        del timeout_s  # memory answers at once
        outcomes = []
        for load in loads:
            slot = self.arena.address + load.location
            image = address_of(load.image, writable=True)[0]
            head = self.arena.image(load.location, HEAD_BYTES)
            if parse_own(head)[1] != load.key or parse_own(head)[3] != load.payload_bytes:
                outcomes.append(Outcome.CORRUPT)
                continue
            rows = [(0, slot, image, HEAD_BYTES, 0, 0, COPY)]
            rows.append(read_op(slot, load, image + HEAD_BYTES + load.start))
            if load.copy_to:
                rows.append(read_op(slot, load, load.copy_to))
            bad = -errno.EBADMSG in transfers(rows).tolist()
            outcomes.append(Outcome.CORRUPT if bad else Outcome.OK)
        return outcomes, None

    def discard(self, locations: Sequence[int], payload_bytes: Sequence[int]) -> None:
        del payload_bytes  # a slab knows the size of its slots
        with self._lock:
            for location in locations:
                self.arena.free(location)

    def scan(self) -> Iterator[Found]:
        return iter(())

    def flush(self) -> bool:
        return True

    def usage(self) -> Usage:
        return Usage(self.arena.capacity_bytes, self.arena.used_bytes, self.arena.memory.nbytes)

    def health(self) -> Health:
        return Health(True)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.arena.close()
