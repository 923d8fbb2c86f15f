"""Facts reach the decision, the decision reaches the load, and speeds are kept for later."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.toy_engine import ToyRequest, full_attention

from kvdepot.adapters.vllm.fetch_decision import (
    FetchDecider,
    LearnedSpeeds,
    queue_before,
    read_speeds,
    speeds_file,
    step_work,
    write_speeds,
)
from kvdepot.adapters.vllm.messages import BlockOrigin, LoadEnd, StepTime, TierTime
from kvdepot.adapters.vllm.requests import DepotHit, Phase, RequestKeys, TrackedRequest
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.first_token import Reason
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.policy.fetching.speed_models import (
    PrefillPace,
    TierProfile,
    attention_work,
    drive_profiles,
)
from kvdepot.testing.clocks import ManualClock

SIZE = 128
BLOCK_BYTES = 6 << 20
SPEEDS = LearnedSpeeds(PrefillPace(0.01, 0.001, 1e-7), {"ssd": TierProfile(0.002, 3e9)})
MEASURED = {"ssd": TierProfile(1e-4, 1e9)}


def tracked(
    name: str,
    tokens: int = 1300,
    *,
    computed: int = 0,
    phase: Phase = Phase.QUEUED,
    size: int = SIZE,
) -> TrackedRequest:
    space = NamespaceHandle(Namespace(model="m", layout=KVLayout.opaque(4096, size)))
    request = ToyRequest(name, [1] * tokens, 4)
    request.num_computed_tokens = computed
    keys = RequestKeys(request, full_attention(size), [[space]], BlockOrigin())
    made = TrackedRequest(request, keys)
    made.phase = phase
    return made


def load(decider: FetchDecider, name: str, blocks: int, end: LoadEnd | float) -> None:
    """A load from the SSD tier; `end`: how it ended, or the seconds that it took."""
    decider.load_started(name, ["ssd"] * blocks)
    if not isinstance(end, LoadEnd):
        end = LoadEnd(name, None, (TierTime("ssd", blocks, end),), 0, end)
    decider.load_ended(end)


def taught(token_s: float, byte_s: float, clock: ManualClock | None = None) -> FetchDecider:
    """A decider that has seen steps and loads of these speeds."""
    decider = FetchDecider(SIZE, BLOCK_BYTES, 2048, (clock or ManualClock()).now)
    for tokens in (256, 512, 1024, 2048):
        work = attention_work(tokens, 0)
        decider.step_ended([StepTime(tokens, work, 0.002 + token_s * tokens)] * 3)
    for turn, blocks in enumerate((1, 2, 4, 8, 4, 2)):
        load(decider, f"load{turn}", blocks, 0.001 + byte_s * blocks * BLOCK_BYTES)
    return decider


def hit(blocks: int = 10, first: int = 0) -> DepotHit:
    return DepotHit(first * SIZE, first, ("ssd",) * blocks)


def test_a_fast_tier_is_used_in_full_and_a_slow_one_not_at_all() -> None:
    assert taught(1e-3, 1e-9).decide(tracked("r"), hit(), []).stop_block == 10
    assert taught(1e-5, 1e-6).decide(tracked("r"), hit(), []).stop_block == 0
    assert taught(1e-5, 1e-6).decide(tracked("r"), hit(6, 4), []).stop_block == 4


def test_a_decision_holds_until_the_hit_changes() -> None:
    decider, one = taught(1e-3, 1e-9), tracked("r")
    assert decider.decide(one, hit(), [one]) is decider.decide(one, hit(), [one])
    assert decider.decide(one, hit(9), [one]).stop_block == 9


def test_a_load_counts_until_it_has_ended() -> None:
    decider = taught(1e-3, 1e-9)
    decider.load_started("r", hit().tiers)
    assert decider._outstanding["ssd"] == 10 * BLOCK_BYTES
    decider.load_ended(LoadEnd("r", 3, (), 7, 1.0))
    assert decider._outstanding["ssd"] == 0


def test_a_tier_that_becomes_slow_is_learnt_from_its_late_loads() -> None:
    decider = taught(1e-4, 1e-9)
    stop, turn = 10, 0
    while stop == 10 and turn < 4:
        turn += 1
        stop = decider.decide(tracked(f"r{turn}"), hit(), []).stop_block
        late = LoadEnd(f"r{turn}", 1, (TierTime("ssd", 1, 0.4),), stop - 1, 0.5)
        load(decider, f"r{turn}", stop, late)
    assert stop < 10


def test_predictions_are_compared_with_what_happened() -> None:
    clock = ManualClock()
    decider, one = taught(1e-3, 1e-9, clock), tracked("r")
    reported: list[Any] = []
    decider._report = reported.append
    decider.decide(one, hit(), [one])
    assert "prediction_error:p50" not in decider.metrics()
    clock.sleep(100.0)
    decider.answered(one)
    decider.answered(one)
    _, first = reported
    assert first.reason is Reason.FETCH
    assert first.seconds > 0 and 0 < first.predicted_s < first.recompute_s
    assert 0 < first.fetched_tokens <= first.prompt_tokens == one.request.num_tokens
    first.check()
    assert decider.metrics()["prediction_error:p50"] > 0
    assert decider.metrics()["tier_bytes_per_second:ssd"] == pytest.approx(1e9, rel=0.2)


def test_the_queue_is_what_comes_before() -> None:
    decoding = tracked("a", 500, computed=500, phase=Phase.COMPUTING)
    prefilling = tracked("b", 1000, computed=400, phase=Phase.COMPUTING)
    waiting, own, behind = tracked("c", 300), tracked("d"), tracked("e")
    queue = queue_before(own, [decoding, prefilling, waiting, own, behind])
    assert (queue.decodes, queue.decode_context_tokens) == (1, 500)
    assert queue.ahead_tokens == 600 + 300
    assert queue.ahead_attention == attention_work(600, 400) + attention_work(300, 0)


def test_loads_are_not_before_a_request_but_in_its_company() -> None:
    decider = taught(1e-3, 1e-9)
    loading, own, queued = tracked("a", phase=Phase.LOADING), tracked("b"), tracked("c")
    queued.hit = hit()
    decision = decider.decide(loading, hit(), [loading]).decision
    decider.load_started("a", hit().tiers, decision)
    assert queue_before(own, [loading, own]).ahead_tokens == 0
    company = decider._company(own, [loading, own, queued, tracked("d")], 5)
    (under_way,) = company.loads
    assert under_way.ready_s > 0 and under_way.work_s > 0
    assert [each.runs[0].blocks for each in company.waiting] == [10]
    assert (company.answered, company.behind) == (5, 1)


def test_if_others_wait_a_slower_disk_is_used_while_the_engine_computes() -> None:
    """0.13 s of prefill for a block, 0.16 s from disk."""
    own, behind = tracked("r"), [tracked(f"w{number}") for number in range(4)]
    assert taught(1e-3, 0.16 / BLOCK_BYTES).decide(own, hit(), [own]).stop_block == 0
    other = tracked("r")
    decided = taught(1e-3, 0.16 / BLOCK_BYTES).decide(other, hit(), [other, *behind])
    assert decided.decision.reason is Reason.RELIEVE
    assert decided.stop_block == 10


def test_a_step_under_way_hides_a_load() -> None:
    decider, one = taught(1e-3, 0.16 / BLOCK_BYTES), tracked("r")
    step = [(tracked("p", 5000), 2048)]
    decider.step_planned(step)
    assert decider.decide(one, hit(), [one]).stop_block == 10
    decider.step_planned(step)
    decider.step_planned(step)
    assert decider._busy_until_s < 2.5 * 2.1, "an engine has at most two steps"


def test_only_steps_with_prefill_are_timed() -> None:
    decoding = tracked("a", 500, computed=499)
    prefilling = tracked("b", 1000, computed=400)
    assert step_work([(decoding, 1)]) == (1, attention_work(1, 499), False)
    tokens, _, has_prefill = step_work([(decoding, 1), (prefilling, 200)])
    assert (tokens, has_prefill) == (201, True)


def test_written_speeds_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "speeds.json"
    for speeds in (SPEEDS, LearnedSpeeds()):
        write_speeds(path, speeds)
        assert read_speeds(path) == speeds
    assert [each.name for each in path.parent.iterdir()] == ["speeds.json"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert speeds_file(Path("~/kept"), b"\x01\xff") == tmp_path / "kept" / "01ff.json"


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
def test_a_bad_file_counts_as_no_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "speeds.json"
    path.write_text(content)
    assert read_speeds(path) == LearnedSpeeds() == read_speeds(tmp_path / "none")
    write_speeds(path / "below.json", SPEEDS)  # there can be no such folder


def assert_fetches_all(path: Path, drives: dict[str, TierProfile]) -> None:
    """A prompt of 3,000 tokens, whose recompute takes some 10 s, is fetched."""
    decider = FetchDecider(512, 23 << 20, 2048, speeds_path=path, drives=drives)
    decided = decider.decide(tracked("r", 3000, size=512), DepotHit(0, 0, ("ssd",) * 5), [])
    assert decided.stop_block == 5
    assert decided.decision.deadline_s > 2.0, "given up before that, it would be recomputed"


@pytest.mark.parametrize("drives", [{}, MEASURED], ids=["none", "measured"])
def test_the_next_process_does_not_trust_one_bad_moment(
    tmp_path: Path, drives: dict[str, TierProfile]
) -> None:
    """One load of a busy machine, 6 of 7 blocks late, left 10.7 MB/s: prompts were recomputed."""
    path, pace = tmp_path / "speeds.json", PrefillPace(0.05, 3e-3, 1e-7)
    write_speeds(path, LearnedSpeeds(pace, {}))
    first = FetchDecider(512, 23 << 20, 2048, speeds_path=path, drives=MEASURED)
    for name in ("cold", "busy"):
        load(first, name, 7, LoadEnd(name, 1, (TierTime("ssd", 1, 2.0),), 6, 3.2))
    first.write_speeds()
    assert_fetches_all(path, drives)
    write_speeds(path, LearnedSpeeds(pace, {"ssd": TierProfile(0.01, 10.7e6)}))
    assert_fetches_all(path, drives)


def test_measured_drives_are_a_tiers_profile() -> None:
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


def test_a_process_goes_on_with_the_speeds_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    first = FetchDecider(16, 1 << 20, 2048, speeds_path=path)
    assert first.advisor.prefill.pace() is None
    first.step_ended([StepTime(1000, 500_000.0, 2.0)] * 3)
    for name in ("cold", "doubted", "confirmed"):
        load(first, name, 64, 0.1)
    first.write_speeds()
    second = FetchDecider(16, 1 << 20, 2048, speeds_path=path)
    assert second.advisor.prefill.pace() == first.advisor.prefill.pace()
    pace = second.advisor.tiers["ssd"].pace()
    assert pace is not None
    assert pace.wait_s + pace.byte_s * (64 << 20) == pytest.approx(0.1, rel=0.1)
