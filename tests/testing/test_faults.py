"""FaultyFiles does to a disk what it was told to, and nothing else."""

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.volumes import open_log

from kvdepot.core.volume import Outcome
from kvdepot.io.files import EngineKind, Ops, aligned, io_ops
from kvdepot.native import READ, WRITE, address_of
from kvdepot.testing.contract import read, store
from kvdepot.testing.faults import (
    Call,
    Corrupt,
    Effect,
    Fail,
    Fault,
    FaultyFiles,
    Kill,
    Stall,
    Tear,
)
from kvdepot.testing.images import Reads, make_key, payload_for

PAGE = 4096
LONG_S = 60.0
OLD, NEW = b"o" * PAGE, b"n" * PAGE


@pytest.fixture(params=["threads", "python"])
def kind(request: pytest.FixtureRequest) -> EngineKind:
    given: EngineKind = request.param
    return given


@pytest.fixture
def files(kind: EngineKind) -> Iterator[FaultyFiles]:
    made = FaultyFiles(kind)
    yield made
    made.clear()
    made.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "disk", os.O_RDWR | os.O_CREAT)
    os.pwrite(opened, OLD * 4, 0)
    yield opened
    os.close(opened)


def batch(fd: int, opcode: int, pages: list[memoryview]) -> Ops:
    ops = io_ops(len(pages))
    ops["fd"], ops["opcode"], ops["nbytes"] = fd, opcode, PAGE
    ops["offset"] = [PAGE * index for index in range(len(pages))]
    ops["address"] = [address_of(page)[0] for page in pages]
    return ops


def pages_of(content: bytes, count: int) -> list[memoryview]:
    pages = [aligned(PAGE) for _ in range(count)]
    for page in pages:
        page[:] = content
    return pages


def write_all(files: FaultyFiles, fd: int, count: int) -> list[int]:
    pages = pages_of(NEW, count)
    ops = batch(fd, WRITE, pages)
    assert files.run(ops, LONG_S) is None
    results: list[int] = ops["result"].tolist()
    return results


def on_disk(fd: int) -> list[bytes]:
    return [os.pread(fd, PAGE, PAGE * index) for index in range(4)]


def test_without_faults_everything_works_and_is_counted(files: FaultyFiles, fd: int) -> None:
    assert write_all(files, fd, 3) == [0, 0, 0]
    files.write(fd, 3 * PAGE, NEW)
    assert on_disk(fd) == [NEW] * 4
    assert files.read(fd, 0, PAGE) == NEW
    files.sync(fd)
    files.allocate(fd, 8 * PAGE)
    expected = {Call.RUN_WRITE: 3, Call.WRITE: 1, Call.READ: 1, Call.SYNC: 1, Call.ALLOCATE: 1}
    assert files.counts == expected
    assert files.boundaries == 5


def test_one_operation_of_a_batch_fails_alone(files: FaultyFiles, fd: int) -> None:
    fault = files.add(Fault(Call.RUN_WRITE, Fail(errno.ENOSPC), skip=1))
    assert write_all(files, fd, 3) == [0, -errno.ENOSPC, 0]
    assert on_disk(fd) == [NEW, OLD, NEW, OLD]
    assert fault.hits == 1
    assert write_all(files, fd, 3) == [0, 0, 0]


def test_a_fault_can_last_and_be_cleared(files: FaultyFiles, fd: int) -> None:
    files.add(Fault(frozenset({Call.WRITE, Call.SYNC}), Fail(errno.EROFS), times=None))
    for _ in range(3):
        with pytest.raises(OSError, match="Read-only"):
            files.write(fd, 0, NEW)
        with pytest.raises(OSError, match="Read-only"):
            files.sync(fd)
    files.clear()
    files.write(fd, 0, NEW)
    files.sync(fd)


def test_a_fault_can_choose_by_what_it_sees(files: FaultyFiles, fd: int) -> None:
    files.add(
        Fault(
            Call.RUN_WRITE,
            Fail(errno.EIO),
            times=None,
            where=lambda operation: operation.path.endswith("disk") and operation.offset == PAGE,
        )
    )
    assert write_all(files, fd, 3) == [0, -errno.EIO, 0]


@pytest.mark.parametrize("torn_bytes", [0, 100, PAGE - 1])
def test_a_torn_write_leaves_its_first_bytes(files: FaultyFiles, fd: int, torn_bytes: int) -> None:
    torn = NEW[:torn_bytes] + OLD[torn_bytes:]
    files.add(Fault.at_boundary(2, Tear(torn_bytes)))
    assert write_all(files, fd, 3) == [0, -errno.EIO, 0]
    assert on_disk(fd) == [NEW, torn, NEW, OLD]
    files.add(Fault(Call.WRITE, Tear(torn_bytes, errno.ENOSPC)))
    with pytest.raises(OSError, match="No space"):
        files.write(fd, 3 * PAGE, NEW)
    assert on_disk(fd)[3] == torn


def test_a_corrupt_read_flips_bits_in_memory_only(files: FaultyFiles, fd: int) -> None:
    files.add(Fault(Call.READ, Corrupt(at=7, mask=0x80)))
    assert files.read(fd, 0, PAGE) == OLD[:7] + bytes([OLD[7] ^ 0x80]) + OLD[8:]
    pages = pages_of(bytes(PAGE), 2)
    files.add(Fault(Call.RUN_READ, Corrupt(at=9), skip=1))
    assert files.run(batch(fd, READ, pages), LONG_S) is None
    assert bytes(pages[0]) == OLD
    assert bytes(pages[1]) == OLD[:9] + bytes([OLD[9] ^ 1]) + OLD[10:]
    assert on_disk(fd) == [OLD] * 4


@pytest.mark.parametrize("kind", ["threads", "python"])
def test_the_engine_itself_notices_corrupt_reads(kind: EngineKind, tmp_path: Path) -> None:
    files = FaultyFiles(kind)
    volume = open_log(tmp_path / "drive", files, segments=8, segment_bytes=128 << 10)
    key, nbytes = make_key(1), 10_000
    (place,) = store(volume, [key], nbytes)
    for at in (0, 60, 130, PAGE, PAGE + 9_999):
        files.add(Fault(Call.RUN_READ, Corrupt(at=at)))
        reads = Reads().add(key, place, nbytes)
        assert read(volume, reads) == [Outcome.CORRUPT]
        assert read(volume, reads) == [Outcome.OK]
        assert reads.payload(0) == payload_for(key, nbytes)
    volume.close()
    files.close()


def test_a_stalled_batch_gives_up_at_its_deadline_and_ends_on_release(
    files: FaultyFiles, fd: int
) -> None:
    stall = Stall()
    files.add(Fault(Call.RUN_WRITE, stall, skip=1))
    pages = pages_of(NEW, 3)
    ops = batch(fd, WRITE, pages)
    pending = files.run(ops, 0.5)
    assert ops["result"].tolist() == [0, -errno.ETIMEDOUT, 0]
    assert pending is not None
    assert not pending.wait(0.01)
    assert on_disk(fd) == [NEW, OLD, NEW, OLD]
    stall.release()
    assert pending.wait(LONG_S)
    assert on_disk(fd) == [NEW, NEW, NEW, OLD]
    assert ops["result"].tolist() == [0, -errno.ETIMEDOUT, 0]


def test_a_stall_that_ends_in_time_is_only_slow(files: FaultyFiles, fd: int) -> None:
    stall = Stall()
    files.add(Fault(Call.RUN_WRITE, stall))
    helper = threading.Timer(0.05, stall.release)
    started = time.monotonic()
    helper.start()
    assert write_all(files, fd, 2) == [0, 0]
    assert time.monotonic() - started >= 0.05
    helper.join()


def test_a_stalled_page_times_out(kind: EngineKind, fd: int) -> None:
    files = FaultyFiles(kind, timeout_s=0.05, faults=[Fault(Call.SYNC, Stall())])
    with pytest.raises(OSError) as caught:
        files.sync(fd)
    assert caught.value.errno == errno.ETIMEDOUT
    files.clear()
    files.close()


@pytest.mark.crash
@pytest.mark.parametrize(
    ("effect", "expected"),
    [
        (Kill("before"), [NEW, OLD, OLD]),
        (Kill("torn"), [NEW, NEW[: PAGE // 2] + OLD[PAGE // 2 :], OLD]),
        (Kill("after"), [NEW, NEW, OLD]),
        (Kill("without"), [NEW, OLD, NEW]),
        (Tear(10, kill=True), [NEW, NEW[:10] + OLD[10:], OLD]),
    ],
    ids=str,
)
def test_kills_come_at_the_boundary(fd: int, effect: Effect, expected: list[bytes]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            killers = FaultyFiles("threads", faults=[Fault.at_boundary(2, effect)])
            write_all(killers, fd, 3)
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert on_disk(fd)[:3] == expected
