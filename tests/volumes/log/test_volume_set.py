"""The drives of a tier know together what was removed: a drive that was away learns it when it is
back, whatever becomes of the others meanwhile.
"""

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.store_contract import prompt, put, space_of
from tests.support.stores import settings
from tests.support.waiting import until

from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey
from kvdepot.core.clock import WallClock
from kvdepot.core.metadata import TOMBSTONE_AGE_US
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.faults import Call, Fail, Fault, FaultyFiles
from kvdepot.testing.power import PowerFiles
from kvdepot.volumes.log.metadata import COPIES

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
    return store.inspect().volumes_of(keys).count(drive)


def is_one_missing(store: Store) -> bool:
    volumes = store.inspect().volumes
    return volumes.metadata._are_missing(volumes.metadata.local())


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
        until(lambda: store.inspect().volumes.facts(1).lost)
        store.remove(keys)
        (folder / "b").unlink()
        show(folder)
        until(lambda: not store.inspect().volumes.down)
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
        assert store.inspect().volumes.down == {1}
        files.clear()
        until(lambda: not store.inspect().volumes.down)
        until(lambda: not store.inspect().volumes.metadata.behind())
    return keys


def then_left_out(folder: Path) -> None:
    """The drive that had the removals all the time is used no more."""
    with opened(folder, "a", "b"):
        pass


def then_drained(folder: Path) -> None:
    with opened(folder, "a", "b") as store:
        store.volumes.drain("ssd", folder / "a")


def then_reused(folder: Path) -> None:
    with opened(folder, "a", "b") as store:
        fill(store, 200, 60)


@pytest.mark.parametrize(
    ("away", "then"),
    [
        *((away, then_left_out) for away in (pulled, not_there, left_out, down)),
        *((pulled, then) for then in (then_drained, then_reused)),
        *(
            pytest.param(away, then, marks=pytest.mark.slow)
            for away in (not_there, left_out, down)
            for then in (then_drained, then_reused)
        ),
    ],
)
def test_no_removed_block_is_back(
    tmp_path: Path, away: Callable[[Path], list[BlockKey]], then: Callable[[Path], None]
) -> None:
    keys = away(tmp_path)
    with opened(tmp_path, "a", "b") as store:
        assert back(store, keys) == 0
    then(tmp_path)
    with opened(tmp_path, "b") as store:
        assert back(store, keys) == 0
        assert store.admin.check().ok


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
    (tmp_path / "b" / COPIES[0]).unlink()  # the other copy counts, and both are made durable
    files = PowerFiles(Forgetful())
    store = assemble(load(overrides=tree(tmp_path, "a", "b")), files=files)
    assert not back(store, keys)
    files.cut()
    store.close(2.0)
    with opened(tmp_path, "b") as store:
        assert not back(store, keys)


def opened_later(folder: Path, share: float, *names: str) -> Store:
    """A store that is opened when a share of the time has passed that tombstones are kept."""
    store = opened(folder, *names)
    stamps = store.inspect().state.stamps
    stamps.observe(stamps.next() + int(share * TOMBSTONE_AGE_US))
    return store


def raise_floor(store: Store) -> None:
    store.inspect().volumes.metadata.raise_floor()


def test_a_drive_that_was_away_too_long_loses_its_blocks(tmp_path: Path) -> None:
    """The others have dropped tombstones meanwhile: its blocks may be among the removed."""
    with opened(tmp_path, "a", "b") as store:
        keys = fill(store)
        on_b = [key for key in keys if on_drive(store, [key], 1)]
        assert on_b
    with opened_later(tmp_path, 1.1, "a") as store:
        space_of(store)
        store.remove(on_b[:1])
        fill(store, 100, 60)  # every segment of the time before is reused
    with opened_later(tmp_path, 1.1, "a") as store:
        fill(store, 200, 60)
        raise_floor(store)
        assert on_b[0] not in store.inspect().log_volume().metadata.known.tombstones
    with opened(tmp_path, "a", "b") as store:
        assert on_drive(store, keys, 1) == 0
        fill(store, 300, 12)
        assert store.admin.check().ok
    with opened(tmp_path, "b") as store:
        assert not back(store, on_b)


def test_a_drive_that_was_away_for_less_keeps_its_blocks(tmp_path: Path) -> None:
    with opened(tmp_path, "a", "b") as store:
        keys = fill(store)
        on_b = [key for key in keys if on_drive(store, [key], 1)]
    with opened_later(tmp_path, 0.25, "a") as store:
        space_of(store)
        store.remove(on_b[:1])
        fill(store, 100, 60)
        raise_floor(store)
        assert on_b[0] in store.inspect().log_volume().metadata.known.tombstones
    with opened(tmp_path, "a", "b") as store:
        assert back(store, on_b) == len(on_b) - 1


def test_a_drive_that_was_drained_or_never_was_is_not_missed(tmp_path: Path) -> None:
    with opened(tmp_path, "a") as store:
        assert not is_one_missing(store)
        store.volumes.add("ssd", tmp_path / "b")
        fill(store)
        store.volumes.drain("ssd", tmp_path / "b")
        assert not is_one_missing(store)
    with opened(tmp_path, "a") as store:
        assert not is_one_missing(store)


def test_a_drive_that_is_away_is_missed(tmp_path: Path) -> None:
    with opened(tmp_path, "a", "b") as store:
        fill(store)
    with opened(tmp_path, "a") as store:
        assert is_one_missing(store)
    with opened(tmp_path, "a", "b") as store:
        assert not is_one_missing(store)


def test_a_removal_covers_what_was_written_on_a_drive_that_was_used_apart(tmp_path: Path) -> None:
    with opened(tmp_path, "a", "b") as store:
        keys = fill(store, prompts=2)
    for count in range(3):
        with opened(tmp_path, "b") as store:
            keys += fill(store, 100 * (count + 1), prompts=6)
            last = store.inspect().state.stamps.next()
    # Each opening skips some stamps, in case a power cut has taken them.
    until(lambda: WallClock().now() * 1e6 > last)
    with opened(tmp_path, "a") as store:
        space_of(store)
        store.remove(keys)
    with opened(tmp_path, "a", "b") as store:
        assert not back(store, keys)


def test_a_block_put_again_on_one_drive_stays_when_the_others_meet_it(tmp_path: Path) -> None:
    """The removal is older than the block, whichever drive has which."""
    with opened(tmp_path, "a", "b") as store:
        keys = fill(store, prompts=2)
    with opened(tmp_path, "a") as store:
        space_of(store)
        store.remove(keys)
    with opened(tmp_path, "b") as store:
        store.remove(fill(store, prompts=2))
        again = fill(store, prompts=2)
    with opened(tmp_path, "a", "b") as store:
        assert back(store, again) == len(again)


def test_what_a_removed_tenant_was_called_leaves_a_drive_that_was_away(tmp_path: Path) -> None:
    name = "confidential-client"
    with opened(tmp_path, "a", "b") as store:
        space = store.namespace(model="m", layout=space_of(store).layout, tenant=name)
        assert all(put(store, prompt(space, 1, 5)))
        assert store.flush()
    assert named_on(tmp_path / "a", name) and named_on(tmp_path / "b", name)
    with opened(tmp_path, "a") as store:
        space = store.namespace(model="m", layout=space_of(store).layout, tenant=name)
        store.remove(namespace=space)
    assert not named_on(tmp_path / "a", name)
    with opened(tmp_path, "a", "b"):
        pass
    assert not named_on(tmp_path / "b", name)


def named_on(folder: Path, name: str) -> bool:
    return any(name.encode() in file.read_bytes() for file in folder.iterdir())
