"""Removed blocks do not come back: not by damage to one note, and not by older files put back."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdepot.codec.record import PAGE, Kind, parse_head
from kvdepot.core.block import BlockKey
from kvdepot.core.config import load
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.store.check.offline import audit
from kvdepot.store.check.repair import repair
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.images import payload_for
from kvdepot.tiers.log.recovery import PUT_BACK

NBYTES = 12_000
SPACE = Namespace(model="m", layout=KVLayout.opaque(NBYTES, 4, 3))
Harm = Callable[[Path, Path], None]


def opened(path: Path) -> Store:
    ssd = {"path": str(path), "capacity": 8 << 17, "segment": 1 << 17, "profile": "never"}
    dram = {"capacity": 2 << 20, "huge_pages": "never", "prefault": False}
    store = assemble(load(overrides={"dram": dram, "ssd": ssd}))
    store.register(SPACE)
    return store


def keys_of(first: int, count: int) -> list[BlockKey]:
    return [SPACE.keys([number] * 4)[0] for number in range(first, first + count)]


def put(store: Store, keys: list[BlockKey]) -> None:
    assert all(store.put_many(keys, [payload_for(key, NBYTES) for key in keys]))
    assert store.flush()


def there(path: Path, keys: list[BlockKey]) -> set[BlockKey]:
    with opened(path) as store:
        return {key for key in keys if store.get(key, bytearray(NBYTES))}


def segments_put_back(path: Path, before: Path) -> None:
    for file in before.glob("segment-*"):
        shutil.copy(file, path / file.name)


def notes_damaged(path: Path, before: Path) -> None:
    for file in path.glob("segment-*"):
        data = bytearray(file.read_bytes())
        for at in range(0, len(data), PAGE):
            head = parse_head(memoryview(data)[at : at + PAGE])
            if head is not None and head.kind is Kind.REMOVAL:
                data[at + PAGE] ^= 1
        file.write_bytes(data)


def file_damaged(path: Path, before: Path) -> None:
    data = (path / "removals").read_bytes()
    (path / "removals").write_bytes(bytes(byte ^ 1 for byte in data))


def file_gone(path: Path, before: Path) -> None:
    (path / "removals").unlink()


@pytest.mark.parametrize("harm", [segments_put_back, notes_damaged, file_damaged, file_gone])
def test_one_place_is_enough(harm: Harm, tmp_path: Path) -> None:
    path, before = tmp_path / "store", tmp_path / "before"
    keys = keys_of(0, 30)
    with opened(path) as store:
        put(store, keys)
    shutil.copytree(path, before)
    with opened(path) as store:
        assert store.remove(keys[:10]) == 10
    harm(path, before)
    assert there(path, keys) == set(keys[10:])
    if harm in (notes_damaged, file_gone):  # the store has given the other place what it lacked
        (file_gone if harm is notes_damaged else notes_damaged)(path, before)
        assert there(path, keys) == set(keys[10:])


def test_a_segment_that_was_given_up_does_not_count_when_it_is_back(tmp_path: Path) -> None:
    path, before = tmp_path / "store", tmp_path / "before"
    keys = keys_of(0, 20)
    with opened(path) as store:
        put(store, keys)
    shutil.copytree(path, before)
    with opened(path) as store:
        assert store.remove(keys) == 20
        for first in range(100, 400, 20):  # every segment is used again, and again
            put(store, keys_of(first, 20))
        last = keys_of(380, 20)
    assert not any((path / "removals").read_bytes()[64:]), "they are not needed any more"
    segments_put_back(path, before)
    assert PUT_BACK in [finding.what for finding in audit(path).findings]
    repaired = Path(shutil.copytree(path, tmp_path / "repaired"))
    repair(repaired)
    assert audit(repaired).findings == []
    for folder in (path, repaired):
        assert not there(folder, keys)
    assert there(path, last) <= set(last)


def test_old_removals_leave_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for part in range(4):
        with opened(path) as store:
            store.remove(keys_of(1000 + part, 1))
            for first in range(part * 1000, part * 1000 + 300, 20):
                put(store, keys_of(first, 20))
    with opened(path) as store:
        assert len(store.inspect().log_tier().drives[0].removal_file.known) <= 1
