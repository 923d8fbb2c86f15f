"""One sweep for many readers; a caller that has gone keeps its memory to itself."""

import errno
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.support.waiting import eventually

from kvdepot.core.clock import SystemClock
from kvdepot.core.tier import Load, Outcome, QueuesReads
from kvdepot.io.files import Files, Ops, io_ops
from kvdepot.native import READ, address_of
from kvdepot.testing.faults import Call, Fault, FaultyFiles, Stall
from kvdepot.testing.images import make_image, make_key, make_load, payload_for
from kvdepot.volumes.log.hdd import DriveReads, Elevator, HardDriveTier
from kvdepot.volumes.log.medium import MountSettings

BLOCK = 4096
NBYTES = 20_000
KEYS = [make_key(number) for number in range(3)]


def test_queued_loads_are_answered_without_a_waiting_thread(tmp_path: Path) -> None:
    files, stall = FaultyFiles(), Stall()
    settings = MountSettings(8 << 20, 1 << 20, tier="hdd")
    tier = HardDriveTier([tmp_path / "first", tmp_path / "second"], files, settings, SystemClock())
    images = [make_image(key, payload_for(key, NBYTES)) for key in KEYS]
    places = [*tier.append(0, images[:2]), *tier.append(1, images[2:])]
    targets = [bytearray(NBYTES) for _ in KEYS]
    loads = [
        make_load(key, place or 0, NBYTES, copy_to=address_of(target)[0])
        for key, place, target in zip(KEYS, places, targets, strict=True)
    ]
    files.add(Fault(Call.RUN_READ, stall, skip=1))
    done = threading.Event()
    reading = tier.submit(loads, 30.0, done.set)
    assert isinstance(tier, QueuesReads)
    assert not done.wait(0.05)
    stall.release()
    assert done.wait(10.0)
    assert targets[0] == bytes(NBYTES), "copied by who asks for the result"
    assert reading.result() == ([Outcome.OK] * 3, None)
    assert targets == [payload_for(key, NBYTES) for key in KEYS]
    late = tier.submit([make_load(KEYS[0], places[0] or 0, NBYTES)], 0.0, done.set)
    outcomes, pending = late.result()
    assert (pending is not None) == (outcomes == [Outcome.LATE])
    assert pending is None or pending.wait(10.0)
    tier.close()


def test_a_round_of_two_readers_does_not_write_to_who_has_gone(tmp_path: Path) -> None:
    files, first, second = FaultyFiles(), Stall(), Stall()
    settings = MountSettings(8 << 20, 1 << 20, tier="hdd")
    tier = HardDriveTier([tmp_path], files, settings, SystemClock())
    places = tier.append(0, [make_image(key, payload_for(key, NBYTES)) for key in KEYS])
    targets = [bytearray(NBYTES) for _ in KEYS]
    loads: list[Load] = []
    for key, place, target in zip(KEYS, places, targets, strict=True):
        assert place is not None
        loads.append(make_load(key, place, NBYTES, copy_to=address_of(target)[0]))
    outcomes: dict[int, Outcome] = {}

    def read(number: int, timeout_s: float) -> None:
        (outcomes[number],), _ = tier.load([loads[number]], timeout_s)

    files.add(Fault(Call.RUN_READ, first, times=1))
    files.add(Fault(Call.RUN_READ, second, skip=1, times=None))
    readers = [
        threading.Thread(target=read, args=(number, timeout_s))
        for number, timeout_s in ((0, 60.0), (1, 0.3), (2, 60.0))
    ]
    elevator = tier._elevator(0)
    readers[0].start()
    assert eventually(lambda: elevator._thread is not None and not elevator._queue)
    for reader in readers[1:]:
        reader.start()
    assert eventually(lambda: len(elevator._queue) == 2)
    first.release()
    readers[1].join()
    assert outcomes[1] is Outcome.LATE
    second.release()
    readers[0].join()
    readers[2].join()
    assert (outcomes[0], outcomes[2]) == (Outcome.OK, Outcome.OK)
    tier.close()
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["answer", "read"])
def test_an_exception_ends_a_round_and_not_the_drive(where: str) -> None:
    files = Recorder()
    files.go.set()
    elevator = Elevator(files, "kvdepot-test-head", time.monotonic)
    bad = request([1])

    def raises() -> None:
        raise MemoryError

    if where == "answer":
        bad.at_end = raises
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
