"""Long prompts lie on two drives: what that means for reads, removals, drains and restarts."""

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.mirrors import LONG, forget_memory, mirrored, places
from tests.support.waiting import eventually

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.core.tier import Contents
from kvdepot.errors import ConfigError
from kvdepot.store.move import mirror as mirrorer
from kvdepot.store.open import open_store
from kvdepot.store.store import Store
from kvdepot.testing.store_contract import BLOCK_BYTES, TOKENS, prompt, put, space_of, tiers


@pytest.fixture(params=["ssd", "hdd"])
def tier(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrorer, "_LOOK_S", 0.02)


def opened(path: Path, tier: str, drives: int = 2, mode: Any = "rw", **more: Any) -> Store:
    table = {
        "path": [str(path / f"drive-{number}") for number in range(drives)],
        "capacity": f"{24 * drives}MiB",
        "segment": "1MiB",
        "retry_initial": "50ms",
        "promote": False,
        "mirror": LONG * TOKENS,
    }
    if tier == "hdd":
        table["run"] = 4 * BLOCK_BYTES
    dram = {"capacity": "4MiB", "prefault": False, "huge_pages": "never"}
    tree: dict[str, Any] = {"dram": dram, tier: {**table, **more}, "writeback": {"staging": "8MiB"}}
    return open_store(mode=mode, **tree)


def stored(store: Store, tier: str, number: int = 1, blocks: int = LONG + 2) -> list[BlockKey]:
    """A prompt that is on two drives and not in memory."""
    before = mirrored(store, tier)
    keys = prompt(space_of(store), number, blocks)
    assert all(put(store, keys))
    assert store.flush()
    assert eventually(lambda: mirrored(store, tier) == before + blocks)
    forget_memory(store, keys)
    return keys


def test_a_long_prompt_lies_on_two_drives_and_a_short_one_does_not(
    tmp_path: Path, tier: str
) -> None:
    with opened(tmp_path, tier, drives=3) as store:
        short = prompt(space_of(store), 2, LONG - 1)
        assert all(put(store, short))
        keys = stored(store, tier)
        found = places(store, keys)
        assert all(len(set(drives)) == 2 for drives in found)
        assert {len(drives) for drives in places(store, short)} == {1}
        assert tiers(store, keys) == [tier] * len(keys)
        counters = store.stats()["counters"]
        assert (counters["mirrored"], counters["get_mirror"]) == (len(keys), 0)
        assert store.check().ok


def test_a_drive_that_comes_back_with_nothing_but_third_copies(tmp_path: Path, tier: str) -> None:
    """None of them is taken in. It ended the thread that looks after drives."""
    with opened(tmp_path, tier, drives=3) as store:
        key = stored(store, tier)[0]
        level = store.inspect().lower()
        (at,) = store.inspect().locations([key])
        words = np.frombuffer(key, np.uint64).reshape(1, 4)
        contents = Contents(words, np.array([at]), np.array([BLOCK_BYTES]))
        with store.inspect().state.lock:
            level.take_in(contents)
        assert len(places(store, [key])[0]) == 2


def test_a_prompt_that_grows_long_is_mirrored_from_its_head(tmp_path: Path, tier: str) -> None:
    with opened(tmp_path, tier) as store:
        keys = prompt(space_of(store), 1, LONG + 3)
        assert all(put(store, keys[: LONG - 1]))
        assert store.flush()
        time.sleep(1.0)  # long enough for it to be looked at
        assert mirrored(store, tier) == 0
        forget_memory(store, keys[: LONG - 1])
        assert all(put(store, keys[LONG - 1 :]))
        assert store.flush()
        assert eventually(lambda: mirrored(store, tier) == len(keys))
        assert store.check().ok


def test_either_drive_alone_has_a_whole_prompt(tmp_path: Path, tier: str) -> None:
    with opened(tmp_path, tier) as store:
        keys = stored(store, tier)
    for lost in (0, 1):
        again = tmp_path / f"without-{lost}"
        shutil.copytree(tmp_path / "drive-0", again / "drive-0")
        shutil.copytree(tmp_path / "drive-1", again / "drive-1")
        shutil.rmtree(again / f"drive-{lost}")
        with opened(again, tier) as store:
            space_of(store)
            assert tiers(store, keys) == [tier] * len(keys)
            assert eventually(lambda: mirrored(store, tier) == len(keys)), "on the new drive"
            assert store.check().ok


def test_what_was_mirrored_is_so_after_a_restart(tmp_path: Path, tier: str) -> None:
    with opened(tmp_path, tier) as store:
        keys = stored(store, tier)
        before = places(store, keys)
        used = store.stats()["tiers"][tier]["used_bytes"]
    with opened(tmp_path, tier) as store:
        assert mirrored(store, tier) == len(keys)
        assert store.stats()["counters"]["mirrored"] == 0
        assert store.stats()["tiers"][tier]["used_bytes"] == used
        assert places(store, keys) == before
        assert store.check().ok
    with opened(tmp_path, tier, mirror=0) as store:
        assert mirrored(store, tier) == 0
        assert {len(drives) for drives in places(store, keys)} == {1}
        assert store.stats()["tiers"][tier]["used_bytes"] == used // 2
        assert store.check().ok


def test_a_store_that_is_opened_read_only_reads_both_copies(tmp_path: Path, tier: str) -> None:
    with opened(tmp_path, tier) as store:
        keys = stored(store, tier)
    with opened(tmp_path, tier, mode="r") as store:
        space_of(store)
        assert store.check().ok
        for failing in store.inspect().log_tier().drives:
            failing.breaker.failed("pulled", at_once=True)
            assert tiers(store, keys) == [tier] * len(keys)
            failing.breaker.succeeded()
        assert store.stats()["counters"]["get_mirror"] == 2 * len(keys)


def test_what_is_removed_is_gone_from_both_drives_after_a_restart(
    tmp_path: Path, tier: str
) -> None:
    with opened(tmp_path, tier) as store:
        keys = stored(store, tier)
        assert store.remove(keys[3:5]) == 2
        assert mirrored(store, tier) == len(keys) - 2
        assert store.check().ok
    for settings in ({}, {"mirror": 0}):
        with opened(tmp_path, tier, **settings) as store:
            space_of(store)
            assert len(store.match(keys)) == 3
            assert tiers(store, keys[3:5]) == [None, None]
            assert tiers(store, keys[5:]) == [tier] * (len(keys) - 5)


def test_a_removed_namespace_is_gone_from_both_drives(tmp_path: Path, tier: str) -> None:
    with opened(tmp_path, tier) as store:
        keys = stored(store, tier)
        assert store.remove_namespace(space_of(store)) == len(keys)
        assert mirrored(store, tier) == 0
    with opened(tmp_path, tier) as store:
        assert store.stats()["blocks"] == 0


def test_a_drive_that_is_drained_leaves_one_copy_and_a_third_drive_gets_the_other(
    tmp_path: Path, tier: str
) -> None:
    with opened(tmp_path, tier, drives=3) as store:
        keys = stored(store, tier)
        store.drain_drive(tier, tmp_path / "drive-1")
        assert eventually(lambda: places(store, keys) == [[0, 2]] * len(keys))
        assert tiers(store, keys) == [tier] * len(keys)
        assert store.check().ok
        store.drain_drive(tier, tmp_path / "drive-0")
        assert places(store, keys) == [[2]] * len(keys)
        assert tiers(store, keys) == [tier] * len(keys)
        store.add_drive(tier, tmp_path / "drive-3")  # in the place of one that went
        assert eventually(lambda: places(store, keys) == [[0, 2]] * len(keys))
        assert store.check().ok


def test_a_full_tier_thins_cold_prompts_out_and_drops_them_then(tmp_path: Path, tier: str) -> None:
    with opened(tmp_path, tier, capacity="12MiB") as store:
        space = space_of(store)
        for number in range(60):
            keys = prompt(space, number, LONG)
            assert all(put(store, keys))
            assert store.flush()
            if number % 4 == 3:  # they come no faster than they can be mirrored
                assert eventually(lambda: set(map(len, places(store, keys))) == {2})  # noqa: B023
        stats = store.stats()
        assert stats["counters"]["reclaimed_segments"] > 0
        assert stats["tiers"][tier]["used_bytes"] <= stats["tiers"][tier]["held_bytes"] <= 12 << 20
        assert store.check().ok
        held = [n for n in range(60) if len(store.match(prompt(space, n, LONG))) == LONG]
        assert held and 59 in held and 0 not in held
        for number in held:
            keys = prompt(space, number, LONG)
            assert all(tiers(store, keys))


def test_a_prompt_that_is_read_all_the_time_stays_on_two_drives(tmp_path: Path, tier: str) -> None:
    with opened(tmp_path, tier, capacity="12MiB") as store:
        hot = stored(store, tier, 1000)
        space = space_of(store)
        for number in range(120):
            keys = prompt(space, number, LONG - 1)
            assert all(put(store, keys))
            assert store.flush()
            assert all(tiers(store, hot))
        counters = store.stats()["counters"]
        assert counters[f"moved_{tier}"] > len(hot), "the log went round"
        assert eventually(lambda: set(map(len, places(store, hot))) == {2})
        assert counters["mirrored"] <= 3 * len(hot), "they are moved, not made anew"
        assert store.check().ok


def test_a_smaller_tier_keeps_its_books(tmp_path: Path, tier: str) -> None:
    with opened(tmp_path, tier) as store:
        for number in range(20):
            keys = stored(store, tier, number, LONG)
        store.resize(tier, "8MiB")
        assert store.check().ok
        assert store.stats()["tiers"][tier]["held_bytes"] <= 8 << 20
        assert all(tiers(store, keys))


def test_a_tier_of_one_drive_cannot_mirror(tmp_path: Path, tier: str) -> None:
    with pytest.raises(ConfigError, match=f"{tier}.mirror: there is one path only"):
        opened(tmp_path, tier, drives=1)


def test_what_the_hard_drives_have_needs_no_second_ssd(tmp_path: Path) -> None:
    below = {"path": [str(tmp_path / "below")], "capacity": "48MiB", "segment": "1MiB"}
    ssd = {"path": [str(tmp_path / "a"), str(tmp_path / "b")], "capacity": "24MiB"}
    for number, mode in enumerate(("write-through", "write-back")):
        with kvdepot.open(
            dram={"capacity": "4MiB", "prefault": False, "huge_pages": "never"},
            ssd={**ssd, "segment": "1MiB", "mirror": LONG * TOKENS},
            hdd={**below, "write_mode": mode},
        ) as store:
            keys = prompt(space_of(store), number, LONG)
            assert all(put(store, keys))
            assert store.flush()
            expected = 0 if mode == "write-through" else LONG
            assert eventually(lambda: mirrored(store, "ssd") == expected)  # noqa: B023
            time.sleep(1.0)
            assert mirrored(store, "ssd") == expected
            store.remove(keys)
