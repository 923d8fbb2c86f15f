"""One sweep for many readers."""

import errno
import threading
import time

import numpy as np
import pytest

from kvdepot.native import READ
from kvdepot.tiers.device.files import Files, Ops, io_ops
from kvdepot.tiers.log.hdd import DriveReads, Elevator

BLOCK = 4096


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


def request(places: list[int], within_s: float = 10.0) -> DriveReads:
    ops = io_ops(len(places))
    ops["opcode"], ops["nbytes"] = READ, BLOCK
    ops["offset"] = places
    return DriveReads(ops, np.array(places, dtype=np.int64), time.monotonic() + within_s)


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


class Broken(Recorder):
    """Fails with something that no caller expects, the first time."""

    def run(self, ops: Ops, timeout_s: float) -> None:
        if not self.go.is_set():
            self.go.set()
            raise RuntimeError("a bug")
        super().run(ops, timeout_s)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_fails_one_round_and_the_next_is_read() -> None:
    files = Broken()
    elevator = Elevator(files, "kvdepot-test-head", time.monotonic)
    ended = threading.Event()
    first = request([1])
    first.at_end = ended.set
    elevator.submit(first)
    assert ended.wait(10.0) and first.wait(10.0)
    assert first.results.tolist() == [-errno.EIO]
    second = request([2])
    elevator.submit(second)
    assert second.wait(10.0)
    assert second.results.tolist() == [0]
    elevator.close()
    files.close()
