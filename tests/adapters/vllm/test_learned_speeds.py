"""What was learnt is there at the next start; a bad file is no file."""

from pathlib import Path

import pytest

from kvdepot.adapters.vllm.fetch_decision import (
    FetchDecider,
    LearnedSpeeds,
    read_speeds,
    speeds_file,
    write_speeds,
)
from kvdepot.adapters.vllm.messages import LoadEnd, StepTime, TierTime
from kvdepot.policy.fetching.speed_models import PrefillPace, TierProfile

SPEEDS = LearnedSpeeds(PrefillPace(0.01, 0.001, 1e-7), {"ssd": TierProfile(0.002, 3e9)})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "speeds.json"
    write_speeds(path, SPEEDS)
    assert read_speeds(path) == SPEEDS
    write_speeds(path, LearnedSpeeds())
    assert read_speeds(path) == LearnedSpeeds()
    assert [each.name for each in path.parent.iterdir()] == ["speeds.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"prefill": [1, 2], "tiers": {}}',
        '{"prefill": [1, 2, -3], "tiers": {}}',
        '{"prefill": [1, 2, 1e999], "tiers": {}}',
        '{"prefill": "no", "tiers": {}}',
        '{"prefill": null, "tiers": {"ssd": [1]}}',
        '{"prefill": null, "tiers": {"ssd": {"a": 1}}}',
        '{"prefill": null, "tiers": {"ssd": [0.1, 0]}}',
        '{"prefill": null, "tiers": []}',
    ],
)
def test_a_bad_file_is_no_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "speeds.json"
    path.write_text(content)
    assert read_speeds(path) == LearnedSpeeds()


def test_no_file_and_no_place_for_one(tmp_path: Path) -> None:
    assert read_speeds(tmp_path / "none") == LearnedSpeeds()
    (tmp_path / "file").write_text("")
    write_speeds(tmp_path / "file" / "below.json", SPEEDS)


def test_each_namespace_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert speeds_file(Path("~/kept"), b"\x01\xff") == tmp_path / "kept" / "01ff.json"


def test_a_desk_goes_on_where_another_ended(tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    first = FetchDecider(16, 1 << 20, 2048, speeds_path=path)
    assert first.advisor.prefill.pace() is None
    first.observe_steps([StepTime(1000, 500_000.0, 2.0)] * 3)
    first.load_started("r", ["ssd"] * 64)
    first.load_ended(LoadEnd("r", None, (TierTime("ssd", 64, 64 << 20, 0.5),), 0, 0.5))
    first.write_speeds()
    second = FetchDecider(16, 1 << 20, 2048, speeds_path=path)
    assert second.advisor.prefill.pace() == first.advisor.prefill.pace()
    assert second.advisor.tiers["ssd"].known
    pace = second.advisor.tiers["ssd"].pace()
    assert pace is not None
    assert pace.wait_s + pace.byte_s * (64 << 20) == pytest.approx(0.5, rel=0.1)
    assert not second.advisor.tiers["dram"].known
