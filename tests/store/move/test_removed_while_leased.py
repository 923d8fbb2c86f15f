"""A block that is removed while it is leased can still be moved; it must not come back."""

import contextlib
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.store_contract import BLOCK_BYTES, prompt, put, space_of

from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey
from kvdepot.core.volume import Volume
from kvdepot.errors import ConfigError
from kvdepot.io.files import Files, Ops, Pending
from kvdepot.store.move.mover import BlockMover
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.images import payload_for
from kvdepot.testing.power import PowerFiles

BLOCKS = 40


def opened(path: Path, drives: int = 2, files: Files | None = None, **changes: Any) -> Store:
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
    return assemble(load(overrides=tree), files=files)


def drain(store: Store, path: Path) -> None:
    store.volumes.drain("ssd", path / "0")


def reclaim_everything(store: Store, path: Path) -> None:
    """Rewrite the drives until no segment is left that was there."""
    inspector = store.inspect()
    lower, room = inspector.lower(), inspector.drives.rooms[inspector.lower()]
    for entry in lower.volumes.entries:
        before = sealed(entry.volume)
        for _ in range(4 * len(before) + 4):
            if not before & sealed(entry.volume) or not room.reclaimer.reclaim(entry.number):
                break


def sealed(volume: Volume) -> set[int]:
    table = volume.segments()
    return set(table.ids[table.sealed].tolist())


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
        assert store.admin.check().ok


def test_the_old_removal_covers_a_moved_record_until_the_new_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the process had died between the two writes."""
    with opened(tmp_path) as store:
        keys = fill(store)
        lease = store.lease(keys)
        store.remove(keys)
        monkeypatch.setattr(BlockMover, "record_tombstones", lambda *_: None)
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


class KilledOften(Files):
    """Keeps what a kill would leave, at every few writes while `armed`."""

    def __init__(self, folder: Path, left: Path, every: int) -> None:
        super().__init__()
        self._folder = folder
        self._left = left
        self._every = every
        self._count = 0
        self._lock = threading.Lock()
        self.armed = False

    def run(self, ops: Ops, timeout_s: float) -> Pending | None:
        self._keep()
        return super().run(ops, timeout_s)

    def write(self, fd: int, offset: int, data: bytes) -> None:
        self._keep()
        super().write(fd, offset, data)

    def _keep(self) -> None:
        with self._lock:
            self._count += self.armed
            if self.armed and self._count % self._every == 0:
                shutil.copytree(self._folder, self._left / str(self._count))


def back_after(path: Path, keys: list[BlockKey]) -> int:
    """How many of the keys a store has when it is opened again."""
    with opened(path) as store:
        space_of(store)
        assert store.admin.check().ok
        return sum(len(store.match([key])) for key in keys)


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("move", [drain, reclaim_everything])
def test_it_does_not_come_back_after_a_kill(
    tmp_path: Path, move: Callable[[Store, Path], None]
) -> None:
    """At any moment while it is moved, with the lease held and when it ends."""
    left = tmp_path / "left"
    (folder := tmp_path / "kv").mkdir()
    files = KilledOften(folder, left, every=23)
    with opened(folder, files=files) as store:
        keys = fill(store)
        lease = store.lease(keys)
        assert store.remove(keys) == BLOCKS
        files.armed = True
        move(store, folder)
        shutil.copytree(folder, left / "moved")
        lease.release()
        reclaim_everything(store, folder)
        files.armed = False
        shutil.copytree(folder, left / "released")
    found = sorted(left.iterdir())
    assert len(found) > 3
    assert {path.name: back_after(path, keys) for path in found} == dict.fromkeys(
        [path.name for path in found], 0
    )


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("move", [drain, reclaim_everything])
def test_it_does_not_come_back_after_a_power_cut(
    tmp_path: Path, move: Callable[[Store, Path], None], seed: int
) -> None:
    """What was removed and flushed; the power goes while it is moved."""
    rng = random.Random(seed)
    for number in range(2):
        (folder := tmp_path / str(number)).mkdir()
        files = PowerFiles(rng)
        store = opened(folder, files=files)
        keys = fill(store)
        lease = store.lease(keys)
        assert store.remove(keys) == BLOCKS
        assert store.flush()
        cut = threading.Timer(rng.random() * 0.1, files.cut)
        cut.start()
        with contextlib.suppress(ConfigError):  # the power goes before the drain ends
            move(store, folder)
        cut.join()
        lease.release()
        store.close(1.0)
        assert not back_after(folder, keys)
