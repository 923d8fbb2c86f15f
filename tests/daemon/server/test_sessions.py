"""`kvdepot session`, and sessions of an attached store."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemon_clients import StartDaemon
from tests.support.store_contract import TOKENS, prompt, put, space_of, tiers

import kvdepot
from kvdepot.cli.main import main
from kvdepot.cli.session import parse_moment
from kvdepot.errors import ConfigError
from kvdepot.testing.daemons import DaemonProcess

Seen = pytest.CaptureFixture[str]


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> DaemonProcess:
    return start_daemon()


def asked(daemon: DaemonProcess, capsys: Seen, verb: str, *rest: str, code: int = 0) -> Any:
    """What a command answers with --json."""
    assert main(["session", verb, "--socket", str(daemon.socket), *rest, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_session_is_listed_pinned_evicted_and_taken_to_another_daemon(
    daemon: DaemonProcess, start_daemon: StartDaemon, tmp_path: Path, capsys: Seen
) -> None:
    file = str(tmp_path / "chat.kvsession")
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 6)
        put(store, keys)
        store.sessions.name("chat", keys)
        assert [one["name"] for one in store.sessions.list()] == ["chat"]
        (listed,) = asked(daemon, capsys, "list", "--order", "busy")["sessions"]
        assert (listed["blocks"], listed["turns"], listed["pin"]) == (6, 1, None)
        assert listed["bytes"]["dram"] > 0
        receipt = asked(daemon, capsys, "pin", "chat", "--for", "1h")
        assert receipt["kept"] and receipt["blocks"] == 6
        assert asked(daemon, capsys, "evict-to-disk", "chat")["freed"] == 6
        assert asked(daemon, capsys, "prefetch", "chat", "--in", "20s")["brought"] == 6
        assert asked(daemon, capsys, "export", "chat", file)["blocks"] == 6
    other = start_daemon(folder="other")
    assert asked(other, capsys, "import", file)["complete"]
    with kvdepot.open(other.address) as store:
        assert len(store.match(prompt(space_of(store), 1, 6))) == 6
    daemon.kill()
    daemon.start()
    (found,) = asked(daemon, capsys, "show", "chat")["sessions"]
    assert found["pin"]["missing"] == 0, "after kill -9"
    assert asked(daemon, capsys, "unpin", "chat")["pins_ended"] == 1
    (listed,) = asked(daemon, capsys, "list")["sessions"]
    assert listed["pin"] is None


def test_the_ledger_of_a_daemon(daemon: DaemonProcess, capsys: Seen) -> None:
    where = ["--socket", str(daemon.socket)]
    assert main(["ledger", *where]) == 0
    assert "no block was given back" in capsys.readouterr().out
    with kvdepot.open(daemon.address) as store:
        space = space_of(store)
        keys = prompt(space, 1, 6)
        put(store, keys)
        assert tiers(store, keys) == ["dram"] * 6
        store.sessions.name("untimed", keys)
        assert store.admin.report_prefill_speed(space.tag.hex(), 0.5, 0.0)
        assert not store.admin.report_prefill_speed("00" * 8, 0.5)
        assert tiers(store, keys) == ["dram"] * 6
        store.sessions.name("chat", keys)
        assert main(["ledger", *where, "--json"]) == 0
        assert json.loads(capsys.readouterr().out).keys() == store.admin.ledger().keys()
        (tenant,) = store.admin.ledger()["tenants"]
        assert (tenant["tokens"], tenant["gpu_s"]) == (12 * TOKENS, 3.0 * TOKENS)
        assert main(["ledger", *where]) == 0
        seen = capsys.readouterr()
        assert "GPU time saved" in seen.out and "measured by its engine" in seen.err
        assert f"{6 * TOKENS:,} tokens have no GPU time" in seen.err
        assert "speed unknown" in seen.out, "of the session that was told before the report"
        sessions = {one["name"]: one["gpu_s"] for one in store.admin.ledger()["sessions"]}
        assert sessions == {"chat": 3.0 * TOKENS, "untimed": 0.0}


def test_for_people(daemon: DaemonProcess, tmp_path: Path, capsys: Seen) -> None:
    where = ["--socket", str(daemon.socket)]
    assert main(["session", "list", *where]) == 0
    assert "no sessions" in capsys.readouterr().out
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 6)
        put(store, keys[:5])
        store.sessions.name("chat", keys)
        assert main(["session", "pin", "chat", *where, "--until", "friday"]) == 2
        seen = capsys.readouterr().err
        assert "cannot be pinned: of 6 blocks 1 are not in the store" in seen and "hint:" in seen
        put(store, keys)
        assert main(["session", "pin", "chat", *where, "--until", "friday"]) == 0
        assert "durable and pinned until" in capsys.readouterr().out
        assert main(["session", "show", "chat", *where]) == 0
        assert "pinned    until" in capsys.readouterr().out
        with pytest.raises(ConfigError, match="'other' is not known"):
            store.sessions.show("other")
    assert main(["session", "show", "other", *where]) == 2
    assert "hint: kvdepot session list" in capsys.readouterr().err


def test_moments() -> None:
    assert parse_moment("2026-11-20") - parse_moment("2026-11-20T23:00") == 3600
    assert parse_moment("2026-11-20T00:00+00:00") == 1795132800.0
    assert 0 <= parse_moment("sunday") - parse_moment("monday") + 6 * 86400 <= 13 * 86400
    with pytest.raises(ValueError, match="not a time such as"):
        parse_moment("soon")
