"""Sessions over HTTP."""

from pathlib import Path

import pytest
from tests.support.http_daemon import HttpDaemon
from tests.support.store_contract import TOKENS, prompt, put, space_of, tiers

TOKEN = "0123456789abcdef"


@pytest.mark.parametrize("verb", ["show", "pin", "unpin", "evict-to-disk", "prefetch"])
def test_an_unknown_session_is_not_found(tmp_path: Path, verb: str) -> None:
    with HttpDaemon(tmp_path, TOKEN) as daemon:
        reply = daemon.ask("POST", f"/api/sessions/{verb}", {"session": "x"})
        assert reply.status == 404 and reply.json["error"]


def test_a_session_is_kept_and_let_go(tmp_path: Path) -> None:
    with HttpDaemon(tmp_path, TOKEN) as daemon:
        keys = prompt(space_of(daemon.store), 1, 4)
        put(daemon.store, keys)
        daemon.store.sessions.name("chat", keys)
        named = {"session": "chat"}
        pinned = daemon.ask("POST", "/api/sessions/pin", {**named, "for_s": 60}).json
        assert pinned["kept"] and pinned["blocks"] == 4
        (shown,) = daemon.ask("POST", "/api/sessions/show", named).json["sessions"]
        assert shown["pin"]["until_s"] == pinned["until_s"]
        (listed,) = daemon.get("/api/sessions").json["sessions"]
        assert listed["pin"] == shown["pin"]
        both = daemon.ask("POST", "/api/sessions/pin", {**named, "for_s": 60, "until_s": 4e9})
        assert both.status == 400 and "not both" in both.json["error"]
        assert daemon.ask("POST", "/api/sessions/evict-to-disk", named).json["freed"] == 4
        assert daemon.ask("POST", "/api/sessions/prefetch", named).json["wanted"] == 4
        assert daemon.ask("POST", "/api/sessions/unpin", named).json == {"pins_ended": 1}
        closed = {**named, "state": "closed"}
        assert daemon.ask("POST", "/api/sessions/state", closed).json["blocks"] == 4
        assert daemon.get("/api/sessions").json["sessions"] == []


def test_the_ledger(tmp_path: Path) -> None:
    with HttpDaemon(tmp_path, TOKEN) as daemon:
        space = space_of(daemon.store)
        daemon.store.admin.report_prefill_speed(space.tag.hex(), 0.5)
        keys = prompt(space, 1, 4)
        put(daemon.store, keys)
        assert tiers(daemon.store, keys) == ["dram"] * 4
        found = daemon.get("/api/ledger").json
        assert found["total"]["gpu_s"] == found["tenants"][0]["gpu_s"] == 4 * TOKENS * 0.5
        assert found["assumed"]["measured"][space.tag.hex()]["tokens_per_s"] == 2.0
        assert "/api/ledger" in daemon.get("/openapi.json").json["paths"]
