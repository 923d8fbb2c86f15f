"""Facts reach the decision, and the decision reaches the load."""

from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.toy_engine import ToyRequest, full_attention

from kvdepot.adapters.vllm.fetch_decision import FetchDecider, queue_before, step_work
from kvdepot.adapters.vllm.messages import LoadEnd, StepTime, TierTime
from kvdepot.adapters.vllm.metrics import WARN_EVERY_S, RateLimitedWarnings
from kvdepot.adapters.vllm.requests import (
    DepotHit,
    Phase,
    RequestKeys,
    TrackedRequest,
)
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.first_token import Reason
from kvdepot.core.layout import KVLayout
from kvdepot.core.namespace import Namespace
from kvdepot.policy.fetching.speed_models import attention_work
from kvdepot.testing.clocks import ManualClock

SIZE = 128
BLOCK_BYTES = 6 << 20


def tracked(name: str, tokens: int = 1300, **facts: Any) -> TrackedRequest:
    space = NamespaceHandle(Namespace(model="m", layout=KVLayout.opaque(4096, SIZE)))
    request = ToyRequest(name, [1] * tokens, 4)
    request.num_computed_tokens = facts.pop("computed", 0)
    return TrackedRequest(request, "", full_attention(SIZE), (RequestKeys([space]),), **facts)


def taught(token_s: float, byte_s: float) -> FetchDecider:
    """A decider that has seen steps and loads of these speeds."""
    decider = FetchDecider(SIZE, BLOCK_BYTES, 2048, ManualClock().now)
    for tokens in (256, 512, 1024, 2048):
        work = attention_work(tokens, 0)
        decider.observe_steps([StepTime(tokens, work, 0.002 + token_s * tokens)] * 3)
    for turn, blocks in enumerate((1, 2, 4, 8, 4, 2)):
        name, nbytes = f"load{turn}", blocks * BLOCK_BYTES
        decider.load_started(name, ["ssd"] * blocks)
        time = TierTime("ssd", blocks, nbytes, 0.001 + byte_s * nbytes)
        decider.load_ended(LoadEnd(name, None, (time,), 0, time.seconds))
    return decider


def hit(blocks: int = 10, first: int = 0) -> DepotHit:
    return DepotHit(first * SIZE, first, ("ssd",) * blocks)


def test_a_fast_tier_is_used_in_full() -> None:
    one = tracked("r")
    assert taught(1e-3, 1e-9).decide(one, hit(), [one]).stop_block == 10


def test_a_slow_tier_is_left_alone() -> None:
    one = tracked("r")
    assert taught(1e-5, 1e-6).decide(one, hit(), [one]).stop_block == 0
    assert taught(1e-5, 1e-6).decide(one, hit(6, 4), [one]).stop_block == 4


def test_the_same_question_is_asked_once() -> None:
    decider, one = taught(1e-3, 1e-9), tracked("r")
    assert decider.decide(one, hit(), [one]) is decider.decide(one, hit(), [one])
    assert decider.decide(one, hit(9), [one]).stop_block == 9


def test_a_load_has_the_decisions_deadline_and_counts_until_it_is_over() -> None:
    decider, one = taught(1e-3, 1e-9), tracked("r")
    ruling = decider.decide(one, hit(), [one])
    assert decider.load_started("r", hit().tiers) is ruling.decision
    assert decider._outstanding["ssd"] == 10 * BLOCK_BYTES
    decider.load_ended(LoadEnd("r", 3, (), 7, 1.0))
    assert decider._outstanding["ssd"] == 0


def test_a_tier_that_turns_slow_is_learnt_from_its_late_loads() -> None:
    decider = taught(1e-4, 1e-9)
    for turn in range(4):
        one = tracked(f"r{turn}")
        stop = decider.decide(one, hit(), [one]).stop_block
        if not stop:
            break
        decider.load_started(f"r{turn}", ["ssd"] * stop)
        decider.load_ended(
            LoadEnd(f"r{turn}", 1, (TierTime("ssd", 1, BLOCK_BYTES, 0.4),), stop - 1, 0.5)
        )
    assert stop < 10


def test_predictions_are_compared_with_what_happened() -> None:
    decider, one = taught(1e-3, 1e-9), tracked("r")
    decider.decide(one, hit(), [one])
    assert "prediction_error:p50" not in decider.metrics()
    decider._clock = lambda: 100.0
    first = decider.answered("r")
    assert first is not None and first.reason is Reason.FETCH
    assert first.seconds > 0 and 0 < first.predicted_s < first.recompute_s
    assert 0 < first.fetched_tokens <= first.prompt_tokens == one.request.num_tokens
    first.check()
    assert decider.answered("r") is None
    assert decider.metrics()["prediction_error:p50"] > 0
    assert decider.metrics()["tier_bytes_per_second:ssd"] == pytest.approx(1e9, rel=0.2)


def test_the_queue_is_what_comes_before() -> None:
    decoding = tracked("a", 500, computed=500, phase=Phase.COMPUTING)
    prefilling = tracked("b", 1000, computed=400, phase=Phase.COMPUTING)
    waiting, me, behind = tracked("c", 300), tracked("d"), tracked("e")
    queue = queue_before(me, [decoding, prefilling, waiting, me, behind])
    assert (queue.decodes, queue.decode_context_tokens) == (1, 500)
    assert queue.ahead_tokens == 600 + 300
    assert queue.ahead_attention == attention_work(600, 400) + attention_work(300, 0)


def test_what_is_loading_is_not_before_it_but_in_its_company() -> None:
    decider = taught(1e-3, 1e-9)
    loading, me = tracked("a", phase=Phase.LOADING), tracked("b")
    decider.decide(loading, hit(), [loading])
    decider.load_started("a", hit().tiers)
    assert queue_before(me, [loading, me]).ahead_tokens == 0
    queued = tracked("c", hit=hit())
    company = decider._company(me, [loading, me, queued, tracked("d")], 5)
    (load,) = company.loads
    assert load.ready_s > 0
    assert load.work_s > 0
    assert [each.runs[0].blocks for each in company.waiting] == [10]
    assert (company.answered, company.behind) == (5, 1)


def test_with_others_waiting_a_slower_disk_is_used_beside_the_engine() -> None:
    """0.13 s of prefill for a block, 0.16 s from disk."""
    me, behind = tracked("r"), [tracked(f"w{number}") for number in range(4)]
    assert taught(1e-3, 0.16 / BLOCK_BYTES).decide(me, hit(), [me]).stop_block == 0
    decided = taught(1e-3, 0.16 / BLOCK_BYTES).decide(me, hit(), [me, *behind])
    assert decided.decision.reason is Reason.RELIEVE
    assert decided.stop_block == 10


def test_a_step_under_way_hides_a_load() -> None:
    decider, one = taught(1e-3, 0.16 / BLOCK_BYTES), tracked("r")
    decider.step_planned(2048, 0.0)
    assert decider.decide(one, hit(), [one]).stop_block == 10
    decider.step_planned(2048, 0.0)
    decider.step_planned(2048, 0.0)
    assert decider._busy_until < 2.5 * 2.1, "an engine has two steps at most"


def test_only_steps_with_prefill_are_timed() -> None:
    decoding = tracked("a", 500, computed=499)
    prefilling = tracked("b", 1000, computed=400)
    assert step_work([(decoding, 1)]) == (1, attention_work(1, 499), False)
    tokens, _, prefill = step_work([(decoding, 1), (prefilling, 200)])
    assert (tokens, prefill) == (201, True)


def test_complaints_are_said_once_in_a_while() -> None:
    now = [0.0]
    complaints = RateLimitedWarnings(lambda: now[0])
    assert complaints.warn("x", ValueError("1"))
    assert not complaints.warn("x", ValueError("2"))
    assert complaints.warn("y", ValueError("1"))
    now[0] = WARN_EVERY_S
    assert complaints.warn("x", ValueError("3"))
