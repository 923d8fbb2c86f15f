"""Any damage to the files of a store, at rest or while it is open: right bytes or a miss.

What a flipped byte must lead to is worked out from docs/formats.md (support/damaged_store.py), not
from the package.
"""

import os
import random
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.damaged_store import (
    BLOCK_BYTES,
    BLOCKS,
    PAGE,
    REMOVED,
    SEGMENT_BYTES,
    Closed,
    Used,
    build,
    get_all,
    keys_of,
    map_file,
    open_store,
    read_all,
    space_of,
)

import kvdepot
from kvdepot.cli.main import main
from kvdepot.core.block import BlockKey
from kvdepot.errors import FormatError, StoreBusyError
from kvdepot.store.check.offline import audit
from kvdepot.store.check.repair import repair
from kvdepot.testing.images import payload_for
from kvdepot.testing.torture.damage import HARMS, Harm, flip, flip_some, swap
from kvdepot.volumes.log.metadata import COPIES


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Closed:
    return build(tmp_path_factory.mktemp("stores") / "closed", chain=1)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Closed:
    return build(tmp_path_factory.mktemp("stores") / "foreign", chain=2)


def map_any(file: Path, live: set[bytes]) -> Used:
    """The bytes of a file that mean something; of a metadata log its header and frames."""
    used = map_file(file, live)
    if file.name not in COPIES:
        return used
    data, at, frames = file.read_bytes(), PAGE, []
    used.add(0, 64, "metadata")
    (synced,) = struct.unpack_from("<Q", data, 56)
    while any(data[at : at + 40]):
        _, value_bytes, _, _, name_bytes, number, told, _ = struct.unpack_from(
            "<QIBBHQQQ", data, at
        )
        length = -(-(40 + name_bytes + value_bytes) // 8) * 8
        frames.append((at, length, number))
        synced = max(synced, told)
        at += length
    for start, length, number in frames:
        # A frame that no later one calls synced may be torn: a crash leaves it so.
        used.add(start, length, "metadata" if number <= synced else "newest metadata")
    return used


def harmed(path: Path, closed: Closed) -> set[str]:
    """Names of the files of a copy that are not as they were."""
    before = {file.name: file.read_bytes() for file in closed.path.iterdir()}
    after = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}
    return {name for name, data in before.items() if after.get(name) != data}


def readable(path: Path, closed: Closed, **settings: Any) -> set[BlockKey]:
    """As read_all; nothing from a store that says that both copies of its metadata are lost."""
    both = set(COPIES) <= harmed(path, closed)
    try:
        return read_all(path, closed, **settings)
    except FormatError as error:
        assert both, error
        return set()


def check_flip(closed: Closed, directory: Path, rng: random.Random) -> str:
    """Flip one bit in a copy and hold everything against what it must lead to."""
    path = closed.copy(directory / "damaged")
    file = rng.choice(sorted(path.iterdir()))
    size = file.stat().st_size
    used = map_any(file, set(closed.keys))
    spans = [span for span in used.spans if rng.random() < 0.5]
    low, high = rng.choice(spans)[:2] if spans else (0, size)
    offset, bit = rng.randrange(low, high), rng.randrange(8)
    what, key = used.at(offset)
    print(f"{file.name}, byte {offset}, bit {bit}: {what} {key.hex()}")
    flip(file, offset, bit)
    shutil.copytree(path, directory / "repaired")
    report = audit(path)
    if what != "newest metadata":
        assert report.ok == (what == "unused"), report.findings
    if what == "block":
        assert [key.hex() in str(finding) for finding in report.findings] == [True]
    intact = {one for one in closed.keys if one != key}
    assert report.blocks == len(intact)
    assert read_all(path, closed) == intact
    repair(directory / "repaired")
    assert audit(directory / "repaired").findings == []
    assert read_all(directory / "repaired", closed) == intact
    shutil.rmtree(path)
    shutil.rmtree(directory / "repaired")
    return what


def test_the_store_under_test_has_all_kinds_of_bytes(closed: Closed) -> None:
    kinds = set()
    for file in closed.path.iterdir():
        kinds |= {span[2] for span in map_any(file, set(closed.keys)).spans}
    kinds.discard("newest metadata")
    assert kinds == {"superblock", "header", "trailer", "footer", "block", "metadata"}
    report = audit(closed.path)
    assert report.ok and report.blocks == len(closed.keys)
    assert report.nbytes == BLOCK_BYTES * len(closed.keys)
    assert read_all(closed.path, closed, mode="r") == set(closed.keys)


def test_a_flipped_bit_costs_at_most_the_block_it_hits(
    closed: Closed, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(15):
        check_flip(closed, tmp_path, rng)


@pytest.mark.slow
def test_many_flipped_bits_one_at_a_time(closed: Closed, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    kinds = {check_flip(closed, tmp_path, rng) for _ in range(300)}
    assert kinds >= {"superblock", "header", "trailer", "footer", "block", "metadata", "unused"}


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_damage_at_rest(
    harm: Harm, closed: Closed, foreign: Closed, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(2):
        path = closed.copy(tmp_path / "damaged")
        harm(path, rng, foreign.path)
        repaired = Path(shutil.copytree(path, tmp_path / "repaired"))
        before = readable(shutil.copytree(path, tmp_path / "reader"), closed, mode="r")
        assert len(before) <= audit(path).blocks
        assert not before & set(closed.removed), "they are recorded in two places, or not served"
        repair(repaired)
        assert audit(repaired).findings == []
        assert before <= read_all(repaired, closed)
        assert before <= readable(path, closed)
        repair(path)
        assert audit(path).findings == []
        assert before <= read_all(path, closed)
        for name in ("damaged", "repaired", "reader"):
            shutil.rmtree(tmp_path / name)


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_damage_while_open(
    harm: Harm, closed: Closed, foreign: Closed, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(2):
        path = closed.copy(tmp_path / "store")
        with open_store(path) as store:
            space = space_of(store)
            more = keys_of(space, chain=3)
            every = [*closed.keys, *closed.removed, *more]
            assert get_all(store, every[:4]) <= set(closed.keys)
            harm(path, rng, foreign.path)
            get_all(store, rng.sample(every, len(every)))
            for key in more:
                store.put_many([key], [payload_for(key, BLOCK_BYTES)], timeout_s=1.0)[0]
            store.flush(10.0)
            harm(path, rng, foreign.path)
            get_all(store, rng.sample(every, len(every)))
            store.admin.check()
            store.remove(every[:2])
        hit_both = set(COPIES) <= harmed(path, closed)
        try:
            with open_store(path) as store:
                space_of(store)
                get_all(store, every)
        except FormatError as error:
            assert hit_both, error
        repair(path)
        assert audit(path).findings == []
        with open_store(path) as store:
            space_of(store)
            get_all(store, every)
            assert store.admin.check().ok
        shutil.rmtree(path)


def test_damage_that_hits_an_open_store_is_found_by_its_own_check(
    closed: Closed, tmp_path: Path
) -> None:
    path = closed.copy(tmp_path / "store")
    with open_store(path) as store:
        space_of(store)
        key = closed.keys[5]
        for file in sorted(path.glob("segment-*")):
            for start, stop, what, owner in map_file(file, set(closed.keys)).spans:
                if what == "block" and owner == key:
                    flip(file, (start + stop) // 2, 3)
        report = store.admin.check()
        assert [key.hex() in finding.what for finding in report.findings] == [True]
        assert not store.get_many([key], [bytearray(BLOCK_BYTES)])[0]


def test_swapped_segments_are_taken_over_where_they_lie(closed: Closed, tmp_path: Path) -> None:
    path = closed.copy(tmp_path / "store")
    one, other = sorted(path.glob("segment-*"))[:2]
    one.rename(path / "between")
    other.rename(one)
    (path / "between").rename(other)
    assert ["swapped" in finding.what for finding in audit(path).findings] == [True, True]
    repair(path)
    assert audit(path).ok
    assert read_all(path, closed) == set(closed.keys)


def test_a_missing_or_emptied_file_is_named(closed: Closed, tmp_path: Path) -> None:
    for name in sorted(file.name for file in closed.path.glob("segment-*")):
        for harm in (Path.unlink, lambda file: os.truncate(file, 0)):
            path = closed.copy(tmp_path / "store")
            harm(path / name)
            assert [finding.where for finding in audit(path).findings] == [
                f"slot {int(name[8:14])}"
            ]
            repair(path)
            assert audit(path).ok
            assert read_all(path, closed) < set(closed.keys)
            shutil.rmtree(path)


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_the_metadata_that_is_lost_is_named_and_made_again(
    name: str, closed: Closed, tmp_path: Path
) -> None:
    for harm in (Path.unlink, lambda file: os.truncate(file, 0)):
        path = closed.copy(tmp_path / "store")
        harm(path / name)
        (finding,) = audit(path).findings
        assert name in str(finding)
        assert read_all(path, closed, mode="r") == set(closed.keys)
        assert not audit(path).ok, "a reader changes nothing"
        repair(path)
        assert audit(path).ok
        (path / next(other for other in COPIES if other != name)).unlink()
        assert read_all(path, closed) == set(closed.keys)
        shutil.rmtree(path)


def test_a_copy_of_a_segment_is_cleared(closed: Closed, tmp_path: Path) -> None:
    path = closed.copy(tmp_path / "store")
    shutil.copyfile(path / "segment-000000.kvs", path / "segment-000009.kvs")
    assert [finding.where for finding in audit(path).findings] == ["slot 9"]
    repair(path)
    assert audit(path).ok
    assert read_all(path, closed) == set(closed.keys)


def test_what_a_crash_leaves_is_not_damage(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.support.damaged_store import BLOCK_BYTES, keys_of, open_store, space_of
from kvdepot.testing.images import payload_for
from kvdepot.testing.torture.damage import HARMS, Harm, flip, flip_some, swap
store = open_store(Path(sys.argv[1]))
for key in keys_of(space_of(store), 1):
    store.put_many([key], [payload_for(key, BLOCK_BYTES)], timeout_s=10.0)[0]
store.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "store"
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", script, path, root], check=False)
    assert ended.returncode == -signal.SIGKILL
    (path / "superblock.new").write_bytes(b"half a superbl")
    (path / "segment-000007.kvs").touch()
    newest = sorted(path.glob("segment-*"))[-2]
    assert newest.stat().st_size == SEGMENT_BYTES
    report = audit(path)
    assert report.ok, report.findings
    assert report.blocks == BLOCKS


def test_a_repair_that_was_interrupted_can_be_run_again(
    closed: Closed, foreign: Closed, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop the repair before every write it makes, in turn."""
    rng = random.Random(seed)
    damaged = closed.copy(tmp_path / "damaged")
    swap(damaged, random.Random(1), foreign.path)
    for _ in range(3):
        flip_some(damaged, rng, foreign.path)
    (damaged / "superblock").unlink(missing_ok=True)
    before = readable(shutil.copytree(damaged, tmp_path / "reader"), closed, mode="r")
    real = os.pwritev
    for allowed in range(100):
        path = Path(shutil.copytree(damaged, tmp_path / f"store-{allowed}"))
        left = allowed

        def limited(fd: int, buffers: Any, offset: int) -> int:
            nonlocal left
            if not left:
                raise KeyboardInterrupt
            left -= 1
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "pwritev", limited)
        try:
            repair(path)
            finished = True
        except KeyboardInterrupt:
            finished = False
        monkeypatch.setattr(os, "pwritev", real)
        repair(path)
        assert audit(path).findings == []
        assert before <= read_all(path, closed)
        shutil.rmtree(path)
        if finished:
            return
    pytest.fail("the repair never ended")


def test_read_only_beside_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with open_store(path) as writer:
        keys = keys_of(space_of(writer), 1)
        for key in keys:
            assert writer.put_many([key], [payload_for(key, BLOCK_BYTES)], timeout_s=10.0)[0]
        assert writer.flush()
        with open_store(path, mode="r") as reader:
            space_of(reader)
            assert get_all(reader, keys) == set(keys)
            for chain in range(2, 8):
                for key in keys_of(space_of(writer), chain):
                    assert writer.put_many([key], [payload_for(key, BLOCK_BYTES)], timeout_s=10.0)[
                        0
                    ]
            get_all(reader, keys)
            assert audit(path).findings == []
        assert main(["check", str(path)]) == 0


def test_a_second_writer_is_told_who_is_first(closed: Closed, tmp_path: Path) -> None:
    path = closed.copy(tmp_path / "store")
    with open_store(path):
        with pytest.raises(StoreBusyError, match=f"process {os.getpid()}"):
            open_store(path)
        with pytest.raises(StoreBusyError, match=f"process {os.getpid()}"):
            repair(path)
    assert read_all(path, closed) == set(closed.keys)


def newer(page: bytes) -> bytes:
    """The same superblock, of a format to come."""
    from kvdepot.native import checksum

    (length,) = struct.unpack_from("<I", page, 20)
    changed = bytearray(page)
    struct.pack_into("<I", changed, 16, 7)
    struct.pack_into("<Q", changed, 0, checksum(bytes(changed[8 : 24 + length])))
    return bytes(changed)


@pytest.mark.parametrize("kept", ["superblock", *COPIES, "segment-000000.kvs"])
def test_any_file_shows_that_a_store_is_of_a_newer_format(
    kept: str, closed: Closed, tmp_path: Path
) -> None:
    path = closed.copy(tmp_path / "store")
    for file in path.iterdir():
        page = file.read_bytes()[:PAGE]
        if file.name != kept:
            file.unlink()
        elif file.name.startswith("segment-"):
            file.write_bytes(page[:12] + struct.pack("<I", 7) + page[16:])
        else:
            file.write_bytes(newer(page))
    before = (path / kept).read_bytes()
    with pytest.raises(FormatError, match="format 7"):
        open_store(path)
    assert (path / kept).read_bytes() == before


def test_an_empty_store_with_a_damaged_superblock(tmp_path: Path) -> None:
    path = tmp_path / "store"
    open_store(path).close()
    flip(path / "superblock", 30, 1)
    assert [finding.where for finding in audit(path).findings] == ["superblock"]
    repair(path)
    assert audit(path).ok
    open_store(path).close()


def test_an_empty_store_with_the_superblock_of_larger_segments(tmp_path: Path) -> None:
    """Such as a hard drive's, put into the place of an SSD's."""
    path, other = tmp_path / "store", tmp_path / "other"
    open_store(path).close()
    large = {"path": str(other), "capacity": "8MiB", "segment": "2MiB"}
    kvdepot.open(dram={"capacity": "256KiB", "huge_pages": "never"}, ssd=large).close()
    shutil.copyfile(other / "superblock", path / "superblock")
    with open_store(path) as store:
        (key,) = keys_of(space_of(store), 1, 1)
        assert store.put_many([key], [payload_for(key, BLOCK_BYTES)], timeout_s=10.0)[0]
        assert store.flush()
    assert audit(path).ok


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[None]:
    """The rest of the test runs as a user who may not read what root may."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    for directory in (tmp_path, *tmp_path.parents[:-2]):
        directory.chmod(directory.stat().st_mode | 0o055)
    yield
    os.seteuid(0)


@pytest.mark.usefixtures("stranger")
def test_unreadable_files_are_an_error_and_not_damage(
    closed: Closed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = closed.copy(tmp_path / "store")
    path.chmod(0o755)
    for file in path.iterdir():
        file.chmod(0o644)
    for unreadable, mode in ((path / "segment-000001.kvs", 0o600), (path, 0o700)):
        os.seteuid(65534)
        assert main(["check", "--json", str(path)]) == 0
        os.seteuid(0)
        before = unreadable.stat().st_mode
        unreadable.chmod(mode)
        os.seteuid(65534)
        capsys.readouterr()
        assert main(["check", "--json", str(path)]) == 2
        told = capsys.readouterr().err
        assert f"{unreadable}: permission denied" in told
        assert "hint: " in told
        os.seteuid(0)
        unreadable.chmod(before)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """A block device of 2 MiB, full of somebody's old bytes behind the first 128 KiB."""
    image = tmp_path / "image"
    image.write_bytes(bytes(128 << 10) + random.Random(5).randbytes((2 << 20) - (128 << 10)))
    made = subprocess.run(
        ["losetup", "-f", "--show", image], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no loop devices here: {made.stderr.strip()}")
    path = Path(made.stdout.strip())
    yield path
    subprocess.run(["losetup", "-d", path], check=True)


@pytest.mark.root
def test_damage_to_a_device(device: Path, seed: int) -> None:
    build(device, chain=1)
    closed = Closed(device, *_keys_on(device))
    assert audit(device).findings == []
    sound = device.read_bytes()
    rng = random.Random(seed)
    places = [(0, 64), *((slot * SEGMENT_BYTES, 56) for slot in range(1, 6))]
    places += [((slot + 1) * SEGMENT_BYTES - PAGE, 96) for slot in range(1, 6)]
    for start, length in places:
        device.write_bytes(sound)
        flip(device, start + rng.randrange(length), rng.randrange(8))
        assert len(audit(device).findings) == 1
        assert read_all(device, closed, mode="r") == set(closed.keys)
        repair(device)
        assert audit(device).findings == []
        assert read_all(device, closed) == set(closed.keys)
    areas = 4  # of the metadata log, behind the superblock: two for each copy
    length = (SEGMENT_BYTES - PAGE) // areas // PAGE * PAGE
    for number in range(areas):
        device.write_bytes(sound)
        flip(device, PAGE + number * length + rng.randrange(64), rng.randrange(8))
        assert read_all(device, closed) == set(closed.keys), "the other copy tells"
    device.write_bytes(sound)
    with device.open("r+b") as opened:
        opened.write(bytes(128 << 10))
    assert read_all(device, closed) == set(), "a device that was cleared starts anew"
    assert audit(device).findings == []


def _keys_on(path: Path) -> tuple[list[BlockKey], list[BlockKey]]:
    with open_store(path, mode="r") as store:
        keys = keys_of(space_of(store), chain=1)
    removed = [keys[index] for index in REMOVED]
    return [key for key in keys if key not in removed], removed
