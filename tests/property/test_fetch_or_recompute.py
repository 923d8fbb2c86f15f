"""What holds for every decision, whatever the facts."""

from math import inf, isfinite

from hypothesis import given
from hypothesis import strategies as st

from kvdepot.policy.fetching.fetch_or_recompute import (
    EXPLORE_BYTES,
    Decision,
    EngineQueue,
    PromptLengths,
    TierRun,
    decide,
)
from kvdepot.policy.fetching.speed_models import (
    PrefillModel,
    PrefillPace,
    TierModel,
    TierPace,
    Transfer,
    attention_work,
)

TIERS = ("dram", "ssd", "hdd")
CLOSE = 1.0 + 1e-9
"""Sums in another order differ in their last digits."""

paces = st.builds(
    TierPace,
    wait_s=st.floats(0.0, 5.0),
    byte_s=st.floats(-12, -5).map(lambda power: 10.0**power),
    spread_share=st.floats(0.0, 1.0),
)
prefills = st.builds(
    PrefillPace,
    step_s=st.floats(0.0, 0.1),
    token_s=st.floats(1e-6, 1e-2),
    pair_s=st.floats(0.0, 1e-6),
)
queues = st.builds(
    EngineQueue,
    ahead_tokens=st.sampled_from([0, 0, 100, 5000]),
    ahead_attention=st.sampled_from([0.0, 1e6]),
    decodes=st.sampled_from([0, 3, 200]),
    decode_context_tokens=st.sampled_from([0, 100_000]),
)
chunks = st.sampled_from([256, 2048, 100_000])


@st.composite
def matches(draw: st.DrawFn, tiers: tuple[str, ...] = TIERS) -> tuple[PromptLengths, list[TierRun]]:
    block_tokens = draw(st.sampled_from([16, 128, 256]))
    block_bytes = draw(st.sampled_from([10_000, 5_898_240, 33_554_432]))
    lengths = draw(st.lists(st.tuples(st.sampled_from(tiers), st.integers(0, 12)), max_size=5))
    runs = [TierRun(tier, blocks, blocks * block_bytes) for tier, blocks in lengths]
    local = draw(st.integers(0, 3 * block_tokens))
    matched = sum(run.blocks for run in runs) + local // block_tokens
    rest = draw(st.integers(0, 3 * block_tokens))
    tokens = max(matched * block_tokens + rest, local + 1)
    return PromptLengths(tokens, block_tokens, local), runs


every_tier = st.fixed_dictionaries(dict.fromkeys(TIERS, paces))
facts = st.tuples(matches(), prefills, every_tier, queues, chunks)
Facts = tuple[
    tuple[PromptLengths, list[TierRun]],
    PrefillPace,
    dict[str, TierPace],
    EngineQueue,
    int,
]


def choose(given_facts: Facts) -> Decision:
    (prompt, runs), prefill, tiers, queue, chunk_tokens = given_facts
    return decide(prompt, runs, prefill, tiers, queue, chunk_tokens)


def first_token_s(given_facts: Facts, blocks: int) -> float:
    """The time to the first token when so many blocks are fetched, block by block."""
    (prompt, runs), pace, tiers, queue, chunk_tokens = given_facts
    ends: dict[str, float] = {}
    left = blocks
    for run in runs:
        taken = min(run.blocks, left)
        left -= taken
        if taken:
            begin = ends.get(run.tier, tiers[run.tier].wait_s)
            block_bytes = run.size_bytes / run.blocks
            ends[run.tier] = begin + taken * block_bytes * tiers[run.tier].byte_s
    fetch_s = max(ends.values(), default=0.0)
    step_s = pace.step_s + pace.token_s * queue.decodes + pace.pair_s * queue.decode_context_tokens
    chunk = max(chunk_tokens - queue.decodes, 1)
    queue_s = queue.ahead_tokens * (step_s / chunk + pace.token_s)
    queue_s += queue.ahead_attention * pace.pair_s
    first = prompt.local_tokens // prompt.block_tokens
    start = max((first + blocks) * prompt.block_tokens, prompt.local_tokens)
    start = min(start, prompt.tokens - 1)
    rest = prompt.tokens - start
    backoff_s = max(rest / chunk, 1.0) * step_s + rest * pace.token_s
    backoff_s += attention_work(rest, start) * pace.pair_s
    return max(fetch_s, queue_s) + backoff_s


@given(facts)
def test_no_cut_is_better_than_the_chosen_one(given_facts: Facts) -> None:
    decision = choose(given_facts)
    blocks = sum(run.blocks for run in given_facts[0][1])
    times = [first_token_s(given_facts, cut) for cut in range(blocks + 1)]
    assert times[decision.cut_blocks] <= min(times) * CLOSE
    assert abs(decision.predicted_s - times[decision.cut_blocks]) <= 1e-9 * decision.predicted_s
    assert abs(decision.recompute_s - times[0]) <= 1e-9 * times[0]


@given(facts)
def test_runs_are_fetched_as_the_cut_says(given_facts: Facts) -> None:
    decision, (_, runs) = choose(given_facts), given_facts[0]
    where = [number for number, run in enumerate(runs) for _ in range(run.blocks)]
    fetched = where[: decision.cut_blocks]
    assert decision.by_run == tuple(fetched.count(number) for number in range(len(runs)))


@given(facts)
def test_the_deadline_lies_between_the_fetch_and_a_recompute(given_facts: Facts) -> None:
    decision = choose(given_facts)
    assert decision.fetch_s <= decision.deadline_s * CLOSE
    assert decision.deadline_s <= decision.recompute_s
    assert (decision.deadline_s > 0.0) == (decision.cut_blocks > 0)


@given(facts, st.sets(st.sampled_from(TIERS)))
def test_what_is_not_known_bounds_what_is_risked(given_facts: Facts, unknown: set[str]) -> None:
    (prompt, runs), prefill, tiers, queue, chunk_tokens = given_facts
    known = {tier: None if tier in unknown else pace for tier, pace in tiers.items()}
    decision = decide(prompt, runs, prefill, known, queue, chunk_tokens)
    asked = sum(
        run.size_bytes * blocks / run.blocks
        for run, blocks in zip(runs, decision.by_run, strict=True)
        if blocks and run.tier in unknown
    )
    largest = max((run.size_bytes / run.blocks for run in runs if run.blocks), default=0.0)
    assert asked <= max(EXPLORE_BYTES, largest)
    assert decision.deadline_s <= decision.recompute_s
    blind = decide(prompt, runs, None, known, queue, chunk_tokens)
    assert blind.deadline_s < inf
    assert blind.predicted_s == inf


durations = st.floats(-7, 5).map(lambda power: 10.0**power)
sizes = st.floats(0, 12).map(lambda power: int(10.0**power))


@given(st.lists(st.tuples(sizes, durations, st.integers(1, 40), st.integers(0, 40), sizes)))
def test_whatever_a_tier_does_its_pace_stays_a_pace(
    transfers: list[tuple[int, float, int, int, int]],
) -> None:
    model = TierModel()
    for size, took, blocks, late, outstanding in transfers:
        model.observe(Transfer(blocks, size, took, outstanding, min(late, blocks)))
        pace = model.pace(outstanding)
        assert pace is not None
        assert isfinite(pace.wait_s) and isfinite(pace.byte_s) and pace.spread_share > 0.0
        assert pace.wait_s + pace.byte_s * size > 0.0


@given(st.lists(st.tuples(st.integers(1, 100_000), st.integers(0, 1_000_000), durations)))
def test_whatever_the_engine_does_its_pace_stays_a_pace(
    steps: list[tuple[int, int, float]],
) -> None:
    model = PrefillModel()
    for tokens, context, took in steps:
        model.observe(tokens, attention_work(tokens, context), took)
        pace = model.pace()
        assert pace is not None
        assert isfinite(pace.step_s + pace.token_s + pace.pair_s)
        assert pace.step_s + pace.token_s + pace.pair_s > 0.0
