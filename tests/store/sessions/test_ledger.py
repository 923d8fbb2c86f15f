"""The ledger counts tokens given back and GPU seconds saved, by tenant, session and tier."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.store_contract import (
    LAYOUT,
    TOKENS,
    WAIT_S,
    flood,
    prompt,
    put,
    small,
    space_of,
    tiers,
)

import kvdepot
from kvdepot.config.settings import LedgerConfig, load
from kvdepot.core.depot import NamespaceHandle
from kvdepot.errors import ConfigError
from kvdepot.planner.parts import load_parts
from kvdepot.store.events import BlocksServed, PrefillReported, Registered, SessionNamed
from kvdepot.store.metrics import values
from kvdepot.store.observers.ledger import (
    OTHERS,
    SESSIONS_LISTED,
    SESSIONS_MAX,
    TENANTS_MAX,
    SavingsLedger,
)
from kvdepot.store.open import assemble
from kvdepot.store.store import Store

TOKEN_S, PAIR_S = 2e-3, 1e-5
SPEED = 4.0


def opened(path: Path, **ledger: float) -> Store:
    return assemble(load(overrides={**small(path / "kv"), "ledger": ledger}))


def measured(store: Store, space: NamespaceHandle) -> None:
    assert store.admin.report_prefill_speed(space.tag.hex(), TOKEN_S, PAIR_S)


def session_of(store: Store, name: str) -> dict[str, Any]:
    found: dict[str, dict[str, Any]]
    found = {one["name"]: one for one in store.admin.ledger()["sessions"]}
    return found[name]


def described(tenant: str) -> bytes:
    return json.dumps({"tenant": tenant, "shard_size": 2, "layout": {"block_tokens": 8}}).encode()


def served(tag: bytes, tier: str, blocks: int, before: int, last: int) -> BlocksServed:
    return BlocksServed(tag, tier, blocks, 4096 * blocks, float(blocks), before, last)


def words(digest: int) -> np.ndarray[Any, Any]:
    return np.array([[0, 0, digest, 0]], np.uint64)


def test_prefill_by_the_measured_speed_and_the_context(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        space = space_of(store)
        measured(store, space)
        keys = prompt(space, 1, 6)
        put(store, keys)
        tiers(store, keys[2:5])
        store.sessions.name("chat", keys)
        found = session_of(store, "chat")
        assert found["tokens"] == 3 * TOKENS and found["untimed_tokens"] == 0
        pairs = sum(2 * TOKENS + before for before in range(3 * TOKENS)) + 3 * TOKENS / 2
        assert found["gpu_s"] == pytest.approx(3 * TOKENS * TOKEN_S + pairs * PAIR_S)
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
            store.sessions.name(name, keys)
        tiers(store, chats["a"])
        tiers(store, chats["b"][:2])  # what all three share
        store.sessions.name("b", chats["b"])
        store.sessions.name("a", chats["a"])
        tiers(store, prompt(space, 9, 2))  # misses save nothing
        found = store.admin.ledger()["sessions"]
        saved = {one["name"]: one["gpu_s"] * 10.0 / TOKENS for one in found}
        total = store.admin.ledger()["total"]["gpu_s"] * 10.0 / TOKENS
    assert saved == {"a": 4, "b": 2} and total == pytest.approx(6)


def test_tokens_of_an_unknown_speed_are_said_to_be(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keys = prompt(space_of(store), 1, 2)
        put(store, keys)
        tiers(store, keys)
        found = store.admin.ledger()["total"]
        assert found["untimed_tokens"] == found["tokens"] == 2 * TOKENS and found["gpu_s"] == 0
        assert store.stats()["ledger"]["gpu_s"] is None


def test_tenants_are_told_apart(tmp_path: Path) -> None:
    with opened(tmp_path, prefill_tokens_per_s=1.0) as store:
        for tenant, blocks in (("one", 1), ("two", 3)):
            space = store.namespace(model="m", layout=LAYOUT, tenant=tenant)
            keys = prompt(space, 1, blocks)
            put(store, keys)
            tiers(store, keys)
        found = {one["tenant"]: one["gpu_s"] for one in store.admin.ledger()["tenants"]}
    assert found == {"one": TOKENS, "two": 3 * TOKENS}


@pytest.mark.parametrize("token_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_makes_no_sense_is_refused(tmp_path: Path, token_s: float) -> None:
    with opened(tmp_path) as store:
        with pytest.raises(ConfigError, match="token_s"):
            store.admin.report_prefill_speed(space_of(store).tag.hex(), token_s)
        assert not store.admin.report_prefill_speed("00" * 8, 1.0), (
            "a namespace that is not registered"
        )
        with pytest.raises(ConfigError, match="namespace"):
            store.admin.report_prefill_speed("no tag", 1.0)


def test_windows_and_states_do_not_count_twice(tmp_path: Path) -> None:
    """They come beside the blocks of full attention, for the same tokens."""
    with opened(tmp_path, prefill_tokens_per_s=1.0) as store:
        fields = {**LAYOUT.description(), "sliding_window": TOKENS}
        layout = kvdepot.KVLayout.from_description(fields)
        keys = prompt(store.namespace(model="m", layout=layout), 1, 2)
        put(store, keys)
        assert tiers(store, keys) == ["dram"] * 2
        assert store.admin.ledger()["total"]["tokens"] == 0


@pytest.mark.parametrize("name", ["gpu_price_per_hour", "gpu_watts", "prefill_tokens_per_s"])
def test_settings_that_make_no_sense(name: str) -> None:
    with pytest.raises(ConfigError, match=f"ledger.{name}"):
        load(overrides={"ledger": {name: -1.0}})


def test_the_default_price_of_a_gpu_hour_is_that_of_the_parts_list() -> None:
    parts, gpu = load_parts(), load_parts().gpu("h100")
    electricity = gpu.power_w / 1000 * parts.pue * parts.electricity_per_kwh
    hour = gpu.price / (parts.years * 12 * 730) + electricity
    assert LedgerConfig().gpu_price_per_hour == pytest.approx(hour, rel=0.02)


def test_tokens_are_counted_by_the_tier_that_they_came_from(tmp_path: Path) -> None:
    made = small(tmp_path / "kv")
    ledger, ssd = {"prefill_tokens_per_s": SPEED}, {**made["ssd"], "promote": False}
    with assemble(load(overrides={**made, "ssd": ssd, "ledger": ledger})) as store:
        space = space_of(store)
        keys = prompt(space, 1, 6)
        put(store, keys)
        assert store.flush(WAIT_S)
        flood(store, space, 100)
        put(store, keys[:2])
        found = tiers(store, keys)
        assert found.count("ssd") > 0
        store.sessions.name("chat", keys)
        expected = {tier: found.count(tier) * TOKENS for tier in set(found) if tier is not None}
        page, stats = store.admin.ledger(), store.stats()
    assert page["tenants"][0]["tiers"] == page["sessions"][0]["tiers"] == expected
    for tier, tokens in expected.items():
        assert values(stats)[f'kvdepot_get_tokens_total{{tier="{tier}"}}'] == tokens
        labels = f'{{tenant="",tier="{tier}"}}'
        assert values(stats)[f"kvdepot_tenant_saved_tokens_total{labels}"] == tokens


def test_the_page_multiplies_tokens_by_speed_and_price() -> None:
    ledger = SavingsLedger(LedgerConfig(gpu_price_per_hour=7200.0))
    ledger.observe(
        [
            Registered(b"tag", described("one")),
            PrefillReported(b"tag", 0.5, 0.25),
            served(b"tag", "ssd", 3, 2, 11),
        ]
    )
    tokens = 3 * 8 / 2  # of two shards
    seconds = tokens * 0.5 + tokens * 0.25 * (2 * 8 + 3 * 8 / 2)
    (tenant,) = ledger.page()["tenants"]
    assert tenant == {
        "tenant": "one",
        "tokens": tokens,
        "tiers": {"ssd": tokens},
        "untimed_tokens": 0.0,
        "gpu_s": seconds,
        "saved": 2.0 * seconds,
    }
    assert ledger.page()["assumed"]["measured"][b"tag".hex()] == {
        "tokens_per_s": 2.0,
        "crossover_tokens": 2.0,
    }


def test_counts_begin_at_zero_when_the_store_is_opened(tmp_path: Path) -> None:
    """Nothing of the ledger is written to a drive."""
    with opened(tmp_path, prefill_tokens_per_s=SPEED) as store:
        keys = prompt(space_of(store), 1, 4)
        put(store, keys)
        tiers(store, keys)
        store.sessions.name("chat", keys)
        assert session_of(store, "chat")["tokens"] == 4 * TOKENS
        assert store.sessions.pin("chat"), "the session is on the drive"
    with opened(tmp_path, prefill_tokens_per_s=SPEED) as store:
        page = store.admin.ledger()
        assert store.sessions.show("chat")[0]["blocks"] == 4
    assert page["tenants"] == page["sessions"] == [] and page["total"]["tokens"] == 0


def test_tenants_sessions_and_unclaimed_calls_are_bounded() -> None:
    ledger = SavingsLedger(LedgerConfig(prefill_tokens_per_s=SPEED))
    for number in range(3 * TENANTS_MAX):
        tag = number.to_bytes(8, "little")
        ledger.observe([Registered(tag, described(str(number))), served(tag, "dram", 1, 0, number)])
    tenants = {one["tenant"]: one["tokens"] for one in ledger.page()["tenants"]}
    assert len(tenants) == TENANTS_MAX + 1 and tenants[OTHERS] == 2 * TENANTS_MAX * 4.0
    for number in range(SESSIONS_MAX + 5):
        named = SessionNamed(tag, f"chat {number}", words(number))
        ledger.observe([served(tag, "dram", 1, 0, number), named])
    assert len(ledger._sessions) == SESSIONS_MAX
    assert len(ledger.page()["sessions"]) == SESSIONS_LISTED
    ledger.observe([served(tag, "dram", 1, 0, number) for number in range(1000)])
    ledger.observe([SessionNamed(tag, "late", words(0))])
    assert all(name != "late" for _, name in ledger._sessions), "call 0 is too long ago"
    ledger.observe([SessionNamed(tag, "in time", words(999))])
    assert ledger._sessions[tag, "in time"].tokens == {"dram": 4.0}


@pytest.mark.parametrize("said", [b"", b"[]", b"{}", b'{"layout": 1, "shard_size": 1}', b"\xff"])
def test_a_namespace_that_is_not_described_is_not_counted(said: bytes) -> None:
    ledger = SavingsLedger(LedgerConfig(prefill_tokens_per_s=SPEED))
    ledger.observe([Registered(b"tag", said), served(b"tag", "dram", 1, 0, 1)])
    assert ledger.page()["total"]["tokens"] == 0
