"""What `flush` says is durable: that, and why the rest is not."""

import errno
from pathlib import Path
from typing import Any

import pytest
from tests.support.store_contract import prompt, put, space_of
from tests.support.stores import counter, settings
from tests.support.waiting import until

import kvdepot
from kvdepot.config.settings import load
from kvdepot.core.depot import Durability
from kvdepot.store.engine import Caller
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.clocks import ManualClock
from kvdepot.testing.faults import BOUNDARIES, Call, Fail, Fault, FaultyFiles


def one_drive(path: Path, **ssd: Any) -> dict[str, Any]:
    tree = settings(path, ssd=ssd)
    del tree["hdd"]
    return tree


def test_everything_is_durable(tmp_path: Path) -> None:
    with kvdepot.open(**one_drive(tmp_path)) as store:
        assert store.flush() and store.flush(keys=[])
        keys = prompt(space_of(store), 1, 4)
        put(store, keys)
        report = store.flush()
        assert report and (report.durable, dict(report.not_durable)) == (4, {})
        absent = prompt(space_of(store), 2, 1)
        report = store.flush(keys=[*keys[:2], *absent])
        assert not report and report.complete
        assert report.blocks == (Durability.DURABLE, Durability.DURABLE, Durability.ABSENT)


def test_a_removal_that_no_drive_could_record_is_not_durable(tmp_path: Path) -> None:
    files = FaultyFiles("python")
    with assemble(load(overrides=one_drive(tmp_path)), files=files) as store:
        keys = prompt(space_of(store), 1, 4)
        put(store, keys)
        assert store.flush()
        files.add(Fault(BOUNDARIES, Fail(errno.EIO), times=None))
        assert store.remove(keys) == 4
        assert not store.flush(1.0).complete
        files.clear()
        until(lambda: store.flush().complete)
    with kvdepot.open(**one_drive(tmp_path)) as store:
        space_of(store)
        assert not store.match(keys)


def test_what_the_write_mode_keeps_in_memory_is_not_durable(tmp_path: Path) -> None:
    with kvdepot.open(**one_drive(tmp_path, write_mode="write-through-selective")) as store:
        keys, others = (prompt(space_of(store), number, 4) for number in (1, 2))
        put(store, keys)
        put(store, others)
        report = store.flush()
        assert not report and report.complete
        assert (report.durable, dict(report.not_durable)) == (0, {Durability.POLICY: 8})
        assert all(store.get_many(keys, [bytearray(space_of(store).block_bytes) for _ in keys]))
        assert store.flush(keys=keys)
        report = store.flush(keys=others)
        assert not report and set(report.blocks) == {"policy"}
        store.remove(others)
        assert store.flush()


def test_what_no_writes_are_left_for_is_not_durable(tmp_path: Path) -> None:
    tree = one_drive(tmp_path, writes_per_day=0.01)
    with assemble(load(overrides=tree), wall=ManualClock()) as store:
        keys = prompt(space_of(store), 1, 60)
        assert all(put(store, keys))
        report = store.flush()
        assert counter(store, "bypassed") == 60
        assert not report and report.complete
        left, evicted = (report.not_durable[why] for why in (Durability.BUDGET, Durability.EVICTED))
        assert report.durable == 0 and left + evicted == 60 and evicted > 0
        assert set(store.flush(keys=keys).blocks) == {Durability.BUDGET, Durability.ABSENT}
        assert store.flush().not_durable == {Durability.BUDGET: left}, "told once"


def test_the_flush_of_one_caller_hides_nothing_from_another(tmp_path: Path) -> None:
    tree = one_drive(tmp_path, writes_per_day=0.01)
    with assemble(load(overrides=tree), wall=ManualClock()) as store:
        keys = prompt(space_of(store), 1, 60)
        assert all(put(store, keys))
        one, two = Caller("one"), Caller("two")
        first, second = (store.flush_for(caller, 60.0, None) for caller in (one, two))
        assert first.not_durable[Durability.EVICTED] > 0
        assert second.not_durable == first.not_durable
        for caller in (one, two):
            assert Durability.EVICTED not in store.flush_for(caller, 60.0, None).not_durable


def test_a_store_that_may_not_write_keeps_nothing(tmp_path: Path) -> None:
    with kvdepot.open(**one_drive(tmp_path)) as store:
        old = prompt(space_of(store), 1, 3)
        put(store, old)
        assert store.flush()
    with kvdepot.open(mode="r", **one_drive(tmp_path)) as store:
        new = prompt(space_of(store), 2, 2)
        assert store.flush()
        assert all(put(store, new))
        report = store.flush()
        assert not report
        assert (report.durable, dict(report.not_durable)) == (3, {Durability.READ_ONLY: 2})
        assert store.flush(keys=old)


def test_a_store_of_memory_alone_keeps_nothing() -> None:
    dram = {"capacity": "2MiB", "prefault": False, "huge_pages": "never"}
    with kvdepot.open(dram=dram) as store:
        assert store.flush()
        put(store, prompt(space_of(store), 1, 2))
        report = store.flush()
        assert not report and report.complete and report.not_durable == {Durability.NO_DRIVE: 2}


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def store(tmp_path: Path, files: FaultyFiles) -> Any:
    tree = one_drive(tmp_path, retry_initial="1ms", retry_max="10ms")
    with assemble(load(overrides=tree), files=files) as opened:
        yield opened
        files.clear()


def test_what_could_not_be_written_is_tried_again(store: Store, files: FaultyFiles) -> None:
    keys = prompt(space_of(store), 1, 3)
    files.add(Fault(Call.RUN_WRITE, Fail(errno.EIO), times=None))
    put(store, keys)
    report = store.flush()
    assert not report and not report.complete and report.given_up >= 3
    assert set(store.flush(keys=keys).blocks) == {Durability.FAILED}
    files.clear()
    until(lambda: bool(store.flush()))
    assert store.flush(keys=keys) and store.inspect().lower().copies.count == 3


def test_what_a_drive_could_not_make_durable_is_not(store: Store, files: FaultyFiles) -> None:
    keys = prompt(space_of(store), 1, 3)
    put(store, keys)
    files.add(Fault(Call.SYNC, Fail(errno.EIO), times=None))
    report = store.flush()
    assert not report and not report.complete
    assert (report.durable, report.given_up) == (0, 3)
    assert set(store.flush(keys=keys).blocks) == {Durability.FAILED}


def test_blocks_of_a_drive_that_was_taken_away_are_not_durable(
    store: Store, tmp_path: Path
) -> None:
    keys = prompt(space_of(store), 1, 3)
    put(store, keys)
    assert store.flush()
    (tmp_path / "ssd").rename(tmp_path / "gone")
    assert not store.flush()
    # It comes back empty; what memory still has is written to it anew.
    until(lambda: bool(store.flush(keys=keys)))
    assert list((tmp_path / "ssd").glob("segment-*"))
