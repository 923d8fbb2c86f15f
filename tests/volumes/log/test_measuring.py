"""A volume is measured once, while nothing uses it, and the profile is kept with it."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.store_contract import prompt, put, space_of, tiers
from tests.support.stores import PROFILE, settings
from tests.support.waiting import eventually

import kvdepot
from kvdepot.config.settings import load
from kvdepot.core.metadata import MetaEntry, MetaKind
from kvdepot.io.files import Files, Ops, Pending
from kvdepot.io.speed import FLASH, HEAD, Profile, VolumeBenchmark
from kvdepot.native import READ, WRITE
from kvdepot.store.check.offline import audit
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.clocks import ManualClock
from kvdepot.testing.emulation import DriveModel, EmulatedHead, open_emulated
from kvdepot.testing.faults import Call, Fail, Fault, FaultyFiles
from kvdepot.testing.images import STAMPS
from kvdepot.volumes.log.measuring import Measuring
from kvdepot.volumes.log.metadata import COPIES
from kvdepot.volumes.log.reader import ThroughputMeter
from kvdepot.volumes.log.volume import LogVolume

MODEL = DriveModel(read_bandwidth=200_000_000, write_bandwidth=100_000_000, seek=0.01)
REGION = 64 << 20


class Imagined(Files):
    """A drive that is nothing but a model, and takes no real time."""

    def __init__(self, model: DriveModel) -> None:
        super().__init__("python")
        self.clock = ManualClock()
        self.head = EmulatedHead(model)
        self.written: list[tuple[int, int]] = []
        self.code = 0

    def run(self, ops: Ops, timeout_s: float) -> Pending | None:
        del timeout_s
        ends_s = [self.clock.now()]
        for op in ops:
            read = int(op["opcode"]) == READ
            at, nbytes = int(op["offset"]), int(op["nbytes"])
            ends_s.append(self.head.move(0, at, nbytes, read=read, now_s=self.clock.now()))
            if int(op["opcode"]) == WRITE:
                self.written.append((at, at + nbytes))
        ops["result"] = -self.code
        self.clock.advance(max(ends_s) - self.clock.now())
        return None


@pytest.fixture
def drive() -> Iterator[Imagined]:
    opened = Imagined(MODEL)
    yield opened
    opened.close()


def finished(drive: Imagined, survey: VolumeBenchmark) -> Profile:
    while not survey.done:
        survey.step(drive.clock.now)
    return survey.profile(direct_io=True, emulated=True)


class TestSurvey:
    @pytest.mark.parametrize("region", [REGION, REGION - 8192, 200 << 20, 21_000_000])
    def test_it_finds_the_speeds_of_the_drive(self, drive: Imagined, region: int) -> None:
        found = finished(drive, VolumeBenchmark(drive, (0, 4096, region), HEAD, writes=True))
        assert found.read_bytes_per_s == pytest.approx(200e6, rel=0.1)
        assert found.write_bytes_per_s == pytest.approx(100e6, rel=0.1)
        unit_s = found.random_bytes / 200e6
        jumping = found.random_bytes / (MODEL.seek + unit_s)
        assert found.random_read_bytes_per_s == pytest.approx(jumping, rel=0.1)
        assert found.read_latency_us == pytest.approx(1e6 * MODEL.seek, rel=0.05)
        assert found.emulated

    @pytest.mark.parametrize(("terms", "limit_s"), [(FLASH, 1.5), (HEAD, 4.5)])
    def test_it_takes_seconds_whatever_the_drive(
        self, drive: Imagined, terms: Any, limit_s: float
    ) -> None:
        finished(drive, VolumeBenchmark(drive, (0, 4096, REGION), terms, writes=True))
        assert drive.clock.now() < limit_s

    def test_it_stays_in_its_place(self, drive: Imagined) -> None:
        survey = VolumeBenchmark(drive, (0, 4096, REGION), FLASH, writes=True)
        finished(drive, survey)
        assert drive.written
        assert survey.written_bytes == sum(stop - start for start, stop in drive.written)
        assert min(start for start, _ in drive.written) >= 4096
        assert max(stop for _, stop in drive.written) <= 4096 + REGION

    def test_without_a_place_of_its_own_it_only_reads(self, drive: Imagined) -> None:
        found = finished(drive, VolumeBenchmark(drive, (0, 4096, REGION), FLASH, writes=False))
        assert not drive.written
        assert found.read_bytes_per_s > 0
        assert (found.write_bytes_per_s, found.random_write_bytes_per_s) == (0, 0)

    def test_what_was_disturbed_does_not_count(self, drive: Imagined) -> None:
        survey = VolumeBenchmark(drive, (0, 4096, REGION), HEAD, writes=True)
        for _ in range(5):
            drive.head.slowdown = 50.0
            survey.step(drive.clock.now)
            survey.discard()
        drive.head.slowdown = 1.0
        assert finished(drive, survey).write_bytes_per_s == pytest.approx(100e6, rel=0.1)

    def test_a_drive_that_fails_is_told(self, drive: Imagined) -> None:
        survey = VolumeBenchmark(drive, (0, 4096, REGION), FLASH, writes=True)
        drive.code = errno.EIO
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            survey.step(drive.clock.now)


class TestProfile:
    def test_what_is_packed_is_parsed(self) -> None:
        assert Profile.parse(PROFILE.pack()) == PROFILE

    @pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"speed": 1}', b"\xff"])
    def test_what_is_of_another_version_is_nothing(self, text: bytes) -> None:
        assert Profile.parse(text) is None


class TestThroughputMeter:
    def read(self, meter: ThroughputMeter, clock: ManualClock, bytes_per_s: float) -> bool:
        nbytes = 64 << 20
        meter.begin(nbytes)
        assert meter.queued_bytes == nbytes
        clock.advance(nbytes / bytes_per_s)
        fine = meter.end(nbytes, 8, nbytes)
        assert meter.queued_bytes == 0
        return fine

    def test_it_tells_how_much_of_its_speed_a_drive_has_lately(self) -> None:
        clock = ManualClock()
        meter = ThroughputMeter(clock)
        assert meter.of_profile is None
        meter.profile = PROFILE
        self.read(meter, clock, 200e6)
        assert meter.of_profile == pytest.approx(1.0)
        for _ in range(20):
            self.read(meter, clock, 50e6)
        assert meter.of_profile == pytest.approx(0.25, abs=0.01)

    def test_a_drive_that_is_slow_from_the_start_is_seen(self) -> None:
        clock = ManualClock()
        meter = ThroughputMeter(clock)
        meter.profile = PROFILE
        assert [self.read(meter, clock, 10e6) for _ in range(3)] == [True, False, False]

    def test_without_a_profile_it_cannot_be(self) -> None:
        clock = ManualClock()
        meter = ThroughputMeter(clock)
        assert all(self.read(meter, clock, 10e6) for _ in range(5))


def small(path: Path, **ssd: Any) -> dict[str, Any]:
    tree = settings(path, ssd={"segment": "1MiB", "capacity": "8MiB", **ssd})
    del tree["hdd"]
    return tree


def volume_of(store: Store) -> LogVolume:
    return store.inspect().log_volume()


def measuring_of(store: Store) -> Measuring:
    return volume_of(store)._measuring


def profile_of(store: Store) -> Any:
    return store.stats()["tiers"]["ssd"]["drives"][0]["profile"]


def measured(path: Path) -> Any:
    with kvdepot.open(**small(path, profile="always")) as store:
        assert eventually(lambda: profile_of(store))
        assert volume_of(store).wear.written_bytes > 1 << 20, "what it cost is counted"
        assert store.admin.check().ok
        return profile_of(store)


class TestStore:
    def test_it_is_measured_kept_and_read_at_the_next_opening(self, tmp_path: Path) -> None:
        first = measured(tmp_path)
        assert first["read_bytes_per_s"] > 0 and first["write_bytes_per_s"] > 0
        assert not list((tmp_path / "ssd").glob("*.new"))
        assert not first["emulated"]
        with kvdepot.open(**small(tmp_path)) as store:
            assert profile_of(store) == first
        assert audit(tmp_path / "ssd").ok

    def test_small_stores_are_left_alone(self, tmp_path: Path) -> None:
        with kvdepot.open(**small(tmp_path)) as store:
            assert measuring_of(store).is_over
            assert profile_of(store) is None

    def test_what_is_measured_does_not_touch_blocks(self, tmp_path: Path) -> None:
        with kvdepot.open(**small(tmp_path)) as store:
            keys = [key for number in range(12) for key in prompt(space_of(store), number, 4)]
            assert all(put(store, keys))
            assert store.flush()
            there = [key for key in keys if store.match([key])]
        measured(tmp_path)
        with kvdepot.open(**small(tmp_path)) as store:
            space_of(store)
            assert None not in tiers(store, there)

    def test_it_outlives_a_log_that_is_written_anew(self, tmp_path: Path) -> None:
        first = measured(tmp_path)
        with kvdepot.open(**small(tmp_path)) as store:
            volume = volume_of(store)
            described = MetaEntry(MetaKind.NAMESPACE, b"namespac", STAMPS.next(), b"{}")
            assert volume.put_meta([described])
            before = (tmp_path / "ssd" / COPIES[0]).stat().st_ino
            assert volume.put_meta([MetaEntry(described.kind, described.name, STAMPS.next(), None)])
            assert (tmp_path / "ssd" / COPIES[0]).stat().st_ino != before
        with kvdepot.open(**small(tmp_path)) as store:
            assert profile_of(store) == first

    def test_the_last_spare_segment_is_never_borrowed(self, tmp_path: Path) -> None:
        with kvdepot.open(**small(tmp_path)) as store:
            segments = volume_of(store).segment_set
            borrowed = []
            while (one := segments.borrow_free_segment()) is not None:
                borrowed.append(one)
            assert len(borrowed) == 7, "of eight"
            for one in borrowed:
                segments.return_segment(one)
                segments.return_segment(one)
            assert segments.spare_slots() == 8

    @pytest.mark.slow
    def test_drives_that_are_emulated_are_not_those_that_are_not(self, tmp_path: Path) -> None:
        measured(tmp_path)
        model = DriveModel(read_bandwidth=10**9, write_bandwidth=10**9)
        with open_emulated({"ssd": model}, **small(tmp_path)) as store:
            assert profile_of(store) is None

    @pytest.mark.slow
    def test_a_new_drive_does_not_get_the_profile_of_another(self, tmp_path: Path) -> None:
        measured(tmp_path)
        with kvdepot.open(**small(tmp_path)) as store:
            space_of(store)
            store.volumes.add("ssd", tmp_path / "more")
            first, second = (store.inspect().log_volume(number) for number in (0, 1))
            profiles = [one["profile"] for one in store.stats()["tiers"]["ssd"]["drives"]]
            assert [profile is not None for profile in profiles] == [True, False]
            own = {MetaKind.PROFILE, MetaKind.RELEASED}
            known = [one.metadata.snapshot().entries.keys() for one in (first, second)]
            assert known[1] == {name for name in known[0] if name[0] not in own}

    def test_a_drive_that_fails_while_it_is_measured_is_not_measured(self, tmp_path: Path) -> None:
        files = FaultyFiles()
        fault = files.add(Fault(Call.RUN_WRITE, Fail(errno.EIO), times=None))
        with assemble(load(overrides=small(tmp_path, profile="always")), files=files) as store:
            assert eventually(lambda: fault.hits > 0)
            assert eventually(lambda: measuring_of(store).is_over)
            files.clear()
            assert profile_of(store) is None
            assert not len(volume_of(store).segments().segments)
            assert store.admin.check().ok

    @pytest.mark.slow
    def test_closing_does_not_wait_for_it(self, tmp_path: Path) -> None:
        model = DriveModel(read_bandwidth=10**6, write_bandwidth=10**6, seek=0.1)
        store = open_emulated({"ssd": model}, **small(tmp_path, profile="always"))
        measuring = measuring_of(store)
        assert eventually(lambda: measuring._benchmark is not None)
        assert store.close()
        assert measuring._benchmark is None
        assert audit(tmp_path / "ssd").ok
