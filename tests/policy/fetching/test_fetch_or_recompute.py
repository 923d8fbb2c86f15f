"""Decisions in situations where the right one can be worked out by hand."""

from collections.abc import Mapping
from math import inf

import pytest

from kvdepot.core.first_token import Reason
from kvdepot.policy.fetching.advisor import PROBE_BLOCKS, PROBE_EVERY, Advisor, DecisionLog
from kvdepot.policy.fetching.fetch_or_recompute import (
    EXPLORE_BYTES,
    EXPLORE_SHARE,
    PATIENCE_SHARE,
    Decision,
    EngineQueue,
    PromptLengths,
    TierRun,
    decide,
    worth_waiting_s,
)
from kvdepot.policy.fetching.speed_models import PrefillPace, TierPace, TierProfile, Transfer

MB = 1_000_000
BLOCK = 10 * MB
PROMPT = PromptLengths(tokens=1010, block_tokens=100)
PACE = PrefillPace(0.0, 0.01, 0.0)
"""A block of a hundred tokens takes a second, the last ten tokens a tenth."""
CHUNK_TOKENS = 100_000


def tier(block_s: float, wait_s: float = 0.0, spread: float = 0.0) -> TierPace:
    """A tier that gives a block in so many seconds."""
    return TierPace(wait_s, block_s / BLOCK, spread)


def runs(*parts: tuple[str, int]) -> list[TierRun]:
    return [TierRun(name, blocks, blocks * BLOCK) for name, blocks in parts]


def choose(
    matched: list[TierRun],
    tiers: Mapping[str, TierPace | None],
    *,
    pace: PrefillPace | None = PACE,
    queue: EngineQueue | None = None,
) -> Decision:
    return decide(PROMPT, matched, pace, tiers, queue or EngineQueue(), CHUNK_TOKENS)


@pytest.mark.parametrize(
    ("matched", "reason", "by_run"),
    [
        pytest.param([("ssd", 10)], Reason.FETCH, (10,), id="a fast tier"),
        pytest.param([("hdd", 10)], Reason.RECOMPUTE, (0,), id="a slow tier"),
        pytest.param([], Reason.NOTHING_MATCHED, (), id="nothing matched"),
        pytest.param([("ssd", 6), ("hdd", 4)], Reason.CUT, (6, 0), id="a slow tail"),
        pytest.param([("hdd", 2), ("ssd", 8)], Reason.FETCH, (2, 8), id="a slow head, fast tail"),
    ],
)
def test_what_is_fetched_and_why(
    matched: list[tuple[str, int]], reason: Reason, by_run: tuple[int, ...]
) -> None:
    """That no other cut is faster: tests/property/test_fetch_or_recompute.py."""
    decision = choose(runs(*matched), {"ssd": tier(0.1), "hdd": tier(2.0)})
    assert (decision.reason, decision.by_run) == (reason, by_run)


@pytest.mark.parametrize(
    ("block_s", "spread", "queued_tokens", "deadline_s"),
    [
        pytest.param(0.3, 0.01, 0, 4.5, id="a sure fetch is given up soon"),
        pytest.param(0.001, 0.01, 0, PATIENCE_SHARE * 10.1, id="giving up costs more"),
        pytest.param(0.1, 0.5, 0, 3.0, id="an unsure one later"),
        pytest.param(0.9, 0.5, 0, 10.1, id="never later than a recompute takes"),
        pytest.param(0.1, 0.0, 700, 7.0, id="waiting is free while the engine is busy"),
    ],
)
def test_when_a_fetch_is_given_up(
    block_s: float, spread: float, queued_tokens: int, deadline_s: float
) -> None:
    queue, ssd = EngineQueue(ahead_tokens=queued_tokens), tier(block_s, spread=spread)
    decision = choose(runs(("ssd", 10)), {"ssd": ssd}, queue=queue)
    assert decision.deadline_s == pytest.approx(deadline_s)


@pytest.mark.parametrize(
    ("came", "late", "took_s", "recompute_s", "wait_s"),
    [
        pytest.param(6, 1, 0.6, 10.0, 0.15, id="what is nearly there is waited for"),
        pytest.param(1, 9, 1.0, 8.0, 0.0, id="what is far away is not"),
        pytest.param(5, 5, 0.9, 2.0, 1.0, id="no longer than its recompute"),
        pytest.param(0, 7, 0.1, inf, 0.0, id="nothing came"),
        pytest.param(7, 0, 0.1, inf, 0.0, id="nothing is late"),
    ],
)
def test_how_long_a_late_fetch_is_worth_waiting_for(
    came: int, late: int, took_s: float, recompute_s: float, wait_s: float
) -> None:
    assert worth_waiting_s(came, late, took_s, recompute_s) == pytest.approx(wait_s)


class TestUnknown:
    def test_an_unknown_tier_is_given_a_little_time(self) -> None:
        decision = choose(runs(("new", 6)), {"new": None})
        assert decision.reason is Reason.EXPLORE
        assert decision.by_run == (6,)
        assert decision.deadline_s == pytest.approx(EXPLORE_SHARE * 6.0)

    def test_and_few_bytes(self) -> None:
        decision = choose([TierRun("new", 10, 10 * EXPLORE_BYTES // 4)], {"new": None})
        assert decision.by_run == (4,)
        assert choose([TierRun("new", 10, 100 * EXPLORE_BYTES)], {"new": None}).by_run == (1,)

    def test_a_known_tier_before_it_is_fetched_from_as_ever(self) -> None:
        tiers = {"dram": tier(0.01), "new": None}
        assert choose(runs(("dram", 5), ("new", 5)), tiers).by_run == (5, 5)

    def test_before_the_first_step_all_is_fetched(self) -> None:
        decision = choose(runs(("hdd", 10)), {"hdd": tier(2.0)}, pace=None)
        assert decision.reason is Reason.PREFILL_UNKNOWN
        assert decision.by_run == (10,)
        assert decision.deadline_s == pytest.approx(30.0)
        assert decision.recompute_s == inf

    def test_nothing_known_and_nothing_matched(self) -> None:
        assert choose([], {}, pace=None).reason is Reason.NOTHING_MATCHED


def advisor(profile: TierProfile | None) -> Advisor:
    made = Advisor(CHUNK_TOKENS, {"hdd": profile})
    made.prefill.observe(1000, 0.0, 10.0)
    return made


class TestAdvisor:
    SLOW = TierProfile(0.0001, BLOCK / 20)
    """Twenty seconds a block."""

    def test_a_tier_that_is_passed_over_is_probed_now_and_then(self) -> None:
        asked = advisor(self.SLOW)
        advice = [asked.advise(PROMPT, runs(("hdd", 10)), {}) for _ in range(4 * PROBE_EVERY)]
        assert all(each.decision.cut_blocks == 0 for each in advice)
        probes = [each.probe.blocks if each.probe else 0 for each in advice]
        assert probes == [0, PROBE_BLOCKS[0], 0, PROBE_BLOCKS[1]] * 2

    def test_a_tier_that_is_busy_is_not_probed(self) -> None:
        asked = advisor(self.SLOW)
        advice = [asked.advise(PROMPT, runs(("hdd", 10)), {"hdd": 1}) for _ in range(10)]
        assert not any(each.probe for each in advice)

    def test_a_surprising_probe_is_repeated_at_once(self) -> None:
        asked = advisor(self.SLOW)
        for _ in range(4):
            asked.tiers["hdd"].observe(Transfer(1, BLOCK, 20.0))
        while asked.advise(PROMPT, runs(("hdd", 10)), {}).probe is None:
            pass
        asked.tiers["hdd"].observe(Transfer(1, BLOCK, 0.2))
        assert asked.advise(PROMPT, runs(("hdd", 10)), {}).probe is not None

    def test_a_tier_far_below_its_profile_is_probed_every_time_and_soon_used_again(self) -> None:
        one = advisor(TierProfile(0.001, BLOCK / 0.1))
        for _ in range(2):
            one.tiers["hdd"].observe(Transfer(7, 7 * BLOCK, 20.0, late_blocks=6))
        for _ in range(2):
            advice = one.advise(PROMPT, runs(("hdd", 10)), {})
            assert advice.decision.reason is Reason.RECOMPUTE
            assert advice.probe is not None
            size = advice.probe.blocks * BLOCK
            one.tiers["hdd"].observe(Transfer(advice.probe.blocks, size, 0.1 * size / BLOCK))
        advice = one.advise(PROMPT, runs(("hdd", 10)), {})
        assert advice.decision.reason is Reason.FETCH

    def test_a_tier_in_use_needs_no_probe(self) -> None:
        asked = advisor(TierProfile(0.001, BLOCK * 10))
        advice = [asked.advise(PROMPT, runs(("hdd", 10)), {}) for _ in range(10)]
        assert not any(each.probe for each in advice)

    def test_the_probe_starts_where_the_fetch_ends(self) -> None:
        asked = Advisor(CHUNK_TOKENS, {"dram": TierProfile(0.0, 1e12), "hdd": self.SLOW})
        asked.prefill.observe(1000, 0.0, 10.0)
        matched = runs(("dram", 4), ("hdd", 6))
        probes = [asked.advise(PROMPT, matched, {}).probe for _ in range(PROBE_EVERY)]
        assert probes[-1] is not None
        assert (probes[-1].tier, probes[-1].start) == ("hdd", 4)


class TestDecisionLog:
    def test_errors_are_relative_to_what_was_measured(self) -> None:
        log = DecisionLog()
        decision = choose(runs(("ssd", 10)), {"ssd": tier(0.1)})
        assert log.error() is None
        for actual in (1.1, 2.2, 2.2, 2.2):
            log.record(decision, actual)
        error = log.error()
        assert error is not None
        assert error.count == 4
        assert error.p50 == pytest.approx(0.5)
        assert error.bias == pytest.approx(3.3 / 7.7)
        assert log.counts[Reason.FETCH] == 4

    def test_what_predicted_nothing_is_counted_only(self) -> None:
        log = DecisionLog()
        log.record(choose(runs(("ssd", 1)), {"ssd": tier(0.1)}, pace=None), 1.0)
        assert log.counts[Reason.PREFILL_UNKNOWN] == 1
        assert log.error() is None
