"""`bench io`: the native I/O engines and copies, compared with the raw device and fastest copy."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from kvdepot import native
from kvdepot.bench.raw import (
    MIB,
    Bytes,
    RawFile,
    best_copies,
    engine_for,
    filled,
    owning,
    pieces,
    raw_file,
    run_batch,
)
from kvdepot.bench.rounds import BenchPart, BenchPlan, Result, Work, compare, stopwatch
from kvdepot.errors import StateError

_CHUNK_BYTES: Final = 64 << 10
_CHUNKS_MAX: Final = 480
MEMORY_BLOCKS: Final = (1 * MIB, 4 * MIB, 32 * MIB)


def parts(plan: BenchPlan, directory: Path) -> Iterator[BenchPart]:
    for size in plan.blocks_bytes:
        label = f"reading and writing {size >> 10} KiB"
        yield BenchPart(label, partial(measure_disk, plan, directory, size))
    for size in MEMORY_BLOCKS:
        if size <= plan.total_bytes:
            run = partial(measure_copies, size, min(plan.total_bytes, 512 * MIB), plan.rounds)
            yield BenchPart(f"copying {size >> 20} MiB", run)


def engine_kinds() -> list[str]:
    kinds = ["threads"] if native.NAME == "c" else ["python"]
    return (["uring"] if native.uring_available()[0] else []) + kinds


def measure_disk(plan: BenchPlan, directory: Path, block_bytes: int) -> list[Result]:
    count = max(1, plan.total_bytes // block_bytes)
    with ExitStack() as scope:
        raw = scope.enter_context(raw_file(directory, block_bytes, count))
        engines = {
            kind: scope.enter_context(engine_for(raw.memory, kind)) for kind in engine_kinds()
        }
        writes = {f"write {k}": raw.batch(e, native.WRITE) for k, e in engines.items()}
        reads = {f"read {k}": raw.batch(e, native.READ) for k, e in engines.items()}
        # Buffers of other programs are often not on huge pages.
        ordinary = replace(raw, memory=filled(len(raw.memory), seed=9, huge=False))
        fastest = engines[engine_kinds()[0]]
        writes["write, ordinary pages"] = ordinary.batch(fastest, native.WRITE)
        reads["read, ordinary pages"] = ordinary.batch(fastest, native.READ)
        speeds = compare(raw.writes(), writes, plan.rounds)
        reads |= {f"read+verify {k}": verified_read(raw, e) for k, e in engines.items()}
        speeds |= compare(raw.reads(), reads, plan.rounds)
    return [speed.row("ssd", op, block_bytes, raw.nbytes) for op, speed in speeds.items()]


def verified_read(raw: RawFile, engine: native.IoEngine) -> Work:
    """Reads as in the store: each block is verified and copied."""
    chunk_bytes = max(_CHUNK_BYTES, -(-raw.block_bytes // _CHUNKS_MAX))
    targets = pieces(filled(raw.buffers * raw.block_bytes), raw.block_bytes)
    tables = np.zeros((raw.buffers, -(-raw.block_bytes // chunk_bytes)), dtype=np.uint64)
    for buffer, table in zip(pieces(raw.memory, raw.block_bytes), tables, strict=False):
        native.chunk_checksums(buffer, chunk_bytes, table)
    run_batch(engine, raw.ops(native.WRITE, raw.fd))
    ops = raw.ops(native.READ, raw.fd)
    number = np.arange(raw.blocks, dtype=np.uint64) % raw.buffers
    ops["payload_address"], ops["payload_bytes"] = ops["address"], raw.block_bytes
    ops["chunk_bytes"] = chunk_bytes
    ops["table"] = tables.ctypes.data + number * tables.strides[0]
    ops["copy_target"] = targets[0].ctypes.data + number * raw.block_bytes

    def read() -> None:
        for first in range(0, raw.blocks, raw.buffers):
            run_batch(engine, ops[first : first + raw.buffers])

    return owning(stopwatch(read), (raw, tables, targets))


def measure_copies(block_bytes: int, total_bytes: int, rounds: int) -> list[Result]:
    total_bytes = total_bytes // block_bytes * block_bytes
    batch_bytes = max(block_bytes, min(total_bytes, 64 * MIB))
    sources = pieces(filled(total_bytes), block_bytes)
    targets = pieces(filled(batch_bytes), block_bytes)
    subjects = {
        "copy": _transfers(sources, targets, native.COPY),
        "copy+checksum": _transfers(sources, targets, native.FILL),
        "copy+verify": _transfers(sources, targets, native.VERIFY),
        "checksum": stopwatch(lambda: [native.checksum(source) for source in sources]),
    }
    speeds = compare(best_copies(sources, targets), subjects, rounds)
    return [speed.row("dram", op, block_bytes, total_bytes) for op, speed in speeds.items()]


def _transfers(sources: list[Bytes], targets: list[Bytes], mode: int) -> Work:
    """One native batch over all sources. VERIFY uses the checksums that FILL has written."""
    block_bytes = len(sources[0])
    chunk_bytes = max(_CHUNK_BYTES, block_bytes // 32)
    tables = np.zeros((len(sources), -(-block_bytes // chunk_bytes)), dtype=np.uint64)
    ops = np.zeros(len(sources), dtype=native.TRANSFER_DTYPE)
    ops["source"] = [source.ctypes.data for source in sources]
    ops["target"] = [targets[i % len(targets)].ctypes.data for i in range(len(sources))]
    ops["nbytes"], ops["chunk_bytes"] = block_bytes, chunk_bytes
    ops["table"] = tables.ctypes.data + np.arange(len(sources)) * tables.strides[0]
    ops["mode"] = native.FILL
    native.transfer(ops)
    ops["mode"] = mode

    def run() -> None:
        native.transfer(ops)
        if ops["result"].any():
            raise StateError("a copy in memory does not match its checksum")

    return owning(stopwatch(run), (sources, targets, tables))
