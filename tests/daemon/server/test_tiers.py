"""`kvdepot tiers` as the person on call meets it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemon_clients import StartDaemon
from tests.support.store_contract import prompt, put, small, space_of, tiers

import kvdepot
from kvdepot.cli.main import main
from kvdepot.testing.daemons import DaemonProcess

Seen = pytest.CaptureFixture[str]


@pytest.fixture
def daemon(start_daemon: StartDaemon, tmp_path: Path) -> DaemonProcess:
    ssd: dict[str, Any] = small(tmp_path)["ssd"]
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    return start_daemon(ssd={**ssd, "path": paths, "promote": False})


def asked(daemon: DaemonProcess, *arguments: str) -> int:
    verb, *rest = arguments
    return main(["tiers", verb, "--socket", str(daemon.socket), *rest])


def listed(daemon: DaemonProcess, capsys: Seen) -> dict[str, Any]:
    assert asked(daemon, "list", "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["tiers"]
    return found


def test_a_drive_is_replaced_while_blocks_are_read(
    daemon: DaemonProcess, tmp_path: Path, capsys: Seen
) -> None:
    with kvdepot.open(daemon.address) as store:
        space = space_of(store)
        chains = [prompt(space, number, 8) for number in range(10)]
        for keys in chains:
            assert all(put(store, keys)) and store.flush()
        assert asked(daemon, "add", "ssd", str(tmp_path / "c")) == 0
        seen = capsys.readouterr()
        assert "is in use" in seen.out
        assert "hint: for the next start set ssd.path = [" in seen.err
        assert f'"{tmp_path / "c"}"], ssd.capacity = "' in seen.err
        assert asked(daemon, "drain", "ssd", str(tmp_path / "a"), "--json") == 0
        said = json.loads(capsys.readouterr().out)
        assert said["tier"] == "ssd" and said["moved"] > 0
        assert [None in tiers(store, keys) for keys in chains] == [False] * 10
    assert asked(daemon, "list") == 0
    lines = capsys.readouterr().out.splitlines()
    states = {line.split()[1]: line.split()[2] for line in lines[2:]}
    assert states == {
        "memory": "ok",
        str(tmp_path / "a"): "drained",
        str(tmp_path / "b"): "ok",
        str(tmp_path / "c"): "ok",
    }


def test_room_and_mode(daemon: DaemonProcess, capsys: Seen) -> None:
    assert asked(daemon, "resize", "ssd", "32MiB") == 0
    seen = capsys.readouterr()
    assert seen.out == "ssd: the capacity is 32MiB\n"
    assert 'ssd.capacity = "32MiB"; --save does it' in seen.err
    assert asked(daemon, "mode", "ssd", "write-through", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "tier": "ssd",
        "write_mode": "write-through",
        "settings": {"ssd.write_mode": "write-through"},
        "saved": None,
    }
    found = listed(daemon, capsys)["ssd"]
    assert (found["write_mode"], found["capacity_bytes"]) == ("write-through", 32 << 20)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("drain", "ssd", "nowhere"), "is not one of this store's volumes"),
        (("add", "hdd", "x"), "no such tier"),
        (("resize", "dram", "1GiB"), "memory tiers cannot change while the store is open"),
        (("resize", "ssd", "1MiB"), "less than 3 segments"),
    ],
)
def test_mistakes(
    daemon: DaemonProcess, capsys: Seen, arguments: tuple[str, ...], complaint: str
) -> None:
    assert asked(daemon, *arguments) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("error: ") and complaint in seen.err


@pytest.mark.parametrize("arguments", [("resize", "ssd", "much"), ("mode", "ssd", "often")])
def test_what_cannot_be_meant_is_not_asked(
    daemon: DaemonProcess, capsys: Seen, arguments: tuple[str, ...]
) -> None:
    assert asked(daemon, *arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_no_daemon(tmp_path: Path, capsys: Seen) -> None:
    assert main(["tiers", "list", "--socket", str(tmp_path / "none.sock")]) == 2
    seen = capsys.readouterr()
    assert "no daemon answers" in seen.err and "hint: start one" in seen.err


def rooms(daemon: DaemonProcess, capsys: Seen) -> dict[str, int]:
    drives = listed(daemon, capsys)["ssd"]["drives"]
    return {one["path"]: one["capacity_bytes"] for one in drives if not one["drained"]}


def test_what_is_saved_gives_every_drive_its_room_again(
    daemon: DaemonProcess, tmp_path: Path, capsys: Seen
) -> None:
    """The hint of `add` once made each drive smaller: the capacity stayed for more paths."""
    file = tmp_path / "daemon.toml"
    file.write_text("# kept by hand\n" + file.read_text())
    assert asked(daemon, "resize", "ssd", "24MiB", "--save") == 0
    assert asked(daemon, "add", "ssd", str(tmp_path / "c"), "--save") == 0
    assert f"saved to {file}" in capsys.readouterr().out
    now = rooms(daemon, capsys)
    assert set(now.values()) == {12 << 20}
    assert asked(daemon, "mode", "ssd", "write-through", "--save") == 0
    assert daemon.stop() == 0
    daemon.start()
    capsys.readouterr()
    assert rooms(daemon, capsys) == now
    assert asked(daemon, "drain", "ssd", str(tmp_path / "a"), "--save") == 0
    capsys.readouterr()
    now = rooms(daemon, capsys)
    assert daemon.stop() == 0
    daemon.start()
    assert rooms(daemon, capsys) == now == {str(tmp_path / name): 12 << 20 for name in "bc"}
    assert listed(daemon, capsys)["ssd"]["write_mode"] == "write-through"
    assert file.read_text().startswith("# kept by hand\n")


def test_what_cannot_be_saved_is_told(start_daemon: StartDaemon, capsys: Seen) -> None:
    daemon = start_daemon("--set", "ssd.write_mode=write-back")
    assert asked(daemon, "mode", "ssd", "write-through", "--save") == 2
    said = capsys.readouterr().err
    assert "not saved: ssd.write_mode was given by --set or the environment" in said
    assert listed(daemon, capsys)["ssd"]["write_mode"] == "write-through"


def test_unnamed_daemons_are_found(
    daemon: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Seen
) -> None:
    """By the variable; else the machine's, where this user has none."""
    monkeypatch.setenv("KVDEPOT_SOCKET", str(daemon.socket))
    assert main(["tiers", "list"]) == 0
    monkeypatch.delenv("KVDEPOT_SOCKET")
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr("kvdepot.cli.arguments.SYSTEM_SOCKET", tmp_path / "none.sock")
    assert main(["tiers", "list"]) == 2
    monkeypatch.setattr("kvdepot.cli.arguments.SYSTEM_SOCKET", daemon.socket)
    assert main(["tiers", "list"]) == 0
    assert "no daemon answers" in capsys.readouterr().err
