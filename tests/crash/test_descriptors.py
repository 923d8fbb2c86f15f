"""Whatever ends the work of a tier, and at whichever of its steps, no descriptor stays open."""

import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.waiting import until

from kvdepot.core.clock import StampClock, SystemClock, WallClock
from kvdepot.core.volume import OpenVolume, VolumeContext
from kvdepot.errors import KVDepotError
from kvdepot.io.breaker import RetryPauses
from kvdepot.io.files import Files
from kvdepot.store.check.offline import audit
from kvdepot.store.check.repair import repair
from kvdepot.store.volume_set import VolumeSet
from kvdepot.testing.contract import put
from kvdepot.testing.images import make_key, make_records, removal_of
from kvdepot.testing.power import PowerFiles
from kvdepot.volumes.log.medium import MountSettings
from kvdepot.volumes.log.volume import LogVolume

pytestmark = pytest.mark.crash

SEGMENT_BYTES = 64 << 10
STRIDE = 7
"""One write of so many is the one, another time another."""


def test_the_power_is_cut_at_any_write(tmp_path: Path, seed: int) -> None:
    before, cut_at, off = open_files(), seed % STRIDE, True
    while off:
        cut_at += STRIDE
        files = PowerFiles(random.Random(cut_at), "python")
        files.cut_at = cut_at
        lead_a_life(tmp_path / str(cut_at), files)
        off = files.off
        assert open_files() == before, f"the power was cut at write {cut_at}"
    assert cut_at > 80


def test_a_drive_goes_again_while_it_is_mounted(tmp_path: Path) -> None:
    before = open_files()
    for number in range(1, 12):
        folder = tmp_path / str(number)
        files = PullingFiles(folder / "0", number)
        lead_a_life(folder, files, files.arm)
        assert (folder / "0-away").exists()
        assert open_files() == before, f"it went before step {number}"


@pytest.mark.parametrize("damaged", [False, True])
def test_the_offline_check_and_repair(tmp_path: Path, damaged: bool) -> None:
    before, drive = open_files(), tmp_path / "life" / "0" / "kv"
    lead_a_life(tmp_path / "life", Files("python"))
    if damaged:
        (drive / "metadata-a").write_bytes(b"?" * 8192)
    audit(drive)
    assert open_files() == before
    repair(drive)
    assert open_files() == before


class PullingFiles(Files):
    """Files that rename a folder away before the nth step of a mount, once armed."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__("python")
        self._folder = folder
        self._left = number
        self._armed = False

    def arm(self) -> None:
        self._armed = True

    def _step(self) -> None:
        self._left -= self._armed
        if self._armed and not self._left:
            self._armed = False
            self._folder.rename(self._folder.with_name(f"{self._folder.name}-away"))

    def open_file(self, path: Path, flags: int) -> int:
        self._step()
        return super().open_file(path, flags)

    def open_directory(self, path: Path) -> int:
        self._step()
        fd = super().open_directory(path)
        self._step()
        return fd

    def unlink(self, path: Path) -> None:
        self._step()
        super().unlink(path)
        self._step()


def lead_a_life(
    folder: Path, files: Files, before_reopening: Callable[[], None] = lambda: None
) -> None:
    """Everything that opens or closes files: volumes opened, lost, opened again, added, drained and
    made smaller. What fails is left.
    """
    folder.mkdir()
    drives = [folder / name / "kv" for name in "012"]
    for path in drives:
        path.parent.mkdir()
    settings = MountSettings(4 * SEGMENT_BYTES, SEGMENT_BYTES, pauses=RetryPauses(0.001, 0.01))
    volumes = VolumeSet(VolumeContext(SystemClock(), WallClock(), StampClock(WallClock())))

    def opener(path: Path) -> OpenVolume:
        return lambda context: LogVolume(path, files, settings, context, [])

    try:
        volumes.open_all([("ssd", str(path), opener(path)) for path in drives[:2]])
    except KVDepotError:
        volumes.entries.clear()
    keys = [make_key(number) for number in range(8)]
    entries = volumes.entries
    steps: list[Callable[[], object]] = [
        lambda: [put(entry.volume, make_records(keys, 12_000)) for entry in entries],
        lambda: volumes.metadata.put(removal_of(make_key(3))),
        lambda: [entry.volume.sync(10.0) for entry in entries],
        lambda: drives[0].rename(folder / "hidden"),
        lambda: entries[0].volume.maintain(lambda: False),
        lambda: (folder / "hidden").rename(drives[0]),
        before_reopening,
        lambda: until(lambda: not volumes.facts(0).retry_in_s),
        lambda: volumes.reopen(entries[0]),
        lambda: volumes.add("ssd", str(drives[2]), opener(drives[2])),
        lambda: entries[1].volume.set_limits(None, may_write=False),
        lambda: volumes.retire(entries[1]),
        lambda: entries[0].volume.set_limits(3 * SEGMENT_BYTES, may_write=True),
        lambda: entries[0].volume.maintain(lambda: False),
    ]
    for step in steps:
        with contextlib.suppress(OSError, KVDepotError, IndexError):
            step()
    volumes.close()
    files.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
