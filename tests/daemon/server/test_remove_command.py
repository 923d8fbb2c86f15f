"""`kvdepot remove` deletes the blocks of a namespace for all who use the daemon."""

import json

import pytest
from tests.support.daemon_clients import StartDaemon
from tests.support.store_contract import prompt, put, space_of

import kvdepot
from kvdepot.cli.main import main

Seen = pytest.CaptureFixture[str]


def test_a_namespace_goes_and_the_others_stay(start_daemon: StartDaemon, capsys: Seen) -> None:
    daemon = start_daemon()
    where = ["--socket", str(daemon.socket)]
    with kvdepot.open(daemon.address) as store:
        gone, kept = space_of(store), space_of(store, "another")
        for space in (gone, kept):
            put(store, prompt(space, 1, 4))
        name = gone.tag.hex()
        assert main(["remove", name, *where, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"removed": {name: 4}}
        assert len(store.match(prompt(gone, 1, 4))) == 0
        assert len(store.match(prompt(kept, 1, 4))) == 4
    assert main(["remove", name, *where]) == 0
    assert capsys.readouterr().out == f"{name}: 0 blocks removed\n"


def test_what_is_no_namespace_and_a_daemon_that_is_gone_are_errors(
    start_daemon: StartDaemon, capsys: Seen
) -> None:
    daemon = start_daemon()
    where = ["--socket", str(daemon.socket)]
    assert main(["remove", "everything", *where]) != 0
    assert "'everything' is not 16 hexadecimal digits" in capsys.readouterr().err
    daemon.kill()
    assert main(["remove", "00" * 8, *where]) != 0
    assert capsys.readouterr().out == ""
