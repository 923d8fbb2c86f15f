"""The simulator against figures that others measured, and against slow models of itself."""

import json
import os
from collections import OrderedDict
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.policy.eviction import ORDERS
from kvdepot.sim.hits_only import POLICIES, Case, HitCounts, parse_capacity, play, prefill_work
from kvdepot.sim.traces import read_trace
from kvdepot.sim.workload import NO_PARENT, Numbering, PromptRequest, Workload

TRACES = Path(os.environ.get("KVDEPOT_TRACES", "/work/shared/data/traces"))
CONVERSATION = TRACES / "mooncake_conversation.jsonl.xz"
KNOWN = {"1M": 0.054, "3M": 0.139, "5M": 0.211, "10M": 0.291, "20M": 0.358, "50M": 0.371}
"""LRU, from the README beside the traces: tokens hit over tokens asked for."""

needs_traces = pytest.mark.skipif(not CONVERSATION.exists(), reason="the public traces are absent")


def ratio(workload: Workload, policy: str, capacity: str) -> float:
    return hits(workload, policy, capacity).token_hit_ratio


def hits(workload: Workload, policy: str, capacity: str) -> HitCounts:
    return play(workload, Case(policy, parse_capacity(capacity)), lambda done: None)


@cache
def conversation() -> Workload:
    return read_trace(CONVERSATION)


@cache
def of_conversation(policy: str, capacity: str) -> HitCounts:
    """Played once for all tests: it takes seconds."""
    return hits(conversation(), policy, capacity)


@needs_traces
@pytest.mark.slow
def test_lru_has_the_known_figures() -> None:
    found = {size: of_conversation("lru", f"dram={size}tok").token_hit_ratio for size in KNOWN}
    assert found == pytest.approx(KNOWN, abs=0.001)


@needs_traces
@pytest.mark.slow
def test_a_cache_without_end_hits_what_can_be_hit() -> None:
    lru = of_conversation("lru", "dram=inf").token_hit_ratio
    assert lru == pytest.approx(0.374, abs=0.001)
    assert of_conversation("optimal", "dram=inf").token_hit_ratio == lru


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize("size", ["1M", "3M", "10M", "50M"])
def test_the_default_is_as_good_as_the_others(size: str) -> None:
    played = {
        policy: of_conversation(policy, f"dram={size}tok")
        for policy in POLICIES
        if policy != "value"
    }
    found = {policy: counts.token_hit_ratio for policy, counts in played.items()}
    best = found.pop("optimal")
    ours = found.pop("default")
    assert ours >= found["lru"]
    assert ours >= 0.98 * max(found.values())
    assert ours <= best
    if size in ("1M", "3M"):
        assert ours > found["s3fifo"], "here the cache thrashes"


def workload_of(prompts: list[list[int]], block_tokens: int = 10, last: int = 10) -> Workload:
    """Prompts as lists of branches; a block is named by the whole path to it."""
    workload = Workload(block_tokens)
    numbering = Numbering(workload)
    for number, path in enumerate(prompts):
        names = [tuple(path[: length + 1]) for length in range(len(path))]
        tokens = block_tokens * (len(path) - 1) + last if path else 0
        workload.add(PromptRequest(float(number), tokens, 0, numbering.chain(names)))
    return workload


Prompts = st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=40)


@given(Prompts, st.integers(5, 30), st.integers(1, 10))
def test_lru_is_a_list_of_blocks(prompts: list[list[int]], capacity: int, last: int) -> None:
    """Blocks in one list by use, tail before head, cut at the capacity: no tree at all."""
    order: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hit = 0
    for path in prompts:
        names = [tuple(path[: length + 1]) for length in range(len(path))]
        there = 0
        while there < len(names) and names[there] in order:
            there += 1
        hit += min(there * 10, 10 * (len(path) - 1) + last) if path else 0
        for name in reversed(names):
            order[name] = None
            order.move_to_end(name)
        while len(order) > capacity:
            order.popitem(last=False)
    workload = workload_of(prompts, last=last)
    counts = hits(workload, "lru", f"dram={capacity * 10}tok")
    assert sum(counts.tokens_hit.values()) == hit


@given(Prompts, st.integers(1, 12))
def test_nobody_hits_more_than_the_optimum(prompts: list[list[int]], capacity: int) -> None:
    workload = workload_of(prompts)
    best = ratio(workload, "optimal", f"dram={capacity * 10}tok")
    for policy in ORDERS:
        counts = hits(workload, policy, f"dram={capacity * 10}tok")
        assert counts.token_hit_ratio <= best + 1e-12
        assert counts.blocks_entered - counts.blocks_evicted <= capacity


def slow_optimum(prompts: list[list[int]], capacity: int) -> int:
    """The most blocks that can be hit: every choice of what to keep after every prompt."""
    states: dict[frozenset[tuple[int, ...]], int] = {frozenset(): 0}
    for path in prompts:
        names = [tuple(path[: length + 1]) for length in range(len(path))]
        after: dict[frozenset[tuple[int, ...]], int] = {}
        for kept, hit in states.items():
            there = 0
            while there < len(names) and names[there] in kept:
                there += 1
            for choice in subsets(sorted(kept | set(names)), capacity):
                after[choice] = max(after.get(choice, 0), hit + there)
        states = after
    return max(states.values())


def subsets(names: list[tuple[int, ...]], most: int) -> list[frozenset[tuple[int, ...]]]:
    found: list[frozenset[tuple[int, ...]]] = [frozenset()]
    for name in names:
        found += [one | {name} for one in found if len(one) < most]
    return found


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), max_size=5), st.integers(1, 3))
def test_the_optimum_is_the_best_of_all_choices(prompts: list[list[int]], capacity: int) -> None:
    counts = hits(workload_of(prompts), "optimal", f"dram={capacity * 10}tok")
    assert sum(counts.tokens_hit.values()) == 10 * slow_optimum(prompts, capacity)


@given(Prompts, st.integers(2, 8), st.integers(10, 40))
def test_a_second_tier_adds_what_it_alone_would_hit(
    prompts: list[list[int]], small: int, large: int
) -> None:
    workload = workload_of(prompts)
    both = hits(workload, "lru", f"dram={small * 10}tok,ssd={large * 10}tok")
    assert both.token_hit_ratio == ratio(workload, "lru", f"ssd={large * 10}tok")
    assert both.by_tier["dram"] == ratio(workload, "lru", f"dram={small * 10}tok")


def test_a_partly_filled_block_counts_with_its_tokens() -> None:
    workload = Workload(512)
    numbering = Numbering(workload)
    for number in range(2):
        workload.add(PromptRequest(float(number), 700, 0, numbering.chain(["a", "b"])))
    assert hits(workload, "lru", "dram=inf").tokens_hit == {"dram": 700}


def test_requests_without_blocks_are_no_trouble() -> None:
    workload = Workload(512)
    workload.add(PromptRequest(0.0, 0, 0, np.zeros(0, dtype=np.int64)))
    workload.add(PromptRequest(1.0, 700, 0, workload.new_blocks(NO_PARENT, 2)))
    for policy in POLICIES:
        assert ratio(workload, policy, "dram=1ktok") == 0.0


def test_a_prompt_longer_than_the_cache_keeps_its_head() -> None:
    workload = workload_of([[0] * 8, [0] * 8])
    for policy in POLICIES:
        counts = hits(workload, policy, "dram=50tok")
        assert counts.tokens_hit == {"dram": 50}, policy


@needs_traces
@pytest.mark.slow
def test_the_same_trace_has_the_same_outcome() -> None:
    first = of_conversation("default", "dram=1Mtok")
    again = hits(conversation(), "default", "dram=1Mtok")
    assert json.dumps(first.tokens_hit) == json.dumps(again.tokens_hit)


def test_gpu_time_grows_with_context() -> None:
    workload = workload_of([[1, 2, 3], [1, 2, 4]])
    counts = hits(workload, "lru", "dram=inf")
    assert counts.prefill_saved_ratio == pytest.approx(
        prefill_work(20) / (2 * prefill_work(30)), rel=1e-9
    )
    assert prefill_work(60_000) / 60_000 == pytest.approx(2.0)
    best = hits(workload, "optimal", "dram=inf")
    assert best.prefill_saved_ratio == counts.prefill_saved_ratio
