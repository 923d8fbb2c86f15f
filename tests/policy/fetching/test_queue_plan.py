"""Decisions for all waiting requests: never worse together, none too late, alone as before."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.core.first_token import Reason
from kvdepot.policy.fetching.fetch_or_recompute import (
    Decision,
    EngineQueue,
    PromptLengths,
    TierRun,
    decide,
)
from kvdepot.policy.fetching.queue_plan import (
    STRETCH_MAX,
    Company,
    FetchingPrompt,
    FetchOption,
    MatchedPrompt,
    QueuedPrompt,
    QueueModel,
    decide_jointly,
    decide_separately,
    plan_queue,
)
from kvdepot.policy.fetching.speed_models import PrefillPace, TierPace

PACE = PrefillPace(0.0, 1 / 31_000, 0.0)
CHUNK_TOKENS = 8192
TOKEN_BYTES = 131_072
SSD = {"ssd": TierPace(0.0, 1 / (22_000 * TOKEN_BYTES), 0.1)}
"""A disk that gives 22,000 tokens a second beside an engine that computes 31,000."""
EPS = 1e-9

times = st.floats(0.0, 10.0)
options = st.lists(
    st.builds(
        FetchOption,
        cut=st.integers(0, 50),
        tiers_s=st.dictionaries(st.sampled_from(["ssd", "hdd", "dram"]), times, max_size=2),
        work_s=times,
    ),
    min_size=1,
    max_size=4,
).map(tuple)
loads = st.lists(st.builds(FetchingPrompt, times, times), max_size=3).map(tuple)
models = st.builds(
    QueueModel,
    waits_s=st.fixed_dictionaries({"ssd": times, "hdd": times, "dram": times}),
    engine_s=times,
    loads=loads,
    losers=times,
)


def prompt(tokens: int = 10_000, local: int = 5_000) -> MatchedPrompt:
    blocks = (tokens - local) // 250
    run = TierRun("ssd", blocks, blocks * 250 * TOKEN_BYTES)
    return MatchedPrompt(PromptLengths(tokens, 250, local), [run])


def choose(company: Company, busy_s: float = 0.0) -> Decision:
    queue = EngineQueue(busy_s=busy_s)
    return decide_jointly(prompt(), PACE, SSD, queue, CHUNK_TOKENS, lambda: company)


def sum_s(model: QueueModel, chosen: Sequence[FetchOption]) -> float:
    return model.finish_s(chosen)[1]


@given(model=models, queue=st.lists(options, min_size=1, max_size=5))
def test_never_worse_together_than_any_simple_rule(
    model: QueueModel, queue: list[tuple[FetchOption, ...]]
) -> None:
    prompts = [QueuedPrompt(each) for each in queue]
    total_s = sum_s(model, plan_queue(model, prompts))
    for other in (
        [each[0] for each in queue],
        [each[-1] for each in queue],
        decide_separately(model, prompts),
    ):
        assert total_s <= sum_s(model, other) * (1 + EPS)


@given(
    model=models,
    queue=st.lists(options, min_size=1, max_size=5),
    stretch=st.floats(1.0, 4.0),
)
def test_deadlines_are_kept_where_that_is_possible(
    model: QueueModel, queue: list[tuple[FetchOption, ...]], stretch: float
) -> None:
    selfish = decide_separately(model, [QueuedPrompt(each) for each in queue])
    due = [stretch * at for at in model.finish_s(selfish)[0]]
    prompts = [QueuedPrompt(each, at) for each, at in zip(queue, due, strict=True)]
    chosen = plan_queue(model, prompts)
    assert all(at <= limit for at, limit in zip(model.finish_s(chosen)[0], due, strict=True))
    assert sum_s(model, chosen) <= sum_s(model, selfish) * (1 + EPS)


def test_the_sum_of_waits_by_hand() -> None:
    """Two prompts: one is computed in 2 s while the disk brings the other in 3 s."""
    compute, fetch = FetchOption(0, {}, 2.0), FetchOption(9, {"ssd": 3.0}, 0.5)
    model = QueueModel({"ssd": 0.0})
    assert model.finish_s([compute, fetch]) == ([2.0, 3.5], 5.5)
    assert model.finish_s([compute, compute]) == ([2.0, 4.0], 6.0)
    assert model.finish_s([fetch, fetch]) == ([3.5, 6.5], 10.0)
    both = QueuedPrompt((compute, fetch))
    assert [one.cut for one in plan_queue(model, [both, both])] in ([0, 9], [9, 0])
    assert [one.cut for one in plan_queue(model, [both])] == [0]


def test_alone_a_disk_that_is_slower_than_the_engine_is_left_alone() -> None:
    assert choose(Company()).reason is Reason.RECOMPUTE


def test_with_others_it_is_capacity_beside_the_engine() -> None:
    for company in (
        Company(answered=6),
        Company(behind=2),
        Company(waiting=(prompt(), prompt())),
        Company(answered=1, loads=(FetchingPrompt(0.0, 0.05), FetchingPrompt(0.1, 0.05))),
    ):
        decision = choose(company)
        assert decision.reason is Reason.RELIEVE, company
        assert decision.by_run == (decision.cut_blocks,)
        assert decision.cut_blocks > 0
        assert decision.fetch_s <= decision.deadline_s


@given(
    tokens=st.integers(600, 30_000),
    local=st.integers(0, 500),
    disk_tokens_s=st.floats(100.0, 100_000.0),
    ahead=st.integers(0, 50_000),
    busy_s=st.floats(0.0, 2.0),
    company=st.builds(
        Company,
        loads=loads,
        answered=st.integers(0, 100),
        behind=st.integers(0, 100),
        waiting=st.integers(0, 5).map(lambda count: (prompt(),) * count),
    ),
)
def test_no_prompt_pays_more_than_its_share(
    tokens: int, local: int, disk_tokens_s: float, ahead: int, busy_s: float, company: Company
) -> None:
    """Whatever is gained for the others; and nobody else there means the same as before."""
    tiers = {"ssd": TierPace(1e-4, 1 / (disk_tokens_s * TOKEN_BYTES), 0.1)}
    one, queue = prompt(tokens, local // 250 * 250), EngineQueue(ahead, busy_s=busy_s)
    alone = decide(one.lengths, one.runs, PACE, tiers, queue, CHUNK_TOKENS)
    found = decide_jointly(one, PACE, tiers, queue, CHUNK_TOKENS, lambda: company)
    assert found.cut_blocks >= alone.cut_blocks
    if not company:
        assert found == alone
    if found.reason is Reason.RELIEVE:
        without = replace(company, waiting=(), answered=0, behind=0)
        waited_s = sum(load.work_s + load.ready_s for load in without.loads)
        assert found.predicted_s <= STRETCH_MAX * (alone.predicted_s + waited_s) * (1 + EPS)
        assert found.deadline_s >= found.fetch_s or found.deadline_s >= alone.recompute_s


@pytest.mark.parametrize("known", [False, True])
def test_what_is_not_known_is_decided_as_before(known: bool) -> None:
    company, queue = Company(answered=6), EngineQueue()
    pace = PACE if known else None
    tiers: dict[str, TierPace | None] = {"ssd": None} if known else dict(SSD)
    one = prompt()
    found = decide_jointly(one, pace, tiers, queue, CHUNK_TOKENS, lambda: company)
    assert found == decide(one.lengths, one.runs, pace, tiers, queue, CHUNK_TOKENS)
    assert found.recompute_s == inf or found.reason is Reason.EXPLORE


def test_the_step_that_runs_hides_a_fetch() -> None:
    """Its tokens are in no queue any more, its time is."""
    assert choose(Company(), busy_s=0.3).reason is Reason.FETCH
