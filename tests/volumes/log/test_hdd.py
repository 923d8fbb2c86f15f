"""One sweep for many readers; a caller that has gone keeps its memory to itself."""

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.volumes import open_log
from tests.support.waiting import until

from kvdepot.core.volume import Outcome, PendingRead, Priority
from kvdepot.io.files import Files, Ops, io_ops
from kvdepot.native import READ, address_of
from kvdepot.testing.contract import store
from kvdepot.testing.faults import Call, Fault, FaultyFiles, Stall
from kvdepot.testing.images import Reads, make_key, payload_for
from kvdepot.volumes.log import elevator as elevator_module
from kvdepot.volumes.log.elevator import Elevator, QueuedReads
from kvdepot.volumes.log.volume import LogVolume

BLOCK = 4096
NBYTES = 20_000
KEYS = [make_key(number) for number in range(3)]


@pytest.fixture
def files() -> Iterator[FaultyFiles]:
    files = FaultyFiles()
    yield files
    files.clear()
    files.close()


@pytest.fixture
def volume(tmp_path: Path, files: FaultyFiles) -> Iterator[LogVolume]:
    volume = open_log(
        tmp_path / "drive", files, segments=8, segment_bytes=1 << 20,
        tier="hdd", contiguous_bytes=1 << 20,
    )  # fmt: skip
    yield volume
    files.clear()
    volume.close()


def begin(volume: LogVolume, reads: Reads, timeout_s: float) -> PendingRead:
    return volume.read(reads.rows, Priority.FOREGROUND, timeout_s)


def test_queued_reads_are_answered_without_a_waiting_thread(
    volume: LogVolume, files: FaultyFiles
) -> None:
    stall, places = Stall(), store(volume, KEYS, NBYTES)
    targets = [bytearray(NBYTES) for _ in KEYS]
    reads = Reads()
    for key, place, target in zip(KEYS, places, targets, strict=True):
        reads.add(key, place, NBYTES, target=address_of(target)[0])
    files.add(Fault(Call.RUN_READ, stall, skip=1))
    done = threading.Event()
    pending = begin(volume, reads, 30.0)
    pending.when_done(done.set)
    assert not done.wait(0.05)
    stall.release()
    assert done.wait(10.0)
    assert targets[0] == bytes(NBYTES), "copied by who asks for the result"
    assert pending.result().tolist() == [Outcome.OK] * 3
    assert pending.released(0.0)
    assert targets == [payload_for(key, NBYTES) for key in KEYS]
    reads = Reads().add(KEYS[0], places[0], NBYTES)
    pending = begin(volume, reads, 0.0)
    assert pending.result()[0] in (Outcome.OK, Outcome.LATE)
    assert pending.released(10.0)


def test_a_round_of_two_readers_does_not_write_to_who_has_gone(
    volume: LogVolume, files: FaultyFiles
) -> None:
    first, second = Stall(), Stall()
    places = store(volume, KEYS, NBYTES)
    targets = [bytearray(NBYTES) for _ in KEYS]
    reads = [
        Reads().add(key, place, NBYTES, target=address_of(target)[0])
        for key, place, target in zip(KEYS, places, targets, strict=True)
    ]
    fault = files.add(Fault(Call.RUN_READ, first, times=1))
    files.add(Fault(Call.RUN_READ, second, skip=1, times=None))
    pending = [begin(volume, reads[0], 60.0)]
    until(lambda: fault.hits == 1)
    pending += [begin(volume, reads[1], 0.3), begin(volume, reads[2], 60.0)]
    first.release()
    assert pending[1].result().tolist() == [Outcome.LATE]
    second.release()
    for number in (0, 2):
        assert pending[number].result().tolist() == [Outcome.OK]
    assert pending[1].released(10.0)
    assert targets[1] == bytes(NBYTES), "written to after its caller had the answer"
    assert targets[0] == payload_for(KEYS[0], NBYTES)
    assert targets[2] == payload_for(KEYS[2], NBYTES)


class Recorder(Files):
    """Notes what is read, in order; the first batch waits for `go`."""

    def __init__(self) -> None:
        super().__init__("threads", 1)
        self.read_at: list[int] = []
        self.go = threading.Event()
        self.begun = threading.Event()

    def run(self, ops: Ops, timeout_s: float) -> None:
        self.begun.set()
        assert self.go.wait(60.0)
        self.read_at += [int(offset) for offset in ops["offset"]]
        ops["result"] = 0


def request(places: list[int], priority: Priority = Priority.FOREGROUND) -> QueuedReads:
    ops = io_ops(len(places))
    ops["opcode"], ops["nbytes"] = READ, BLOCK
    ops["offset"] = places
    deadline_s = time.monotonic() + 60.0
    return QueuedReads(ops, np.array(places, dtype=np.int64), deadline_s, priority)


def test_what_waits_together_is_read_in_one_sweep_from_where_the_head_is() -> None:
    files = Recorder()
    elevator = Elevator(files, "kvdepot-test-head", time.monotonic)
    first = request([500])
    elevator.submit(first)
    assert files.begun.wait(60.0)
    users = [request([900, 100]), request([700, 50]), request([600])]
    for user in users:
        elevator.submit(user)
    files.go.set()
    for user in [first, *users]:
        assert user.wait(60.0)
        assert not user.results.any()
    assert files.read_at == [500, 600, 700, 900, 50, 100]
    elevator.close()
    files.close()


def test_it_can_be_closed_while_its_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that was lost is closed by one thread while another one reads from it."""
    files = Recorder()
    files.go.set()
    elevator = Elevator(files, "kvdepot-test-head", time.monotonic)
    begun, go_on, start = threading.Event(), threading.Event(), threading.Thread.start

    def slowly(thread: threading.Thread) -> None:
        if thread.name == "kvdepot-test-head":
            begun.set()
            assert go_on.wait(60.0)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slowly)
    reader = threading.Thread(target=elevator.submit, args=(request([500]),))
    reader.start()
    assert begun.wait(60.0)
    errors: list[BaseException] = []

    def close() -> None:
        try:
            elevator.close()
        except RuntimeError as error:
            errors.append(error)

    closer = threading.Thread(target=close)
    closer.start()
    closer.join(0.2)
    go_on.set()
    closer.join()
    reader.join()
    assert not errors
    files.close()


def test_foreground_reads_enter_a_round_first_and_one_other_enters_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round is as long as one read here."""
    monkeypatch.setattr(elevator_module, "_ROUND_BYTES", BLOCK)
    files = Recorder()
    elevator = Elevator(files, "kvdepot-test-head", time.monotonic)
    elevator.submit(request([0]))
    assert files.begun.wait(60.0)
    priorities = [Priority.BACKGROUND, Priority.PREFETCH, Priority.PREFETCH]
    others = [request([number + 1], one) for number, one in enumerate(priorities)]
    urgent = [request([place]) for place in (101, 102)]
    for reads in (*others, *urgent):
        elevator.submit(reads)
    files.go.set()
    for reads in (*others, *urgent):
        assert reads.wait(60.0)
    rounds = [set(files.read_at[at : at + 2]) for at in (1, 3)]
    assert rounds == [{101, 2}, {102, 3}], "before what is less urgent"
    assert files.read_at[5:] == [1]
    elevator.close()
    files.close()


def test_who_gives_up_in_the_queue_is_not_read_and_has_its_memory_back() -> None:
    files = Recorder()
    elevator = Elevator(files, "kvdepot-test-head", time.monotonic)
    elevator.submit(request([1]))
    assert files.begun.wait(60.0)
    gone = request([2])
    elevator.submit(gone)
    elevator.abandon(gone)
    assert gone.wait(0.0)
    assert gone.results.tolist() == [-errno.ETIMEDOUT]
    files.go.set()
    elevator.close()
    assert files.read_at == [1]
    files.close()


def test_who_withdraws_is_told_whether_it_is_read() -> None:
    files = Recorder()
    elevator = Elevator(files, "kvdepot-test-head", time.monotonic)
    begun, queued = request([1]), request([2])
    elevator.submit(begun)
    assert files.begun.wait(60.0)
    elevator.submit(queued)
    assert elevator.withdraw(queued) and queued.wait(0.0)
    assert not elevator.withdraw(begun)
    files.go.set()
    assert begun.wait(60.0)
    assert not begun.results.any()
    elevator.close()
    assert files.read_at == [1]
    files.close()


def test_who_gives_up_while_it_is_read_waits_for_its_memory() -> None:
    files = Recorder()
    elevator = Elevator(files, "kvdepot-test-head", time.monotonic)
    slow = request([1])
    elevator.submit(slow)
    assert files.begun.wait(60.0)
    elevator.abandon(slow)
    assert not slow.wait(0.0)
    files.go.set()
    assert slow.wait(60.0)
    elevator.close()
    files.close()


def test_a_drive_may_be_closed_while_its_first_read_begins() -> None:
    files = Recorder()
    files.go.set()
    for _ in range(300):
        elevator = Elevator(files, "kvdepot-test-head", time.monotonic)
        reads = request([1])
        submits = threading.Thread(target=elevator.submit, args=[reads])
        submits.start()
        elevator.close()
        submits.join()
        assert reads.wait(60.0)
        elevator.close()
    files.close()


class Broken(Recorder):
    """Fails with something that no caller expects, the first time."""

    def run(self, ops: Ops, timeout_s: float) -> None:
        if not self.go.is_set():
            self.go.set()
            raise RuntimeError("a bug")
        super().run(ops, timeout_s)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_fails_one_round_and_the_next_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = Broken()
    elevator = Elevator(files, "kvdepot-test-head", time.monotonic)
    ended = threading.Event()
    first = request([1])
    monkeypatch.setattr(first, "on_answer", ended.set)
    elevator.submit(first)
    assert ended.wait(10.0) and first.wait(10.0)
    assert first.results.tolist() == [-errno.EIO]
    second = request([2])
    elevator.submit(second)
    assert second.wait(10.0)
    assert second.results.tolist() == [0]
    elevator.close()
    files.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["answer", "read"])
def test_an_exception_ends_a_round_and_not_the_drive(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Recorder()
    files.go.set()
    elevator = Elevator(files, "kvdepot-test-head", time.monotonic)
    bad = request([1])

    def raises() -> None:
        raise MemoryError

    if where == "answer":
        monkeypatch.setattr(bad, "on_answer", raises)
    else:
        bad.places = np.zeros(2, np.int64)  # more places than reads: an IndexError
    elevator.submit(bad)
    assert bad.answered.wait(60.0)
    assert bad.wait(60.0), "its memory is free"
    good = request([2])
    elevator.submit(good)
    assert good.wait(60.0)
    assert not good.results.any()
    elevator.close()
    files.close()
