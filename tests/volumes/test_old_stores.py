"""A store of 0.2.0 is refused with a hint on every kind of medium, and left untouched."""

import json
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.store_contract import prompt, put, small, space_of

import kvdepot
from kvdepot.errors import FormatError, KVDepotError
from kvdepot.native import checksum
from kvdepot.store.check.offline import audit
from kvdepot.store.check.repair import repair

PAGE = 4096
STORE = "23bc1c1c-1c64-4c0e-8967-b738d9270817"
MIB = 1 << 20


def old_superblock() -> bytes:
    fields = {
        "budget_at_s": 0.0, "budget_bytes": 0.0, "epoch": 222962340, "format": 1, "made_by": "",
        "members": "", "segment_bytes": MIB, "slots": "0", "store": STORE,
    }  # fmt: skip
    text = json.dumps(fields).encode()
    body = struct.pack("<8sII", b"KVDEPOT\0", 1, len(text)) + text
    return (struct.pack("<Q", checksum(body)) + body).ljust(PAGE, b"\0")


def old_segment() -> bytes:
    body = struct.pack("<IIQQQ16s", 0x3153564B, 1, 5, 0, MIB, bytes.fromhex(STORE.replace("-", "")))
    return (struct.pack("<Q", checksum(body)) + body).ljust(PAGE, b"\0") + bytes(MIB - PAGE)


def old_folder(path: Path) -> None:
    path.mkdir(mode=0o700)
    files = {
        "superblock": old_superblock(), "segment-000000.kvs": old_segment(),
        "removals": b"KVREMOV1" + bytes(PAGE - 8), "lock": b"12345\n",
    }  # fmt: skip
    for name, data in files.items():
        (path / name).write_bytes(data)
        (path / name).chmod(0o600)


def old_bucket(path: Path) -> None:
    for name, data in {
        "meta/format": b'{"kvdepot": "object", "version": 1}',
        "meta/alive/3865f6a5f4da2441": b"1",
        "meta/index/3865f6a5f4da2441/000000000001-000000000001-000000000001": b"KVDM\1\0\0\0",
        "data/3865f6a5f4da2441/000000000001": bytes(PAGE),
    }.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    image = tmp_path / "image"
    image.write_bytes(old_superblock() + bytes(MIB - PAGE) + old_segment() + bytes(14 * MIB))
    command = ["losetup", "-f", "--show", str(image)]
    path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    yield Path(path)
    subprocess.run(["losetup", "-d", path], check=True)


def contents(path: Path) -> dict[str, bytes]:
    files = [path] if not path.is_dir() else [one for one in path.rglob("*") if one.is_file()]
    return {str(file): file.read_bytes() for file in files}


def table(path: Path) -> dict[str, Any]:
    return {"path": path, "capacity": "8MiB", "segment": "1MiB"}


def assert_refused(path: Path, match: str, **tree: Any) -> None:
    before = contents(path)
    for mode in ("rw", "r"):
        with pytest.raises(FormatError, match=match) as caught:
            kvdepot.open(dram={"capacity": "2MiB", "prefault": False}, mode=mode, **tree)
        assert caught.value.hint
    assert contents(path) == before


OF_FORMAT_1 = "of format 1, this kvdepot reads format 2"


@pytest.mark.parametrize("tier", ["ssd", "hdd"])
def test_a_folder(tier: str, tmp_path: Path) -> None:
    old_folder(tmp_path / "kv")
    assert_refused(tmp_path / "kv", OF_FORMAT_1, **{tier: table(tmp_path / "kv")})
    assert_not_checked(tmp_path / "kv")


@pytest.mark.root
def test_a_device(device: Path) -> None:
    assert_refused(device, OF_FORMAT_1, ssd=table(device))
    assert_not_checked(device)


def assert_not_checked(path: Path) -> None:
    before = contents(path)
    commands: list[Callable[[Path], object]] = [audit, repair]
    for command in commands:
        with pytest.raises(FormatError, match=OF_FORMAT_1):
            command(path)
    assert contents(path) == before


def test_a_folder_that_has_lost_its_superblock(tmp_path: Path) -> None:
    old_folder(tmp_path / "kv")
    os.unlink(tmp_path / "kv" / "superblock")
    before = contents(tmp_path / "kv")
    with pytest.raises(FormatError, match=OF_FORMAT_1):
        kvdepot.open(dram="2MiB", ssd=table(tmp_path / "kv"))
    assert contents(tmp_path / "kv").keys() == before.keys()
    assert (tmp_path / "kv" / "segment-000000.kvs").read_bytes() == old_segment()


def test_a_folder_as_a_bucket(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="the extra s3 is not installed")
    old_bucket(tmp_path / "shared")
    url = f"file://{tmp_path}/shared"
    assert_refused(tmp_path / "shared", OF_FORMAT_1, object={"url": url, "capacity": "1GiB"})


def test_the_folder_of_a_drive_as_a_bucket_and_the_other_way_round(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="the extra s3 is not installed")
    old_folder(tmp_path / "kv")
    url = f"file://{tmp_path}/kv"
    assert_refused(tmp_path / "kv", "not a depot", object={"url": url, "capacity": "1GiB"})
    old_bucket(tmp_path / "shared")
    match = "no store here|not a kvdepot store"
    assert_refused(tmp_path / "shared", match, ssd=table(tmp_path / "shared"))


def test_a_bucket_of_a_server() -> None:
    pytest.importorskip("obstore", reason="the extra s3 is not installed")
    from tests.support.object_nodes import memory_bucket, object_config, paths_of, same_bucket

    from kvdepot.testing.fakes import CONTEXT
    from kvdepot.volumes.object.volume import BucketVolume

    bucket = memory_bucket()
    bucket.create("meta/format", b'{"kvdepot": "object", "version": 1}')
    bucket.create("data/3865f6a5f4da2441/000000000001", bytes(PAGE))
    before = paths_of(bucket)
    with pytest.raises(FormatError, match=OF_FORMAT_1) as caught:
        BucketVolume(object_config(), CONTEXT, same_bucket(bucket))
    assert caught.value.hint and paths_of(bucket) == before


def test_one_damaged_segment_is_not_another_format(tmp_path: Path) -> None:
    """All headers are gone: the segments say which format the store has."""
    path = tmp_path / "kv"
    with kvdepot.open(None, **small(path)) as store:
        put(store, prompt(space_of(store), 1, 40))
        assert store.flush()

    def refusal() -> str:
        for name in ("superblock", "metadata-a", "metadata-b"):
            (path / name).unlink(missing_ok=True)
        with pytest.raises(KVDepotError) as caught:
            kvdepot.open(None, **small(path))
        return str(caught.value)

    before = refusal()
    assert len(list(path.glob("segment-*.kvs"))) > 1 and "format" not in before
    with (path / "segment-000000.kvs").open("r+b") as file:
        file.seek(13)
        file.write(b"\x40")
    assert refusal() == before
