"""What a depot is asked for, written down and played again."""

import json
import threading
from pathlib import Path

import pytest
from tests.support.daemon_clients import StartDaemon
from tests.support.store_contract import prompt, put, small, space_of, tiers

import kvdepot
from kvdepot.cli.main import main
from kvdepot.errors import ConfigError
from kvdepot.sim.traces import read_trace

Seen = pytest.CaptureFixture[str]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lookups_become_a_trace_that_the_simulator_reads(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with kvdepot.open(**small(tmp_path)) as store:
        space = space_of(store)
        store.match(prompt(space, 9, 2))
        store.admin.record(path)
        for number, blocks in ((1, 3), (2, 2), (1, 5)):
            keys = prompt(space, number, blocks)
            store.match(keys)
            store.lease(keys).release()
            assert all(put(store, keys))
        assert store.admin.stop_recording() == 3, (
            "a lookup and a lease of one prompt are one request"
        )
        store.match(prompt(space, 3, 1))
    header, *requests = lines(path)
    assert header["format"] == "kvdepot-trace"
    chains = [request["keys"] for request in requests]
    assert [len(keys) for keys in chains if isinstance(keys, list)] == [3, 2, 5]
    first, _, third = chains
    assert isinstance(first, list) and isinstance(third, list)
    assert third[:3] == first
    workload = read_trace(path)
    assert len(workload) == 3 and workload.block_count == 7
    assert str(space.keys([1] * 64)[0].hex()) not in path.read_text()


def test_one_at_a_time_and_never_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with kvdepot.open(**small(tmp_path)) as store:
        store.admin.record(path)
        with pytest.raises(ConfigError, match="already"):
            store.admin.record(tmp_path / "other.jsonl")
        assert store.admin.stop_recording() == 0
        assert store.admin.stop_recording() == 0
        with pytest.raises(ConfigError, match="File exists"):
            store.admin.record(path)
        store.admin.record(tmp_path / "left-open.jsonl")
    assert len(lines(tmp_path / "left-open.jsonl")) == 1


def test_closing_writes_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with kvdepot.open(**small(tmp_path)) as store:
        store.admin.record(path)
        store.match(prompt(space_of(store), 1, 4))
    assert len(lines(path)) == 2


def test_of_a_daemon_by_command(start_daemon: StartDaemon, tmp_path: Path, capsys: Seen) -> None:
    daemon = start_daemon()
    path, done = tmp_path / "trace.jsonl", threading.Event()

    def ask() -> None:
        with kvdepot.open(daemon.address) as store:
            keys = prompt(space_of(store), 1, 4)
            assert all(put(store, keys))
            while not done.wait(0.05):
                assert None not in tiers(store, keys)
                store.match(keys)

    client = threading.Thread(target=ask)
    client.start()
    try:
        command = ["record", str(path), "--socket", str(daemon.socket), "--for", "1s", "--json"]
        assert main(command) == 0
    finally:
        done.set()
        client.join()
    said = json.loads(capsys.readouterr().out)
    assert said == {"file": str(path), "requests": 1}
    assert len(read_trace(path)) == 1
    assert main(command) == 2
    assert "File exists" in capsys.readouterr().err


def test_hints_say_what_is_in_the_way(tmp_path: Path) -> None:
    taken = tmp_path / "taken.jsonl"
    taken.touch()
    with kvdepot.open(**small(tmp_path / "kv")) as store:
        with pytest.raises(ConfigError) as told:
            store.admin.record(tmp_path / "no" / "folder" / "trace.jsonl")
        assert told.value.hint.startswith(f"mkdir -p {tmp_path / 'no' / 'folder'}")
        with pytest.raises(ConfigError) as told:
            store.admin.record(taken)
        assert told.value.hint == "name a file that does not exist yet"
