"""A removal reaches a drive that was away, whatever becomes of the others meanwhile."""

import errno
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.stores import settings
from tests.support.waiting import until

from kvdepot.core.block import BlockKey
from kvdepot.core.config import load
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.faults import Call, Fail, Fault, FaultyFiles
from kvdepot.testing.power import PowerFiles
from kvdepot.testing.store_contract import prompt, put, space_of
from kvdepot.tiers.log.numbers import EPOCH_S

ALL = frozenset({Call.RUN_READ, Call.RUN_WRITE, Call.READ, Call.WRITE})


def tree(folder: Path, *names: str) -> dict[str, Any]:
    paths = [str(folder / name) for name in names]
    room = {"capacity": f"{4 * len(paths)}MiB", "retry_initial": 0.01, "retry_max": 0.05}
    built = settings(folder, ssd={"path": paths, "promote": False, **room})
    del built["hdd"]
    return built


def opened(folder: Path, *names: str) -> Store:
    return assemble(load(overrides=tree(folder, *names)))


def fill(store: Store, first: int = 0, prompts: int = 12) -> list[BlockKey]:
    space = space_of(store)
    chains = [prompt(space, number, 5) for number in range(first, first + prompts)]
    for keys in chains:
        assert all(put(store, keys))
        store.flush()
    return [key for keys in chains for key in keys]


def back(store: Store, keys: list[BlockKey]) -> int:
    """How many of these blocks are there."""
    space_of(store)
    return sum(row >= 0 for row in store.inspect().rows(keys))


def on_drive(store: Store, keys: list[BlockKey], drive: int) -> int:
    return store.inspect().drives_of(keys).count(drive)


def hide(folder: Path) -> None:
    (folder / "b").rename(folder / "hidden")


def show(folder: Path) -> None:
    if (folder / "hidden").exists():
        (folder / "hidden").rename(folder / "b")


def pulled(folder: Path) -> list[BlockKey]:
    """While the store runs, one drive is pulled, blocks are removed, and it comes back."""
    with opened(folder, "a", "b") as store:
        keys = fill(store)
        assert on_drive(store, keys, 1)
        hide(folder)
        (folder / "b").write_text("something else")
        until(lambda: store.inspect().log_tier().drives[1].lost)
        store.remove(keys)
        (folder / "b").unlink()
        show(folder)
        until(lambda: store.inspect().log_tier().is_up(1))
        assert not back(store, keys)
    return keys


def not_there(folder: Path) -> list[BlockKey]:
    """The drive cannot be mounted when the store is opened."""
    with opened(folder, "a", "b") as store:
        keys = fill(store)
    hide(folder)
    (folder / "b").write_text("something else")
    with opened(folder, "a", "b") as store:
        space_of(store)
        store.remove(keys)
        fill(store, 100, 30)  # the segments with the removals are reused
    (folder / "b").unlink()
    show(folder)
    return keys


def left_out(folder: Path) -> list[BlockKey]:
    """The settings do not name the drive for a while."""
    with opened(folder, "a", "b") as store:
        keys = fill(store)
    with opened(folder, "a") as store:
        space_of(store)
        store.remove(keys)
        fill(store, 100, 60)
        assert store.stats()["counters"]["reclaimed_segments"]
    return keys


def down(folder: Path) -> list[BlockKey]:
    """All that the drive is asked fails for a while."""
    files = FaultyFiles()
    with assemble(load(overrides=tree(folder, "a", "b")), files=files) as store:
        keys = fill(store)
        files.add(Fault(ALL, Fail(errno.EIO), times=None, where=lambda one: "/b/" in one.path))
        store.remove(keys)
        assert not store.inspect().log_tier().is_up(1)
        files.clear()
        until(lambda: store.inspect().log_tier().is_up(1))
        until(lambda: not store.inspect().log_tier()._members.owed)
    return keys


def then_left_out(folder: Path) -> None:
    """The drive that had the removals all the time is used no more."""
    with opened(folder, "a", "b"):
        pass


def then_drained(folder: Path) -> None:
    with opened(folder, "a", "b") as store:
        store.drain_drive("ssd", folder / "a")


def then_reused(folder: Path) -> None:
    with opened(folder, "a", "b") as store:
        fill(store, 200, 60)


@pytest.mark.parametrize("then", [then_left_out, then_drained, then_reused])
@pytest.mark.parametrize("away", [pulled, not_there, left_out, down])
def test_no_removed_block_is_back(
    tmp_path: Path, away: Callable[[Path], list[BlockKey]], then: Callable[[Path], None]
) -> None:
    keys = away(tmp_path)
    with opened(tmp_path, "a", "b") as store:
        assert back(store, keys) == 0
    then(tmp_path)
    with opened(tmp_path, "b") as store:
        assert back(store, keys) == 0
        assert store.check().ok


class Forgetful(random.Random):
    """Of what was not synced a power cut leaves nothing."""

    def random(self) -> float:
        return 0.99

    def choice(self, seq: Any) -> Any:
        return seq[0]


def test_a_drive_has_for_good_what_it_got_from_the_others(tmp_path: Path) -> None:
    """The drives have met: the others may drop the removals now, or go."""
    with opened(tmp_path, "a", "b") as store:
        keys = fill(store)
        store.remove(keys[:1])
        assert on_drive(store, keys, 1)
    with opened(tmp_path, "a") as store:
        space_of(store)
        store.remove(keys)
    (tmp_path / "b" / "removals").unlink()  # it is begun anew, durably, before what is handed over
    files = PowerFiles(Forgetful())
    store = assemble(load(overrides=tree(tmp_path, "a", "b")), files=files)
    assert not back(store, keys)
    files.cut()
    store.close(2.0)
    with opened(tmp_path, "b") as store:
        assert not back(store, keys)


def test_a_drive_that_was_given_up_comes_back_empty(tmp_path: Path) -> None:
    with opened(tmp_path, "a", "b") as store:
        keys = fill(store)
    with opened(tmp_path, "a") as store:
        space = space_of(store)
        members = store.inspect().log_tier()._members
        assert members.are_missing()
        for first in range(0, 6000, 1000):
            store.remove([prompt(space, 10_000 + n, 1)[0] for n in range(first, first + 1000)])
        until(lambda: not members.are_missing())
    with opened(tmp_path, "a", "b") as store:
        assert on_drive(store, keys, 1) == 0
        assert on_drive(store, keys, 0) > 0
        fill(store, 300, 12)
        assert store.check().ok


def test_a_drive_that_was_drained_or_never_was_is_not_missed(tmp_path: Path) -> None:
    with opened(tmp_path, "a") as store:
        assert not store.inspect().log_tier()._members.are_missing()
        store.add_drive("ssd", tmp_path / "b")
        fill(store)
        store.drain_drive("ssd", tmp_path / "b")
        assert not store.inspect().log_tier()._members.are_missing()
    with opened(tmp_path, "a") as store:
        assert not store.inspect().log_tier()._members.are_missing()


def test_a_removal_covers_what_was_written_on_a_drive_that_was_used_apart(tmp_path: Path) -> None:
    with opened(tmp_path, "a", "b") as store:
        first = fill(store, prompts=2)
    for count in range(3):  # what b writes bears higher numbers than a has ever seen
        with opened(tmp_path, "b") as store:
            keys = [*first, *fill(store, 100 * (count + 1), prompts=6)]
        time.sleep(EPOCH_S)
    with opened(tmp_path, "a") as store:
        space_of(store)
        store.remove(keys)
    with opened(tmp_path, "a", "b") as store:
        assert not back(store, keys)
