"""What `doctor` and `inspect` say of the speed of a store's drives, and measuring it anew."""

import json
from pathlib import Path

import pytest
from tests.support.waiting import eventually

import kvdepot
from kvdepot.cli.doctor.drives import profile_text
from kvdepot.cli.main import main
from kvdepot.testing.store_contract import prompt, put, space_of
from kvdepot.tiers.device.speed import Profile

Seen = pytest.CaptureFixture[str]
EMULATED = """
[hdd.emulate]
read_bandwidth = "400MB"
write_bandwidth = "400MB"
seek = "1ms"
"""


def settings_file(folder: Path, more: str = "") -> Path:
    path = folder / "depot.toml"
    path.write_text(
        f'[dram]\ncapacity = "4MiB"\n[hdd]\npath = "{folder / "hdd"}"\n'
        f'capacity = "64MiB"\nsegment = "8MiB"\n{more}'
    )
    return path


def store_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "hdd store " in line]


@pytest.fixture
def emulated(tmp_path: Path) -> Path:
    return settings_file(tmp_path, EMULATED)


def test_measure_tells_and_keeps_what_it_finds(
    emulated: Path, tmp_path: Path, capsys: Seen
) -> None:
    assert main(["doctor", "--quick", "--measure", "--config", str(emulated)]) == 0
    (line,) = store_lines(capsys.readouterr().out)
    assert "emulated, read" in line and "µs" in line
    assert main(["inspect", "--json", str(tmp_path / "hdd")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["profile"]["emulated"] is True
    assert 0 < found["profile"]["read_bytes_per_s"] <= 400_000_000 * 1.05
    assert found["namespaces"] == [], "it is none"
    assert main(["inspect", str(tmp_path / "hdd")]) == 0
    assert "speed     emulated, read" in capsys.readouterr().out


def test_doctor_says_emulated_before_there_is_a_store(emulated: Path, capsys: Seen) -> None:
    main(["doctor", "--quick", "--config", str(emulated)])
    (line,) = store_lines(capsys.readouterr().out)
    assert line.endswith("emulated, not measured")


def test_a_small_store_on_emulated_drives_is_known_as_such(
    emulated: Path, tmp_path: Path, capsys: Seen
) -> None:
    with kvdepot.open(emulated) as store:
        assert all(put(store, prompt(space_of(store), 1, 2)))
        (drive,) = store.inspect().log_tier().drives
        assert eventually(lambda: drive.notes.profile is not None)
    assert main(["inspect", str(tmp_path / "hdd")]) == 0
    assert "speed     emulated, not measured" in capsys.readouterr().out


def test_a_store_that_was_not_measured(tmp_path: Path, capsys: Seen) -> None:
    with kvdepot.open(settings_file(tmp_path)) as store:
        assert all(put(store, prompt(space_of(store), 1, 2)))
    assert main(["inspect", str(tmp_path / "hdd")]) == 0
    assert "speed     not measured" in capsys.readouterr().out


def test_measure_needs_to_know_the_store(capsys: Seen) -> None:
    assert main(["doctor", "--quick", "--measure"]) == 2
    assert "hint: add --config FILE" in capsys.readouterr().err


def test_measure_needs_a_drive(tmp_path: Path, capsys: Seen) -> None:
    path = tmp_path / "memory.toml"
    path.write_text('[dram]\ncapacity = "4MiB"\n')
    assert main(["doctor", "--quick", "--measure", "--config", str(path)]) == 2
    assert "no drive" in capsys.readouterr().err


def test_a_store_in_use_is_left_alone(emulated: Path, capsys: Seen) -> None:
    with kvdepot.open(emulated):
        assert main(["doctor", "--quick", "--measure", "--config", str(emulated)]) == 2
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
