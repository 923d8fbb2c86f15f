"""Every metric has the value that a known workload must lead to."""

import importlib.util
import json
import re
import threading
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.store_contract import (
    BLOCK_BYTES,
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
from tests.support.waiting import until

import kvdepot
from kvdepot.core.first_token import FirstToken, Reason
from kvdepot.core.keys import as_words
from kvdepot.daemon.http.exposition import render
from kvdepot.store.alerts import alerts
from kvdepot.store.engine import Caller
from kvdepot.store.events import FirstTokenReported, Took
from kvdepot.store.metrics import METRICS, values
from kvdepot.store.observers.activity import Activity
from kvdepot.store.store import Store

ROOT = Path(__file__).parents[2]
SITE = {
    "connected": True,
    "messages": {"sent": 3, "received": 2, "refused": 0, "dropped": 0, "connected": 1},
    "hints": {"followed": 1, "open": 0, "passed_on": 0, "unknown": 0, "withheld": 0},
}
DAEMON = {
    "version": "1.2.3",
    "uptime_s": 12.5,
    "sessions": [{}, {}],
    "counters": {"requests": 7},
}
LEDGER = {"prefill_tokens_per_s": 4.0, "gpu_watts": 100.0}


def settings(folder: Path, **others: Any) -> dict[str, Any]:
    made = small(folder / "kv")
    return {**made, "ssd": {**made["ssd"], "promote": False}, **others}


def parsed(text: str) -> dict[str, float]:
    """Samples as prometheus_client reads them."""
    return {
        sample.name + json.dumps(sample.labels, sort_keys=True): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def sample(text: str, name: str, **labels: str) -> float:
    return parsed(text)[name + json.dumps(labels, sort_keys=True)]


def test_a_known_workload_gives_these_numbers(tmp_path: Path) -> None:
    with kvdepot.open(**settings(tmp_path)) as store:
        space = space_of(store)
        keys, other = prompt(space, 1, 6), prompt(space, 2, 3)
        put(store, keys)
        put(store, keys[:2])
        store.match(keys)  # all
        store.match([*keys[:4], *other])  # some
        store.match(other)  # none
        with store.lease([*keys[:5], *other]):
            leased = kvdepot.metrics(store)
        assert tiers(store, keys) == ["dram"] * 6
        assert tiers(store, other) == [None] * 3
        assert store.flush()
        store.sessions.name("chat", keys)
        text = kvdepot.metrics(store)
        found = values(store.stats())
    assert sample(leased, "kvdepot_leased_blocks") == 5
    told = {
        "kvdepot_blocks": 6,
        "kvdepot_corrupt_blocks_total": 0,
        'kvdepot_get_blocks_total{tier="dram"}': 6,
        'kvdepot_get_blocks_total{tier="ssd"}': 0,
        'kvdepot_get_bytes_total{tier="dram"}': 6 * BLOCK_BYTES,
        "kvdepot_get_missed_blocks_total": 3,
        'kvdepot_get_tokens_total{tier="dram"}': 6 * TOKENS,
        "kvdepot_hit_ratio": 10 / 16,
        "kvdepot_leased_blocks": 0,
        'kvdepot_lookup_blocks_total{call="lease",outcome="absent"}': 3,
        'kvdepot_lookup_blocks_total{call="lease",outcome="found"}': 5,
        'kvdepot_lookup_blocks_total{call="match",outcome="absent"}': 6,
        'kvdepot_lookup_blocks_total{call="match",outcome="found"}': 10,
        'kvdepot_lookups_total{call="lease",outcome="partial"}': 1,
        'kvdepot_lookups_total{call="match",outcome="full"}': 1,
        'kvdepot_lookups_total{call="match",outcome="none"}': 1,
        'kvdepot_lookups_total{call="match",outcome="partial"}': 1,
        'kvdepot_matched_blocks_total{tier="dram"}': 10,
        'kvdepot_matched_blocks_total{tier="ssd"}': 0,
        'kvdepot_put_blocks_total{outcome="present"}': 2,
        'kvdepot_put_blocks_total{outcome="stored"}': 6,
        "kvdepot_put_bytes_total": 6 * BLOCK_BYTES,
        "kvdepot_sessions": 1,
        'kvdepot_tier_blocks{tier="dram"}': 6,
        'kvdepot_tier_blocks{tier="ssd"}': 6,
        'kvdepot_tier_healthy{tier="ssd"}': 1,
        'kvdepot_write_queue_blocks{tier="ssd"}': 0,
        'kvdepot_write_queue_oldest_seconds{tier="ssd"}': 0,
        "kvdepot_written_blocks_total": 6,
    }
    assert {name: found[name] for name in told} == told
    assert sample(text, "kvdepot_get_duration_seconds_count") == 2
    assert sample(text, "kvdepot_put_duration_seconds_count") == 2
    assert sample(text, "kvdepot_write_duration_seconds_count", tier="ssd") >= 1


def test_what_comes_from_drives_leaves_and_is_removed(tmp_path: Path) -> None:
    with kvdepot.open(**settings(tmp_path)) as store:
        space = space_of(store)
        keys = prompt(space, 1, 6)
        put(store, keys)
        assert store.flush()
        flood(store, space, 100)
        assert store.match(keys).tiers == ("ssd",) * 6
        assert tiers(store, keys) == ["ssd"] * 6
        assert store.remove(keys[5:]) == 1
        stats = store.stats()
        found, text = values(stats), kvdepot.metrics(store)
    assert found['kvdepot_get_blocks_total{tier="ssd"}'] == 6
    assert found['kvdepot_get_bytes_total{tier="ssd"}'] == 6 * BLOCK_BYTES
    assert found['kvdepot_get_tokens_total{tier="ssd"}'] == 6 * TOKENS
    assert found['kvdepot_matched_blocks_total{tier="ssd"}'] == 6
    assert found["kvdepot_removed_blocks_total"] == 1
    gone = found['kvdepot_evicted_blocks_total{tier="dram",reason="room"}']
    assert gone == stats["counters"]["evicted_dram"] > 0
    assert gone == found["kvdepot_blocks"] + 1 - found['kvdepot_tier_blocks{tier="dram"}']
    assert sample(text, "kvdepot_read_duration_seconds_count", tier="ssd") >= 1


def test_pins_granted_refused_ended_and_missing(tmp_path: Path) -> None:
    made = settings(tmp_path, ssd={**small(tmp_path / "kv")["ssd"], "capacity": 4 << 20})
    with kvdepot.open(**made) as store:
        for number, name in enumerate("abc"):
            keys = prompt(space_of(store), number, 4)
            put(store, keys)
            store.sessions.name(name, keys)
        for name in "abc":
            assert store.sessions.pin(name)
        assert store.sessions.pin("c", for_s=60), "in the place of the one it had"
        assert not store.sessions.pin("a", until_s=1.0), "in the past"
        assert store.sessions.unpin("b") == 1
        before = values(store.stats())
        assert store.remove(prompt(space_of(store), 0, 4)[3:]) == 1
        assert store.sessions.unpin("c") == 1, "pins are counted again"
        after = values(store.stats())
    record_bytes = 4096 + -(-BLOCK_BYTES // 4096) * 4096
    told = {
        "kvdepot_pins": 2,
        'kvdepot_pin_events_total{event="granted"}': 4,
        'kvdepot_pin_events_total{event="refused"}': 1,
        'kvdepot_pin_events_total{event="ended"}': 1,
        "kvdepot_pinned_blocks": 8,
        "kvdepot_pinned_bytes": 8 * record_bytes,
        "kvdepot_pinned_missing_blocks": 0,
    }
    assert {name: before[name] for name in told} == told
    assert after["kvdepot_pinned_missing_blocks"] == 1


def test_what_a_drain_drops_is_told_apart(tmp_path: Path) -> None:
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    made = small(tmp_path)["ssd"]
    with kvdepot.open(**settings(tmp_path, ssd={**made, "path": paths})) as store:
        state = store.inspect().state
        put(store, prompt(space_of(store), 1, 4))
        state.events.count("evicted_ssd", 3)
        state.events.count("drained_ssd", 1)
        found = values(store.stats())
    assert found['kvdepot_evicted_blocks_total{tier="ssd",reason="room"}'] == 2
    assert found['kvdepot_evicted_blocks_total{tier="ssd",reason="drain"}'] == 1


def test_every_counter_of_the_store_is_a_metric(tmp_path: Path) -> None:
    """Each counter gets a number of its own, and that number shows up."""
    with kvdepot.open(**small(tmp_path / "kv")) as store:
        put(store, prompt(space_of(store), 1, 2))
        stats = store.stats()
    counters = {name: 1000 + number for number, name in enumerate(sorted(stats["counters"]))}
    text = render({**stats, "counters": counters})
    shown = set(parsed(text).values())
    room = sample(text, "kvdepot_evicted_blocks_total", tier="ssd", reason="room")
    assert room == counters["evicted_ssd"] - counters["drained_ssd"]
    absent_tiers = {"evicted_ssd"} | {
        name
        for name in counters
        for tier in ("cxl", "hdd", "plugin", "object")
        if name.endswith(f"_{tier}")
    }
    totals = {"get_bytes"}  # by tier as a metric
    for name, value in counters.items():
        assert value in shown or name in absent_tiers | totals, name


def test_every_metric_has_values_somewhere(tmp_path: Path) -> None:
    """No line of the table reads what is not there."""
    ssd = {**small(tmp_path / "kv")["ssd"], "writes_per_day": 1.0}
    with kvdepot.open(**settings(tmp_path, ssd=ssd, ledger=LEDGER)) as store:
        keys = prompt(space_of(store), 1, 4)
        put(store, keys)
        store.match(keys)
        assert store.flush()
        flood(store, space_of(store), 100)
        tiers(store, keys)
        with store.reserve(prompt(space_of(store), 7, 1)):
            pass
        assert store.admin.ledger()["tenants"]
        store.admin.report_first_token(FirstToken(100, 80, 0.5, 0.4, 2.0, Reason.FETCH))
        told = {"events": {"stored": 3, "blocks": 3}}
        stats = {**store.stats(), "daemon": DAEMON, "site": SITE, **told}
        store.inspect().state.events.took("request", 0.001, "match")
        stats["traffic"] = store.stats()["traffic"]
        stats["tiers"]["ssd"]["drives"][0]["refused_manifests"] = 0  # as a bucket has it
    absent = [metric.name for metric in METRICS if not list(metric.read(stats))]
    assert absent == []
    found = values(stats)
    tokens = stats["ledger"]["tokens"]
    assert found["kvdepot_gpu_saved_seconds_total"] == tokens / 4.0
    assert found["kvdepot_gpu_saved_joules_total"] == tokens / 4.0 * 100.0
    assert found['kvdepot_tenant_gpu_saved_seconds_total{tenant=""}'] == tokens / 4.0
    assert found['kvdepot_tenant_saved_tokens_total{tenant="",tier="ssd"}'] == tokens == 4 * TOKENS
    assert found["kvdepot_clients"] == 2
    assert found['kvdepot_client_events_total{event="requests"}'] == 7
    assert found['kvdepot_build_info{version="1.2.3"}'] == 1


def test_first_tokens_are_counted_as_told() -> None:
    activity = Activity()
    told = [
        FirstToken(1000, 800, 0.25, 0.5, 2.0, Reason.FETCH),
        FirstToken(500, 0, 1.0, 1.0, 1.0, Reason.RECOMPUTE),
        FirstToken(50, 50, 4.0, inf, inf, Reason.PREFILL_UNKNOWN),
    ]
    activity.observe([FirstTokenReported(at, first) for at, first in enumerate(told)])
    stats = activity.describe(10.0)
    found = values(stats)
    assert found["kvdepot_first_tokens_compared_total"] == 2
    assert found["kvdepot_first_token_measured_seconds_total"] == 1.25
    assert found["kvdepot_first_token_predicted_seconds_total"] == 1.5
    assert found["kvdepot_first_token_recompute_seconds_total"] == 3.0
    assert found['kvdepot_decisions_total{decision="fetch"}'] == 1
    assert found['kvdepot_decisions_total{decision="prefill_unknown"}'] == 1
    assert sample(render(stats), "kvdepot_first_token_duration_seconds_sum") == 5.25
    newest = stats["first_tokens"]["latest"][0]
    assert newest["predicted_s"] is None and newest["recompute_s"] is None
    assert (newest["ago_s"], newest["seconds"], newest["decision"]) == (8.0, 4.0, "prefill_unknown")
    json.loads(json.dumps(stats, allow_nan=False))


def test_the_latest_decisions_are_few() -> None:
    activity = Activity()
    told = [FirstToken(number, 0, 0.1, 0.1, 0.1, Reason.CUT) for number in range(1000)]
    activity.observe([FirstTokenReported(0.0, first) for first in told])
    latest = activity.describe(0.0)["first_tokens"]["latest"]
    assert [one["prompt_tokens"] for one in latest] == list(range(999, 979, -1))


@pytest.mark.parametrize("seconds", [float("nan"), inf, -1.0])
def test_a_first_token_that_cannot_be_is_refused(seconds: float, tmp_path: Path) -> None:
    with kvdepot.open(**small(tmp_path / "kv")) as store:
        with pytest.raises(kvdepot.ConfigError, match="first token"):
            store.admin.report_first_token(FirstToken(5, 5, seconds, 1.0, 1.0, Reason.FETCH))
        with pytest.raises(kvdepot.ConfigError, match="6 of 5"):
            store.admin.report_first_token(FirstToken(5, 6, 1.0, 1.0, 1.0, Reason.FETCH))
        assert store.stats()["first_tokens"]["latest"] == []


def test_first_tokens_later_than_computing_are_told() -> None:
    slow = {"compared": 20, "seconds": 40.0, "recompute_seconds": 20.0}
    (alert,) = alerts({"first_tokens": slow})
    assert alert.level == "warn" and "take 2 s" in alert.what and "take 1 s" in alert.what
    assert not alerts({"first_tokens": {**slow, "compared": 19}})
    assert not alerts({"first_tokens": {**slow, "seconds": 20.0}})


def test_the_text_is_what_prometheus_reads(tmp_path: Path) -> None:
    with kvdepot.open(**small(tmp_path / "kv")) as store:
        put(store, prompt(space_of(store), 1, 4))
        text = render({**store.stats(), "daemon": {**DAEMON, "version": 'a"b\\c\nd'}})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for metric in METRICS:
        family = families.get(metric.name.removesuffix("_total"))
        if family is not None:
            assert (family.type, family.documentation) == (metric.kind, metric.help)
    assert sample(text, "kvdepot_build_info", version='a"b\\c\nd') == 1


def test_buckets_hold_what_took_less() -> None:
    activity = Activity()
    times = (0.0, 15e-6, 17e-6, 0.0011, 1.0, 1e6)
    activity.observe([Took("get", "", seconds) for seconds in times])
    found = parsed(render(activity.describe(0.0)))
    bucket = {
        float(json.loads(name.removeprefix("kvdepot_get_duration_seconds_bucket"))["le"]): value
        for name, value in found.items()
        if "_bucket" in name
    }
    assert bucket[16e-6] == 2 and bucket[64e-6] == 3 and bucket[0.001024] == 3
    assert bucket[0.004096] == 4 and bucket[1.048576] == 5 and bucket[67.108864] == 5
    assert bucket[float("inf")] == 6


def test_lookups_of_many_threads_are_all_counted(tmp_path: Path) -> None:
    made = small(tmp_path / "kv")
    with kvdepot.open(**{**made, "dram": {**made["dram"], "shared": True}}) as store:
        assert isinstance(store, Store)
        keys = prompt(space_of(store), 1, 4)
        put(store, keys)
        caller, words = Caller("a test"), as_words(keys)

        def look() -> None:
            for _ in range(500):
                store.engine.match(caller, words)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = values(store.stats())
    assert found['kvdepot_lookups_total{call="match",outcome="full"}'] == 2000
    assert found['kvdepot_matched_blocks_total{tier="dram"}'] == 8000


def test_the_oldest_block_that_waits_has_an_age(tmp_path: Path) -> None:
    with kvdepot.open(**small(tmp_path / "kv")) as store:
        lower = store.inspect().lower()
        state = store.inspect().state
        assert store.flush(WAIT_S)
        with state.lock:
            lower.queue.tickets[1], lower.queue._arrivals = (
                10,
                type(lower.queue._arrivals)([(5, 100.0), (12, 107.0)]),
            )
            assert lower.queue.oldest_age_s(130.0) == 30.0
            lower.queue.tickets[1] = 12
            assert lower.queue.oldest_age_s(130.0) == 23.0
            del lower.queue.tickets[1]
            assert lower.queue.oldest_age_s(130.0) == 0.0


def page_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "metrics_page", ROOT / "benchmarks" / "metrics_page.py"
    )
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_page_lists_what_there_is() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == page_script().written(page), "python benchmarks/metrics_page.py --write"


def test_names_follow_the_rules() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"kvdepot(_[a-z]+)+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"healthy": False, "reason": "write failed"}, "/d is down: write failed"),
        ({"draining": True, "used_bytes": 1 << 20}, "/d is being drained, 1MiB left"),
        ({"of_profile": 0.2}, "reads at 20% of its measured speed"),
        ({"written": {"daily_bytes": 1 << 30, "level_bytes": 0}}, "has used up its write budget"),
        ({"full": True}, "/d"),
    ],
)
def test_alerts_name_the_drive_and_what_to_do(change: dict[str, Any], said: str) -> None:
    drive = {"path": "/d", "healthy": True, **change}
    found = alerts({"tiers": {"ssd": {"drives": [drive]}}})
    assert len(found) == 1 and said in found[0].what and found[0].do


def test_a_store_that_is_well_has_no_alerts(tmp_path: Path) -> None:
    with kvdepot.open(**small(tmp_path / "kv")) as store:
        put(store, prompt(store.namespace(model="m", layout=LAYOUT), 1, 4))
        until(lambda: not store.stats()["dirty_bytes"])
        assert alerts(store.stats()) == []
        corrupt = {**store.stats(), "counters": {"quarantined": 3}}
        assert [alert.level for alert in alerts(corrupt)] == ["bad"]
