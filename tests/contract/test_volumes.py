"""Every volume of ours obeys the contract.

Slow: what differs from a quick one in its I/O only.
"""

import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.support.object_nodes import memory_bucket, object_config
from tests.support.volumes import open_log

from kvdepot.core.volume import Volume
from kvdepot.io.files import EngineKind, Files
from kvdepot.native import uring_available
from kvdepot.testing.contract import Reopen, VolumeContract
from kvdepot.testing.emulation import DriveModel, EmulatedFiles
from kvdepot.testing.fakes import CONTEXT, MemoryVolume
from kvdepot.testing.faults import FaultyFiles
from kvdepot.volumes.log.medium import DirectIo
from kvdepot.volumes.log.volume import LogVolume
from kvdepot.volumes.object.bucket import Bucket, open_bucket
from kvdepot.volumes.object.volume import BucketVolume

CAPACITY_BYTES = 4 << 20
SEGMENT_BYTES = 256 << 10


class TestMemoryVolume(VolumeContract):
    @pytest.fixture
    def volume(self) -> Volume:
        return MemoryVolume(CAPACITY_BYTES)

    @pytest.fixture
    def reopen(self, volume: MemoryVolume) -> Reopen | None:
        return lambda: MemoryVolume(CAPACITY_BYTES, volume.medium)


class LogVolumeContract(VolumeContract):
    """A log volume, whatever its medium and its engine."""

    engine: EngineKind = "threads"
    direct: DirectIo = "never"
    contiguous_bytes = 0

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "drive"

    @pytest.fixture
    def files(self) -> Iterator[Files]:
        files = self.open_files()
        yield files
        files.close()

    def open_files(self) -> Files:
        return Files(self.engine)

    def open(self, path: Path, files: Files) -> LogVolume:
        return open_log(
            path,
            files,
            segments=CAPACITY_BYTES // SEGMENT_BYTES,
            segment_bytes=SEGMENT_BYTES,
            direct_io=self.direct,
            contiguous_bytes=self.contiguous_bytes,
        )

    @pytest.fixture
    def volume(self, path: Path, files: Files) -> Iterator[Volume]:
        volume = self.open(path, files)
        yield volume
        volume.close()

    @pytest.fixture
    def reopen(self, volume: Volume, path: Path, files: Files) -> Iterator[Reopen | None]:
        opened: list[Volume] = []

        def again() -> Volume:
            volume.close()
            opened.append(self.open(path, files))
            return opened[0]

        yield again
        for one in opened:
            one.close()


class TestDirectory(LogVolumeContract):
    pass


@pytest.mark.disk
class TestDirectoryDirect(LogVolumeContract):
    direct = "always"


@pytest.mark.slow
class TestDirectoryInPython(LogVolumeContract):
    engine = "python"
    direct = "always"


@pytest.mark.slow
@pytest.mark.skipif(not uring_available()[0], reason="io_uring is not available")
class TestDirectoryByRing(LogVolumeContract):
    engine = "uring"
    direct = "always"


@pytest.mark.slow
class TestDirectoryThroughFaultyFiles(LogVolumeContract):
    def open_files(self) -> Files:
        return FaultyFiles(self.engine)


@pytest.mark.root
@pytest.mark.disk
class TestRawDevice(LogVolumeContract):
    direct = "always"

    @pytest.fixture
    def path(self, tmp_path: Path) -> Iterator[Path]:
        image = tmp_path / "image"
        image.touch()
        with image.open("r+b") as file:
            file.truncate(CAPACITY_BYTES + SEGMENT_BYTES)
        attach = ["losetup", "--find", "--show", str(image)]
        device = subprocess.run(attach, check=True, capture_output=True, text=True).stdout.strip()
        yield Path(device)
        subprocess.run(["losetup", "--detach", device], check=True)


class TestHardDrive(LogVolumeContract):
    contiguous_bytes = 1 << 20


@pytest.mark.slow
class TestEmulatedHardDrive(TestHardDrive):
    def open_files(self) -> Files:
        fast = DriveModel(read_bandwidth=1 << 30, write_bandwidth=1 << 30, seek=0.0001)
        return EmulatedFiles(lambda _: fast, self.engine)


@pytest.mark.skipif(find_spec("obstore") is None, reason="the extra s3 is not installed")
class TestBucket(VolumeContract):
    @pytest.fixture
    def bucket(self) -> Bucket:
        return memory_bucket()

    @pytest.fixture
    def volume(self, bucket: Bucket) -> Iterator[Volume]:
        volume = BucketVolume(object_config(), CONTEXT, bucket)
        yield volume
        volume.close()

    @pytest.fixture
    def reopen(self, bucket: Bucket, volume: Volume) -> Iterator[Reopen]:
        opened: list[Volume] = []

        def again() -> Volume:
            volume.close()
            opened.append(BucketVolume(object_config(), CONTEXT, bucket))
            return opened[0]

        yield again
        for one in opened:
            one.close()

    @pytest.mark.slow
    def test_agrees_with_a_dict(self, volume: Volume) -> None:
        super().test_agrees_with_a_dict(volume)


class TestSharedFolder(TestBucket):
    @pytest.fixture
    def bucket(self, tmp_path: Path) -> Bucket:
        return open_bucket(object_config(url=f"file://{tmp_path}/shared"))
