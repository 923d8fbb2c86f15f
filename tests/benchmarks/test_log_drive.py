"""A simulated log against what must hold of any, and the loads it is tried on."""

import numpy as np
import pytest
from benchmarks.log_drive import SEGMENTS, LogDrive, play_log
from benchmarks.synthetic_loads import LOADS, SyntheticLoad, load_named

from kvdepot.errors import ConfigError
from kvdepot.policy.placing.reclaim import RULES, rule_named
from kvdepot.sim.tiers import BlockIndex
from kvdepot.sim.workload import NO_PARENT, PromptRequest, Workload

BLOCKS = 4


def looped(prompts: int, rounds: int) -> Workload:
    """The same prompts of four blocks, one after the other."""
    workload = Workload(16)
    chains = [workload.new_blocks(NO_PARENT, BLOCKS) for _ in range(prompts)]
    for _ in range(rounds):
        for chain in chains:
            workload.add(PromptRequest(0.0, 16 * BLOCKS, 0, chain))
    return workload


@pytest.mark.parametrize("name", RULES)
def test_what_fits_is_written_once_and_then_read(name: str) -> None:
    counts = play_log(looped(16, 3), 2 * SEGMENTS, rule_named(name), lambda _: None)
    assert (counts.blocks_asked, counts.blocks_hit) == (3 * 64, 2 * 64)
    assert (counts.blocks_new, counts.blocks_again) == (64, 0)


def test_first_in_first_out_hits_nothing_of_a_longer_loop() -> None:
    counts = play_log(looped(64, 3), 2 * SEGMENTS, rule_named("fifo"), lambda _: None)
    assert (counts.blocks_hit, counts.blocks_new, counts.blocks_again) == (0, 3 * 256, 0)
    assert counts.written_per_read == 3 * 256


@pytest.mark.parametrize("name", RULES)
def test_nothing_is_there_without_its_head_nor_beyond_the_capacity(name: str) -> None:
    workload = SyntheticLoad(LOADS["mixture"].make, 300, held_out=False).workload(seed=3)
    index = BlockIndex.of(workload)
    drive, capacity = LogDrive(20 * SEGMENTS, index, rule_named(name)), 20 * SEGMENTS
    everyone, parents = np.arange(workload.block_count), np.array(workload.parents)
    for request in workload:
        rows = request.blocks.tolist()
        hit = int(np.append(drive.has(request.blocks), False).argmin())
        index.tree.use(rows[:hit])
        drive.write(rows[hit:])
        here = drive.has(everyone)
        assert here.sum() <= capacity
        continued = here & (parents != NO_PARENT)
        assert here[parents[continued]].all()


@pytest.mark.parametrize("name", LOADS)
def test_a_load_is_the_same_for_the_same_seed_and_made_of_chains(name: str) -> None:
    short = SyntheticLoad(load_named(name).make, 60, held_out=False)
    one, same, other = short.workload(1), short.workload(1), short.workload(2)
    assert [r.blocks.tolist() for r in one] == [r.blocks.tolist() for r in same]
    assert len(one) == len(other) == 60
    for request in one:
        chain = request.blocks.tolist()
        assert [one.parents[block] for block in chain] == [NO_PARENT, *chain[:-1]]
        assert request.input_tokens == len(chain) * one.block_tokens


def test_a_load_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="rush hour"):
        load_named("rush hour")
