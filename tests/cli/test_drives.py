"""What `doctor` and `inspect` say of the speed of a store's drives, and measuring it anew."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.store_contract import prompt, put, space_of
from tests.support.waiting import eventually

import kvdepot
from kvdepot.cli.drive_speed import profile_text
from kvdepot.cli.main import main
from kvdepot.config.loader import to_toml
from kvdepot.config.settings import load
from kvdepot.core.metadata import MetaKind
from kvdepot.io.speed import Profile
from kvdepot.testing.emulation import DriveModel, open_emulated

Seen = pytest.CaptureFixture[str]
MODEL = DriveModel(read_bandwidth=400_000_000, write_bandwidth=400_000_000, seek=0.001)


def settings(folder: Path, **hdd: str) -> dict[str, Any]:
    table = {"path": str(folder / "hdd"), "capacity": "64MiB", "segment": "8MiB", **hdd}
    return {"dram": {"capacity": "4MiB"}, "hdd": table}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "depot.toml"
    path.write_text(to_toml(load(overrides=settings(tmp_path))))
    return path


def store_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "hdd store " in line]


def test_measure_tells_and_keeps_what_it_finds(config: Path, tmp_path: Path, capsys: Seen) -> None:
    assert main(["doctor", "--quick", "--measure", "--config", str(config)]) == 0
    (line,) = store_lines(capsys.readouterr().out)
    assert "read" in line and "µs" in line and "emulated" not in line
    assert main(["inspect", "--json", str(tmp_path / "hdd")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["profile"]["emulated"] is False
    assert found["profile"]["read_bytes_per_s"] > 0
    assert found["namespaces"] == [], "it is none"


def test_what_is_measured_of_an_emulated_drive_is_known_as_such(
    tmp_path: Path, capsys: Seen
) -> None:
    with open_emulated({"hdd": MODEL}, **settings(tmp_path, profile="always")) as store:
        meter = store.inspect().log_volume().reader.meter
        assert eventually(lambda: meter.profile is not None)
        assert meter.profile is not None
        assert 0 < meter.profile.read_bytes_per_s <= MODEL.read_bandwidth * 1.05
    assert main(["inspect", str(tmp_path / "hdd")]) == 0
    assert "speed       emulated, read" in capsys.readouterr().out


def test_a_small_store_on_emulated_drives_is_known_as_such(tmp_path: Path, capsys: Seen) -> None:
    with open_emulated({"hdd": MODEL}, **settings(tmp_path)) as store:
        assert all(put(store, prompt(space_of(store), 1, 2)))
        metadata = store.inspect().log_volume().metadata
        assert eventually(lambda: bool(metadata.known.values(MetaKind.PROFILE)))
    assert main(["inspect", str(tmp_path / "hdd")]) == 0
    assert "speed       emulated, not measured" in capsys.readouterr().out


def test_a_store_that_was_not_measured(tmp_path: Path, capsys: Seen) -> None:
    with kvdepot.open(**settings(tmp_path)) as store:
        assert all(put(store, prompt(space_of(store), 1, 2)))
    assert main(["inspect", str(tmp_path / "hdd")]) == 0
    assert "speed       not measured" in capsys.readouterr().out


def test_measure_needs_a_drive(tmp_path: Path, capsys: Seen) -> None:
    path = tmp_path / "memory.toml"
    path.write_text('[dram]\ncapacity = "4MiB"\n')
    assert main(["doctor", "--quick", "--measure", "--config", str(path)]) == 2
    assert "no drive" in capsys.readouterr().err


def test_a_store_in_use_is_left_alone(config: Path, capsys: Seen) -> None:
    with kvdepot.open(config):
        assert main(["doctor", "--quick", "--measure", "--config", str(config)]) == 2
    assert "error:" in capsys.readouterr().err


def test_what_could_not_be_measured_is_not_made_up() -> None:
    found = Profile(
        read_bytes_per_s=2_000_000_000,
        write_bytes_per_s=0,
        random_read_bytes_per_s=1_000_000_000,
        random_write_bytes_per_s=0,
        random_bytes=1 << 18,
        read_latency_us=80,
        write_latency_us=0,
        direct_io=False,
        emulated=False,
        measured_at_s=1_794_700_800,
    )
    text = profile_text(found)
    assert text.startswith("through the page cache, read ")
    assert "write ?;" in text and "80 and ? µs" in text
    assert text.endswith("measured 2026-11-15")
