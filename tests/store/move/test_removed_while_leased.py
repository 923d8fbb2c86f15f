"""A block that is removed while it is leased can still be moved; it must not come back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.store.move.copy_run import RecordMover
from kvdepot.store.store import Store
from kvdepot.testing.images import payload_for
from kvdepot.testing.store_contract import BLOCK_BYTES, prompt, put, space_of

BLOCKS = 40


def opened(path: Path, drives: int = 2, **changes: Any) -> Store:
    tree: dict[str, Any] = {
        "dram": {"capacity": "8MiB", "prefault": False, "huge_pages": "never"},
        "ssd": {
            "path": [str(path / str(number)) for number in range(drives)],
            "capacity": f"{drives * 8}MiB",
            "segment": "256KiB",
            **changes,
        },
        "writeback": {"staging": "2MiB"},
    }
    store = kvdepot.open(**tree)
    assert isinstance(store, Store)
    return store


def drain(store: Store, path: Path) -> None:
    store.drain_drive("ssd", path / "0")


def reclaim_everything(store: Store, path: Path) -> None:
    """Rewrite the drives until no segment is left that was there."""
    inspector = store.inspect()
    lower, room = inspector.lower(), inspector.drives.rooms[inspector.lower()]
    for drive in range(lower.tier.drive_count()):
        before = {one.segment_id for one in lower.tier.segments(drive)}
        for _ in range(4 * len(before) + 4):
            left = before & {one.segment_id for one in lower.tier.segments(drive)}
            if not left or not room.reclaimer.reclaim(drive):
                break


def fill(store: Store) -> list[BlockKey]:
    """Three prompts block by block in turn; the first is the one to be removed.

    So no more than a third of a segment is leased, and it can be reclaimed.
    """
    prompts = [prompt(space_of(store), number, BLOCKS) for number in range(3)]
    for keys in zip(*prompts, strict=True):
        for key in keys:
            assert all(put(store, [key]))
    assert store.flush()
    store.inspect().drop_from_memory()
    return prompts[0]


@pytest.mark.parametrize("move", [drain, reclaim_everything])
@pytest.mark.parametrize("released", [False, True])
def test_it_does_not_come_back_after_it_was_moved(
    tmp_path: Path, move: Callable[[Store, Path], None], released: bool
) -> None:
    with opened(tmp_path) as store:
        keys = fill(store)
        lease = store.lease(keys)
        assert len(lease) == BLOCKS
        assert store.remove(keys) == BLOCKS
        move(store, tmp_path)
        assert store.stats()["counters"]["moved_ssd"] > 0
        if released:
            lease.release()
        assert not len(store.match(keys))
    with opened(tmp_path) as store:
        space_of(store)
        assert not any(store.match([key]).tiers for key in keys), "removed blocks are back"
        assert store.check().ok


def test_the_old_removal_covers_a_moved_record_until_the_new_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the process had died between the two writes."""
    with opened(tmp_path) as store:
        keys = fill(store)
        lease = store.lease(keys)
        store.remove(keys)
        monkeypatch.setattr(RecordMover, "record_removals", lambda *_, **__: None)
        moved = store.stats()["counters"]["moved_ssd"]
        reclaim_everything(store, tmp_path)
        assert store.stats()["counters"]["moved_ssd"] > moved
        lease.release()
    with opened(tmp_path) as store:
        space_of(store)
        assert not any(store.match([key]).tiers for key in keys)


def test_a_block_put_again_after_its_removal_stays(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keys: list[BlockKey] = prompt(space_of(store), 1, BLOCKS)
        assert all(put(store, keys)) and store.flush()
        with store.lease(keys):
            store.remove(keys)
            assert all(put(store, keys)) and store.flush()
            drain(store, tmp_path)
    with opened(tmp_path) as store:
        space_of(store)
        assert len(store.match(keys)) == BLOCKS
        targets = [np.empty(BLOCK_BYTES, np.uint8) for _ in keys]
        assert all(store.get_many(keys, targets))
        for target, key in zip(targets, keys, strict=True):
            assert target.tobytes() == payload_for(key, BLOCK_BYTES)
