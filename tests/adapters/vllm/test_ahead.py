"""Engines that schedule before they know what was sampled, and devices whose copies take time."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.toy_engine import OpenStore, ToyRequest

from kvdepot.adapters.vllm.config import ConnectorConfig
from kvdepot.adapters.vllm.groups import GroupRule
from kvdepot.adapters.vllm.messages import GroupFacts, ShardFacts, StepPlan, WorkerRank
from kvdepot.adapters.vllm.requests import DepotHit
from kvdepot.adapters.vllm.scheduler import ConnectorScheduler, EngineFacts
from kvdepot.adapters.vllm.shards import WorkerShard
from kvdepot.adapters.vllm.shared_depot import SharedDepot
from kvdepot.core.depot import Match
from kvdepot.core.layout import KVLayout
from kvdepot.store.store import Store

SIZE = 4
PAGES = list(range(100, 140))


FULL = GroupRule("full", 0, SIZE)


def scheduler(
    store: Store, *, at_once: bool = True, rules: Sequence[GroupRule] = (FULL,)
) -> ConnectorScheduler:
    groups = tuple(
        GroupFacts(
            rule,
            KVLayout.opaque(4096, SIZE).description(),
            (("group", str(number)),),
            WorkerShard(0, 1),
        )
        for number, rule in enumerate(rules)
    )
    facts = ShardFacts("m", "f", "w", "", WorkerRank(0, 1, "v"), groups, SIZE, at_once)
    engine = EngineFacts(64, shares_pages=True)
    side = ConnectorScheduler(
        ConnectorConfig(), SharedDepot("", store), engine, loads=True, saves=True
    )
    side.set_workers([facts])
    return side


def step(side: ConnectorScheduler, request: ToyRequest, tokens: int) -> StepPlan:
    table = SimpleNamespace(get_block_ids=lambda name: (PAGES,), boundary_state_offloads={})
    output: Any = SimpleNamespace(
        num_scheduled_tokens={request.request_id: tokens},
        kv_connector_block_state=table,
        preempted_req_ids=None,
    )
    plan = side.plan(output)
    request.num_computed_tokens += tokens
    return plan


def saved(plan: StepPlan) -> list[tuple[int, tuple[int, ...]]]:
    return [(save.first_block, save.pages) for save in plan.saves]


def test_a_block_waits_until_its_tokens_are_known(open_store: OpenStore) -> None:
    side = scheduler(open_store())
    request = ToyRequest("r", list(range(7)), 9)
    side.add(request)
    assert saved(step(side, request, 7)) == [(0, (100,))]
    assert saved(step(side, request, 1)) == []  # the eighth token is being sampled
    request.all_token_ids.append(40)
    assert saved(step(side, request, 1)) == [(1, (101,))]


def test_what_was_sampled_last_is_saved_when_the_request_is_over(open_store: OpenStore) -> None:
    side = scheduler(open_store())
    request = ToyRequest("r", list(range(7)), 2)
    side.add(request)
    step(side, request, 7)
    step(side, request, 1)
    request.all_token_ids += [40, 41]
    assert side.finish(request, [PAGES])
    plan = side.plan(
        SimpleNamespace(
            num_scheduled_tokens={}, kv_connector_block_state=None, preempted_req_ids=None
        )
    )
    assert saved(plan) == [(1, (101,))]
    assert plan.awaited == ["r"]


def test_nothing_is_awaited_where_saves_are_over_with_the_step(open_store: OpenStore) -> None:
    side = scheduler(open_store())
    request = ToyRequest("r", list(range(8)), 1)
    side.add(request)
    step(side, request, 8)
    assert not side.finish(request, [PAGES])


def test_pages_are_kept_while_a_device_copies_them(open_store: OpenStore) -> None:
    side = scheduler(open_store(), at_once=False)
    request = ToyRequest("r", list(range(8)), 1)
    side.add(request)
    step(side, request, 8)
    assert side.finish(request, [PAGES])
    short = ToyRequest("s", [1, 2], 1)
    side.add(short)
    step(side, short, 2)
    assert not side.finish(short, [PAGES])


def test_drafts_that_may_be_refused_are_not_saved(open_store: OpenStore) -> None:
    side = scheduler(open_store())
    request = ToyRequest("r", list(range(7)), 9)
    side.add(request)
    assert saved(step(side, request, 7 + 5)) == [(0, (100,))]


def test_throttled_blocks_are_offered_again_with_the_next_one(open_store: OpenStore) -> None:
    from kvdepot.adapters.vllm.messages import StepReport

    side = scheduler(open_store())
    request = ToyRequest("r", list(range(16)), 9)
    side.add(request)
    assert saved(step(side, request, 8)) == [(0, (100, 101))]
    side.handle_report(StepReport(unsaved={"r": 1}))
    assert saved(step(side, request, 3)) == []
    assert saved(step(side, request, 1)) == [(1, (101, 102))]


def test_pages_outside_a_window_are_neither_saved_nor_loaded(open_store: OpenStore) -> None:
    side = scheduler(open_store(), rules=[GroupRule("window", 0, SIZE, 6)])
    request = ToyRequest("r", list(range(17)), 9)
    side.add(request)
    tracked = side._tracked["r"]
    (save,) = tracked.plan_save(4, [[0, 0, 102, 103]])
    assert (save.first_block, save.pages) == (2, (102, 103))
    tracked.found(DepotHit(0, 0, ("dram",) * 4), Match(()), 0)
    (load,) = tracked.begin_load(16, [[0, 0, 102, 103]])
    assert (load.first_block, load.pages, load.present_pages) == (2, (102, 103), 0)
    assert load.keys == tracked.block_keys.keys(2, 4)
    assert load.whole


def test_a_window_that_vllm_has_lost_a_part_of_is_not_saved(open_store: OpenStore) -> None:
    side = scheduler(open_store(), rules=[GroupRule("window", 0, SIZE, 6)])
    request = ToyRequest("r", list(range(17)), 9)
    side.add(request)
    assert side._tracked["r"].plan_save(4, [[0, 0, 0, 103]]) == []


def test_a_part_of_full_attention_alone_is_of_use(open_store: OpenStore) -> None:
    side = scheduler(open_store())
    request = ToyRequest("r", list(range(17)), 9)
    side.add(request)
    tracked = side._tracked["r"]
    tracked.grow(4)
    tracked.found(DepotHit(0, 0, ("dram",) * 4), Match(()), 0)
    (load,) = tracked.begin_load(16, [PAGES])
    assert not load.whole


def test_requests_without_token_ids_are_left_to_vllm(open_store: OpenStore) -> None:
    side = scheduler(open_store())
    request = ToyRequest("r", list(range(8)), 1)
    request.prompt_embeds = object()  # type: ignore[attr-defined]
    side.add(request)
    assert side.match(request, 0) == 0
    assert saved(step(side, request, 8)) == []
    assert side.counts.take() == {"unserved_requests:prompt_embeds": 1}
