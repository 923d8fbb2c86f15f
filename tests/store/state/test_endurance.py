"""Drives with a budget of writes for a day: it is kept, and the least promising blocks bypass."""

import os
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.support.store_contract import prompt, put, space_of, tiers
from tests.support.stores import blocks_in, counter, settings

import kvdepot
from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey
from kvdepot.core.endurance import BURST_S, DAY_S
from kvdepot.core.metadata import MetaKind
from kvdepot.errors import ConfigError
from kvdepot.io.files import Files, Ops, Pending
from kvdepot.native import WRITE
from kvdepot.store.check.offline import opened as opened_offline
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.clocks import ManualClock

DAILY_BYTES = 8 << 20
STEP_S = 600.0


class MeteredFiles(Files):
    """Counts what really goes to each drive's segments."""

    def __init__(self) -> None:
        super().__init__()
        self.written: Counter[str] = Counter()

    def run(self, ops: Ops, timeout_s: float) -> Pending | None:
        for op in ops[ops["opcode"] == WRITE]:
            self._count(int(op["fd"]), int(op["nbytes"]))
        return super().run(ops, timeout_s)

    def write(self, fd: int, offset: int, data: bytes) -> None:
        self._count(fd, len(data))
        super().write(fd, offset, data)

    def _count(self, fd: int, nbytes: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.name.startswith("segment"):
            self.written[path.parent.name] += nbytes


def opened(path: Path, clock: ManualClock, files: Files | None = None, **changes: Any) -> Store:
    """Three tiers; the ssd of 4 MiB may be written twice a day."""
    ssd = {"writes_per_day": 2.0, **changes.pop("ssd", {})}
    tree = settings(path, ssd=ssd, **changes)
    return assemble(load(overrides=tree), files=files, wall=clock)


def offer(store: Store, number: int, blocks: int = 4) -> list[BlockKey]:
    keys = prompt(space_of(store), number, blocks)
    assert all(put(store, keys))
    assert store.flush().complete
    return keys


def wear(store: Store, drive: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = store.stats()["tiers"]["ssd"]["drives"][drive]["written"]
    return found


def kept(path: Path) -> tuple[float, float]:
    """What the drive says may be written, and when that was so."""
    with opened_offline(path / "ssd") as volume:
        entry = volume.metadata.own(MetaKind.BUDGET)
    level, at_s = struct.unpack("<dd", entry.value) if entry and entry.value else (0.0, 0.0)
    return level, at_s


class TestBudget:
    def test_a_day_sees_no_more_than_the_budget_and_nearly_all_of_it(self, tmp_path: Path) -> None:
        """24 MB are offered in a day, 8 may be written."""
        clock, files = ManualClock(1e9), MeteredFiles()
        with opened(tmp_path, clock, files) as store:
            everything = []
            for step in range(int(DAY_S / STEP_S)):
                everything.append(offer(store, step))
                clock.advance(STEP_S)
            assert counter(store, "bypassed") > 200
            assert all(len(store.match(keys)) == 4 for keys in everything), "below, or in memory"
            assert wear(store)["bytes"] == pytest.approx(files.written["ssd"], rel=0.02)
            assert wear(store)["bytes_per_day"] == pytest.approx(wear(store)["bytes"], rel=0.01)
            assert store.admin.check().ok
        assert 0.8 * DAILY_BYTES < files.written["ssd"] <= DAILY_BYTES

    @pytest.mark.parametrize("crash", [False, True])
    def test_a_store_that_restarts_all_the_time_writes_no_more(
        self, tmp_path: Path, crash: bool
    ) -> None:
        clock, files = ManualClock(1e9), MeteredFiles()
        path, copy = tmp_path / "a", tmp_path / "b"
        path.mkdir()
        steps = 48
        for step in range(steps):
            with opened(path, clock, files.share()) as store:
                offer(store, step, blocks=10)
                if crash:
                    shutil.copytree(path, copy)
            clock.advance(STEP_S)
            if crash:
                shutil.rmtree(path)
                copy.rename(path)
        files.close()
        allowed = DAILY_BYTES * (steps * STEP_S + BURST_S) / (DAY_S + BURST_S)
        assert 0.5 * allowed < files.written["ssd"] <= allowed

    def test_what_is_left_is_kept_over_a_restart(self, tmp_path: Path) -> None:
        clock = ManualClock(1e9)
        with opened(tmp_path, clock) as store:
            full = wear(store)
            assert full["level_bytes"] == full["bucket_bytes"] == round(DAILY_BYTES / 25)
            offer(store, 1, blocks=2)
        left, at_s = kept(tmp_path)
        assert left < full["level_bytes"] - 80_000
        assert at_s == 1e9
        clock.advance(60.0)
        with opened(tmp_path, clock) as store:
            filled = DAILY_BYTES * 60 / (DAY_S + BURST_S)
            assert wear(store)["level_bytes"] == pytest.approx(left + filled, abs=1.0)

    def test_a_clock_that_was_set_back_gives_nothing_and_takes_nothing(
        self, tmp_path: Path
    ) -> None:
        with opened(tmp_path, ManualClock(1e9)) as store:
            offer(store, 1, blocks=2)
        left, _ = kept(tmp_path)
        clock = ManualClock(1e6)
        with opened(tmp_path, clock) as store:
            assert wear(store)["level_bytes"] == round(left)
            clock.advance(60.0)
            assert wear(store)["level_bytes"] > left

    def test_a_drive_that_is_spent_leaves_the_work_to_the_other(self, tmp_path: Path) -> None:
        clock, files = ManualClock(1e9), MeteredFiles()
        paths = [str(tmp_path / name) for name in ("one", "two")]
        changes = {"path": paths, "capacity": "8MiB", "writes_per_day": 8.0}
        with opened(tmp_path, clock, files, ssd=changes) as store:
            space_of(store)
            first = store.inspect().log_volume()
            first.wear.take(int(first.wear.level_bytes) + 1)
            before = files.written.copy()
            offer(store, 1, blocks=2)
            assert blocks_in(store, "ssd") == 2
        assert files.written["two"] - before["two"] > 80_000
        assert files.written["one"] - before["one"] < 16_384, "a footer, no blocks"


class TestBypass:
    def test_blocks_of_sessions_that_came_back_are_written_others_are_not(
        self, tmp_path: Path
    ) -> None:
        """Of every four sessions one comes back and goes on; three are never heard of again."""
        clock = ManualClock(1e9)
        with opened(tmp_path, clock, ssd={"capacity": "16MiB", "writes_per_day": 1.0}) as store:
            space = space_of(store)
            once: list[BlockKey] = []
            again: list[BlockKey] = []
            for step in range(240):
                keys = prompt(space, step, 8)
                assert all(put(store, keys[:2]))
                if step % 4 == 0:
                    for turn in (2, 4, 6):
                        assert None not in tiers(store, keys[:turn])
                        assert all(put(store, keys[turn : turn + 2]))
                        store.flush()
                    again += keys[2:] if step >= 120 else []
                else:
                    once += keys[:2] if step >= 120 else []
                store.flush()
                clock.advance(120.0)
            assert counter(store, "bypassed") > 100
            rows = store.inspect().catalog.rows
            ready = store.inspect().lower().copies.ready
            kept_again = sum(ready(row) for row in rows(again)) / len(again)
            kept_once = sum(ready(row) for row in rows(once)) / len(once)
            assert kept_again > 0.2 > 2 * kept_once

    def test_without_hard_drives_they_stay_in_memory(self, tmp_path: Path) -> None:
        tree = settings(tmp_path, ssd={"writes_per_day": 0.5})
        del tree["hdd"]
        clock = ManualClock(1e9)
        with assemble(load(overrides=tree), wall=clock) as store:
            keys = offer(store, 1, blocks=12)
            assert counter(store, "bypassed") > 0
            assert blocks_in(store, "ssd") == 12 - counter(store, "bypassed")
            assert tiers(store, keys) == ["dram"] * 12
            assert counter(store, "write_failed") == 0

    def test_a_block_that_is_read_from_below_is_not_promoted_for_nothing(
        self, tmp_path: Path
    ) -> None:
        clock = ManualClock(1e9)
        with opened(tmp_path, clock) as store:
            store.volumes.set_write_mode("hdd", "pass-through")
            keys = offer(store, 1, blocks=4)
            store.volumes.set_write_mode("hdd", "write-back")
            drive = store.inspect().log_volume()
            drive.wear.take(int(drive.wear.level_bytes))
            store.inspect().drop_from_memory(keys)
            assert tiers(store, keys) == ["hdd"] * 4
            assert store.flush()
            assert (blocks_in(store, "ssd"), counter(store, "bypassed")) == (0, 4)


class TestWithoutABudget:
    def test_nothing_bypasses_and_nothing_is_kept(self, tmp_path: Path) -> None:
        with kvdepot.open(**settings(tmp_path)) as store:
            offer(store, 1, blocks=40)
            assert counter(store, "bypassed") == 0
            assert wear(store)["bytes"] > 40 * 32_800
            assert "level_bytes" not in wear(store)
        assert kept(tmp_path) == (0.0, 0.0)

    @pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
    def test_a_budget_that_cannot_be_is_refused(self, tmp_path: Path, value: float) -> None:
        with pytest.raises(ConfigError, match="writes_per_day"):
            load(overrides=settings(tmp_path, ssd={"writes_per_day": value}))
