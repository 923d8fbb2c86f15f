"""Removed blocks do not come back: not by damage to the metadata, not by older files put back."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.errors import FormatError
from kvdepot.format.record import PAGE
from kvdepot.store.check.offline import audit
from kvdepot.store.check.repair import repair
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.images import payload_for
from kvdepot.volumes.log.metadata import COPIES
from kvdepot.volumes.log.recovery import PUT_BACK

NBYTES = 12_000
SPACE = Namespace(model="m", layout=KVLayout.opaque(NBYTES, 4, 3))
Harm = Callable[[Path, Path], None]


def opened(path: Path) -> Store:
    ssd = {"path": str(path), "capacity": 8 << 17, "segment": 1 << 17, "profile": "never"}
    dram = {"capacity": 2 << 20, "huge_pages": "never", "prefault": False}
    store = assemble(load(overrides={"dram": dram, "ssd": ssd}))
    store.namespace(SPACE)
    return store


def keys_of(first: int, count: int) -> list[BlockKey]:
    return [SPACE.keys([number] * 4)[0] for number in range(first, first + count)]


def put(store: Store, keys: list[BlockKey]) -> None:
    assert all(store.put_many(keys, [payload_for(key, NBYTES) for key in keys]))
    assert store.flush()


def there(path: Path, keys: list[BlockKey]) -> set[BlockKey]:
    with opened(path) as store:
        return {key for key in keys if store.get_many([key], [bytearray(NBYTES)])[0]}


def segments_put_back(path: Path, before: Path) -> None:
    for file in before.glob("segment-*"):
        shutil.copy(file, path / file.name)


def metadata_put_back(name: str) -> Harm:
    def harm(path: Path, before: Path) -> None:
        shutil.copy(before / name, path / name)

    return harm


def metadata_damaged(name: str) -> Harm:
    def harm(path: Path, before: Path) -> None:
        data = (path / name).read_bytes()
        (path / name).write_bytes(bytes(byte ^ 1 for byte in data))

    return harm


def metadata_gone(name: str) -> Harm:
    def harm(path: Path, before: Path) -> None:
        (path / name).unlink()

    return harm


def harms_of(name: str) -> list[Harm]:
    return [metadata_put_back(name), metadata_damaged(name), metadata_gone(name)]


ALL_HARMS: dict[str, list[Harm]] = {
    "segments": [segments_put_back],
    **{name: harms_of(name) for name in COPIES},
}
ONE_PLACE = [
    pytest.param(harm, other, id=f"{place}-{number}")
    for place, harms in ALL_HARMS.items()
    for number, harm in enumerate(harms)
    for other in COPIES
    if other != place
]


@pytest.mark.parametrize(("harm", "other"), ONE_PLACE)
def test_one_place_is_enough(harm: Harm, other: str, tmp_path: Path) -> None:
    path, before = tmp_path / "store", tmp_path / "before"
    keys = keys_of(0, 30)
    with opened(path) as store:
        put(store, keys)
    shutil.copytree(path, before)
    with opened(path) as store:
        assert store.remove(keys[:10]) == 10
    harm(path, before)
    assert there(path, keys) == set(keys[10:])
    # The store has given each place what it lacked.
    metadata_gone(other)(path, before)
    assert there(path, keys) == set(keys[10:])


def both_gone(path: Path, before: Path) -> None:
    for name in COPIES:
        (path / name).unlink()


def both_damaged(path: Path, before: Path) -> None:
    for name in COPIES:
        metadata_damaged(name)(path, before)


def one_entry_damaged(path: Path, before: Path) -> None:
    """The frame of one tombstone has a wrong bit in both copies."""
    for name in COPIES:
        data = bytearray((path / name).read_bytes())
        at = data.index(keys_of(3, 1)[0])
        data[at] ^= 1
        (path / name).write_bytes(data)


@pytest.mark.parametrize("harm", [both_gone, both_damaged, one_entry_damaged])
def test_without_both_copies_nothing_is_served_until_it_is_repaired(
    harm: Harm, tmp_path: Path
) -> None:
    """Which blocks are removed is not known: none may be served, and a repair drops them."""
    path, before = tmp_path / "store", tmp_path / "before"
    keys = keys_of(0, 30)
    with opened(path) as store:
        put(store, keys)
    shutil.copytree(path, before)
    with opened(path) as store:
        assert store.remove(keys[:10]) == 10
    harm(path, before)
    for _ in range(2):  # the first try has not made it whole
        with pytest.raises(FormatError, match="metadata is damaged") as caught:
            opened(path)
        assert "check --repair" in caught.value.hint
    assert not audit(path).ok
    assert repair(path)
    assert audit(path).findings == []
    assert not there(path, keys)
    with opened(path) as store:
        put(store, keys[5:15])
    assert there(path, keys) == set(keys[5:15]), "it can be used again"


def test_a_segment_that_is_damaged_does_not_bring_removed_blocks_back(tmp_path: Path) -> None:
    """It is scanned record by record: the tombstone covers what is found."""
    path = tmp_path / "store"
    keys = keys_of(0, 30)
    with opened(path) as store:
        put(store, keys)
        assert store.remove(keys[:10]) == 10
    for file in path.glob("segment-*"):
        data = bytearray(file.read_bytes())
        data[:PAGE] = bytes(byte ^ 1 for byte in data[:PAGE])
        data[-PAGE:] = bytes(byte ^ 1 for byte in data[-PAGE:])
        file.write_bytes(data)
    assert there(path, keys) == set(keys[10:])


def test_a_block_that_is_put_again_is_there(tmp_path: Path) -> None:
    path = tmp_path / "store"
    keys = keys_of(0, 10)
    with opened(path) as store:
        put(store, keys)
        assert store.remove(keys) == 10
        put(store, keys[:5])
    assert there(path, keys) == set(keys[:5])


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
    assert not tombstones_of(path) & set(keys), "they are not needed any more"
    segments_put_back(path, before)
    assert PUT_BACK in [finding.what for finding in audit(path).findings]
    repaired = Path(shutil.copytree(path, tmp_path / "repaired"))
    repair(repaired)
    assert audit(repaired).findings == []
    for folder in (path, repaired):
        assert not there(folder, keys)
    assert there(path, last) <= set(last)


def tombstones_of(path: Path) -> set[bytes]:
    """Names of the tombstones that the next store will know."""
    with opened(path) as store:
        return set(store.inspect().log_volume().metadata.known.tombstones)


def test_tombstones_that_cover_nothing_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for part in range(4):
        with opened(path) as store:
            put(store, keys_of(1000 * part + 900, 1))
            store.remove(keys_of(1000 * part + 900, 1))
            for first in range(part * 1000, part * 1000 + 300, 20):
                put(store, keys_of(first, 20))
    assert len(tombstones_of(path)) <= 1


def test_tombstones_are_kept_while_an_old_segment_is(tmp_path: Path) -> None:
    path = tmp_path / "store"
    kept, keys = keys_of(0, 1), keys_of(1, 5)
    with opened(path) as store:
        put(store, [*kept, *keys])
        assert store.remove(keys) == 5
    for _ in range(3):
        assert there(path, [*kept, *keys]) == set(kept)
    assert tombstones_of(path) == set(keys)
