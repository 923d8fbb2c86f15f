"""Every tier of ours, and every wrapper, obeys the contract.

Slow: what joins two others, each of which is in the quick tests.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdepot.core.clock import SystemClock
from kvdepot.core.tier import Tier
from kvdepot.io.files import EngineKind, Files
from kvdepot.native import uring_available
from kvdepot.testing.contract import Reopen, TierContract
from kvdepot.testing.emulation import DriveModel, EmulatedFiles
from kvdepot.testing.fakes import CountingTier, FaultyTier, MemoryTier, SlowTier
from kvdepot.testing.faults import FaultyFiles
from kvdepot.volumes.log.hdd import HardDriveTier
from kvdepot.volumes.log.medium import DirectIo, MountSettings
from kvdepot.volumes.log.tier import LogTier

CAPACITY_BYTES = 4 << 20
LOG_BYTES = 4 << 20
SEGMENT_BYTES = 256 << 10
URING = uring_available()[0]


class TestMemoryTier(TierContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = MemoryTier(CAPACITY_BYTES)
        yield tier
        tier.close()

    @pytest.fixture
    def reopen(self, tier: MemoryTier) -> Reopen | None:
        return lambda: MemoryTier(CAPACITY_BYTES, tier.medium)


class TestFaultyTierWithoutFaults(TierContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = FaultyTier(MemoryTier(CAPACITY_BYTES))
        yield tier
        tier.close()


class TestSlowTierWithoutDelay(TierContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = SlowTier(MemoryTier(CAPACITY_BYTES), 0.0)
        yield tier
        tier.close()


class TestCountingTier(TierContract):
    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        tier = CountingTier(MemoryTier(CAPACITY_BYTES))
        yield tier
        tier.close()


class LogTierContract(TierContract):
    """The `ssd` tier, whatever its drives and its engine."""

    drives = 1
    engine: EngineKind = "threads"
    direct: DirectIo = "never"
    kind: type[LogTier] = LogTier

    @pytest.fixture
    def paths(self, tmp_path: Path) -> list[Path]:
        return [tmp_path / f"drive-{number}" for number in range(self.drives)]

    def open(self, paths: list[Path]) -> LogTier:
        settings = MountSettings(LOG_BYTES // self.drives, SEGMENT_BYTES, direct_io=self.direct)
        return self.kind(paths, self.files(), settings, SystemClock())

    def files(self) -> Files:
        return Files(self.engine)

    @pytest.fixture
    def tier(self, paths: list[Path]) -> Iterator[Tier]:
        tier = self.open(paths)
        yield tier
        tier.close()

    @pytest.fixture
    def reopen(self, tier: Tier, paths: list[Path]) -> Iterator[Reopen | None]:
        opened: list[LogTier] = []

        def again() -> Tier:
            tier.close()
            opened.append(self.open(paths))
            return opened[0]

        yield again
        for one in opened:
            one.close()


class TestLogTier(LogTierContract):
    pass


class TestLogTierOnTwoDrives(LogTierContract):
    drives = 2


@pytest.mark.disk
class TestLogTierDirect(LogTierContract):
    direct = "always"


class TestLogTierInPython(LogTierContract):
    engine = "python"


@pytest.mark.slow
class TestLogTierDirectInPython(LogTierContract):
    engine = "python"
    direct = "always"


@pytest.mark.slow
@pytest.mark.skipif(not URING, reason="io_uring is not available")
class TestLogTierByRing(LogTierContract):
    engine = "uring"


@pytest.mark.disk
@pytest.mark.skipif(not URING, reason="io_uring is not available")
class TestLogTierDirectByRingOnTwoDrives(LogTierContract):
    engine = "uring"
    direct = "always"
    drives = 2


class TestLogTierThroughFaultyFiles(LogTierContract):
    def files(self) -> Files:
        return FaultyFiles(self.engine)


class TestHardDriveTier(LogTierContract):
    kind = HardDriveTier


@pytest.mark.slow
class TestHardDriveTierOnThreeDrives(LogTierContract):
    kind = HardDriveTier
    drives = 3


class TestEmulatedHardDriveTier(LogTierContract):
    kind = HardDriveTier
    drives = 2

    def files(self) -> Files:
        fast = DriveModel(read_bandwidth=1 << 30, write_bandwidth=1 << 30, seek=0.0001)
        return EmulatedFiles(lambda _: fast, self.engine)
