"""Mistakes of a caller: one clear error each, and the store goes on as if nothing had been said."""

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import pytest
from tests.support.store_contract import touch

import kvdepot
from kvdepot.core.depot import NamespaceHandle
from kvdepot.depot import check_block_bytes
from kvdepot.errors import (
    BadBufferError,
    ConfigError,
    KeyFormatError,
    KVDepotError,
    LeaseError,
    StoreClosedError,
)
from kvdepot.testing.images import payload_for

BLOCK = 16384
LAYOUT = kvdepot.KVLayout.opaque(BLOCK, 16, 4)


def settings(path: Path, **dram: Any) -> dict[str, Any]:
    return {
        "dram": {"capacity": "4MiB", "prefault": False, "huge_pages": "never", **dram},
        "ssd": {"path": path, "capacity": "16MiB", "segment": "1MiB"},
        "writeback": {"staging": "2MiB"},
    }


class Corner:
    """A store with ten good blocks, and what a caller needs to make mistakes with."""

    def __init__(self, store: kvdepot.Store) -> None:
        self.store = store
        self.space: NamespaceHandle = store.namespace(model="m", layout=LAYOUT)
        self.keys = self.space.keys(range(16 * 10))
        self.fresh = self.space.keys(range(1000, 1000 + 16 * 20))
        self.target = bytearray(BLOCK)
        assert all(store.put_many(self.keys, [payload_for(k, BLOCK) for k in self.keys]))
        assert store.flush()

    def check(self) -> None:
        """Nothing was lost, nothing was added, nothing is held."""
        for key in self.keys:
            target = bytearray(BLOCK)
            assert self.store.get_many([key], [target])[0]
            assert bytes(target) == payload_for(key, BLOCK)
        assert self.store.flush()
        stats = self.store.stats()
        assert stats["blocks"] == 10
        assert (stats["leased"], stats["dirty_bytes"], stats["staging_bytes"]) == (0, 0, 0)
        assert self.store.admin.check()
        key = self.fresh[0]
        assert self.store.put_many([key], [payload_for(key, BLOCK)])[0] is kvdepot.PutResult.STORED
        assert self.store.get_many([key], [self.target])[0]


@pytest.fixture
def corner(tmp_path: Path) -> Iterator[Corner]:
    with kvdepot.open(**settings(tmp_path / "kv")) as store:
        corner = Corner(store)
        yield corner
        corner.check()


@pytest.mark.usefixtures("embedded_or_attached")
class TestBuffers:
    @pytest.mark.parametrize("nbytes", [0, 1, BLOCK - 1, BLOCK + 1, 2 * BLOCK])
    def test_of_the_wrong_size(self, corner: Corner, nbytes: int) -> None:
        with pytest.raises(BadBufferError, match=rf"{BLOCK} bytes.* {nbytes}"):
            corner.store.put_many([corner.fresh[0]], [bytes(nbytes)])[0]
        with pytest.raises(BadBufferError, match=rf"{BLOCK} bytes.* {nbytes}"):
            corner.store.get_many([corner.keys[0]], [bytearray(nbytes)])[0]
        with pytest.raises(BadBufferError, match=rf"{BLOCK // 4} bytes.* {nbytes}"):
            corner.store.get_many([corner.keys[0]], [bytearray(nbytes)], layers=range(1, 2))[0]

    def test_a_read_only_target(self, corner: Corner) -> None:
        frozen = np.zeros(BLOCK, np.uint8)
        frozen.setflags(write=False)
        targets: list[Any] = [bytes(BLOCK), memoryview(bytes(BLOCK)), frozen]
        for target in targets:
            with pytest.raises(BadBufferError, match="read-only"):
                corner.store.get_many([corner.keys[0]], [target])[0]

    def test_with_gaps(self, corner: Corner) -> None:
        wide = np.zeros((2, BLOCK), np.uint8)
        buffers: list[Any] = [wide.reshape(-1)[::2], memoryview(bytearray(2 * BLOCK))[::2]]
        for buffer in buffers:
            with pytest.raises(BadBufferError, match="contiguous"):
                corner.store.put_many([corner.fresh[0]], [buffer])[0]
            with pytest.raises(BadBufferError, match="contiguous"):
                corner.store.get_many([corner.keys[0]], [buffer])[0]

    @pytest.mark.parametrize("thing", [None, "text", 5, [1, 2], object()])
    def test_that_are_none(self, corner: Corner, thing: Any) -> None:
        with pytest.raises(BadBufferError, match=type(thing).__name__):
            corner.store.put_many([corner.fresh[0]], [thing])[0]
        with pytest.raises(BadBufferError, match=type(thing).__name__):
            corner.store.get_many([corner.keys[0]], [thing])[0]

    def test_more_or_fewer_than_keys(self, corner: Corner) -> None:
        with pytest.raises(BadBufferError, match="2 keys but 1"):
            corner.store.put_many(corner.fresh[:2], [bytes(BLOCK)])
        with pytest.raises(BadBufferError, match="1 keys but 2"):
            corner.store.get_many(corner.keys[:1], [bytearray(BLOCK)] * 2)

    def test_one_bad_one_in_a_batch_stores_none_of_it(self, corner: Corner) -> None:
        buffers = [bytes(BLOCK)] * 9 + [bytes(BLOCK - 1)]
        with pytest.raises(BadBufferError):
            corner.store.put_many(corner.fresh[:10], buffers)
        assert len(corner.store.match(corner.fresh)) == 0

    def test_made_while_the_batch_is_read_are_stored_as_they_were(self, tmp_path: Path) -> None:
        """A lazy sequence hands out buffers that nobody else refers to."""

        class Lazy(Sequence[bytes]):
            def __init__(self, keys: list[kvdepot.BlockKey]) -> None:
                self.keys = keys

            def __len__(self) -> int:
                return len(self.keys)

            @overload
            def __getitem__(self, index: int) -> bytes: ...
            @overload
            def __getitem__(self, index: slice) -> Sequence[bytes]: ...
            def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
                assert isinstance(index, int)
                return payload_for(self.keys[index], BLOCK)

        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            keys = store.namespace(model="m", layout=LAYOUT).keys(range(16 * 20))
            assert all(store.put_many(keys, Lazy(keys)))
            for key in keys:
                target = bytearray(BLOCK)
                assert store.get_many([key], [target])[0]
                assert bytes(target) == payload_for(key, BLOCK)


@pytest.mark.usefixtures("embedded_or_attached")
class TestKeys:
    @pytest.mark.parametrize(
        "thing", [None, "text", 5, 1.5, b"", b"short", bytes(33), bytearray(32)]
    )
    def test_that_are_none(self, corner: Corner, thing: Any) -> None:
        self.refused(corner, thing)

    @pytest.mark.parametrize("change", ["shorter", "longer", "memoryview"])
    def test_that_begin_like_ours(self, tmp_path: Path, change: str) -> None:
        with kvdepot.open(**settings(tmp_path / "kv")) as store:
            corner = Corner(store)
            key = corner.fresh[0]
            forms: dict[str, Any] = {
                "shorter": key[:-1],
                "longer": key + b"x",
                "memoryview": memoryview(key),
            }
            self.refused(corner, forms[change])
            corner.check()

    def refused(self, corner: Corner, thing: Any) -> None:
        store = corner.store
        calls: list[Callable[[], object]] = [
            lambda: store.match([thing]),
            lambda: store.lease([thing]),
            lambda: touch(store, [thing]),
            lambda: store.remove([thing]),
            lambda: store.get_many([thing], [bytearray(BLOCK)])[0],
            lambda: store.get_many([*corner.keys, thing] * 2, [bytearray(BLOCK)] * 22),
            lambda: store.put_many([thing], [bytes(BLOCK)])[0],
        ]
        for call in calls:
            with pytest.raises(KeyFormatError, match="key"):
                call()

    def test_of_a_namespace_that_was_not_registered(self, corner: Corner, tmp_path: Path) -> None:
        with kvdepot.open(dram="2MiB") as other:
            stranger = other.namespace(model="other", layout=LAYOUT).keys(range(16))[0]
        for call in (
            lambda: corner.store.put_many([stranger], [bytes(BLOCK)])[0],
            lambda: corner.store.get_many([stranger], [bytearray(BLOCK)])[0],
        ):
            with pytest.raises(KeyFormatError, match="namespace") as caught:
                call()
            assert "namespace" in caught.value.hint
        assert len(corner.store.match([stranger])) == 0


@pytest.mark.usefixtures("embedded_or_attached")
class TestLayers:
    @pytest.mark.parametrize("layers", [range(0), range(-1, 2), range(3, 5), range(2, 1)])
    def test_out_of_range(self, corner: Corner, layers: range) -> None:
        with pytest.raises(KVDepotError, match="layer"):
            corner.store.get_many([corner.keys[0]], [bytearray(BLOCK)], layers=layers)[0]

    @pytest.mark.parametrize("layers", [(0, 2), 1, [0, 1], range(0, 4, 2)])
    def test_that_are_no_consecutive_range(self, corner: Corner, layers: Any) -> None:
        with pytest.raises(KVDepotError, match="layers"):
            corner.store.get_many([corner.keys[0]], [bytearray(BLOCK)], layers=layers)[0]


class TestLease:
    def test_a_view_after_the_store_was_closed(self, tmp_path: Path) -> None:
        store = kvdepot.open(**settings(tmp_path / "kv"))
        lease = store.lease(Corner(store).keys)
        store.close()
        try:
            with pytest.raises((StoreClosedError, LeaseError)):
                lease.view(0)
        finally:
            lease.release()


class TestConfiguration:
    def refused(self, path: str, **given: Any) -> ConfigError:
        """Opening fails with an error that names `path`, and leaves no descriptor open."""
        before = sorted(os.listdir("/proc/self/fd"))
        with pytest.raises(ConfigError) as caught:
            kvdepot.open(**given)
        assert caught.value.path == path
        assert str(caught.value).startswith(f"{path}: ")
        assert sorted(os.listdir("/proc/self/fd")) == before
        return caught.value

    def test_more_memory_than_addresses(self) -> None:
        self.refused("dram.capacity", dram={"capacity": "4EiB", "prefault": False})

    def test_more_memory_than_the_machine_has(self) -> None:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        huge = {"capacity": 8 * total, "prefault": False, "huge_pages": "never"}
        store = None
        try:
            with pytest.raises(ConfigError, match=r"dram\.capacity"):
                store = kvdepot.open(dram=huge)
        finally:
            if store is not None:
                store.close()

    @pytest.mark.parametrize("size", [0, -1, "4KiB", "2MiB"])
    def test_a_disk_too_small_for_two_segments(self, tmp_path: Path, size: Any) -> None:
        given = {"path": tmp_path / "kv", "capacity": size, "segment": "2MiB"}
        self.refused("ssd.capacity", dram="2MiB", ssd=given)
        assert not (tmp_path / "kv").exists()

    @pytest.mark.parametrize(
        ("nbytes", "setting"),
        [
            (5 << 20, r"dram\.capacity.*5MiB"),
            (3 << 20, r"writeback\.staging"),
            (1 << 20, r"ssd\.segment"),
        ],
    )
    def test_a_block_larger_than_there_is_room_for(
        self, corner: Corner, nbytes: int, setting: str
    ) -> None:
        with pytest.raises(ConfigError, match=setting):
            corner.store.namespace(model="m", layout=kvdepot.KVLayout.opaque(nbytes, 16))

    def test_a_path_that_is_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_bytes(b"mine")
        error = self.refused("ssd.path", **settings(file))
        assert str(file) in str(error)
        assert file.read_bytes() == b"mine"

    def test_a_path_below_nothing(self, tmp_path: Path) -> None:
        error = self.refused("ssd.path", **settings(tmp_path / "missing" / "kv"))
        assert "missing" in str(error)
        assert "parent" in error.hint
        assert not (tmp_path / "missing").exists()

    def test_a_path_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"mine")
        self.refused("ssd.path", **settings(tmp_path / "file" / "kv"))

    @pytest.mark.parametrize("mode", ["w", "rw+", "", None, "read"])
    def test_a_mode_that_is_none(self, mode: Any) -> None:
        self.refused("mode", dram="2MiB", mode=mode)

    def test_a_reader_of_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(KVDepotError, match="no store"):
            kvdepot.open(**settings(tmp_path / "kv"), mode="r")
        assert not (tmp_path / "kv").exists()

    @pytest.mark.parametrize("mode", [0o500, 0o000])
    def test_a_directory_without_permission(self, mode: int) -> None:
        with tempfile.TemporaryDirectory() as outer:
            folder = Path(outer) / "kv"
            folder.mkdir(mode)
            Path(outer).chmod(0o755)
            given = {"path": str(folder), "capacity": "16MiB"}
            output = as_nobody(f'kvdepot.open(dram="2MiB", ssd={given!r})')
            folder.chmod(0o700)
            assert output.startswith(f"ssd.path: cannot write to {folder}: Permission denied\n")
            assert "permissions" in output
            assert list(folder.iterdir()) == []


def as_nobody(statement: str) -> str:
    """The error and the hint that a statement gives to a user who is not root."""
    program = f"""
        import os, sys
        sys.path[:0] = {sys.path!r}
        import kvdepot.store.open
        from kvdepot.errors import ConfigError
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        try:
            {statement}
        except ConfigError as error:
            print(error, error.hint, sep="\\n")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_block_is_no_larger_than_one_read_can_be() -> None:
    check_block_bytes((1 << 31) - 8192)
    for nbytes in (1 << 31, 3 << 30):
        with pytest.raises(ConfigError, match="over 2 GiB") as raised:
            check_block_bytes(nbytes)
        assert raised.value.hint
