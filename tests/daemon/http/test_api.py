"""The HTTP API as an operator's script meets it, and as an attacker does."""

import asyncio
import logging
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send
from tests.support.http_daemon import HttpDaemon, ask
from tests.support.store_contract import (
    BLOCK_BYTES,
    LAYOUT,
    TOKENS,
    prompt,
    put,
    small,
    space_of,
    tiers,
)
from tests.support.waiting import until

import kvdepot
from kvdepot.cli.report import Report
from kvdepot.core.log import RateLimitedLog
from kvdepot.core.private import write_private_file
from kvdepot.daemon.http import service
from kvdepot.daemon.http.changes import ChangeRunner, ChangeRunningError
from kvdepot.daemon.http.guard import BODY_BYTES_MAX, AccessRules, Guard, RateLimit
from kvdepot.daemon.http.service import HttpSettings
from kvdepot.errors import ConfigError
from kvdepot.store.metrics import values

TOKEN = "0123456789abcdef-token"


@pytest.fixture
def open_daemon(tmp_path: Path) -> Iterator[HttpDaemon]:
    """Without a token: everyone on the machine may read."""
    with HttpDaemon(tmp_path) as daemon:
        yield daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[HttpDaemon]:
    ssd = {**small(tmp_path)["ssd"], "path": [str(tmp_path / "a"), str(tmp_path / "b")]}
    with HttpDaemon(tmp_path, TOKEN, ssd=ssd, tenants={"t": {"secret_hex": "c0ffee" * 8}}) as one:
        yield one


def test_health_readiness_and_the_document(open_daemon: HttpDaemon) -> None:
    assert open_daemon.get("/healthz").json == {"ok": True}
    assert open_daemon.get("/readyz").json == {"ready": True}
    document = open_daemon.get("/openapi.json").json
    assert document["info"]["version"] == kvdepot.__version__
    paths = document["paths"]
    assert {"/metrics", "/healthz", "/readyz", "/api/stats"} <= set(paths)
    taken = paths["/api/hints"]["post"]
    assert taken["security"] == [{"token": []}] and "422" not in taken["responses"]
    for path in ("/docs", "/redoc"):
        assert open_daemon.get(path).status == 404, "they would load scripts from other hosts"
    open_daemon.daemon.loop.is_stopping = True
    assert open_daemon.get("/readyz").status == 503


def test_a_head_is_that_of_the_answer(open_daemon: HttpDaemon) -> None:
    parts = urlsplit(open_daemon.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60) as peer:
        for path, status in (("/healthz", 200), ("/nowhere", 404)):
            whole = open_daemon.get(path)
            peer.sendall(f"HEAD {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
            head = b""
            while b"\r\n\r\n" not in head:
                head += peer.recv(65536)
            lines, _, rest = head.decode().partition("\r\n\r\n")
            assert lines.startswith(f"HTTP/1.1 {status} ") and whole.status == status
            assert f"content-length: {len(whole.body)}" in lines.lower().splitlines()
            assert rest == ""
        # What comes next begins with the next answer: no body lies between.
        peer.sendall(b"GET /readyz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert peer.recv(9) == b"HTTP/1.1 "


def test_metrics_are_those_of_the_store(open_daemon: HttpDaemon) -> None:
    keys = prompt(space_of(open_daemon.store), 1, 4)
    put(open_daemon.store, keys)
    open_daemon.store.match(keys)
    assert open_daemon.store.flush()
    reply = open_daemon.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(reply.text))
    told = {s.name: s.value for family in families for s in family.samples if not s.labels}
    assert told["kvdepot_blocks"] == 4
    assert told["kvdepot_put_bytes_total"] == 4 * BLOCK_BYTES
    found = values(open_daemon.get("/api/stats").json)
    assert {told[name] - found[name] for name in told if name in found} <= {
        0.0, told["kvdepot_uptime_seconds"] - found["kvdepot_uptime_seconds"]
    }  # fmt: skip


def test_reading_needs_no_token_on_loopback_changing_does(open_daemon: HttpDaemon) -> None:
    seen = set()
    for path, methods in open_daemon.get("/openapi.json").json["paths"].items():
        for method in methods:
            asked = path.format(tier="ssd", session="chat")
            reply = open_daemon.ask(method.upper(), asked, None if method == "get" else {})
            open_to_all = method == "get" and not path.endswith("/export")
            assert reply.status == (200 if open_to_all else 403), path
            seen.add(method)
    assert seen == {"get", "post", "put"}


def test_names_of_sessions_are_for_those_with_the_token(
    open_daemon: HttpDaemon, daemon: HttpDaemon
) -> None:
    for one, hidden in ((open_daemon, True), (daemon, False)):
        keys = prompt(space_of(one.store), 1, 3)
        put(one.store, keys)
        one.store.sessions.name("alice's chat", keys)
        reply = one.get("/api/sessions?order=busy&limit=5")
        assert reply.json["names_hidden"] is hidden
        assert ("alice" in reply.text) is not hidden
        listed = reply.json["sessions"][0]
        assert (listed["blocks"], listed["turns"], listed["tiers"]) == (3, 1, {"dram": 3})
        assert ("alice" in one.get("/api/overview").text) is not hidden
        assert tiers(one.store, keys) == ["dram"] * 3
        one.store.sessions.name("alice's chat", keys)
        ledger = one.get("/api/ledger")
        assert ledger.json["sessions"][0]["tokens"] == 3 * TOKENS
        assert ("alice" in ledger.text) is not hidden


def test_without_a_token_tenants_and_paths_have_pseudonyms(tmp_path: Path) -> None:
    tenants = {"acme": {"secret_hex": "c0ffee" * 8}}
    with HttpDaemon(tmp_path, tenants=tenants) as daemon:
        space = daemon.store.namespace(model="contract", layout=LAYOUT, tenant="acme")
        keys = prompt(space, 1, 3)
        put(daemon.store, keys)
        assert daemon.store.flush()
        daemon.store.sessions.name("alice's chat", keys)
        assert daemon.store.match(keys)
        into = bytearray(BLOCK_BYTES)
        assert daemon.store.get_many(keys[:1], [into])
        drive = daemon.store.stats()["tiers"]["ssd"]["drives"][0]["path"]
        seen = ""
        for path, methods in daemon.get("/openapi.json").json["paths"].items():
            if "get" in methods and not path.endswith("/export"):
                text = daemon.get(path).text
                seen += text
                for secret in (
                    "acme",
                    "alice",
                    str(tmp_path),
                    drive,
                    str(daemon.daemon.describe()["socket"]),
                ):
                    assert secret not in text, path
        assert re.search("tenant [0-9a-f]{8}", seen) and re.search("path [0-9a-f]{8}", seen)
        assert 'drive="path ' in daemon.get("/metrics").text


def test_without_the_right_token_nothing_is_told(daemon: HttpDaemon) -> None:
    for given in (
        "",
        "Bearer wrong",
        "Bearer ",
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        "Bearer \xff",
    ):
        for path in ("/metrics", "/api/stats", "/api/config", "/openapi.json", "/nowhere"):
            reply = daemon.ask("GET", path, authorization=given)
            assert reply.status == 401 and reply.headers["www-authenticate"] == "Bearer"
        assert daemon.ask("POST", "/api/hints", {}, authorization=given).status == 401
        assert daemon.ask("GET", "/healthz", authorization=given).status == 200
    assert daemon.get("/metrics").status == 200


def test_other_hosts_are_refused_where_there_is_no_token(open_daemon: HttpDaemon) -> None:
    """A page of another site could point its name at this address."""
    assert open_daemon.ask("GET", "/api/stats", host="evil.example").status == 421
    assert open_daemon.ask("GET", "/api/stats", host="localhost:1").status == 200


def test_secrets_are_masked(daemon: HttpDaemon) -> None:
    reply = daemon.get("/api/config")
    assert reply.json["config"]["dram"]["capacity"] == "2MiB"
    assert "c0ffee" not in reply.text and TOKEN not in reply.text
    assert TOKEN not in daemon.get("/api/overview").text


def test_tiers_are_changed(daemon: HttpDaemon, tmp_path: Path) -> None:
    put(daemon.store, prompt(space_of(daemon.store), 1, 8))
    assert daemon.store.flush()
    added = daemon.ask("POST", "/api/tiers/ssd/drives", {"path": str(tmp_path / "c")})
    assert (added.status, added.json["state"]) == (200, "done")
    begun = daemon.ask("POST", "/api/tiers/ssd/drain", {"path": str(tmp_path / "a")})
    assert begun.status in (200, 202)
    until(lambda: daemon.get("/api/change").json["state"] == "done")
    assert daemon.get("/api/change").json["what"] == f"drain {tmp_path / 'a'} of ssd"
    drives = daemon.get("/api/tiers").json["tiers"]["ssd"]["drives"]
    assert [(Path(one["path"]).name, one["drained"]) for one in drives] == [
        ("a", True), ("b", False), ("c", False)
    ]  # fmt: skip
    assert daemon.ask("PUT", "/api/tiers/ssd/capacity", {"capacity": "24MiB"}).status == 200
    mode = daemon.ask("PUT", "/api/tiers/ssd/write-mode", {"mode": "write-through-selective"})
    assert mode.status == 200
    assert daemon.get("/api/tiers").json["tiers"]["ssd"]["write_mode"] == "write-through-selective"


BAD: list[tuple[str, str, Any, str]] = [
    ("POST", "/api/tiers/ssd/drives", {"path": "relative"}, "must be absolute"),
    ("POST", "/api/tiers/ssd/drives", {}, "path: Field required"),
    ("POST", "/api/tiers/ssd/drives", {"path": 3}, "path: Input should be a valid string"),
    ("POST", "/api/tiers/ssd/drain", {"path": "/a\0b"}, "cannot be printed"),
    ("POST", "/api/tiers/ssd/drain", {"path": "/nowhere"}, "/nowhere"),
    ("POST", "/api/tiers/dram/drain", {"path": "/nowhere"}, "memory tiers cannot change"),
    ("PUT", "/api/tiers/ssd/capacity", {"capacity": "much"}, "much"),
    ("PUT", "/api/tiers/ssd/write-mode", {"mode": "often"}, "mode: Input should be '"),
    ("PUT", "/api/tiers/ssd/write-mode", {"mode": "write-back", "x": 1}, "x: Extra inputs are not"),
    ("POST", "/api/hints", {"deadline_s": 1}, "give one of session, keys and tokens"),
    (
        "POST",
        "/api/hints",
        {"deadline_s": 1, "keys": ["zz"]},
        "keys.0: String should match",
    ),
    (
        "POST",
        "/api/hints",
        {"deadline_s": True, "session": "a"},
        "should be a valid number",
    ),
    ("POST", "/api/hints", {"deadline_s": -1, "session": "a"}, "greater than or equal to 0"),
    (
        "POST",
        "/api/sessions/state",
        {"session": "x", "state": "gone"},
        "should be 'alive'",
    ),
    ("GET", "/api/sessions?limit=0", None, "greater than or equal to 1"),
    ("GET", "/api/sessions?limit=x", None, "limit: Input should be a valid integer"),
    ("GET", "/api/sessions?what=x", None, "what: Extra inputs are not"),
]


def test_bad_requests_get_one_clear_error(daemon: HttpDaemon) -> None:
    for method, path, body, said in BAD:
        reply = daemon.ask(method, path, body)
        assert reply.status == 400, reply.text
        assert said in reply.json["error"]


def test_what_is_not_there_is_not_found(daemon: HttpDaemon) -> None:
    hinted = daemon.ask("POST", "/api/hints", {"deadline_s": 1, "session": "none"})
    assert (hinted.status, hinted.json["error"]) == (404, "session: not found")
    drained = daemon.ask("POST", "/api/tiers/tape/drain", {"path": "/x"})
    assert (drained.status, drained.json["hint"]) == (404, "this store has dram, ssd")


def test_bodies_are_json_objects_of_bounded_size(daemon: HttpDaemon) -> None:
    json_type = {"content_type": "application/json"}
    for body in (b"", b"{", b"[]", b"NaN", b'{"deadline_s": NaN}', b"[" * 100_000, b"\xff"):
        assert daemon.ask("POST", "/api/hints", body, **json_type).status == 400
    assert daemon.ask("POST", "/api/hints", b"{}", content_type="text/plain").status == 415
    large = b'{"session": "' + b"a" * BODY_BYTES_MAX + b'"}'
    assert daemon.ask("POST", "/api/hints", large, **json_type).status == 413
    pieces = (large[at : at + 4096] for at in range(0, len(large), 4096))
    assert daemon.ask("POST", "/api/hints", pieces, **json_type).status == 413, "in chunks"


def test_sessions_are_told_of_and_hinted_at(daemon: HttpDaemon) -> None:
    space = space_of(daemon.store)
    keys = prompt(space, 1, 4)
    put(daemon.store, keys)
    daemon.store.sessions.name("chat", keys)
    listed = daemon.get("/api/sessions").json["sessions"]
    assert [(one["name"], one["namespace"]) for one in listed] == [("chat", space.tag.hex())]
    hinted = daemon.ask("POST", "/api/hints", {"session": "chat", "deadline_s": 5})
    assert hinted.json == {"resident": 4, "wanted": 0}
    by_keys = {"keys": [key.hex() for key in keys[:2]], "deadline_s": 5}
    assert daemon.ask("POST", "/api/hints", by_keys).json == {"resident": 2, "wanted": 0}
    tokens = [1, *range(1, TOKENS * 3)]
    by_tokens = {"tokens": tokens, "model": "contract", "deadline_s": 5}
    assert daemon.ask("POST", "/api/hints", by_tokens).json == {"resident": 3, "wanted": 0}
    by_tokens["model"] = "another"
    assert daemon.ask("POST", "/api/hints", by_tokens).json == {"resident": 0, "wanted": 0}
    closed = {"session": "chat", "state": "closed", "namespace": space.tag.hex()}
    assert daemon.ask("POST", "/api/sessions/state", closed).status == 200


OUTSIDE = [
    "/../pyproject.toml", "/..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd",
    "/page/index.html", "/dashboard.js/../../service.py", "/api/tiers/..%2f..%2fssd/drives",
    "/api", "/api/stats/", "/index.html", "/%00",
]  # fmt: skip


def test_there_is_nothing_outside(open_daemon: HttpDaemon) -> None:
    for path in OUTSIDE:
        reply = open_daemon.get(path)
        assert reply.status in (404, 405)
        assert "root:" not in reply.text and "location" not in reply.headers


def test_the_page_needs_nothing_from_outside(open_daemon: HttpDaemon) -> None:
    for path, media in (("/", "html"), ("/dashboard.js", "javascript"), ("/dashboard.css", "css")):
        reply = open_daemon.get(path)
        assert reply.status == 200 and media in reply.headers["content-type"]
        assert not re.search(r"(?:https?:)?//[a-z]", reply.text.replace("// ", ""))


def test_reports_and_the_dashboard_have_one_palette(open_daemon: HttpDaemon) -> None:
    style = open_daemon.get("/dashboard.css").text
    report = Report("report", "", []).html({})
    for tier in ("dram", "cxl", "ssd", "hdd", "object"):
        colour = re.search(rf"--{tier}: (#[0-9a-f]{{6}})", style)
        assert colour is not None and colour[0] in report
        assert f"svg .{tier} {{ fill: var(--{tier})" in report
        assert f".fill.{tier} " in style


def test_every_answer_keeps_browsers_from_other_sites(open_daemon: HttpDaemon) -> None:
    for path in ("/healthz", "/metrics", "/nowhere", "/api/stats"):
        headers = open_daemon.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers and "server" not in headers


def test_too_many_requests_are_refused_and_health_is_not() -> None:
    now = [0.0]
    limit = RateLimit(10.0, 20.0, lambda: now[0])
    assert [limit.allows() for _ in range(22)] == [True] * 20 + [False] * 2
    now[0] = 0.5
    assert [limit.allows() for _ in range(6)] == [True] * 5 + [False]


def test_a_flood_is_limited() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse({})(scope, receive, send)

    guard = Guard(app, AccessRules(), clock=lambda: 0.0)

    async def statuses(path: str, count: int) -> list[int]:
        found: list[int] = []

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                found.append(message["status"])

        async def receive() -> Message:
            return {"type": "http.request"}

        scope = {"type": "http", "path": path, "method": "GET", "headers": []}
        for _ in range(count):
            await guard(dict(scope), receive, send)
        return found

    assert asyncio.run(statuses("/api/stats", 101)) == [200] * 100 + [429]
    for path in ("/healthz", "/metrics"):
        assert asyncio.run(statuses(path, 150)) == [200] * 150, "these are not limited"


def test_one_change_at_a_time() -> None:
    runner, go = ChangeRunner(), threading.Event()
    waiting = threading.Thread(target=lambda: runner.run("first", lambda: go.wait(60) and None))
    waiting.start()
    until(lambda: runner.last.what == "first")
    with pytest.raises(ChangeRunningError, match="first"):
        runner.run("second", lambda: None)
    go.set()
    waiting.join()
    until(lambda: runner.last.state == "done")

    def fail() -> None:
        raise ConfigError("ssd", "no", hint="yes")

    change = runner.run("third", fail)
    assert (change.state, change.error, change.hint) == ("failed", "ssd: no", "yes")


def test_other_addresses_need_a_token(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "192.0.2.1", "::", "example.org"):
        with pytest.raises(ConfigError, match="needs a token") as caught:
            HttpSettings(host, 0).check()
        assert "--http-token-file" in caught.value.hint
    write_private_file(tmp_path / "short", b"secret\n")
    with pytest.raises(ConfigError, match="less than 16"):
        HttpSettings("127.0.0.1", 0, tmp_path / "short").check()
    with pytest.raises(ConfigError, match="cannot be read"):
        HttpSettings("127.0.0.1", 0, tmp_path / "absent").check()
    with pytest.raises(ConfigError, match="needs both --http-cert and --http-key"):
        HttpSettings("::1", 0, cert_file=tmp_path / "short").check()
    HttpSettings("::1", 0).check()


def test_files_with_secrets_must_be_private(tmp_path: Path) -> None:
    token, cert, key = tmp_path / "token", tmp_path / "cert", tmp_path / "key"
    write_private_file(token, TOKEN.encode())
    write_private_file(key, b"key")
    cert.write_text("certificate")
    settings = HttpSettings("127.0.0.1", 0, token, cert, key)
    for path, option in ((token, "--http-token-file"), (key, "--http-key")):
        for mode in (0o644, 0o604, 0o601, 0o660):
            path.chmod(mode)
            with pytest.raises(ConfigError, match="may be accessed by other users") as caught:
                settings.check()
            assert str(caught.value).startswith(option)
            assert caught.value.hint == f"chmod 600 {path}"
        path.chmod(0o640)
        settings.check()


def test_a_token_in_the_clear_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_log", RateLimitedLog("kvdepot.http"))
    cert = tmp_path / "cert"
    HttpSettings("127.0.0.1", 0).warn()
    HttpSettings("0.0.0.0", 0, cert_file=cert, key_file=cert).warn()
    assert not caplog.messages
    HttpSettings("0.0.0.0", 0).warn()
    assert "--http 0.0.0.0 has no certificate: the token can be read" in caplog.messages[0]


def test_requests_of_clients_are_timed(open_daemon: HttpDaemon) -> None:
    open_daemon.daemon.store.engine.state.events.took("request", 0.01, "match")
    text = open_daemon.get("/metrics").text
    assert 'kvdepot_request_duration_seconds_count{request="match"} 1' in text


def test_what_is_logged_shows_to_those_with_the_token(
    open_daemon: HttpDaemon, daemon: HttpDaemon
) -> None:
    logging.getLogger("kvdepot.volumes").warning("a drive is %s", "slow")
    events = daemon.get("/api/events").json["events"]
    assert events[0]["what"] == "a drive is slow" and events[0]["level"] == "warn"
    assert open_daemon.get("/api/events").json["events"] == []
    assert open_daemon.get("/api/overview").json["events"] == []


def test_it_ends_with_the_daemon(tmp_path: Path) -> None:
    with HttpDaemon(tmp_path) as daemon:
        url = daemon.url
        assert daemon.get("/api/stats").status == 200
    with pytest.raises(OSError):
        ask(url, "GET", "/healthz")
    until(lambda: not any("kvdepot-http" in one.name for one in threading.enumerate()))
