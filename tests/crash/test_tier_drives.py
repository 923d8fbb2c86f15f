"""One drive of several is pulled, filled, slowed or failing under load, and comes back by itself.

Readers and writers go on all the time and compare every byte; a miss is computed anew and put
again, as an engine would. How fast the others are meanwhile: benchmarks/drive_faults.py.
"""

import errno
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.support.drive_traffic import BAD, DRIVES, Traffic, bad_volume, is_up, opened, spread
from tests.support.failing_disks import unplug
from tests.support.store_contract import prompt, put, space_of, tiers
from tests.support.waiting import eventually

from kvdepot.core.volume import Volume
from kvdepot.io.files import Files
from kvdepot.store.store import Store
from kvdepot.testing.emulation import DriveModel, EmulatedFiles
from kvdepot.testing.faults import Call, Fail, Fault, FaultyFiles

pytestmark = pytest.mark.crash

SLOWER = 20.0
MODEL = DriveModel(read_bandwidth=20_000_000, write_bandwidth=200_000_000, seek=0.0)
"""So slow that the machine's own disk does not count."""
USUAL = 700
"""Blocks read from a drive until it is known how fast it usually is; about a second."""
WRITES = frozenset({Call.RUN_WRITE, Call.WRITE, Call.ALLOCATE})
ALL = WRITES | {Call.RUN_READ, Call.READ}

Name = Literal["pulled", "filled", "slowed", "errors"]


@dataclass
class World:
    """A store, and what can happen to one of its drives."""

    path: Path
    tier: str
    name: Name
    files: Files = field(init=False)

    def __post_init__(self) -> None:
        self.files = EmulatedFiles(lambda _: MODEL) if self.name == "slowed" else FaultyFiles()

    @property
    def drive_path(self) -> Path:
        return self.path / f"drive-{BAD}"

    def begin(self) -> None:
        if self.name == "pulled":
            unplug(self.drive_path)
        elif isinstance(self.files, EmulatedFiles):
            self.files.slow_down(str(self.drive_path), SLOWER)
        elif isinstance(self.files, FaultyFiles):
            filled = self.name == "filled"
            effect = Fail(errno.ENOSPC if filled else errno.EIO)
            calls = WRITES if filled else ALL
            self.files.add(Fault(calls, effect, where=self._is_bad, times=None))

    def _is_bad(self, operation: Any) -> bool:
        return self.drive_path.name in operation.path

    def end(self) -> None:
        if isinstance(self.files, EmulatedFiles):
            self.files.slow_down(str(self.drive_path), 1.0)
        elif isinstance(self.files, FaultyFiles):
            self.files.clear()


@pytest.fixture(params=["ssd", "hdd"])
def tier(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize(
    "writes",
    [
        pytest.param(True, id="reads-and-writes"),
        pytest.param(False, id="reads", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "name", ["pulled", "filled", pytest.param("slowed", marks=pytest.mark.slow), "errors"]
)
def test_a_bad_volume_harms_nobody_and_comes_back(
    tmp_path: Path, tier: str, name: Name, writes: bool
) -> None:
    if name == "filled" and not writes:
        pytest.skip("a full drive reads as ever")
    world = World(tmp_path, tier, name)
    with opened(tmp_path, tier, world.files) as store:
        drive = bad_volume(store)
        traffic = Traffic(store, spread(store), writes)
        with traffic.running():
            assert traffic.goes_on(list(range(DRIVES)), USUAL if name == "slowed" else 16)
            world.begin()
            assert eventually(lambda: is_left_alone(drive, name)), "it is left alone"
            assert traffic.goes_on([0, 2], 48), "the others are read as ever"
            world.end()
            assert eventually(lambda: is_up(store)), "it comes back by itself"
            if name in ("slowed", "errors"):
                assert traffic.goes_on([BAD], 16), "with its blocks"
            if writes:
                assert eventually(lambda: written_to(store)), "and is written to"
        assert (name == "pulled") == (bad_volume(store) is not drive), "only a pulled one is new"
        assert store.flush() or name == "pulled", "what went with a drive is said"
        assert store.admin.check().ok
    with opened(tmp_path, tier, None) as store:
        space_of(store)
        assert store.admin.check().ok
        for keys in traffic.by_drive.values():
            tiers(store, keys)


def is_left_alone(volume: Volume, name: Name) -> bool:
    """A full volume is left alone by writes only."""
    facts = volume.facts()
    if name == "filled":
        assert facts.up
        return not facts.takes_blocks
    return not facts.up


def written_to(store: Store) -> bool:
    before = bad_volume(store).facts(details=True).details["written"]["bytes"]
    time.sleep(0.2)
    return bool(bad_volume(store).facts(details=True).details["written"]["bytes"] != before)


def test_a_store_that_is_only_read_gets_its_drive_back_with_its_blocks(
    tmp_path: Path, tier: str
) -> None:
    """The folder is moved away and comes back as it was, below a reader that cannot write."""
    with opened(tmp_path, tier, None) as store:
        by_drive = spread(store)
    away = tmp_path / "away"
    with opened(tmp_path, tier, None, mode="r") as store:
        space_of(store)
        drive = bad_volume(store)
        assert None not in tiers(store, by_drive[BAD])
        (tmp_path / f"drive-{BAD}").rename(away)
        assert eventually(lambda: drive.facts().lost)
        assert set(tiers(store, by_drive[BAD])) == {None}
        assert None not in tiers(store, by_drive[0])
        away.rename(tmp_path / f"drive-{BAD}")
        assert eventually(lambda: is_up(store))
        assert eventually(lambda: None not in tiers(store, by_drive[BAD]))
        assert store.admin.check().ok


def test_another_folder_in_its_place_is_not_taken_for_the_drive(tmp_path: Path) -> None:
    """A reader finds somebody else's store where its own was: its blocks are misses, no more."""
    with opened(tmp_path, "ssd", None) as store:
        by_drive = spread(store)
    other = tmp_path / "other"
    other.mkdir()
    with opened(other, "ssd", None) as store:
        theirs = prompt(space_of(store), 77, 4)
        assert all(put(store, theirs))
    with opened(tmp_path, "ssd", None, mode="r") as store:
        space_of(store)
        drive = bad_volume(store)
        (tmp_path / f"drive-{BAD}").rename(tmp_path / "away")
        (other / f"drive-{BAD}").rename(tmp_path / f"drive-{BAD}")
        assert eventually(lambda: bad_volume(store) is not drive and is_up(store))
        assert set(tiers(store, by_drive[BAD])) == {None}
        assert None not in tiers(store, by_drive[0])
        assert store.admin.check().ok


def test_nobody_who_asks_has_to_try_a_drive(tmp_path: Path) -> None:
    """`match` does not promise what a bad drive has, so nobody asks for it: it is tried alone."""
    world = World(tmp_path, "ssd", "errors")
    with opened(tmp_path, "ssd", world.files) as store:
        keys = spread(store)[BAD]
        world.begin()
        assert eventually(lambda: tiers(store, keys[:4]) == [None] * 4 and not is_up(store))
        whole = [key for key in keys if store.match([key])]
        assert not whole
        world.end()
        assert eventually(lambda: bool(store.match(keys[:1]))), "promised again, unasked"
        assert None not in tiers(store, keys[4:])
