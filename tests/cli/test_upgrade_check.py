"""`kvdepot upgrade-check`: what it refuses before anything is touched, and what it accepts."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.support.store_contract import small

import kvdepot
from kvdepot.cli.main import main
from kvdepot.daemon.wire.versions import SpokenVersions
from kvdepot.format.metadata import VolumeHeader
from kvdepot.format.segment import FORMAT
from kvdepot.native import checksum
from kvdepot.testing.daemons import DaemonProcess

Seen = pytest.CaptureFixture[str]


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "kvdepot.toml"
    path.write_text(f'[ssd]\npath = "{tmp_path}/kv"\ncapacity = "16MiB"\n')
    return path


def checked(capsys: Seen, tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and the findings by what they are about."""
    socket = ["--socket", str(tmp_path / "depot.sock")]
    status = main(["upgrade-check", *socket, *words, "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return status, {one["what"].split()[0]: one for one in findings}


def test_a_store_of_this_format_is_taken_over(settings: Path, tmp_path: Path, capsys: Seen) -> None:
    kvdepot.open(settings, dram="2MiB").close()
    before = (tmp_path / "kv" / "superblock").read_bytes()
    status, found = checked(capsys, tmp_path, "--config", str(settings))
    assert status == 0
    assert (found["settings"]["verdict"], found["store"]["verdict"]) == ("ok", "ok")
    assert found["daemon"]["verdict"] == "note"
    assert (tmp_path / "kv" / "superblock").read_bytes() == before


@pytest.mark.parametrize("number", [FORMAT + 1, 0])
def test_a_store_of_another_format_stops_it(number: int, tmp_path: Path, capsys: Seen) -> None:
    with kvdepot.open(dram="2MiB", ssd={"path": tmp_path / "kv", "capacity": "16MiB"}):
        pass
    path = tmp_path / "kv" / "superblock"
    page = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<I", page, 20)
    struct.pack_into("<I", page, 16, number)
    struct.pack_into("<Q", page, 0, checksum(page[8 : 24 + length]))
    assert VolumeHeader.parse(bytes(page)) == number
    path.write_bytes(page)
    status, found = checked(capsys, tmp_path, str(tmp_path / "kv"))
    assert status == 1
    assert found["store"]["verdict"] == "stop"
    assert f"format {number}" in found["store"]["found"]


def test_a_damaged_store_stops_it(tmp_path: Path, capsys: Seen) -> None:
    (tmp_path / "superblock").write_bytes(b"no superblock")
    status, found = checked(capsys, tmp_path, str(tmp_path))
    assert status == 1 and "damaged" in found["store"]["found"]


def test_settings_that_this_version_does_not_know_stop_it(
    settings: Path, tmp_path: Path, capsys: Seen
) -> None:
    settings.write_text("[future]\nkey = 1\n")
    status, found = checked(capsys, tmp_path, "--config", str(settings))
    assert status == 1
    assert "future: unknown key" in found["settings"]["found"]


def test_a_running_daemon_is_asked(tmp_path: Path, capsys: Seen) -> None:
    with DaemonProcess(tmp_path, small(tmp_path / "kv")):
        status, found = checked(capsys, tmp_path)
        assert status == 0
        assert found["daemon"]["verdict"] == "ok"
        assert f"version {kvdepot.__version__}" in found["daemon"]["found"]
        assert "0 clients attached" in found["daemon"]["found"]


def test_a_daemon_of_another_protocol_stops_it(
    tmp_path: Path, capsys: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DaemonProcess(tmp_path, small(tmp_path / "kv")):
        future = SpokenVersions(60_000, 60_001, 1, 1)
        monkeypatch.setattr("kvdepot.daemon.client.connections._SPOKEN", future)
        status, found = checked(capsys, tmp_path)
    assert status == 1
    assert "the daemon speaks protocol" in found["daemon"]["found"]
    assert found["daemon"]["verdict"] == "stop"


def test_people_are_told_in_words(settings: Path, tmp_path: Path, capsys: Seen) -> None:
    words = ["--config", str(settings), "--socket", str(tmp_path / "none.sock")]
    assert main(["upgrade-check", *words]) == 0
    assert capsys.readouterr().out.endswith("ready to upgrade\n")
