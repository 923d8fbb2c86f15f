"""Blocks of waiting requests come to memory; sessions and the prefill speed are reported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.toy_engine import (
    FULL_PAGES,
    PROMPT,
    Split,
    ToyEngine,
    ToyRequest,
    Toys,
    answer_of,
    ask,
)
from tests.support.waiting import eventually

from kvdepot.adapters.vllm.queue_hints import session_of
from kvdepot.depot import Depot
from kvdepot.errors import ConfigError
from kvdepot.policy.fetching.speed_models import PrefillPace
from kvdepot.store.store import Store

LONG = [(3 * number) % 50 for number in range(200)]


def hinted(store: Depot) -> int:
    count: int = store.stats()["counters"]["hinted"]
    return count


def queued_behind(engine: ToyEngine, *, steps: int = 2) -> None:
    """PROMPT waits while LONG takes all of each step."""
    engine.add(ToyRequest("long", list(LONG), 2))
    engine.add(ToyRequest("queued", list(PROMPT), 2))
    for _ in range(steps):
        engine.step()
    assert engine.requests["queued"].status == "waiting"


def finish(engine: ToyEngine) -> dict[str, int]:
    """Run to the end; loaded blocks by tier."""
    engine.run()
    assert engine.done["queued"].answer == answer_of(PROMPT, 2)
    assert engine.done["long"].answer == answer_of(LONG, 2)
    figures = engine.workers[0].metrics()
    assert figures is not None
    return {
        str(name).partition(":")[2]: int(count)
        for name, count in figures.items()
        if str(name).startswith("loaded_blocks:")
    }


Reopened = Callable[..., ToyEngine]


@pytest.fixture
def reopened(tmp_path: Path, toys: Toys) -> Reopened:
    """Opens an engine whose depot has PROMPT on a drive only."""

    def open_it(tier: str = "hdd", **settings: Any) -> ToyEngine:
        place = {"path": str(tmp_path / "kv"), "segment": "1MiB"}
        if tier == "object":
            place = {"url": f"file://{tmp_path}/kv"}
        tiers = {tier: {"capacity": "64MiB", **place}}
        toys.saved(toys.depot(**tiers)).close()
        return toys.engine(toys.depot(**tiers), settings=settings)

    return open_it


@pytest.mark.parametrize("tier", ["hdd", "object"])
def test_a_waiting_request_finds_its_blocks_in_memory(reopened: Reopened, tier: str) -> None:
    if tier == "object":
        pytest.importorskip("obstore")
    engine = reopened(tier)
    queued_behind(engine)
    store = engine.side._store
    assert eventually(lambda: hinted(store) == FULL_PAGES)
    assert finish(engine) == {"dram": FULL_PAGES}


@pytest.mark.parametrize(("tier", "hint"), [("hdd", 0.0), ("ssd", 30.0)])
def test_hints_can_be_turned_off_and_are_for_slow_tiers(
    reopened: Reopened, tier: str, hint: float
) -> None:
    engine = reopened(tier, hint=hint)
    queued_behind(engine)
    store = engine.side._store
    assert finish(engine) == {tier: FULL_PAGES}
    assert hinted(store) == 0


def test_a_request_that_begins_at_once_is_not_hinted_at(reopened: Reopened) -> None:
    engine = reopened()
    store = engine.side._store
    ask(engine, "warm", PROMPT)
    assert hinted(store) == 0


def test_hints_end_with_their_request(reopened: Reopened) -> None:
    engine = reopened()
    queued_behind(engine, steps=1)
    engine.abort("queued")
    assert not engine.side.hints._hints and not engine.side.hints._waiting
    engine.run()


class TestSessions:
    def test_a_session_is_known_when_its_request_has_ended(self, toys: Toys) -> None:
        engine = toys.engine(split=Split(2))
        store = engine.side._store
        ask(engine, "r", PROMPT, 14, kv_transfer_params={"kvdepot_session": "chat"})
        blocks = (len(PROMPT) + 13) // 4
        assert store.sessions.name("chat") == 2 * blocks

    def test_a_closed_session_is_closed(self, toys: Toys) -> None:
        engine = toys.engine()
        store = engine.side._store
        params = {"kvdepot_session": "chat", "kvdepot_state": "closed"}
        ask(engine, "r", PROMPT, kv_transfer_params=params)
        engine.step()  # everything is saved by now, and it is reported once more
        assert isinstance(store, Store)
        catalog = store.inspect().catalog
        rows = catalog.rows(engine.spaces()[0].keys(PROMPT))
        assert all(row in catalog.closed for row in rows)
        assert store.sessions.name("chat") == 0

    @pytest.mark.parametrize(
        "params", [{"kvdepot_session": ""}, {"kvdepot_session": "x", "kvdepot_state": "asleep"}]
    )
    def test_an_invalid_session_fails_no_request(self, toys: Toys, params: dict[str, Any]) -> None:
        engine = toys.engine()
        ask(engine, "r", PROMPT, kv_transfer_params=params)
        assert engine.side._store.stats()["sessions"]["remembered"] == 0
        with pytest.raises(ConfigError):
            session_of(ToyRequest("r", [1], 1, kv_transfer_params=params))

    def test_salted_sessions_do_not_meet(self, toys: Toys) -> None:
        engine = toys.engine()
        params = {"kvdepot_session": "chat"}
        ask(engine, "a", PROMPT, kv_transfer_params=params, cache_salt="s")
        ask(engine, "b", PROMPT, kv_transfer_params=params, cache_salt="t")
        store = engine.side._store
        assert store.stats()["sessions"]["remembered"] == 2
        assert store.sessions.name("chat") == 0


class TestPrefillSpeed:
    @pytest.mark.parametrize("workers", [1, 2])
    def test_the_ledger_knows_what_the_engine_measures(self, toys: Toys, workers: int) -> None:
        """With two workers each has a shard of every block: together they save as much as one."""
        engine = toys.engine(split=Split(workers))
        store = engine.side._store
        ask(engine, "first", PROMPT, 4)
        engine.side.report(PrefillPace(0.0, 0.5, 0.25))
        engine.side.hints.prefill.wait(60.0)
        blocks, before = len(PROMPT) // 4, store.admin.ledger()["total"]["gpu_s"]
        for space in engine.spaces():
            keys = space.keys(PROMPT)
            assert all(store.get_many(keys, [bytearray(space.block_bytes) for _ in keys]))
        saved = store.admin.ledger()["total"]["gpu_s"] - before
        tokens = blocks * 4
        assert saved == pytest.approx(tokens * 0.5 + tokens * tokens / 2 * 0.25)

    def test_a_depot_without_a_ledger_is_asked_once(
        self, toys: Toys, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine, asked = toys.engine(), []

        def refuse(*given: object) -> bool:
            asked.append(given)
            raise ConfigError("call", "is not known")

        service = type(engine.side._store.admin)
        monkeypatch.setattr(service, "report_prefill_speed", refuse)
        prefill = engine.side.hints.prefill
        for _ in range(3):
            prefill.report([b"x" * 8], 1.0, 0.0)
            prefill.wait(60.0)
        assert len(asked) == 1
