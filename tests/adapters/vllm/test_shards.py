"""Blocks that were saved at one tensor-parallel size are read at another; pipeline stages."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from tests.support.toy_engine import (
    ALL,
    FULL_PAGES,
    PAGE_TOKENS,
    PROMPT,
    REST,
    Split,
    Toys,
    answer_at_random,
    answer_of,
    ask,
    forget_local,
)

from kvdepot.adapters.vllm.shards import WorkerShard, find_shard, other_sizes, parts_of
from kvdepot.errors import ModelError


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize(("saved", "read"), [(2, 1), (1, 2), (4, 2), (1, 8), (8, 1), (2, 4)])
def test_blocks_of_one_size_are_read_at_another_after_a_restart(
    toys: Toys, saved: int, read: int, layout: str
) -> None:
    toys.saved(split=Split(saved, heads=4, layout=layout)).close()
    reader = toys.engine(split=Split(read, heads=4, layout=layout))
    assert ask(reader, "warm", PROMPT) == REST
    assert reader.side.metrics() == {
        "hit_tokens": FULL_PAGES * PAGE_TOKENS,
        "resharded_tokens": FULL_PAGES * PAGE_TOKENS,
    }
    forget_local(reader)
    assert ask(reader, "again", PROMPT) == REST
    assert (reader.side.metrics() or {}).get("resharded_tokens") is None, "it was saved here"


@pytest.mark.parametrize(
    ("saved", "read", "kinds", "computed"),
    [
        (Split(2, heads=6), Split(3, heads=6), ("full",), REST),
        (Split(2, stages=3), Split(1, stages=3), ("full",), REST),
        (Split(2, heads=4), Split(1, heads=4, layout="LBNHC"), ("full",), ALL),
        (Split(2, heads=4), Split(1, heads=2), ("full",), ALL),
        (Split(2), Split(1), ("full", "window"), REST),
        (Split(2), Split(1), ("full", "state"), ALL),
        (Split(2, stages=2), Split(2), ("full",), ALL),
    ],
)
def test_which_blocks_are_read(
    toys: Toys, saved: Split, read: Split, kinds: tuple[str, ...], computed: int
) -> None:
    """Sizes that share no part of the heads evenly, stages, windows; no other layout or heads, no
    states, no other stages."""
    store = toys.store()
    toys.saved(store, split=saved, kinds=kinds)
    assert ask(toys.engine(store, split=read, kinds=kinds), "warm", PROMPT) == computed


def test_a_lacking_shard_ends_the_hit_and_a_reset_all_hits(toys: Toys) -> None:
    store = toys.store()
    writer = toys.saved(store, split=Split(2, heads=4))
    store.remove(writer.spaces()[1].keys(PROMPT)[5])
    reader = toys.engine(store, split=Split(1, heads=4))
    assert ask(reader, "warm", PROMPT) == ALL - 5 * PAGE_TOKENS
    assert reader.side.reset()
    forget_local(reader)
    assert ask(reader, "after", PROMPT) == ALL


def test_the_next_turn_goes_on_from_either_size(toys: Toys) -> None:
    store = toys.store()
    ask(toys.engine(store, split=Split(2)), "first", PROMPT, 14)
    turn = PROMPT + answer_of(PROMPT, 14) + [1, 2]
    known = (len(PROMPT) + 13) // PAGE_TOKENS * PAGE_TOKENS
    alone = toys.engine(store)
    assert ask(alone, "second", turn, 9) == len(turn) - known + 8
    longer = turn + answer_of(turn, 9)
    known = (len(turn) + 8) // PAGE_TOKENS * PAGE_TOKENS
    forget_local(alone)
    assert ask(alone, "third", longer, 1) == len(longer) - known
    assert ask(toys.engine(store, split=Split(2)), "fourth", longer, 1) == 1


def test_the_part_of_a_block_that_vllm_has_is_not_written(toys: Toys) -> None:
    store, settings = toys.store(), {"block_tokens": 12}
    ask(toys.engine(store, split=Split(2), settings=settings), "cold", PROMPT)
    reader = toys.engine(store, settings={**settings, "save": "none"})
    ask(reader, "short", PROMPT[: 2 * PAGE_TOKENS + 12 + 1], 1)
    kept = [name for name in reader.pool.known if len(name[2]) <= 2 * PAGE_TOKENS + 12]
    reader.pool.known = {name: reader.pool.known[name] for name in kept}
    assert ask(reader, "warm", PROMPT) == len(PROMPT) % 12 + 2


def test_latents_and_heads_that_several_workers_have_are_stored_once(toys: Toys) -> None:
    store = toys.store()
    for split, blocks in ((Split(2, latent=True), 1), (Split(4), 2)):
        before = store.stats()["blocks"]
        engine = toys.engine(store, split=split)
        ask(engine, "cold", PROMPT, 1)
        assert store.stats()["blocks"] - before == blocks * FULL_PAGES
        forget_local(engine)
        assert ask(engine, "warm", PROMPT) == REST
    latent = toys.engine(store, split=Split(latent=True))
    assert ask(latent, "alone", PROMPT) == REST
    assert "resharded_tokens" not in (latent.side.metrics() or {}), "it has the same name"


@pytest.mark.parametrize("kinds", [("full",), ("full", "window", "state")])
@pytest.mark.parametrize("shards", [1, 2])
def test_pipeline_stages_hit_together(toys: Toys, shards: int, kinds: tuple[str, ...]) -> None:
    split = Split(shards, stages=2)
    toys.saved(split=split, kinds=kinds).close()
    store = toys.store()
    again = toys.engine(store, split=split, kinds=kinds)
    assert ask(again, "warm", PROMPT) == REST
    assert again.workers[shards].facts.place.stage == 1
    assert len({space.tag for space in again.spaces()}) == 2 * shards * len(kinds)
    store.remove(again.spaces()[2 * shards - 1].keys(PROMPT)[2])
    forget_local(again)
    assert ask(again, "a stage lacks a block", PROMPT) > REST + 4 * PAGE_TOKENS


def test_stages_that_do_not_fit_together_are_refused(toys: Toys) -> None:
    store = toys.store()
    facts = [worker.facts for worker in toys.engine(store, split=Split(2, stages=2)).workers]
    other = toys.engine(store, split=Split(2, stages=2), kinds=("full", "window"))
    with pytest.raises(ModelError, match=r"no pages: .*\(1, 0\)"):
        other.side.set_workers([facts[0], facts[1], facts[3]])
    with pytest.raises(ModelError, match="different KV groups"):
        other.side.set_workers([*facts[:3], other.workers[3].facts])


@pytest.mark.slow
def test_all_sizes_answer_rightly_side_by_side(toys: Toys, seed: int) -> None:
    chance = random.Random(seed)
    store = toys.store(dram=2 << 20)
    settings = {"block_tokens": chance.choice([0, 8])}
    splits = [Split(shards, chance.choice([1, 1, 2]), heads=4) for shards in (1, 2, 4)]
    engines = [toys.engine(store, pages=40, settings=settings, split=split) for split in splits]
    for _ in range(2):
        state = chance.getrandbits(32)
        for engine in engines:
            answer_at_random(engine, random.Random(state), 4, 0.5)


def spec(**fields: Any) -> Any:
    return SimpleNamespace(**{"num_kv_heads": 2, "block_size": 4, **fields})


def engine_of(heads: int, **fields: Any) -> Any:
    arch = SimpleNamespace(per_layer_overrides=None)
    model = SimpleNamespace(
        hf_config=SimpleNamespace(), model_arch_config=arch, get_total_num_kv_heads=lambda: heads
    )
    return SimpleNamespace(model_config=model, **fields)


PAGES = torch.zeros(6, 2, 4, 8)
SPLIT_PAGES = torch.zeros(6, 2, 4, 2, 8)


@pytest.mark.parametrize(
    ("cache", "layout", "rows", "head_bytes"),
    [
        (PAGES, "KVCacheLayout.LBHNC", 1, 128),
        (torch.zeros(6, 4, 2, 8).transpose(1, 2), "LBNHC", 4, 32),
        (torch.zeros(12, 2, 2, 8), "LBHNC", 2, 64),
        (torch.zeros(6, 3, 2, 4, 8)[:, 1], "BLHNC", 1, 128),
        (SPLIT_PAGES, "LBNHC", 8, 32),
        (torch.zeros(6, 2, 2, 4, 8).transpose(2, 3), "LBHNC", 2, 128),
    ],
)
def test_position_of_heads(cache: Any, layout: str, rows: int, head_bytes: int) -> None:
    shard, reason = find_shard(engine_of(4), layout, spec(), cache, (1, 2, 6))
    assert not reason
    assert shard.axis is not None
    assert (shard.rank, shard.size) == (1, 2)
    assert (shard.axis.heads, shard.axis.rows, shard.axis.head_bytes) == (4, rows, head_bytes)


@pytest.mark.parametrize(
    ("engine", "layout", "found", "cache"),
    [
        (engine_of(8), "LBHNC", spec(), PAGES),
        (engine_of(3), "LBHNC", spec(), PAGES),
        (engine_of(4, speculative_config=1), "LBHNC", spec(), PAGES),
        (engine_of(4), "LBNHC", spec(), PAGES),
        (engine_of(4), "None", spec(), PAGES),
        (engine_of(4), "LHBNC", spec(), torch.zeros(2, 6, 4, 8).transpose(0, 1)),
        (engine_of(4), "LBHNC", spec(state_content_bytes=9), PAGES),
        (engine_of(4), "LBHNC", spec(num_kv_heads=0), PAGES),
        (engine_of(4), "LBHNC", spec(), torch.zeros(6, 64)),
    ],
)
def test_uncertain_pages_are_not_cut(engine: Any, layout: str, found: Any, cache: Any) -> None:
    shard, reason = find_shard(engine, layout, found, cache, (1, 2, 6))
    assert shard == WorkerShard(1, 2)
    assert reason
    assert other_sizes([shard]) == []


def test_parts_cover_each_head_once() -> None:
    axis = find_shard(engine_of(12), "LBHNC", spec(), PAGES, (0, 6, 6))[0].axis
    for size in (1, 2, 3, 4, 6, 12):
        for rank in range(size):
            shard = WorkerShard(rank, size, axis)
            assert size not in other_sizes([shard])
            for other in other_sizes([shard]):
                count = 12 // other
                parts = parts_of(shard, other)
                found = [
                    part.rank * count + part.first + at
                    for part in parts
                    for at in range(part.count)
                ]
                assert found == list(shard.heads)
                targets = [part.target + at for part in parts for at in range(part.count)]
                assert targets == list(range(12 // size))
