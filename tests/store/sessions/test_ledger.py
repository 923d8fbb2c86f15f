"""The ledger: what was saved and what is held, by session and tenant, also after a restart."""

from pathlib import Path
from typing import Any

import pytest

import kvdepot
from kvdepot.core.config import LedgerConfig, load
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.tier import TIER_NAMES
from kvdepot.errors import ConfigError
from kvdepot.index.catalog import Catalog
from kvdepot.planner.parts import Parts, load_parts
from kvdepot.store.metrics import values
from kvdepot.store.open import assemble
from kvdepot.store.sessions import pages
from kvdepot.store.state.ledger import (
    MONTH_S,
    OTHERS,
    TENANTS_MAX,
    Account,
    SavingsLedger,
)
from kvdepot.store.store import Store
from kvdepot.testing.store_contract import (
    BLOCK_BYTES,
    LAYOUT,
    TOKENS,
    prompt,
    put,
    small,
    space_of,
    tiers,
)

TOKEN_S, PAIR_S = 2e-3, 1e-5
HOUR_S = 3600.0


def opened(path: Path, **ledger: float) -> Store:
    return assemble(load(overrides={**small(path / "kv"), "ledger": ledger}))


def measured(store: Store, space: NamespaceHandle) -> None:
    assert store.sessions.tell_prefill(space.tag.hex(), TOKEN_S, PAIR_S)


def ledger_of(store: Store) -> SavingsLedger:
    return store.inspect().state.ledger


def pass_an_hour(store: Store) -> None:
    """All that is held now is held for an hour."""
    ledger = ledger_of(store)
    with ledger._sampling:
        ledger._sampled_s = 0.0
    ledger.sample(HOUR_S)


def shown(store: Store, name: str) -> dict[str, Any]:
    (found,) = store.sessions.show(name)
    entry: dict[str, Any] = found["ledger"]
    return entry


def test_prefill_by_the_measured_speed_and_the_context(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        space = space_of(store)
        measured(store, space)
        keys = prompt(space, 1, 6)
        put(store, keys)
        tiers(store, keys[2:5])
        store.session("chat", keys)
        found = shown(store, "chat")
        assert found["tokens"] == 3 * TOKENS and found["untimed_tokens"] == 0
        pairs = sum(2 * TOKENS + before for before in range(3 * TOKENS)) + 3 * TOKENS / 2
        assert found["gpu_s"] == pytest.approx(3 * TOKENS * TOKEN_S + pairs * PAIR_S)
        assert store.sessions.known("saved")[0]["ledger"] == found
        stats = store.stats()
    assert stats["ledger"]["gpu_s"] == found["gpu_s"]
    assert values(stats)['kvdepot_tenant_gpu_saved_seconds_total{tenant=""}'] == found["gpu_s"]


def test_each_call_counts_for_the_session_that_is_told_of_with_it(tmp_path: Path) -> None:
    with opened(tmp_path, prefill_tokens_per_s=10.0) as store:
        space = space_of(store)
        head = list(range(TOKENS * 2))
        chats = {name: space.keys([*head, *[at] * TOKENS * 2]) for at, name in enumerate("abc")}
        for name, keys in chats.items():
            put(store, keys)
            store.session(name, keys)
        tiers(store, chats["a"])
        tiers(store, chats["b"][:2])  # what all three share
        store.session("b", chats["b"])
        store.session("a", chats["a"])
        tiers(store, prompt(space, 9, 2))  # misses save nothing
        saved = {name: shown(store, name)["gpu_s"] * 10.0 / TOKENS for name in chats}
        total = store.sessions.ledger()["total"]["gpu_s"] * 10.0 / TOKENS
    assert saved == {"a": 4, "b": 2, "c": 0} and total == pytest.approx(6)


def test_tokens_of_an_unknown_speed_are_said_to_be(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keys = prompt(space_of(store), 1, 2)
        put(store, keys)
        tiers(store, keys)
        found = store.sessions.ledger()["total"]
        assert found["untimed_tokens"] == found["tokens"] == 2 * TOKENS and found["gpu_s"] == 0
        assert store.stats()["ledger"]["gpu_s"] is None


def test_every_byte_is_held_by_one_session_and_one_tenant(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        space = space_of(store)
        head = list(range(TOKENS * 2))
        chats = {name: space.keys([*head, *[at] * TOKENS * 2]) for at, name in enumerate("ab")}
        for name, keys in chats.items():
            put(store, keys)
            store.session(name, keys)
        put(store, prompt(space, 9, 3))
        assert store.flush()
        pass_an_hour(store)
        held = {name: shown(store, name)["byte_hours"] for name in chats}
        tenant = store.stats()["ledger"]["tenants"][""]
    each = {
        name: {"dram": blocks * BLOCK_BYTES, "ssd": blocks * BLOCK_BYTES}
        for name, blocks in (("a", 2), ("b", 4))
    }
    assert held == each, "shared blocks count for the session that was told of last"
    assert tenant["byte_hours"] == {"dram": 9 * BLOCK_BYTES, "ssd": 9 * BLOCK_BYTES}
    prices = LedgerConfig()
    per_byte_s = (prices.dram_price + prices.ssd_price) / 1e12 / MONTH_S
    assert tenant["cost"] == pytest.approx(9 * BLOCK_BYTES * HOUR_S * per_byte_s)


def test_what_has_left_memory_costs_only_its_drive(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keys = prompt(space_of(store), 1, 4)
        put(store, keys)
        store.session("chat", keys)
        assert store.flush()
        assert store.sessions.park("chat")["freed"] == 4
        pass_an_hour(store)
        assert shown(store, "chat")["byte_hours"] == {"ssd": 4 * BLOCK_BYTES}


def test_tenants_are_told_apart(tmp_path: Path) -> None:
    with opened(tmp_path, prefill_tokens_per_s=1.0) as store:
        for tenant, blocks in (("one", 1), ("two", 3)):
            space = store.namespace(model="m", layout=LAYOUT, tenant=tenant)
            keys = prompt(space, 1, blocks)
            put(store, keys)
            tiers(store, keys)
        found = {one["tenant"]: one["gpu_s"] for one in store.sessions.ledger()["tenants"]}
    assert found == {"one": TOKENS, "two": 3 * TOKENS}


def test_it_outlives_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path, prefill_tokens_per_s=10.0) as store:
        keys = prompt(space_of(store), 1, 4)
        put(store, keys)
        tiers(store, keys)
        store.session("chat", keys)
        assert store.flush()
        pass_an_hour(store)
        ledger_of(store).tenants["gone"] = Account(7.0, 3.0)
        store.session("chat", keys)
        before = shown(store, "chat")
    with opened(tmp_path, prefill_tokens_per_s=10.0) as store:
        found = store.sessions.ledger()
        tenants = {one["tenant"]: one for one in found["tenants"]}
        assert shown(store, "chat")["gpu_s"] == before["gpu_s"] == 4 * TOKENS / 10.0
        assert shown(store, "chat")["byte_hours"]["ssd"] >= before["byte_hours"]["ssd"]
        assert tenants["gone"]["gpu_s"] == 3.0 and tenants[""]["gpu_s"] == before["gpu_s"]
        assert store.stats()["ledger"]["tokens"] == 0, "counters begin anew"
        space_of(store)
        pass_an_hour(store)
        again = shown(store, "chat")["byte_hours"]["ssd"]
        assert again >= before["byte_hours"]["ssd"] + 4 * BLOCK_BYTES, "it owns its blocks again"


def test_pages_of_before_have_no_accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What yesterday's version wrote; and it passes over what it does not know."""
    entry = pages._entry

    def without(*args: Any) -> dict[str, Any]:
        return {name: value for name, value in entry(*args).items() if name != "l"}

    monkeypatch.setattr(pages, "_entry", without)
    monkeypatch.setattr(pages, "LEDGER_PAGE", -1)
    monkeypatch.setattr(pages.SessionPages, "tenants_changed", lambda _: None)
    with opened(tmp_path, prefill_tokens_per_s=10.0) as store:
        keys = prompt(space_of(store), 1, 4)
        put(store, keys)
        tiers(store, keys)
        store.session("chat", keys)
    monkeypatch.undo()
    with opened(tmp_path) as store:
        assert shown(store, "chat")["gpu_s"] == 0.0
        assert store.sessions.show("chat")[0]["turns"] == 1


@pytest.mark.parametrize(
    "said",
    [None, 1, [], [1, 2, 3], [1, 2, 3, 4], ["x", 0, 0, {}], [-1, 0, 0, {}], [1e40, 0, 0, {}]],
)
def test_an_account_that_makes_no_sense_is_empty(said: Any) -> None:
    assert Account.unpacked(said) == Account()


def test_an_account_is_read_as_it_was_written() -> None:
    account = Account(5.0, 2.5, 1.0, [float(at) for at in range(len(TIER_NAMES))])
    assert Account.unpacked(account.packed()) == account


def test_tenants_and_open_calls_are_bounded() -> None:
    ledger = SavingsLedger(Catalog(), LedgerConfig(), 0.0)
    for number in range(3 * TENANTS_MAX):
        ledger._tenant(str(number)).tokens += 1
    assert len(ledger.tenants) == TENANTS_MAX + 1
    assert ledger.tenants[OTHERS].tokens == 2 * TENANTS_MAX


def test_sessions_that_are_forgotten_take_no_room(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keys = prompt(space_of(store), 1, 4)
        put(store, keys)
        for number in range(5):
            store.session(f"chat {number}", keys)
        assert len(ledger_of(store)._accounts) == 5
        for number in range(5):
            store.sessions.expire(f"chat {number}")
        assert not ledger_of(store)._accounts


@pytest.mark.parametrize("token_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_makes_no_sense_is_refused(tmp_path: Path, token_s: float) -> None:
    with opened(tmp_path) as store:
        with pytest.raises(ConfigError, match="token_s"):
            store.sessions.tell_prefill(space_of(store).tag.hex(), token_s)
        assert not store.sessions.tell_prefill("00" * 8, 1.0), "a namespace that is not registered"
        with pytest.raises(ConfigError, match="namespace"):
            store.sessions.tell_prefill("no tag", 1.0)


def test_windows_and_states_do_not_count_twice(tmp_path: Path) -> None:
    """They come beside the blocks of full attention, for the same tokens."""
    with opened(tmp_path, prefill_tokens_per_s=1.0) as store:
        fields = {**LAYOUT.description(), "sliding_window": TOKENS}
        layout = kvdepot.KVLayout.from_description(fields)
        keys = prompt(store.namespace(model="m", layout=layout), 1, 2)
        put(store, keys)
        assert tiers(store, keys) == ["dram"] * 2
        assert store.sessions.ledger()["total"]["tokens"] == 0


@pytest.mark.parametrize("name", ["gpu_price_per_hour", "ssd_price", "prefill_tokens_per_s"])
def test_settings_that_make_no_sense(name: str) -> None:
    with pytest.raises(ConfigError, match=f"ledger.{name}"):
        load(overrides={"ledger": {name: -1.0}})


def test_default_prices_are_those_of_the_parts_list() -> None:
    parts, prices = load_parts(), LedgerConfig()
    months = parts.years * 12
    for tier, device in parts.tiers.items():
        bought = (device.price + device.slot_price) / device.unit * 1e12 / months
        per_month = bought + electricity(parts, device.power_w / device.unit * 1e12) * 730
        asked = prices.price_per_tb_month(tier)
        assert asked == pytest.approx(per_month + device.price_per_tb_month, rel=0.02), tier
    gpu = parts.gpu("h100")
    hour = gpu.price / (months * 730) + electricity(parts, gpu.power_w)
    assert prices.gpu_price_per_hour == pytest.approx(hour, rel=0.02)


def electricity(parts: Parts, watts: float) -> float:
    """For an hour."""
    return watts / 1000 * parts.pue * parts.electricity_per_kwh
