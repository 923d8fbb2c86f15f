"""Torture finds what is broken on purpose: each promise, broken, is seen."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvdepot.core.depot import FlushReport
from kvdepot.store.move.copy_run import RecordMover
from kvdepot.store.store import Store
from kvdepot.store.write.write_back import Flusher
from kvdepot.testing.torture.ledger import Expectation
from kvdepot.testing.torture.rounds import Kind, play

pytestmark = [pytest.mark.crash, pytest.mark.slow]

ROUNDS_MAX = 60


def forget_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordMover, "record_removals", lambda *_: None)


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


@pytest.mark.parametrize(
    ("sabotage", "fault"),
    [
        (forget_removals, "back"),
        (claim_to_flush, "lost"),
        (give_other_bytes, "wrong"),
        (raise_in_removals, "error"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_broken_promise_is_seen(
    sabotage: Callable[[pytest.MonkeyPatch], None],
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sabotage(monkeypatch)
    assert fault in found(tmp_path, "kills", fault)


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
    assert one.ok and other.ok
    assert (one.words, one.done) == (other.words, other.done)


def test_a_removed_block_that_is_seen_until_the_drives_meet_is_not_lost_when_they_do() -> None:
    """Its removal was not flushed: a power cut took the note of one drive and left another's."""
    expected = Expectation()
    seen = {"cut": True, "ssds": [0, 1]}
    for fact in (
        {"fact": "flushed", "blocks": [7, 8], "removed": []},
        {"fact": "removed", "blocks": [7], "durable": False, "away": True},
        {"fact": "present", "blocks": [8], "away": True, **seen},
        {"fact": "present", "blocks": [7, 8], "away": True, **seen},
        {"fact": "flushed", "blocks": [7, 8], "removed": []},
        {"fact": "residents", "blocks": [7, 8]},
    ):
        expected.take(fact)
    assert expected.must == {8}
