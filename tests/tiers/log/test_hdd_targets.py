"""A hard drive's read that comes after its caller has gone leaves the caller's memory alone."""

import threading
from pathlib import Path

from tests.support.waiting import eventually

from kvdepot.core.clock import SystemClock
from kvdepot.core.tier import Load, Outcome, QueuesReads
from kvdepot.native import address_of
from kvdepot.testing.faults import Call, Fault, FaultyFiles, Stall
from kvdepot.testing.images import make_image, make_key, make_load, payload_for
from kvdepot.tiers.log.hdd import HardDriveTier
from kvdepot.tiers.log.mount import MountSettings

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
