"""What was learnt is there at the next start; a bad file is no file."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.toy_engine import ToyRequest, full_attention

from kvdepot.adapters.vllm.fetch_decision import (
    FetchDecider,
    LearnedSpeeds,
    read_speeds,
    speeds_file,
    write_speeds,
)
from kvdepot.adapters.vllm.messages import LoadEnd, StepTime, TierTime
from kvdepot.adapters.vllm.requests import DepotHit, RequestKeys, TrackedRequest
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.policy.fetching.speed_models import PrefillPace, TierProfile, drive_profiles

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


def test_one_bad_moment_is_not_believed_by_the_next_process(tmp_path: Path) -> None:
    """One load of a busy machine, 6 of 7 blocks late, left 10.7 MB/s: prompts were recomputed."""
    path = tmp_path / "speeds.json"
    measured = {"ssd": TierProfile(1e-4, 1e9)}
    write_speeds(path, LearnedSpeeds(PrefillPace(0.05, 3e-3, 1e-7), {}))
    first = FetchDecider(512, 23 << 20, 2048, speeds_path=path, drives=measured)
    for name in ("cold", "busy"):
        first.load_started(name, ["ssd"] * 7)
        one = (TierTime("ssd", 1, 23 << 20, 2.0),)
        first.load_ended(LoadEnd(name, 1, one, 6, 3.2))
    first.write_speeds()
    for drives in (measured, {}):
        second = FetchDecider(512, 23 << 20, 2048, speeds_path=path, drives=drives)
        assert_fetches_all(second)


@pytest.mark.parametrize("drives", [{}, {"ssd": TierProfile(1e-4, 1e9)}], ids=["none", "measured"])
def test_kept_speeds_that_are_absurd_are_not_believed(
    tmp_path: Path, drives: dict[str, TierProfile]
) -> None:
    path = tmp_path / "speeds.json"
    bad = LearnedSpeeds(PrefillPace(0.05, 3e-3, 1e-7), {"ssd": TierProfile(0.01, 10.7e6)})
    write_speeds(path, bad)
    assert_fetches_all(FetchDecider(512, 23 << 20, 2048, speeds_path=path, drives=drives))


def assert_fetches_all(decider: FetchDecider) -> None:
    """Of a prompt of 3,000 tokens, whose recompute takes some 10 s."""
    request = ToyRequest("r", [1] * 3000, 4)
    space = NamespaceHandle(Namespace(model="m", layout=KVLayout.opaque(4096, 512)))
    tracked = TrackedRequest(request, "", full_attention(512), (RequestKeys([space]),))
    decided = decider.decide(tracked, DepotHit(0, 0, ("ssd",) * 5), [tracked])
    assert decided.stop_block == 5
    assert decided.decision.deadline_s > 2.0, "given up before that, it would be recomputed"


def test_what_drives_were_measured_to_do_is_a_tiers_profile() -> None:
    def drive(read: int, *, direct: bool = True) -> dict[str, Any]:
        profile = {"read_bytes_per_s": read, "read_latency_us": 90, "direct_io": direct}
        return {"profile": profile if read else None}

    stats = {
        "tiers": {
            "dram": {"used_bytes": 1},
            "ssd": {"drives": [drive(3 * 10**9), drive(1 * 10**9), drive(0)]},
            "hdd": {"drives": [drive(2 * 10**9, direct=False)]},
        }
    }
    assert drive_profiles(stats) == {"ssd": TierProfile(9e-5, 6e9)}
    assert drive_profiles({}) == {}


def test_a_desk_goes_on_where_another_ended(tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    first = FetchDecider(16, 1 << 20, 2048, speeds_path=path)
    assert first.advisor.prefill.pace() is None
    first.observe_steps([StepTime(1000, 500_000.0, 2.0)] * 3)
    for name in ("cold", "doubted", "confirmed"):
        first.load_started(name, ["ssd"] * 64)
        first.load_ended(LoadEnd(name, None, (TierTime("ssd", 64, 64 << 20, 0.1),), 0, 0.1))
    first.write_speeds()
    second = FetchDecider(16, 1 << 20, 2048, speeds_path=path)
    assert second.advisor.prefill.pace() == first.advisor.prefill.pace()
    pace = second.advisor.tiers["ssd"].pace()
    assert pace is not None
    assert pace.wait_s + pace.byte_s * (64 << 20) == pytest.approx(0.1, rel=0.1)
