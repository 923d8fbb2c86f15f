"""An emulated drive takes the time that such a drive would take."""

import errno
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.store_contract import prompt, put, space_of, tiers
from tests.support.stores import settings

import kvdepot
from kvdepot.errors import ConfigError
from kvdepot.io.files import Ops, aligned, io_ops
from kvdepot.native import READ, address_of
from kvdepot.testing.emulation import DriveModel, EmulatedFiles, open_emulated

MODEL = DriveModel(read_bandwidth=10 << 20, write_bandwidth=5 << 20, seek=0.02, latency=0.001)
BLOCK = 64 << 10


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "drive"
    path.write_bytes(os.urandom(1 << 20))
    opened = os.open(path, os.O_RDWR)
    yield opened
    os.close(opened)


@pytest.fixture
def files(fd: int) -> Iterator[EmulatedFiles]:
    opened = EmulatedFiles(lambda _: MODEL, "threads")
    opened.attach(fd, "drive")
    yield opened
    opened.close()


def reads(fd: int, offsets: list[int]) -> tuple[Ops, list[memoryview]]:
    ops = io_ops(len(offsets))
    images = [aligned(BLOCK) for _ in offsets]
    ops["fd"], ops["opcode"], ops["nbytes"] = fd, READ, BLOCK
    ops["offset"] = offsets
    ops["address"] = [address_of(image)[0] for image in images]
    return ops, images


def seconds(files: EmulatedFiles, batch: tuple[Ops, list[memoryview]]) -> float:
    started = time.monotonic()
    assert files.run(batch[0], 10.0) is None
    return time.monotonic() - started


def test_adjacent_reads_pay_for_one_seek_and_others_for_many(files: EmulatedFiles, fd: int) -> None:
    transfer_s = 8 * BLOCK / MODEL.read_bandwidth
    in_order = min(seconds(files, reads(fd, [n * BLOCK for n in range(8)])) for _ in range(3))
    assert MODEL.seek + transfer_s <= in_order < 4 * MODEL.seek + transfer_s + 0.5
    jumping = seconds(files, reads(fd, [n * BLOCK for n in (7, 3, 5, 1, 6, 2, 4, 0)]))
    assert jumping >= 8 * MODEL.seek + transfer_s


def test_the_bytes_are_real(files: EmulatedFiles, fd: int) -> None:
    ops, images = reads(fd, [BLOCK, 0])
    seconds(files, (ops, images))
    assert b"".join(images[::-1]) == os.pread(fd, 2 * BLOCK, 0)


def test_what_would_come_too_late_is_late(fd: int) -> None:
    model = replace(MODEL, seek=0.5)
    files = EmulatedFiles(lambda _: model, "threads")
    files.attach(fd, "drive")
    ops, images = reads(fd, [0, 8 * BLOCK])
    started = time.monotonic()
    pending = files.run(ops, 0.75)
    assert ops["result"].tolist() == [0, -errno.ETIMEDOUT]
    assert pending is not None
    assert not pending.wait(0.0)
    assert pending.wait(60.0)
    assert len(images) == 2, "alive until then"
    assert time.monotonic() - started >= 2 * (model.seek + BLOCK / model.read_bandwidth)
    files.close()


def test_a_store_says_which_of_its_drives_are_emulated(tmp_path: Path) -> None:
    models = {"hdd": replace(MODEL, read_bandwidth=10**8, write_bandwidth=10**8)}
    with open_emulated(models, **settings(tmp_path)) as store:
        store.volumes.set_write_mode("hdd", "pass-through")
        keys = prompt(space_of(store), 1, 5)
        assert all(put(store, keys))
        assert store.flush()
        described = store.stats()["tiers"]
        assert (described["ssd"]["emulated"], described["hdd"]["emulated"]) == (False, True)
        assert [drive["emulated"] for drive in described["hdd"]["drives"]] == [True]
    with open_emulated(models, **settings(tmp_path)) as store:
        space_of(store)
        assert tiers(store, keys) == ["hdd"] * 5


PLUGIN = {"name": "kvdepot.testing.emulation:emulated_drive", "capacity": "32MiB"}
FAST = {"read_bandwidth": "1GB", "write_bandwidth": "1GB"}


def with_plugin(folder: Path, **plugin: Any) -> dict[str, Any]:
    table = {**PLUGIN, "path": str(folder / "emulated"), "options": FAST, **plugin}
    return {"dram": {"capacity": "2MiB", "prefault": False}, "plugin": table}


@pytest.mark.parametrize("seek", ["0s", "1ms"])
def test_a_configuration_loads_an_emulated_drive_as_a_plug_in(tmp_path: Path, seek: str) -> None:
    tree = with_plugin(tmp_path, options={**FAST, "seek": seek})
    with kvdepot.open(**tree) as store:
        keys = prompt(space_of(store), 1, 5)
        assert all(put(store, keys))
        assert store.flush()
        described = store.stats()["tiers"]["plugin"]
        assert (described["emulated"], described["drives"][0]["emulated"]) == (True, True)
    with kvdepot.open(**tree) as store:
        space_of(store)
        assert tiers(store, keys) == ["plugin"] * 5
        assert store.admin.check().ok


@pytest.mark.parametrize(
    ("plugin", "says"),
    [
        ({"path": None}, "plugin.path: missing"),
        ({"options": {**FAST, "seek": "-1ms"}}, "plugin.options.seek: "),
        ({"options": {**FAST, "read_bandwidth": "0"}}, "plugin.options.read_bandwidth: must be"),
        ({"options": {**FAST, "bandwidth": "1GB"}}, "plugin.options.bandwidth: unknown key"),
        ({"options": {}}, "plugin.options.read_bandwidth: missing"),
    ],
)
def test_a_wrong_option_of_an_emulated_drive_is_named(
    tmp_path: Path, plugin: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}"):
        kvdepot.open(**with_plugin(tmp_path, **plugin))
