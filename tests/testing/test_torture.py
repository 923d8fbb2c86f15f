"""Torture finds what is broken on purpose: each promise, broken, is seen."""

import errno
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.failures import check_data
from tests.support.waiting import until

from kvdepot.core.depot import FlushReport
from kvdepot.core.volume import Purpose
from kvdepot.store.move import mover
from kvdepot.store.move.mover import BlockMover
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.store import Store
from kvdepot.store.write.write_back import Flusher
from kvdepot.testing.faults import BOUNDARIES, Fail, Fault, FaultyFiles
from kvdepot.testing.images import make_key, make_records
from kvdepot.testing.power import Seam
from kvdepot.testing.torture import rounds, workload
from kvdepot.testing.torture.judge import judge_store
from kvdepot.testing.torture.ledger import Expectation, Ledger
from kvdepot.testing.torture.rounds import (
    KINDS,
    Kind,
    RecordedKill,
    RoundOutcome,
    TorturedFiles,
    _follow,
    _live_until_cut,
    in_child,
    play,
    torture,
)
from kvdepot.testing.torture.workload import StoreSession
from kvdepot.testing.torture.world import SEGMENT_BYTES, TierMix, World, prompts

pytestmark = [pytest.mark.crash, pytest.mark.slow]

ROUNDS_MAX = 60


def forget_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockMover, "record_tombstones", lambda *_: None)


def claim_to_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flusher, "flush", lambda *_: FlushReport(True, 0, {}))


def give_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Store.get_many

    def wrong(store: Store, keys: Sequence[Any], intos: Sequence[Any], **named: Any) -> Any:
        answers = right(store, keys, intos, **named)
        for into in intos:
            into[0] ^= 1
        return answers

    monkeypatch.setattr(Store, "get_many", wrong)


def raise_in_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    def raised(*_: Any) -> Any:
        raise KeyError(7)

    monkeypatch.setattr(Store, "remove", raised)


def bind_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any) -> Any:
        return np.zeros(len(args[1]), dtype=bool)

    monkeypatch.setattr(LowerTier, "bound", none)


def sync_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    sync_only(monkeypatch, "sync_directory")


def sync_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    sync_only(monkeypatch, "sync")


def sync_only(monkeypatch: pytest.MonkeyPatch, seam: Seam) -> None:
    """The other sync says that it is done, and does nothing."""

    class HalfSynced(TorturedFiles):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._seams = frozenset({seam})

    monkeypatch.setattr(rounds, "TorturedFiles", HalfSynced)


@pytest.mark.parametrize(
    ("sabotage", "kind", "fault"),
    [
        (bind_nothing, "kills", "broken"),
        (forget_removals, "kills", "back"),
        (claim_to_flush, "kills", "lost"),
        (give_other_bytes, "kills", "wrong"),
        (raise_in_removals, "kills", "error"),
        (sync_no_file, "cuts", "error"),
        (sync_no_directory, "cuts", "lost"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_broken_promise_is_seen(
    sabotage: Callable[[pytest.MonkeyPatch], None],
    kind: Kind,
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sabotage(monkeypatch)
    assert fault in found(tmp_path, kind, fault)


def test_a_round_that_failed_is_kept_with_its_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_in_removals(monkeypatch)
    for seed in range(ROUNDS_MAX):
        if not play(tmp_path, seed, "kills", keep=True).ok:
            break
    (kept,) = tmp_path.iterdir()
    assert sorted(path.name for path in kept.iterdir()) == ["drives", "ledger.jsonl"]
    facts = [json.loads(line) for line in (kept / "ledger.jsonl").read_text().splitlines()]
    assert next(fact["kind"] for fact in facts if fact["fact"] == "fault") == "error"
    assert [fact["at_s"] for fact in facts] == sorted(fact["at_s"] for fact in facts)


def test_what_does_not_end_leaves_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "CLOSE_S", 0.0)
    monkeypatch.setattr(workload, "ALLOWANCE_S", 0.01)
    world = World(tmp_path / "drives", TierMix.draw(random.Random(1)))
    world.folder.mkdir()
    world.make_folders()
    ledger, go = Ledger(), threading.Event()
    with world.open() as store:
        monkeypatch.setattr(store.volumes, "resize", lambda *_: go.wait())
        session = StoreSession(world, store, ledger, random.Random(1))
        session.drives.resize(random.Random(1))
        session.drives.wait()
        go.set()
    assert [fact["kind"] for fact in ledger.everything() if fact["fact"] == "fault"] == ["late"]
    assert "_resize" in world.stacks_path.read_text()
    ledger.close()


def test_a_removal_that_no_drive_wrote_down_is_not_promised(tmp_path: Path) -> None:
    """Docs of `removal_unrecorded`: its blocks may return after a restart."""
    mix = replace(TierMix.draw(random.Random(1)), ssds=1, hdds=0, engine="python")
    world = World(tmp_path / "drives", mix)
    world.folder.mkdir()
    world.make_folders()
    ledger, files = Ledger(), FaultyFiles("python")
    with world.open(files) as store:
        session = StoreSession(world, store, ledger, random.Random(1))
        session.remove_namespace()
        files.add(Fault(BOUNDARIES, Fail(errno.EIO), times=None))
        session.remove_namespace()
        files.clear()
    facts = [fact["fact"] for fact in ledger.everything()]
    assert facts == ["removing", "removed", "removing", "unrecorded"]
    ledger.close()


def test_room_is_left_for_a_segment_that_is_begun_after_the_last_words(tmp_path: Path) -> None:
    """A drive that is to be smaller has more segments than it may for a while. Opened with less
    room than those take, it drops the oldest: that would be no loss by the kill.
    """
    mix = replace(TierMix.draw(random.Random(1)), ssds=1, hdds=0, fsync="flush")
    world = World(tmp_path / "drives", replace(mix, ssd_segments=4, ssd_mode="write-back"))
    world.folder.mkdir()
    world.make_folders()
    ledger = Ledger()

    def live() -> None:
        end = RecordedKill(ledger, 0)
        store = end.store = world.open()
        session = StoreSession(world, store, ledger, random.Random(1))
        volume = store.inspect().log_volume()
        for blocks in prompts():
            if len(volume.segments().segments) < 3:
                session._put(list(blocks))
                session.flush()
        assert len(volume.segments().segments) == 3
        volume.set_limits(3 * SEGMENT_BYTES, may_write=True)
        end.record()
        for number in range(18):  # as a thread that is at a write, and needs no lock of the store
            moved = make_records([make_key(number)], 6_000)
            volume.append(moved.rows, Purpose.MOVE)
        end.kill()

    assert in_child(world, ledger, live) == -signal.SIGKILL
    ledger.catch_up()
    _follow(world, ledger)
    assert world.ssd_segments > 4
    ledger.write("open")
    with world.open() as store:
        judge_store(store, world, ledger)
    assert ledger.expected.had_snapshot
    assert [fact for fact in ledger.everything() if fact["fact"] == "fault"] == []
    ledger.close()


def test_a_store_that_no_drive_opens_in_time_has_its_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first writes to the only drive that is there come late: that is no fault of the store."""

    class LateFiles(TorturedFiles):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.late = 1.0

    monkeypatch.setattr(rounds, "TorturedFiles", LateFiles)
    monkeypatch.setattr(mover, "_TOMBSTONE_WAIT_S", 0.0)  # as a cut leaves it
    mix = replace(TierMix.draw(random.Random(1)), ssds=1, hdds=0, engine="python")
    world = World(tmp_path / "drives", mix)
    world.folder.mkdir()
    world.make_folders()
    ledger = Ledger()
    _live_until_cut(world, ledger, random.Random(1))
    assert [fact["fact"] for fact in ledger.everything()] == ["open", "unopened", "cut"]
    ledger.close()


def test_rounds_run_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_for_another(folder: Path, seed: int, kind: Kind, **_: Any) -> RoundOutcome:
        (folder / str(seed)).touch()
        until(lambda: len(list(folder.iterdir())) > 1)
        return RoundOutcome(kind, seed, 1)

    monkeypatch.setattr(rounds, "play", wait_for_another)
    played = list(torture(tmp_path, 7, jobs=2, more=lambda begun: begun < 5))
    assert sorted(one.seed for one in played) == [7, 8, 9, 10, 11]
    assert all(one.kind == KINDS[one.seed % len(KINDS)] for one in played)
    assert all(one.ok and one.done for one in played)


def test_a_round_whose_process_ends_early_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "play", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    (outcome,) = torture(tmp_path, 7, ["cuts"], more=lambda begun: begun < 1)
    assert (outcome.kind, outcome.seed, dict(outcome.faults)) == ("cuts", 7, {"error": 1})


def test_rounds_that_are_not_waited_for_are_killed_with_what_they_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "pids"

    def fork_and_wait(_: Path, seed: int, kind: Kind, **__: Any) -> RoundOutcome:
        if seed:
            forked = os.fork()
            if forked:
                told.with_suffix(".new").write_text(f"{os.getpid()} {forked}")
                told.with_suffix(".new").rename(told)
            signal.pause()
        until(told.exists)
        return RoundOutcome(kind, seed)

    monkeypatch.setattr(rounds, "play", fork_and_wait)
    played = torture(tmp_path, 0, jobs=2, more=lambda begun: begun < 2)
    assert next(played).seed == 0
    played.close()
    for pid in told.read_text().split():
        until(partial(has_ended, pid))


def has_ended(pid: str) -> bool:
    """Whether a process is gone, or waits for its parent to notice."""
    try:
        status = Path("/proc", pid, "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


def found(folder: Path, kind: Kind, fault: str) -> set[str]:
    """Faults of some rounds, until there is the one."""
    seen: set[str] = set()
    for seed in range(ROUNDS_MAX):
        seen |= set(play(folder, seed, kind).faults)
        if fault in seen:
            break
    return seen


def test_a_round_follows_from_its_seed(tmp_path: Path) -> None:
    one, other = (play(tmp_path, 3, "damages") for _ in range(2))
    for outcome in (one, other):
        check_data(outcome.ok, outcome)
    assert (one.words, one.done) == (other.words, other.done)
    assert one.done


def test_a_removed_block_that_is_seen_until_the_drives_meet_is_not_lost_when_they_do() -> None:
    """Its removal was not flushed: a power cut took it from one drive and left it on another."""
    expected = Expectation()
    seen = {"cut": True, "ssds": [0, 1]}
    for fact in (
        {"fact": "flushed", "blocks": [7, 8], "removed": []},
        {"fact": "removed", "blocks": [7], "durable": False, "away": True},
        {"fact": "present", "blocks": [8], "away": True, **seen},
        {"fact": "present", "blocks": [7, 8], "away": True, **seen},
        {"fact": "flushed", "blocks": [7, 8], "removed": []},
        {"fact": "residents", "blocks": [7, 8], "left_out": 0},
    ):
        expected.take(fact)
    assert expected.must == {8}


@pytest.mark.parametrize("way", ["killed", "cut"])
def test_a_removal_that_only_the_absent_drive_knows_of_may_show_when_the_drives_meet(
    way: str,
) -> None:
    """The end came between the writes to two drives; or both were written, and one was lost."""
    expected = Expectation()
    facts: list[dict[str, Any]] = [
        {"fact": "flushed", "blocks": [7, 8], "removed": []},
        {"fact": "removing", "blocks": [7]},
    ]
    if way == "cut":
        facts += [{"fact": "removed", "blocks": [7], "durable": False, "away": False}]
    seen = {"cut": way == "cut", "ssds": [0, 1]}
    facts += [
        {"fact": "present", "blocks": [7, 8], "away": True, **seen},
        {"fact": "residents", "blocks": [7, 8], "left_out": 0},
    ]
    for fact in facts:
        expected.take(fact)
    assert expected.must == {8}
    expected.take({"fact": "present", "blocks": [8], "away": False, **seen})
    assert expected.doubtful == expected.limbo == set()


def test_a_contract_counts_where_only_the_absent_drive_knows_of_a_removal() -> None:
    """The block is pinned where its removal is not known, and stays when the drives meet."""
    expected = Expectation()
    seen = {"cut": True, "away": True, "ssds": [0, 1]}
    for fact in (
        {"fact": "removing", "blocks": [7]},
        {"fact": "removed", "blocks": [7], "durable": False, "away": True},
        {"fact": "present", "blocks": [], **seen},
        {"fact": "present", "blocks": [7, 8], **seen},
        {"fact": "putting", "blocks": [7, 8], "nbytes": 1},
        {"fact": "pinning", "blocks": [7, 8], "session": "a"},
        {"fact": "pinned", "blocks": [7, 8], "session": "a"},
    ):
        expected.take(fact)
    assert expected.kept == {"a": {7, 8}}
    assert expected.limbo == set()


@pytest.mark.parametrize(("still_out", "apart"), [(1, {7}), (0, set())])
def test_what_is_on_a_drive_that_was_mounted_again_may_make_room(
    still_out: int, apart: set[int]
) -> None:
    """A drive that fails as it is opened is tried again: its blocks are kept only until then."""
    expected = Expectation()
    seen = {"cut": True, "ssds": [0, 1]}
    for fact in (
        {"fact": "present", "blocks": [7, 8], "away": False, **seen},
        {"fact": "residents", "blocks": [7, 8], "left_out": 0},
        {"fact": "open", "blocks": []},
        {"fact": "opened", "blocks": [], "left_out": 1},
        {"fact": "present", "blocks": [8], "away": True, **seen},
        {"fact": "residents", "blocks": [8], "left_out": still_out},
    ):
        expected.take(fact)
    assert expected.apart == apart
    assert expected.must == {8}
