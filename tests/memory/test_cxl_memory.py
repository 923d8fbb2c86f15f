"""Where the slower memory comes from: a NUMA node, a device, or ordinary memory that stands in."""

import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.cxl_world import MIB, settings, settle
from tests.support.store_contract import BLOCK_BYTES, prompt, put, space_of, tiers

import kvdepot
from kvdepot.config.settings import load
from kvdepot.errors import ConfigError
from kvdepot.memory.memory import Memory
from kvdepot.testing.images import payload_for

NODES = Path("/sys/devices/system/node")
numa = pytest.mark.skipif(not (NODES / "node0").exists(), reason="no NUMA nodes")


def policy_at(address: int) -> str:
    """What the kernel says of the memory there."""
    maps = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    return next(words[1] for words in maps if int(words[0], 16) == address)


def file_of(path: Path, nbytes: int) -> Path:
    with path.open("wb") as file:
        file.truncate(nbytes)
    return path


class TestSettings:
    def test_capacity_alone(self) -> None:
        cxl = load(overrides={"cxl": "256GiB"}).cxl
        assert cxl is not None and cxl.capacity == 256 << 30
        assert (cxl.emulated, cxl.source) == (True, "ordinary memory")

    def test_a_node_or_a_device(self) -> None:
        node = load(overrides={"cxl": {"capacity": "1GiB", "node": 1}}).cxl
        device = load(overrides={"cxl": {"capacity": "1GiB", "path": "/dev/dax0.0"}}).cxl
        assert node is not None and (node.emulated, node.source) == (False, "NUMA node 1")
        assert device is not None and (device.emulated, device.source) == (False, "/dev/dax0.0")

    @pytest.mark.parametrize(
        ("cxl", "path", "says"),
        [
            (
                {"capacity": "1GiB", "node": 0, "path": "/dev/dax0.0"},
                "cxl.path",
                "cannot be set together",
            ),
            ({"capacity": "1GiB", "node": -1}, "cxl.node", "negative"),
            ({"capacity": 7}, "cxl.capacity", "at least"),
            ({}, "cxl.capacity", "missing"),
            ({"capacity": "1GiB", "nodes": 1}, "cxl.nodes", "unknown"),
        ],
        ids=repr,
    )
    def test_mistakes_are_named(self, cxl: dict[str, Any], path: str, says: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load(overrides={"cxl": cxl})
        assert caught.value.path == path
        assert says in str(caught.value)


@numa
class TestNode:
    @pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
    def test_pages_come_from_that_node(self, shared: bool) -> None:
        memory = Memory.on_node(3 * MIB, 0, shared=shared)
        assert memory.nbytes == 4 * MIB
        memory.view[:] = bytes(range(256)) * (16 << 10)
        assert policy_at(memory.address) == "bind:0"
        assert bytes(memory.view[-4:]) == b"\xfc\xfd\xfe\xff"
        memory.close()

    def test_a_store_on_it(self) -> None:
        with kvdepot.open(**settings(node=0)) as store:
            assert policy_at(store.inspect().memory(1).arena.address) == "bind:0"
            keys = prompt(space_of(store), 1, 10)
            assert all(put(store, keys))
            assert tiers(store, keys) == ["dram"] * 10
            cxl = store.stats()["tiers"]["cxl"]
            assert (cxl["emulated"], cxl["source"]) == (False, "NUMA node 0")

    def test_one_that_is_not_there(self) -> None:
        with pytest.raises(ConfigError, match="no NUMA node 999") as caught:
            kvdepot.open(**settings(node=999))
        assert caught.value.path == "cxl.node"
        assert "0 (" in caught.value.hint

    def test_one_that_is_too_small(self) -> None:
        with pytest.raises(ConfigError, match=r"less than the capacity of 1\.0 ?PiB|PiB") as caught:
            kvdepot.open(**settings(node=0, capacity="1PiB"))
        assert caught.value.path == "cxl.node"

    def test_the_kernel_refuses_too(self) -> None:
        with pytest.raises(OSError, match="mbind to node 999"):
            Memory.on_node(MIB, 999)


class TestDevice:
    """A file stands for a DAX device: mapped in the same way."""

    def test_blocks_are_in_it(self, tmp_path: Path) -> None:
        device = file_of(tmp_path / "dax", 6 * MIB)
        with kvdepot.open(**settings(path=str(device))) as store:
            space = space_of(store)
            everything = [prompt(space, number, 10) for number in range(9)]
            for keys in everything:
                assert all(put(store, keys))
                settle(store)
            there = [
                key for keys in everything for key in keys if store.match([key]).tiers == ("cxl",)
            ]
            assert len(there) > 20
            content = device.read_bytes()
            assert all(payload_for(key, BLOCK_BYTES) in content for key in there[:5])
            cxl = store.stats()["tiers"]["cxl"]
            assert (cxl["emulated"], cxl["source"]) == (False, str(device))

    def test_what_an_earlier_store_left_there_is_not_found(self, tmp_path: Path) -> None:
        device = tmp_path / "dax"
        device.write_bytes(b"\xff" * (4 * MIB))
        with kvdepot.open(**settings(path=str(device))) as store:
            space = space_of(store)
            for number in range(9):
                put(store, prompt(space, number, 10))
                settle(store)
            assert None not in tiers(store, prompt(space, 8, 10))
        with kvdepot.open(**settings(path=str(device))) as store:
            assert tiers(store, prompt(space_of(store), 8, 10)) == [None] * 10

    @pytest.mark.parametrize("path", ["nowhere/dax0.0", "folder", "/dev/null", "small", "empty"])
    def test_what_cannot_be_used(self, tmp_path: Path, path: str) -> None:
        (tmp_path / "folder").mkdir()
        file_of(tmp_path / "small", 3 * MIB)
        file_of(tmp_path / "empty", 0)
        before = len(os.listdir("/proc/self/fd"))
        says = {
            "nowhere/dax0.0": "No such file",
            "folder": "Is a directory",
            "small": "3 ?MiB, less than the capacity of 4 ?MiB",
        }
        with pytest.raises(
            ConfigError, match=says.get(path, "neither a DAX device nor a non-empty file")
        ) as caught:
            kvdepot.open(**settings(path=str(tmp_path / path)))
        assert caught.value.path == "cxl.path"
        assert len(os.listdir("/proc/self/fd")) == before

    def test_two_stores_cannot_have_it(self, tmp_path: Path) -> None:
        device = file_of(tmp_path / "dax", 4 * MIB)
        store = kvdepot.open(**settings(path=str(device)))
        with store, pytest.raises(ConfigError, match="in use by another store"):
            kvdepot.open(**settings(path=str(device)))
        kvdepot.open(**settings(path=str(device))).close()


def test_memories_behind_each_other_are_one_for_who_maps_them() -> None:
    first, second = (Memory(2 * MIB, "never", shared=True) for _ in range(2))
    first.view[-1:], second.view[:1] = b"a", b"b"
    both = Memory.mapped((os.dup(first.fd), 2 * MIB), (os.dup(second.fd), 2 * MIB))
    assert both.nbytes == 4 * MIB and both.address % (2 * MIB) == 0
    assert bytes(both.view[2 * MIB - 1 : 2 * MIB + 1]) == b"ab"
    both.view[3 * MIB : 3 * MIB + 1] = b"c"
    assert bytes(second.view[MIB : MIB + 1]) == b"c"
    for memory in (both, first, second):
        memory.close()
