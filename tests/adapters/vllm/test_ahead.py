"""Engines that schedule before they know what was sampled, and devices whose copies take time."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.toy_engine import ToyRequest, Toys

from kvdepot.adapters.vllm.config import ConnectorConfig
from kvdepot.adapters.vllm.groups import GroupRule
from kvdepot.adapters.vllm.messages import GroupFacts, ShardFacts, StepPlan, StepReport, WorkerRank
from kvdepot.adapters.vllm.requests import DepotHit, TrackedRequest
from kvdepot.adapters.vllm.scheduler import ConnectorScheduler, EngineFacts
from kvdepot.adapters.vllm.shards import WorkerShard
from kvdepot.adapters.vllm.weights import WeightsSource
from kvdepot.core.layout import KVLayout

SIZE = 4
PAGES = list(range(100, 140))
FULL, WINDOW = GroupRule("full", 0, SIZE), GroupRule("window", 0, SIZE, 6)


class Followed:
    """One request of a scheduler that has just been added."""

    def __init__(
        self, toys: Toys, tokens: int, *, at_once: bool = True, rule: GroupRule = FULL, **more: Any
    ) -> None:
        layout = KVLayout.opaque(4096, SIZE)
        groups = (GroupFacts(rule, layout, 1, (), WorkerShard(0, 1)),)
        rank, weights = WorkerRank(0, 1, "v"), WeightsSource("w")
        engine = EngineFacts(64, shares_pages=True)
        self.side = ConnectorScheduler(ConnectorConfig(), toys.store(), engine)
        self.side.set_workers([ShardFacts("m", "f", weights, rank, groups, SIZE, at_once)])
        self.request = ToyRequest("r", list(range(tokens)), 9)
        vars(self.request).update(more)
        self.side.add(self.request)

    @property
    def tracked(self) -> TrackedRequest:
        return self.side._tracked["r"]

    def step(self, tokens: int) -> StepPlan:
        table = SimpleNamespace(get_block_ids=lambda name: (PAGES,), boundary_state_offloads={})
        plan = self.side.plan(
            SimpleNamespace(
                num_scheduled_tokens={"r": tokens} if tokens else {},
                kv_connector_block_state=table,
                preempted_req_ids=None,
            )
        )
        self.request.num_computed_tokens += tokens
        return plan

    def saved(self, tokens: int) -> list[tuple[int, tuple[int, ...]]]:
        """The first block and the pages of each save of a step."""
        return [(save.blocks.first_block, save.blocks.pages) for save in self.step(tokens).saves]


def test_a_block_waits_until_its_tokens_are_known(toys: Toys) -> None:
    one = Followed(toys, 7)
    assert one.saved(7) == [(0, (100,))]
    assert one.saved(1) == []  # the eighth token is being sampled
    one.request.all_token_ids.append(40)
    assert one.saved(1) == [(1, (101,))]


def test_drafts_that_may_be_refused_are_not_saved(toys: Toys) -> None:
    assert Followed(toys, 7).saved(7 + 5) == [(0, (100,))]


def test_the_last_sampled_block_is_saved_when_the_request_has_ended(toys: Toys) -> None:
    one = Followed(toys, 7)
    one.step(7)
    one.step(1)
    one.request.all_token_ids += [40, 41]
    assert one.side.finish(one.request, [PAGES])
    plan = one.step(0)
    assert [(save.blocks.first_block, save.blocks.pages) for save in plan.saves] == [(1, (101,))]
    assert plan.awaited == ["r"]


@pytest.mark.parametrize(
    ("tokens", "at_once", "kept"), [(8, True, False), (8, False, True), (2, False, False)]
)
def test_pages_are_kept_only_while_a_device_copies_them(
    toys: Toys, tokens: int, at_once: bool, kept: bool
) -> None:
    one = Followed(toys, tokens, at_once=at_once)
    one.step(tokens)
    assert one.side.finish(one.request, [PAGES]) is kept


def test_throttled_blocks_are_offered_again_with_the_next_one(toys: Toys) -> None:
    one = Followed(toys, 16)
    assert one.saved(8) == [(0, (100, 101))]
    one.side.step_ended(StepReport(unsaved={"r": 1}))
    assert one.saved(3) == []
    assert one.saved(1) == [(1, (101, 102))]


def load(one: Followed, pages: Sequence[int]) -> Any:
    one.tracked.keys.grow(4)
    one.tracked.hit = DepotHit(0, 0, ("dram",) * 4)
    return one.tracked.begin_load(16, [pages])


def test_pages_outside_a_window_are_neither_saved_nor_loaded(toys: Toys) -> None:
    one = Followed(toys, 17, rule=WINDOW)
    kept = [0, 0, 102, 103]
    (save,) = one.tracked.saves.plan(4, [kept])
    assert (save.blocks.first_block, save.blocks.pages) == (2, (102, 103))
    job = load(one, kept)
    (blocks,) = job.groups
    assert (blocks.first_block, blocks.pages, blocks.present_pages) == (2, (102, 103), 0)
    assert blocks.keys == one.tracked.keys.of(0, 2, 4)
    assert job.whole


def test_a_window_that_vllm_has_lost_a_part_of_is_not_saved(toys: Toys) -> None:
    assert Followed(toys, 17, rule=WINDOW).tracked.saves.plan(4, [[0, 0, 0, 103]]) == []


def test_a_part_of_full_attention_is_of_use(toys: Toys) -> None:
    assert not load(Followed(toys, 17), PAGES).whole


def test_requests_without_token_ids_are_left_to_vllm(toys: Toys) -> None:
    one = Followed(toys, 8, prompt_embeds=object())
    assert one.side.match(one.request, 0) == 0
    assert one.saved(8) == []
    assert one.side.counts == {"unserved_requests:prompt_embeds": 1}
