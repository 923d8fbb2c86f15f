"""A block device that really is slow, and one that really fails: nbdkit behind a loop device.

Emulated, but below the kernel: page tables, the block layer and ext4 see a slow disk.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.disk import Disk, are_there
from tests.support.drive_traffic import BAD, DRIVES, Traffic, bad_volume, is_up
from tests.support.drive_traffic import opened as opened_beside
from tests.support.drive_traffic import spread as spread_out
from tests.support.failing_disks import (
    assert_quiet,
    prompt,
    put_all,
    settings,
    space_of,
    verified_hits,
    works_again,
)
from tests.support.store_contract import tiers
from tests.support.waiting import eventually, until

from kvdepot.config.settings import load
from kvdepot.core.block import PutResult
from kvdepot.store.open import assemble
from kvdepot.store.store import Store

DELAY_S = 0.02
FAST, SLOW = 24_000_000, 1_200_000

pytestmark = [
    pytest.mark.root,
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.skipif(
        not are_there(),
        reason="needs root, FUSE and nbdkit: apt-get install nbdkit libnbd-bin fuse3",
    ),
]


@pytest.fixture(params=["ssd", "hdd"])
def tier(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Disk]:
    """A disk of 64 MiB that takes DELAY_S for each request."""
    disk = Disk(tmp_path / "disk", delay_s=DELAY_S)
    yield disk
    disk.remove()


def open_store(device: Disk, tier: str, **table: object) -> Store:
    tree = settings(device.mount / "kv", **table)
    ssd = tree.pop("ssd")
    return assemble(load(overrides={**tree, tier: ssd}))


def test_a_slow_disk_keeps_its_promises_and_its_deadlines(device: Disk, tier: str) -> None:
    with open_store(device, tier, read_timeout="20s", write_timeout="20s") as store:
        keys = prompt(space_of(store), 1, 12)
        assert put_all(store, keys) == [PutResult.STORED] * 12
        assert store.flush(60.0)
    with open_store(device, tier, read_timeout="20s", write_timeout="20s") as store:
        space = space_of(store)
        assert len(store.match(keys)) == 12
        targets = [bytearray(64 << 10) for _ in keys]
        started = time.monotonic()
        answers = store.get_many(keys, targets, timeout_s=DELAY_S / 4)
        assert time.monotonic() - started < 20.0
        assert {answer.reason for answer in answers} == {"late"}
        # What was late has taken the drive out for a moment.
        until(lambda: verified_hits(store, keys) == 12)
        works_again(store, space, 5)
        assert_quiet(store)


def test_a_disk_that_fails_costs_misses_until_it_works_again(device: Disk, tier: str) -> None:
    with open_store(device, tier, read_timeout="5s", write_timeout="5s") as store:
        space = space_of(store)
        keys = prompt(space, 1, 12)
        put_all(store, keys)
        assert store.flush(60.0)
    with open_store(device, tier, read_timeout="5s", write_timeout="5s") as store:
        space = space_of(store)
        device.fail()
        assert verified_hits(store, keys) == 0
        fresh = prompt(space, 2, 4)
        assert put_all(store, fresh) == [PutResult.STORED] * 4
        assert verified_hits(store, fresh) == 4
        assert not store.flush(10.0)
        device.heal()
        works_again(store, space, 10)
        assert_quiet(store)
    with open_store(device, tier) as store:
        space_of(store)
        assert store.admin.check().ok
        verified_hits(store, keys)


@pytest.fixture(params=["errors", "slowed", "filled", "pulled"])
def fault(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def beside(tmp_path: Path, fault: str) -> Iterator[Disk]:
    """A disk that is one of three drives; the others are folders of the machine's own."""
    disk = Disk(tmp_path / "disk", bytes_per_s=FAST, journal=fault == "pulled")
    (tmp_path / f"drive-{BAD}").symlink_to(disk.mount / "kv")
    (disk.mount / "kv").mkdir()
    yield disk
    disk.remove()


def test_a_real_disk_goes_bad_beside_others_and_comes_back(
    tmp_path: Path, beside: Disk, tier: str, fault: str
) -> None:
    begin: dict[str, Any] = {
        "errors": beside.fail,
        "slowed": lambda: beside.limit(SLOW),
        "filled": lambda: fill(beside),
        "pulled": beside.pull,
    }
    end: dict[str, Any] = {
        "errors": beside.heal,
        "slowed": lambda: beside.limit(FAST),
        "filled": (beside.mount / "ballast").unlink,
        "pulled": beside.plug,
    }
    with opened_beside(tmp_path, tier, None) as store:
        by_drive = spread_out(store)
        traffic = Traffic(store, by_drive, writes=fault in ("errors", "filled"))
        with traffic.running():
            assert traffic.goes_on(list(range(DRIVES)), 700)
            begin[fault]()
            if fault != "filled":  # its segments are there already: it goes on
                assert eventually(lambda: not bad_volume(store).facts().up)
            assert traffic.goes_on([0, 2], 300)
            end[fault]()
            assert eventually(lambda: is_up(store), 60.0)
            assert traffic.goes_on([BAD], 16), "with its blocks"
        store.flush()
        assert store.admin.check().ok
        tiers(store, by_drive[BAD])


def fill(disk: Disk) -> None:
    """Take all the room that the file system has left."""
    with (disk.mount / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 20))
        except OSError:
            return
