"""The speed of the hardware: direct I/O on one file, and copies in memory.

All other speeds are compared with these limits. They use registered memory on huge pages; direct
I/O with ordinary pages reaches half to two thirds of that.
"""

import ctypes
import errno
import itertools
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot import native
from kvdepot.bench.rounds import Work, stopwatch

Bytes = npt.NDArray[np.uint8]

MIB: Final = 1 << 20
_THREADS: Final = (1, 4, 16)
_BATCH_DEPTHS: Final = (32, 128)
_BUFFERS_BYTES: Final = 256 * MIB
_BATCH_BUFFER_BYTES: Final = 64 * MIB
_TIMEOUT_S: Final = 120.0


def filled(nbytes: int, seed: int = 0, *, huge: bool = True) -> Bytes:
    """New touched memory with random bytes; on huge pages if the kernel has them."""
    # Shared mappings, mmap's default, are not given huge pages by MADV_HUGEPAGE.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    rng = np.random.default_rng(seed)
    for start in range(0, nbytes, 16 * MIB):
        part = array[start : start + 16 * MIB]
        part[:] = np.frombuffer(rng.bytes(len(part)), np.uint8)
    return array


def pieces(memory: Bytes, piece_bytes: int) -> list[Bytes]:
    """`memory` in equal pieces; the rest is not used."""
    count = len(memory) // piece_bytes
    return [memory[i * piece_bytes : (i + 1) * piece_bytes] for i in range(count)]


def memory_copies(sources: list[Bytes], targets: list[Bytes]) -> dict[str, Work]:
    """Plain copies of each source to a target in one thread; the shorter list is repeated."""
    count = max(len(sources), len(targets))
    nbytes = len(sources[0])
    pairs = [(sources[i % len(sources)], targets[i % len(targets)]) for i in range(count)]
    moves = [(target.ctypes.data, source.ctypes.data, nbytes) for source, target in pairs]

    def memmove() -> None:
        for move in moves:
            ctypes.memmove(*move)

    def copyto() -> None:
        for source, target in pairs:
            np.copyto(target, source)

    ways: dict[str, Callable[[], None]] = {"memmove": memmove, "np.copyto": copyto}
    return {name: owning(stopwatch(way), pairs) for name, way in ways.items()}


def best_copies(sources: list[Bytes], targets: list[Bytes]) -> dict[str, Work]:
    """`memory_copies`, and streaming copies past the cache in one thread and on all cores."""
    count = max(len(sources), len(targets))
    ops = np.zeros(count, native.TRANSFER_DTYPE)
    ops["source"] = [sources[i % len(sources)].ctypes.data for i in range(count)]
    ops["target"] = [targets[i % len(targets)].ctypes.data for i in range(count)]
    ops["nbytes"] = len(sources[0])
    cores = min(len(os.sched_getaffinity(0)), count)
    parts = [ops[core::cores].copy() for core in range(cores)]
    threads = ThreadPoolExecutor(cores, thread_name_prefix="kvdepot-bench-copy")

    def on_all_cores() -> None:
        for done in [threads.submit(native.transfer, part) for part in parts]:
            done.result()

    ways = {
        "streaming copy": stopwatch(lambda: native.transfer(ops)),
        f"streaming copy, {cores} cores": stopwatch(on_all_cores),
    }
    memory = (sources, targets)
    return memory_copies(*memory) | {name: owning(way, memory) for name, way in ways.items()}


def owning(work: Work, memory: object) -> Work:
    """`work`, which uses addresses, with a reference to their memory."""

    def run() -> float:
        seconds = work()
        assert memory is not None
        return seconds

    return run


@dataclass(frozen=True, slots=True)
class RawFile:
    """`blocks` blocks in one nameless file, opened for direct I/O if the filesystem has it."""

    directory: Path
    fd: int
    direct: bool
    block_bytes: int
    blocks: int
    memory: Bytes
    """Touched buffers for reads and writes."""
    engines: Mapping[str, native.IoEngine]
    """Engines to measure the limit with, by their name in tables."""

    @property
    def nbytes(self) -> int:
        return self.block_bytes * self.blocks

    def reads(self) -> dict[str, Work]:
        return self._ways(os.preadv, native.READ)

    def writes(self) -> dict[str, Work]:
        """Writes over written blocks, with fdatasync at the end."""
        return self._ways(os.pwritev, native.WRITE)

    def first_writes(self) -> dict[str, Work]:
        """Writes to a new file of full size, with the cost of new extents."""
        return {name: self._first_write(engine) for name, engine in self.engines.items()}

    def batch(self, engine: native.IoEngine, opcode: int) -> Work:
        ops = self.ops(opcode, self.fd)
        return stopwatch(lambda: self._run(engine, ops, self.fd))

    def _first_write(self, engine: native.IoEngine) -> Work:
        def write() -> float:
            with nameless(self.directory) as (fd, _):
                started = time.perf_counter()
                with suppress(OSError):
                    os.posix_fallocate(fd, 0, self.nbytes)
                self._run(engine, self.ops(native.WRITE, fd), fd)
                return time.perf_counter() - started

        return write

    def _ways(self, move: "Move", opcode: int) -> dict[str, Work]:
        counts = [n for n in _THREADS if n == 1 or n * self.block_bytes <= _BUFFERS_BYTES]
        ways = {f"{n} threads": self._threads(move, n, self.fd) for n in counts}
        return ways | {name: self.batch(one, opcode) for name, one in self.engines.items()}

    def _run(self, engine: native.IoEngine, ops: npt.NDArray[Any], fd: int) -> None:
        run_batch(engine, ops)
        if ops["opcode"][0] == native.WRITE:
            os.fdatasync(fd)

    @property
    def buffers(self) -> int:
        """The blocks at the beginning of `memory` that `ops` uses."""
        return max(1, min(len(self.memory), _BATCH_BUFFER_BYTES) // self.block_bytes)

    def ops(self, opcode: int, fd: int) -> npt.NDArray[Any]:
        """All blocks as one batch; buffers are used repeatedly."""
        ops = np.zeros(self.blocks, dtype=native.IO_DTYPE)
        number = np.arange(self.blocks, dtype=np.uint64)
        ops["fd"], ops["opcode"], ops["nbytes"] = fd, opcode, self.block_bytes
        ops["offset"] = number * self.block_bytes
        ops["address"] = self.memory.ctypes.data + number % self.buffers * self.block_bytes
        return ops

    def _threads(self, move: "Move", depth: int, fd: int) -> Work:
        buffers = pieces(self.memory, self.block_bytes)[:depth]

        def work() -> float:
            numbers = itertools.count()
            failed: list[OSError] = []

            def drain(buffer: Bytes) -> None:
                try:
                    while (number := next(numbers)) < self.blocks:
                        move_all(move, fd, buffer, number * self.block_bytes)
                except OSError as error:
                    failed.append(error)

            started = time.perf_counter()
            helpers = [threading.Thread(target=drain, args=(b,)) for b in buffers[1:]]
            for helper in helpers:
                helper.start()
            drain(buffers[0])
            for helper in helpers:
                helper.join()
            if failed:
                raise failed[0]
            if move is os.pwritev:
                os.fdatasync(fd)
            return time.perf_counter() - started

        return work


Move = Callable[[int, list[memoryview], int], int]


def move_all(move: Move, fd: int, buffer: Bytes, offset: int) -> None:
    """One block, all of it, or OSError."""
    view, done = buffer.data, 0
    while done < len(view):
        moved = move(fd, [view[done:]], offset + done)
        if moved <= 0:
            raise OSError(errno.EIO, "the file is shorter than it was")
        done += moved


def run_batch(engine: native.IoEngine, ops: npt.NDArray[Any]) -> None:
    """Run a native batch; OSError if an operation failed."""
    pending = engine.run(ops, _TIMEOUT_S)
    while pending is not None and not pending.wait(_TIMEOUT_S):
        pass
    worst = int(ops["result"].min())
    if worst < 0:
        raise OSError(-worst, os.strerror(-worst))


@contextmanager
def nameless(directory: Path) -> Iterator[tuple[int, bool]]:
    """A new file without a name, and whether direct I/O works on it.

    The name is removed before the scope begins, so that a killed process leaves no file.
    """
    fd = _open_unlinked(directory, os.O_DIRECT)
    direct = fd is not None and _takes_direct_writes(fd)
    if fd is not None and not direct:
        os.close(fd)
    if not direct:
        fd = _open_unlinked(directory, 0)
    assert fd is not None
    try:
        yield fd, direct
    finally:
        os.close(fd)


def _open_unlinked(directory: Path, flags: int) -> int | None:
    """None if the filesystem refuses the flags."""
    path = directory / f".kvdepot-{secrets.token_hex(8)}"
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        if flags and error.errno == errno.EINVAL:
            return None
        raise
    finally:
        path.unlink(missing_ok=True)  # a refused O_DIRECT can leave the file


def _takes_direct_writes(fd: int) -> bool:
    """Some filesystems accept O_DIRECT and refuse the writes."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            os.pwrite(fd, page, 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                os.close(fd)
                raise
            return False
    return True


@contextmanager
def raw_file(directory: Path, block_bytes: int, blocks: int) -> Iterator[RawFile]:
    """A raw file whose blocks were written once. It has no name, so that a kill removes it."""
    wanted = min(blocks, max(1, _BUFFERS_BYTES // block_bytes)) * block_bytes
    with ExitStack() as scope:
        fd, direct = scope.enter_context(nameless(directory))
        memory = filled(wanted)
        engines = {}
        for depth in _BATCH_DEPTHS:
            engine = scope.enter_context(engine_for(memory, depth=depth))
            engines[f"{engine.kind}, {depth} deep"] = engine
        raw = RawFile(directory, fd, direct, block_bytes, blocks, memory, engines)
        os.posix_fallocate(fd, 0, raw.nbytes)
        raw.batch(engine, native.WRITE)()
        yield raw


@contextmanager
def engine_for(memory: Bytes, kind: str = "auto", depth: int = 32) -> Iterator[native.IoEngine]:
    """An engine with this memory registered, if the machine allows it."""
    engine = native.open_engine(kind, depth=depth)
    try:
        engine.register(memory.ctypes.data, len(memory))
        yield engine
    finally:
        engine.close()
