"""The fleet: nothing is lost, nothing is invented, and one seed gives one outcome."""

import random
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.queue_decision import InFlight
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdepot.errors import ConfigError
from kvdepot.policy.fetching.speed_models import PrefillPace
from kvdepot.sim.arrivals import AsRecorded, Conversations, MultiTurn
from kvdepot.sim.drives import DriveSpeed
from kvdepot.sim.fleet import FleetSetup, RouteName, SimulatedFleet, TierSetup
from kvdepot.sim.gpu import GpuPace
from kvdepot.sim.results import Findings
from kvdepot.sim.worker import HBM, WorkerRules
from kvdepot.sim.workload import NO_PARENT, PromptRequest, Workload

PACE = GpuPace(PrefillPace(0.001, 1e-4, 1e-8), weights_s=0.005, context_token_s=1e-8)
SSD = TierSetup("ssd", 100e6, DriveSpeed(2, 1e9, 5e8, latency_s=1e-4))
HDD = TierSetup("hdd", 400e6, DriveSpeed(3, 1e8, 1e8, seek_s=0.01), remote=True, shared=True)
SETUP = FleetSetup(
    rules=WorkerRules(PACE, 64),
    block_bytes=1e6,
    memory_blocks=40,
    link_bytes_per_s=1e10,
    network_bytes_per_s=1e9,
    tiers=(SSD, HDD),
)
TALKS = MultiTurn(users=6, turns=4, system_tokens=128, history_tokens=512, qps=2.0)


def run(setup: FleetSetup, talks: MultiTurn = TALKS, seed: int = 0) -> Findings:
    workload = talks.workload(setup.rules.block_tokens)
    return SimulatedFleet(setup, workload).run(Conversations(talks, seed), lambda done: None)


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.integers(1, 3),
    workers=st.integers(1, 2),
    memory=st.integers(25, 60),
    ssd=st.integers(1, 60),
    back=st.booleans(),
    policy=st.sampled_from(["lru", "default", "s3fifo"]),
    route=st.sampled_from(["prefix", "random"]),
    decides=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_is_asked_is_hit_or_computed(
    nodes: int,
    workers: int,
    memory: int,
    ssd: int,
    back: bool,
    policy: str,
    route: RouteName,
    decides: bool,
    seed: int,
) -> None:
    setup = replace(
        SETUP,
        rules=WorkerRules(PACE, 64, decides=decides),
        nodes=nodes,
        copies=workers,
        memory_blocks=memory,
        tiers=(replace(SSD, capacity_bytes=ssd * 1e6), HDD),
        write_mode="back" if back else "through",
        policy=policy,
        route=route,
        seed=seed,
    )
    found = run(setup, replace(TALKS, poisson=True), seed)
    assert len(found.served) + found.refused == TALKS.users * TALKS.turns
    assert found.refused == 0
    for one in found.served:
        assert all(tokens > 0 for tokens in one.hits.values())
        assert 0 <= sum(one.hits.values()) < one.input_tokens
        assert one.arrival_s <= one.admitted_s <= one.fetched_s < one.first_s <= one.last_s
    hit = sum(found.hit_ratio(name) for name in (HBM, "ssd", "hdd"))
    assert hit == pytest.approx(found.hit_ratio())
    assert 0.0 <= found.gpu_prefill_busy <= found.gpu_busy <= 1.0 + 1e-9
    for flow in found.tiers:
        blocks = flow.tokens_hit / 64
        assert flow.bytes_read / 1e6 >= blocks - 1e-9, "every hit was read"
        assert flow.read_busy <= 1.0 + 1e-9


def test_one_seed_one_outcome() -> None:
    talks = replace(TALKS, poisson=True)
    setup = replace(SETUP, nodes=2, route="random", seed=7)
    assert run(setup, talks, 7) == run(setup, talks, 7)
    assert run(setup, talks, 7) != run(replace(setup, seed=8), talks, 8)


def test_without_reuse_all_is_computed() -> None:
    found = run(replace(SETUP, rules=WorkerRules(PACE, 64, reuse=False)))
    assert found.hit_ratio() == 0.0
    assert all(flow.bytes_written == 0 for flow in found.tiers)
    assert run(SETUP).hit_ratio() > 0.5


def _two_prompts(gap_s: float) -> Workload:
    """The same prompt of four blocks twice."""
    workload = Workload(64)
    blocks = workload.new_blocks(-1, 4)
    for arrival_s in (0.0, gap_s):
        workload.add(PromptRequest(arrival_s, 256, 1, blocks))
    return workload


def test_times_of_a_fetch_by_hand() -> None:
    """Nothing is kept in GPU memory, so the second prompt comes from the SSDs."""
    rules = WorkerRules(PACE, 64, keeps_memory=False, decides=False)
    workload = _two_prompts(10.0)
    setup = replace(SETUP, rules=rules, tiers=(SSD,))
    cold, warm = SimulatedFleet(setup, workload).run(AsRecorded(workload), lambda done: None).served
    # 256 tokens: a step, 256 tokens, 256 * 128 pairs.
    assert cold.ttft_s == pytest.approx(0.001 + 0.0256 + 1e-8 * 256 * 128)
    # Four blocks of 1 MB on two drives of 1 GB/s: 2 ms, and 0.1 ms of latency.
    assert warm.fetched_s - warm.admitted_s == pytest.approx(0.0021)
    # The last token is computed; reading the weights takes longer.
    assert warm.hits == {"ssd": 255}
    assert warm.ttft_s == pytest.approx(0.0021 + 0.001 + 0.005)


def test_a_slow_tier_is_not_fetched_from() -> None:
    slow = TierSetup("hdd", 400e6, DriveSpeed(1, 1e6, 1e8), remote=True, shared=True)
    workload = _two_prompts(10.0)
    rules = WorkerRules(PACE, 64, keeps_memory=False)
    setup = replace(SETUP, rules=rules, tiers=(slow,))
    _, warm = SimulatedFleet(setup, workload).run(AsRecorded(workload), lambda done: None).served
    assert not warm.hits, "1 s a block, and all is computed in 30 ms"


def test_write_back_writes_what_leaves_and_write_through_all() -> None:
    tiers = (replace(SSD, capacity_bytes=30e6), HDD)
    through, back = (
        run(replace(SETUP, tiers=tiers, write_mode=mode)).tiers[1].bytes_written
        for mode in ("through", "back")
    )
    assert 0 < back < through


def test_prefix_routing_hits_more_than_random() -> None:
    setup = replace(SETUP, nodes=4, tiers=(SSD,))
    assert run(setup).hit_ratio() > run(replace(setup, route="random")).hit_ratio()


def test_a_shared_tier_serves_what_another_node_computed() -> None:
    setup = replace(SETUP, nodes=4, route="random", tiers=(HDD,))
    rules = WorkerRules(PACE, 64, decides=False, keeps_memory=False)
    assert run(replace(setup, rules=rules)).hit_ratio("hdd") > 0.5


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    found = run(replace(SETUP, memory_blocks=5))
    assert not found.served
    assert found.refused == TALKS.users


def test_setups_that_make_no_sense() -> None:
    workload = TALKS.workload(64)
    for setup in (
        replace(SETUP, nodes=0),
        replace(SETUP, tiers=(HDD, SSD)),
        replace(SETUP, tiers=(SSD, SSD)),
        replace(SETUP, tiers=(replace(SSD, capacity_bytes=1.0),)),
    ):
        with pytest.raises(ConfigError):
            SimulatedFleet(setup, workload)


def returning_users(users: int, seed: int) -> Workload:
    """Each comes twice, the second time in another order and with a little more."""
    workload = Workload(256)
    shared = workload.new_blocks(NO_PARENT, 20)
    chains = [
        np.concatenate((shared, workload.new_blocks(int(shared[-1]), 26))) for _ in range(users)
    ]
    for chain in chains:
        workload.add(PromptRequest(0.0, 40 * 256, 16, chain[:40]))
    for user in random.Random(seed).sample(range(users), users):
        workload.add(PromptRequest(0.0, 46 * 256, 16, chains[user]))
    return workload


def test_a_disk_slower_than_the_gpu_is_capacity_beside_it() -> None:
    """A GPU of 31,000 tokens a second, a disk of 22,000: for one prompt alone it is of no use."""
    token_bytes, users = 131_072, 24
    workloads = [returning_users(users, seed) for seed in range(4)]
    pace = GpuPace(PrefillPace(0.012, 26.5e-6, 8.6e-10), 0.005, 4e-8, chunk_tokens=8192)
    setup = FleetSetup(
        rules=WorkerRules(pace, 256),
        block_bytes=256 * token_bytes,
        memory_blocks=234,
        link_bytes_per_s=5e10,
        network_bytes_per_s=1e10,
        tiers=(TierSetup("ssd", 1e12, DriveSpeed(1, 22_000 * token_bytes, 2e9)),),
    )

    def second_visits_s(rules: WorkerRules, tiers: tuple[TierSetup, ...] = setup.tiers) -> float:
        total_s = 0.0
        for workload in workloads:
            fleet = SimulatedFleet(replace(setup, rules=rules, tiers=tiers), workload)
            served = fleet.run(InFlight(workload, 8), lambda done: None).served
            second = [one for one in served if one.number >= users]
            total_s += max(one.last_s for one in second) - min(one.arrival_s for one in second)
        return total_s

    together = second_visits_s(setup.rules)
    assert together < 0.95 * second_visits_s(replace(setup.rules, considers=False))
    assert together < 0.95 * second_visits_s(replace(setup.rules, decides=False))
    assert together < 0.8 * second_visits_s(setup.rules, ())
