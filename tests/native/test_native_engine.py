"""Engines on real descriptors: results, deadlines, registration, shutting down, fork."""

from __future__ import annotations

import array
import errno
import fcntl
import mmap
import os
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdepot import native
from kvdepot.native import fallback
from kvdepot.native.ops import IO_DTYPE, READ, SYNC, WRITE

SPLIT = 4096
LONG_S = 30.0
SHORT_S = 0.1
SOON_S = 0.01
"""Enough to start something."""
LIMITS_S = (SHORT_S, 0.5, 4.0, LONG_S)
"""One after the other, where something must come in time and a busy machine may be slow."""

OpenEngine = Callable[..., Any]


@pytest.fixture(params=["uring", "threads", "python"])
def open_engine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OpenEngine]:
    kind, opened = request.param, []
    if kind != "python" and native.NAME != "c":
        pytest.skip("kvdepot.native._native is not built")
    if kind == "uring" and not native.uring_available()[0]:
        pytest.skip(native.uring_available()[1])

    if kind == "python":
        monkeypatch.setattr(os, "preadv", read_also_pipes)

    def open_one(**settings: int) -> Any:
        opened.append(native.open_engine(kind, **{"depth": 4, "split_bytes": SPLIT, **settings}))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


def read_also_pipes(
    fd: int,
    buffers: Any,
    offset: int,
    preadv: Callable[[int, Any, int], int] = os.preadv,
) -> int:
    """Tests delay I/O with pipes, which have no offsets; the C engines read them as they are."""
    try:
        return preadv(fd, buffers, offset)
    except OSError as error:
        if error.errno != errno.ESPIPE:
            raise
        return os.readv(fd, buffers)


def skip_without_c(engine: Any) -> None:
    if engine.kind == "python":
        pytest.skip("this holds for the C engines alone")


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def batch(*ops: dict[str, int]) -> Any:
    records = np.zeros(len(ops), IO_DTYPE)
    records["result"] = 77
    for record, op in zip(records, ops, strict=True):
        for name, value in op.items():
            record[name] = value
    return records


def move(opcode: int, fd: int, memory: Any, offset: int = 0) -> dict[str, int]:
    address, nbytes = native.address_of(memory)
    return {"opcode": opcode, "fd": fd, "offset": offset, "address": address, "nbytes": nbytes}


def wait_until_empty(pipe_end: int) -> None:
    unread, deadline = array.array("i", [1]), time.monotonic() + LONG_S
    while unread[0]:
        assert time.monotonic() < deadline, "nobody reads the pipe"
        os.sched_yield()
        fcntl.ioctl(pipe_end, termios.FIONREAD, unread)


def drain(pipe_end: int) -> None:
    """Take what no operation has read, because none had begun."""
    unread = array.array("i", [0])
    fcntl.ioctl(pipe_end, termios.FIONREAD, unread)
    if unread[0]:
        os.read(pipe_end, unread[0])


def filled(nbytes: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def test_what_is_written_is_read(open_engine: OpenEngine, file: int) -> None:
    engine = open_engine()
    parts = [filled(n, seed) for seed, n in enumerate((1, SPLIT, 10 * SPLIT + 5, 0))]
    offsets = [100_000 * i for i in range(4)]
    writes = [move(WRITE, file, part, at) for part, at in zip(parts, offsets, strict=True)]
    ops = batch(*writes, {"opcode": SYNC, "fd": file})
    assert engine.run(ops, LONG_S) is None
    assert ops["result"].tolist() == [0] * 5
    copies = [np.zeros_like(part) for part in parts]
    ops = batch(*(move(READ, file, copy, at) for copy, at in zip(copies, offsets, strict=True)))
    assert engine.run(ops, LONG_S) is None
    assert ops["result"].tolist() == [0] * 4
    assert all(np.array_equal(a, b) for a, b in zip(parts, copies, strict=True))


def test_an_empty_batch_is_done(open_engine: OpenEngine) -> None:
    assert open_engine().run(batch(), 0.0) is None


def test_each_op_has_its_own_outcome(open_engine: OpenEngine, file: int) -> None:
    content, memory = filled(3 * SPLIT), [np.zeros(3 * SPLIT, np.uint8) for _ in range(4)]
    os.pwrite(file, content, 0)
    ops = batch(
        move(READ, file, memory[0]),
        move(READ, file, memory[1], SPLIT + 1),
        move(READ, 1 << 30, memory[2]),
        move(READ, -1, memory[3]),
    )
    assert open_engine().run(ops, LONG_S) is None
    assert ops["result"].tolist() == [0, -errno.EIO, -errno.EBADF, -errno.EBADF]
    assert np.array_equal(memory[0], content)


def test_short_transfers_are_continued(open_engine: OpenEngine, pipe: tuple[int, int]) -> None:
    content, memory = filled(SPLIT), np.zeros(SPLIT, np.uint8)
    os.write(pipe[1], content[:10])
    ops = batch(move(READ, pipe[0], memory))
    runner = threading.Thread(target=open_engine().run, args=(ops, LONG_S))
    runner.start()
    wait_until_empty(pipe[0])
    os.write(pipe[1], content[10:])
    runner.join()
    assert ops["result"][0] == 0
    assert np.array_equal(memory, content)


def test_a_late_op_is_pending_until_it_has_really_finished(
    open_engine: OpenEngine, pipe: tuple[int, int], file: int
) -> None:
    os.pwrite(file, bytes(SPLIT), 0)
    late, punctual = np.zeros(4, np.uint8), np.ones(SPLIT, np.uint8)
    engine = open_engine()
    for limit_s in LIMITS_S:
        ops = batch(move(READ, file, punctual), move(READ, pipe[0], late))
        pending = engine.run(ops, limit_s)
        if ops["result"][0] == 0:
            break
        os.write(pipe[1], b"next")
        assert pending.wait(LONG_S)
        drain(pipe[0])
    assert ops["result"].tolist() == [0, -errno.ETIMEDOUT]
    assert not punctual.any()
    assert not pending.wait(0.0)
    assert not pending.wait(0.01)
    os.write(pipe[1], b"late")
    assert pending.wait(LONG_S)
    assert pending.wait(0.0)
    assert late.tobytes() == b"late"
    assert ops["result"].tolist() == [0, -errno.ETIMEDOUT]
    ops = batch(move(READ, file, punctual))
    assert engine.run(ops, LONG_S) is None


def test_a_late_op_does_not_delay_the_ones_after_it(
    open_engine: OpenEngine, pipe: tuple[int, int], file: int
) -> None:
    os.pwrite(file, bytes(SPLIT), 0)
    engine = open_engine()
    skip_without_c(engine)
    late, punctual = np.zeros(4, np.uint8), np.ones(SPLIT, np.uint8)
    for limit_s in LIMITS_S:
        ops = batch(move(READ, pipe[0], late), move(READ, file, punctual))
        pending = engine.run(ops, limit_s)
        os.write(pipe[1], b"late")
        assert pending.wait(LONG_S)
        if ops["result"][1] == 0:
            break
        drain(pipe[0])
    assert ops["result"].tolist() == [-errno.ETIMEDOUT, 0]
    assert not punctual.any()


def test_nothing_is_copied_after_the_deadline(
    open_engine: OpenEngine, pipe: tuple[int, int]
) -> None:
    memory, target = np.zeros(4, np.uint8), np.zeros(4, np.uint8)
    read = move(READ, pipe[0], memory) | {
        "payload_address": memory.ctypes.data,
        "payload_bytes": 4,
        "copy_target": target.ctypes.data,
    }
    engine = open_engine()
    for limit_s in LIMITS_S:
        pending = engine.run(batch(read), limit_s)
        os.write(pipe[1], b"late")
        assert pending.wait(LONG_S)
        if memory.any():
            break  # it had begun
        drain(pipe[0])
    assert memory.tobytes() == b"late"
    assert not target.any()


def test_what_was_not_started_by_the_deadline_never_starts(
    open_engine: OpenEngine, pipe: tuple[int, int], file: int
) -> None:
    memory = np.zeros(4, np.uint8)
    reads = [move(READ, pipe[0], memory)] * 4
    ops = batch(*reads, move(WRITE, file, filled(8)))
    pending = open_engine(depth=4).run(ops, SHORT_S)
    assert set(ops["result"].tolist()) == {-errno.ETIMEDOUT}
    os.write(pipe[1], bytes(16))
    assert pending.wait(LONG_S)
    assert os.fstat(file).st_size == 0


def test_a_pending_may_be_dropped(
    open_engine: OpenEngine, pipe: tuple[int, int], file: int
) -> None:
    """It is a leak, so a child process drops it."""
    memory = np.zeros(4, np.uint8)
    child = os.fork()
    if child == 0:
        try:
            engine = open_engine()
            for _ in range(3):
                engine.run(batch(move(READ, pipe[0], memory)), SOON_S)
            os.write(pipe[1], bytes(12))
            ops = batch(move(WRITE, file, memory))
            os._exit(engine.run(ops, LONG_S) is not None or int(ops["result"][0]) != 0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nothing_starts_after_its_deadline(open_engine: OpenEngine, file: int) -> None:
    memory = np.ones(SPLIT, np.uint8)
    ops = batch(*[move(WRITE, file, memory)] * 3)
    pending = open_engine().run(ops, 0.0)
    assert pending is not None
    assert pending.wait(0.0)
    assert set(ops["result"].tolist()) == {-errno.ETIMEDOUT}
    assert os.fstat(file).st_size == 0


def test_a_sync_follows_the_ops_before_it(
    open_engine: OpenEngine, pipe: tuple[int, int], file: int
) -> None:
    memory = np.zeros(4, np.uint8)
    ops = batch(move(READ, pipe[0], memory), {"opcode": SYNC, "fd": file})
    pending = open_engine().run(ops, SHORT_S)
    assert ops["result"].tolist() == [-errno.ETIMEDOUT] * 2
    os.write(pipe[1], bytes(4))
    assert pending.wait(LONG_S)


@pytest.mark.parametrize(
    ("field", "value", "message"), [("opcode", 3, "opcode 3"), ("table", 4096, "chunk_bytes 0")]
)
def test_a_malformed_batch_starts_nothing(
    open_engine: OpenEngine, file: int, field: str, value: int, message: str
) -> None:
    ops = batch(move(WRITE, file, filled(8)), {field: value})
    with pytest.raises(ValueError, match=message):
        open_engine().run(ops, LONG_S)
    assert os.fstat(file).st_size == 0


def test_run_refuses_bad_buffers_and_timeouts(open_engine: OpenEngine) -> None:
    engine = open_engine()
    for timeout_s in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout_s"):
            engine.run(batch(), timeout_s)
    with pytest.raises(ValueError, match="whole number"):
        engine.run(bytearray(IO_DTYPE.itemsize + 8), LONG_S)
    with pytest.raises(BufferError):
        engine.run(bytes(IO_DTYPE.itemsize), LONG_S)


@pytest.mark.parametrize(
    "settings", [{"depth": 0}, {"threads": 0}, {"split_bytes": 1000}, {"split_bytes": 0}]
)
def test_an_engine_refuses_senseless_settings(
    open_engine: OpenEngine, settings: dict[str, int]
) -> None:
    skip_without_c(open_engine())
    with pytest.raises(ValueError, match="must be"):
        open_engine(**settings)


@pytest.mark.skipif(native.NAME != "c", reason="kvdepot.native._native is not built")
def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown engine kind"):
        native.open_engine("aio")


@pytest.mark.parametrize("kind", ["auto", "uring", "threads", "python"])
def test_without_the_extension_every_kind_is_python(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "NAME", "python")
    assert native.open_engine(kind).kind == "python"
    assert not fallback.uring_available()[0]


def test_a_closed_engine_refuses(open_engine: OpenEngine) -> None:
    engine = open_engine()
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.run(batch(), LONG_S)
    with pytest.raises(ValueError, match="closed"):
        engine.register(0, 4096)


def test_closing_leaves_a_pending_usable(open_engine: OpenEngine, pipe: tuple[int, int]) -> None:
    memory = np.zeros(4, np.uint8)
    engine = open_engine()
    pending = engine.run(batch(move(READ, pipe[0], memory)), SOON_S)
    engine.close()
    os.write(pipe[1], b"done")
    assert pending.wait(LONG_S)


def test_threads_share_an_engine(open_engine: OpenEngine, file: int) -> None:
    content = filled(64 * SPLIT)
    os.pwrite(file, content, 0)
    engine, wrong = open_engine(), []

    def read_all(seed: int) -> None:
        for at in np.random.default_rng(seed).integers(0, 32 * SPLIT, 20).tolist():
            memory = np.zeros(32 * SPLIT, np.uint8)
            ops = batch(move(READ, file, memory, at))
            if engine.run(ops, LONG_S) is not None or ops["result"][0]:
                wrong.append(at)
            if not np.array_equal(memory, content[at : at + memory.nbytes]):
                wrong.append(at)

    readers = [threading.Thread(target=read_all, args=(seed,)) for seed in range(20)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert wrong == []


def test_a_checked_batch_larger_than_may_be_in_flight(open_engine: OpenEngine, file: int) -> None:
    block, count = 1 << 20, 40
    content, memory, copies = filled(count * block), *np.zeros((2, count * block), np.uint8)
    tables = np.zeros((count, 4), np.uint64)
    for table, part in zip(tables, content.reshape(count, block), strict=True):
        native.chunk_checksums(part, block // 4, table)
    tables[7, 3] ^= 1
    os.pwrite(file, content, 0)
    ops = np.zeros(count, IO_DTYPE)
    number = np.arange(count, dtype=np.uint64)
    ops["fd"], ops["opcode"], ops["nbytes"], ops["offset"] = file, READ, block, number * block
    ops["address"] = ops["payload_address"] = memory.ctypes.data + number * block
    ops["payload_bytes"], ops["chunk_bytes"] = block, block // 4
    ops["table"] = tables.ctypes.data + number * tables.strides[0]
    ops["copy_target"] = copies.ctypes.data + number * block
    assert open_engine(depth=128, split_bytes=512 << 10).run(ops, LONG_S) is None
    assert ops["result"].tolist() == [-errno.EBADMSG if i == 7 else 0 for i in range(count)]
    intact = np.delete(np.arange(count), 7)
    assert np.array_equal(
        copies.reshape(count, block)[intact], content.reshape(count, block)[intact]
    )


def test_registered_memory_changes_nothing(open_engine: OpenEngine, file: int) -> None:
    engine = open_engine()
    with mmap.mmap(-1, 16 * SPLIT) as area:
        memory = np.frombuffer(area, np.uint8)
        address = memory.ctypes.data
        registered = engine.register(address, memory.nbytes)
        assert not registered or engine.kind == "uring"
        content = filled(memory.nbytes)
        os.pwrite(file, content, 0)
        for _ in range(2):
            ops = batch(move(READ, file, memory), move(READ, file, memory))
            assert engine.run(ops, LONG_S) is None
            assert ops["result"].tolist() == [0, 0]
            assert np.array_equal(memory, content)
            memory[:] = 0
        del memory


def test_a_descriptor_used_again_is_the_new_file(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine, memory = open_engine(), np.zeros(3, np.uint8)
    for name in (b"one", b"two"):
        path = tmp_path / name.decode()
        path.write_bytes(name)
        fd = os.open(path, os.O_RDONLY)
        assert engine.run(batch(move(READ, fd, memory)), LONG_S) is None
        assert memory.tobytes() == name
        os.close(fd)
    ops = batch(move(READ, fd, memory))
    engine.run(ops, LONG_S)
    assert ops["result"][0] == -errno.EBADF


def test_register_says_no_without_harm(open_engine: OpenEngine, file: int) -> None:
    engine = open_engine()
    assert not engine.register(4096, 1 << 20)
    memory = filled(SPLIT)
    ops = batch(move(WRITE, file, memory))
    assert engine.run(ops, LONG_S) is None
    assert ops["result"][0] == 0


def test_a_child_process_may_not_use_the_engine(open_engine: OpenEngine) -> None:
    engine = open_engine()
    child = os.fork()
    if child == 0:
        try:
            engine.run(batch(), LONG_S)
        except RuntimeError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.run(batch(), LONG_S) is None


def test_the_limit_of_lanes_is_waited_for(open_engine: OpenEngine, pipe: tuple[int, int]) -> None:
    engine, memory = open_engine(threads=32), np.zeros(1, np.uint8)
    held = [engine.run(batch(move(READ, pipe[0], memory)), SOON_S) for _ in range(17)]
    os.write(pipe[1], bytes(17))
    assert all(pending.wait(LONG_S) for pending in held)
