"""All I/O of a drive goes through here: batches by the native engine, single pages by the OS.

One seam, so that tests can put faults, delays and kills between a drive and its disk
(kvdepot.testing.faults), and so that nothing else in the tiers calls the OS.
"""

import mmap
import os
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvdepot.codec.record import round_up
from kvdepot.core.tier import Pending
from kvdepot.native import IO_DTYPE, open_engine

EngineKind = Literal["auto", "uring", "threads", "python"]
Ops = npt.NDArray[Any]


def io_ops(count: int) -> Ops:
    """An empty batch for `Files.run`."""
    return np.zeros(count, dtype=IO_DTYPE)


def aligned(nbytes: int) -> memoryview:
    """Fresh page-aligned memory for direct I/O."""
    return memoryview(mmap.mmap(-1, round_up(max(nbytes, 1))))


class Files:
    """I/O on open descriptors. Raises OSError; batches report errors in their `result` column."""

    def __init__(self, kind: EngineKind = "auto", depth: int = 32) -> None:
        self.engine = open_engine(kind, depth=depth)

    def run(self, ops: Ops, timeout_s: float) -> Pending | None:
        """Execute a batch; see native.Engine.run. GIL released."""
        return self.engine.run(ops, timeout_s)

    def register(self, address: int, nbytes: int) -> bool:
        """Make transfers to and from this memory cheaper. False: the machine does not let us."""
        return self.engine.register(address, nbytes)

    def read(self, fd: int, offset: int, nbytes: int) -> memoryview:
        """`nbytes` (whole pages) from `offset`; fewer at the end of the file."""
        buffer = aligned(nbytes)
        done = 0
        while done < nbytes:
            got = os.preadv(fd, [buffer[done:nbytes]], offset + done)
            if got <= 0:
                break
            done += got
        return buffer[:done]

    def write(self, fd: int, offset: int, data: bytes) -> None:
        """Write whole pages at `offset`, all or OSError."""
        buffer = aligned(len(data))
        buffer[: len(data)] = data
        done = 0
        while done < len(data):
            done += os.pwritev(fd, [buffer[done : len(data)]], offset + done)

    def sync(self, fd: int) -> None:
        """Bytes written so far survive a power cut."""
        os.fdatasync(fd)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Give a file its full size, with its blocks reserved where the filesystem can."""
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            os.ftruncate(fd, nbytes)

    def close(self) -> None:
        self.engine.close()


_UNSUPPORTED = frozenset({22, 38, 95})  # EINVAL, ENOSYS, EOPNOTSUPP
