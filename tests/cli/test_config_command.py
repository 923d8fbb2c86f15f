"""`kvdepot config`: which source wins, what is printed, and how mistakes are told."""

import json
import os
import tomllib
from pathlib import Path

import pytest

import kvdepot
from kvdepot.cli.arguments import parse_settings
from kvdepot.cli.main import main
from kvdepot.config import settings as config
from kvdepot.errors import ConfigError

Seen = pytest.CaptureFixture[str]
TIERS = ("ssd", "hdd")


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVDEPOT_DRAM__CAPACITY", raising=False)
    monkeypatch.delenv("KVDEPOT_BLOCK_TOKENS", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "store.toml"
    path.write_text('block_tokens = 128\n\n[dram]\ncapacity = "2GiB"\n')
    return path


def test_show_prints_toml_that_loads_again(file: Path, tmp_path: Path, capsys: Seen) -> None:
    assert main(["config", "show", "--config", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "#" in shown
    assert tomllib.loads(shown)["dram"]["capacity"] == "2GiB"
    again = tmp_path / "again.toml"
    again.write_text(shown)
    assert config.load(again) == config.load(file)


def test_the_last_source_wins(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Seen) -> None:
    monkeypatch.setenv("KVDEPOT_DRAM__CAPACITY", "3GiB")
    monkeypatch.setenv("KVDEPOT_BLOCK_TOKENS", "64")
    command = ["config", "show", "--json", "--config", str(file), "--set", "block_tokens=32"]
    assert main(command) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["dram"]["capacity"] == "3GiB"
    assert shown["block_tokens"] == 32


def test_secrets_are_not_shown(capsys: Seen) -> None:
    assert main(["config", "show", "--set", "tenants.acme.secret_hex=c0ffee"]) == 0
    assert main(["config", "show", "--json", "--set", "tenants.acme.secret_hex=c0ffee"]) == 0
    seen = capsys.readouterr().out
    assert "acme" in seen
    assert "c0ffee" not in seen


def test_a_wrong_setting_is_told_without_a_trace(capsys: Seen) -> None:
    assert main(["config", "show", "--set", "dram.capactiy=2GiB"]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    error, hint = seen.err.splitlines()
    assert error.startswith("error: dram.capactiy: ")
    assert hint.startswith("hint: ")
    assert "dram.capacity" in hint


def test_settings_may_contain_an_equals_sign() -> None:
    assert parse_settings(["a.b=c=d", "e= f "]) == {"a.b": "c=d", "e": "f"}
    with pytest.raises(ConfigError):
        parse_settings(["=x"])


def test_check_accepts_a_good_file(file: Path, capsys: Seen) -> None:
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: ok\n"
    assert main(["config", "check", "--json", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "notes": []}


def test_check_looks_for_the_room_on_the_disk(file: Path, tmp_path: Path, capsys: Seen) -> None:
    file.write_text(f'[ssd]\npath = "{tmp_path}/not/there"\ncapacity = "900TiB"\n')
    assert main(["config", "check", str(file)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ssd.capacity: 900TiB wanted on the disk of ")
    assert "which has room for" in said and "--file-only" in said
    assert main(["config", "check", "--json", str(file)]) == 1
    assert json.loads(capsys.readouterr().out)["key"] == "ssd.capacity"
    assert main(["config", "check", "--file-only", str(file)]) == 0


def test_two_tiers_on_one_disk_share_its_room(file: Path, tmp_path: Path, capsys: Seen) -> None:
    found = os.statvfs(tmp_path)
    share = found.f_bavail * found.f_frsize * 2 // 3
    tiers = [f'[{tier}]\npath = "{tmp_path}/{tier}"\ncapacity = {share}\n' for tier in TIERS]
    file.write_text("".join(tiers))
    assert main(["config", "check", str(file)]) == 1
    assert "error: ssd.capacity and hdd.capacity: " in capsys.readouterr().err
    file.write_text(tiers[0])
    assert main(["config", "check", str(file)]) == 0
    assert f"does not exist; it would be created in {tmp_path}" in capsys.readouterr().err


def test_a_store_that_is_larger_than_its_disk_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ssd = {"path": tmp_path / "kv", "capacity": "900TiB", "profile": "never"}
    kvdepot.open(dram="2MiB", ssd=ssd).close()
    assert "ssd.capacity: 900TiB wanted on the disk of" in caplog.text


@pytest.mark.parametrize("text", ["[dram]\ncapcity = 1\n", "[dram\n", 'block_tokens = "many"\n'])
def test_check_names_what_is_wrong(text: str, file: Path, capsys: Seen) -> None:
    file.write_text(text)
    assert main(["config", "check", str(file)]) == 1
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("error: ")
    assert main(["config", "check", "--json", str(file)]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert answer["error"].startswith(answer["key"])


def test_check_looks_at_the_file_alone(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Seen
) -> None:
    monkeypatch.setenv("KVDEPOT_BLOCK_TOKENS", "nonsense")
    assert main(["config", "check", str(file)]) == 0
    assert "ok" in capsys.readouterr().out
