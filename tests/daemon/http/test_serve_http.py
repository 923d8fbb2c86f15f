"""`kvdepot serve --http`, `kvdepot stats` and `kvdepot top` against a daemon of its own."""

import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.daemon_clients import StartDaemon
from tests.support.http_daemon import ask
from tests.support.store_contract import TOKENS, prompt, put, space_of, tiers

import kvdepot
from kvdepot.cli.command import address
from kvdepot.cli.main import main
from kvdepot.cli.stats import screen

Seen = pytest.CaptureFixture[str]
SPEED, WATTS = "ledger.prefill_tokens_per_s=10", "ledger.gpu_watts=700"
HTTP = ("--http", "127.0.0.1:0", "--set", SPEED, "--set", WATTS)


@pytest.mark.slow
def test_a_daemon_is_watched(start_daemon: StartDaemon, capsys: Seen) -> None:
    daemon = start_daemon(*HTTP)
    url = daemon.ready["http"]
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 5)
        put(store, keys)
        assert len(store.match(keys)) == 5
        assert tiers(store, keys) == ["dram"] * 5
        store.sessions.name("chat", keys)
        store.sessions.name("chat 2", keys[:3])
        assert store.flush()
        text = ask(url, "GET", "/metrics").text
        assert ask(url, "GET", "/readyz").json == {"ready": True}
        socket = ["--socket", str(daemon.socket)]
        assert main(["stats", *socket, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert main(["stats", *socket, "--prometheus"]) == 0
        by_socket = capsys.readouterr().out
        assert main(["stats", *socket]) == 0
        screen = capsys.readouterr().out
        assert main(["top", *socket, "--once", "--interval", "0.01"]) == 0
        top = capsys.readouterr().out
        assert main(["top", *socket, "--once", "--interval", "0.01", "--json"]) == 0
        watched = json.loads(capsys.readouterr().out)
    found = {
        (one.name, *one.labels.values()): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }
    assert found["kvdepot_get_tokens_total", "dram"] == 5 * TOKENS
    assert found["kvdepot_gpu_saved_seconds_total",] == 0.5 * TOKENS
    assert found["kvdepot_gpu_saved_joules_total",] == 350 * TOKENS
    assert found["kvdepot_clients",] == 1
    assert found["kvdepot_request_duration_seconds_count", "fetch"] == 1
    assert found["kvdepot_matched_blocks_total", "dram"] == 5
    assert found["kvdepot_hit_ratio",] == 1
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {family.name for family in text_string_to_metric_families(by_socket)} == names
    assert told["metrics"]['kvdepot_get_tokens_total{tier="dram"}'] == 5 * TOKENS
    assert told["derived"]["gpu_seconds"] == 0.5 * TOKENS
    assert {one["name"] for one in told["sessions_shown"]["busy"]} == {"chat", "chat 2"}
    for shown in (screen, top):
        assert "hit ratio 100.0%" in shown and "chat" in shown and "\x1b" not in shown
        assert max(map(len, shown.splitlines())) <= 80
    assert watched["flow_bytes_per_s"] == {"dram": 0.0, "ssd": 0.0}
    assert daemon.stop() == 0


def test_options_that_would_do_nothing_are_refused(tmp_path: Path, capsys: Seen) -> None:
    for given in (["--http-token-file", "x"], ["--http-cert", "x"], ["--http-archive-max", "1"]):
        assert main(["serve", "--socket", str(tmp_path / "s"), *given]) == 2
        assert given[0] in capsys.readouterr().err


@pytest.mark.parametrize("text", ["9400", "host", ":1", "a:", "a:-1", "a:65536", "a:x", "a:¹"])
def test_addresses(text: str) -> None:
    assert address("127.0.0.1:0") == ("127.0.0.1", 0)
    assert address("[::1]:9400") == ("::1", 9400)
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        address(text)


def test_a_daemon_that_is_not_there_is_named(tmp_path: Path, capsys: Seen) -> None:
    for command in ("stats", "top"):
        assert main([command, "--socket", str(tmp_path / "none")]) == 2
        seen = capsys.readouterr()
        assert "none" in seen.err and "hint:" in seen.err and not seen.out


def test_an_address_in_use_is_said(tmp_path: Path, capsys: Seen) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = ["--set", "dram=2MiB", "--http", f"127.0.0.1:{port}"]
        assert main(["serve", "--socket", str(tmp_path / "s"), *given]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_screens_fit_narrow_terminals(tmp_path: Path) -> None:
    with kvdepot.open(dram={"capacity": "2MiB", "prefault": False}) as store:
        for columns in (40, 80):
            shown = screen(store.stats(), columns=columns)
            assert max(map(len, shown.splitlines())) <= columns
