"""`kvdepot audit`, and audits of an attached store."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemon_clients import StartDaemon
from tests.support.store_contract import prompt, put, small, space_of, tiers

import kvdepot
from kvdepot.cli.main import main
from kvdepot.core.audit import AuditFinding
from kvdepot.core.block import BlockKey, PutResult
from kvdepot.testing.daemons import DaemonProcess

Seen = pytest.CaptureFixture[str]


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> DaemonProcess:
    return start_daemon()


def failed(key: BlockKey) -> AuditFinding:
    return AuditFinding(key, False, 1.4, 0.01, 3, "engine 2")


def asked(daemon: DaemonProcess, capsys: Seen, verb: str, *rest: str, code: int = 0) -> Any:
    """What a command answers with --json."""
    assert main(["audit", verb, "--socket", str(daemon.socket), *rest, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_quarantine_from_its_beginning_to_its_end(daemon: DaemonProcess, capsys: Seen) -> None:
    with kvdepot.open(daemon.address) as store:
        space = space_of(store)
        space.made_by(store.audits.producer("engine 1"))
        keys = prompt(space, 1, 4)
        put(store, keys)
        assert store.flush()
        store.audits.report(failed(keys[2]))
        assert len(store.match(keys)) == 0
        with store.lease(keys) as lease:
            assert len(lease) == 0
        assert tiers(store, keys) == [None] * 4
        assert put(store, prompt(space, 2, 1)) == [PutResult.REFUSED]
    (found,) = asked(daemon, capsys, "list", code=1)["quarantined"]
    assert (found["made_by"], found["found_by"], found["layer"]) == ("engine 1", "engine 2", 3)
    daemon.kill()
    daemon.start()
    with kvdepot.open(daemon.address) as store:
        space_of(store)
        assert len(store.match(keys)) == 0, "after kill -9"
        name = found["namespace"]
        assert asked(daemon, capsys, "lift", name)["lifted"]
        assert len(store.match(keys)) == 4
        assert not asked(daemon, capsys, "lift", name, code=1)["lifted"]
        store.audits.report(failed(keys[2]))
        assert asked(daemon, capsys, "purge", name)["removed"] == 4
        assert asked(daemon, capsys, "list")["quarantined"] == []
        assert put(store, keys) == [PutResult.STORED] * 4


def test_for_people(daemon: DaemonProcess, capsys: Seen) -> None:
    where = ["--socket", str(daemon.socket)]
    assert main(["audit", "list", *where]) == 0
    assert "no namespace is in quarantine" in capsys.readouterr().out
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 2)
        put(store, keys)
        store.audits.report(failed(keys[0]))
    assert main(["audit", "list", *where]) == 1
    seen = capsys.readouterr().out
    assert "layer 3 is off by 1.4" in seen
    assert "found by  engine 2" in seen
    assert main(["stats", *where]) == 0
    seen = capsys.readouterr().out
    assert "audited 1, mismatched 1; 1 namespace in quarantine" in seen
    assert "bad: namespace" in seen
    assert main(["audit", "purge", keys[0][:8].hex(), *where]) == 0
    assert "2 blocks removed" in capsys.readouterr().out


def test_of_a_store_without_a_daemon(tmp_path: Path, capsys: Seen) -> None:
    settings = small(tmp_path / "kv")
    with kvdepot.open(**settings) as store:
        keys = prompt(space_of(store), 1, 2)
        put(store, keys)
        store.audits.report(failed(keys[0]))
    given = [
        f"--set={tier}.{name}={value}"
        for tier, facts in settings.items()
        for name, value in facts.items()
    ]
    assert main(["audit", "list", "--json", *given]) == 1
    (found,) = json.loads(capsys.readouterr().out)["quarantined"]
    assert main(["audit", "purge", found["namespace"], *given]) == 0
    with kvdepot.open(**settings) as store:
        space_of(store)
        assert len(store.match(keys)) == 0
        assert not store.audits.list()["quarantined"]


def test_producers_travel_with_the_blocks(daemon: DaemonProcess) -> None:
    """By put and by reserve; a client that says none leaves none."""
    with kvdepot.open(daemon.address) as store:
        space = space_of(store)
        assert put(store, prompt(space, 1, 1)) == [PutResult.STORED]
        space.made_by(store.audits.producer("engine 1"))
        put(store, prompt(space, 2, 1))
        found = {}
        for number in (1, 2):
            store.audits.report(failed(prompt(space, number, 1)[0]))
            (one,) = store.audits.list()["quarantined"]
            found[number] = one["made_by"]
            store.audits.lift(one["namespace"])
        assert found == {1: "unknown", 2: "engine 1"}
