"""Models with several KV groups: windows, states, and memory that groups share."""

import errno
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.toy_engine import (
    PAGE_TOKENS,
    PROMPT,
    WINDOW,
    FullAttentionSpec,
    MambaSpec,
    OpenEngine,
    OpenStore,
    SlidingWindowSpec,
    Split,
    ToyEngine,
    ToyRequest,
    answer_at_random,
    answer_of,
    ask,
    forget_local,
)

from kvdepot.adapters.vllm.config import ConnectorConfig
from kvdepot.adapters.vllm.groups import (
    GroupRule,
    block_tokens,
    checkpoint_tokens,
    grain_tokens,
    layer_groups,
)
from kvdepot.adapters.vllm.requests import TrackedRequest
from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey
from kvdepot.core.keys import without_link
from kvdepot.errors import ConfigError, ModelError
from kvdepot.store.open import assemble
from kvdepot.testing.faults import Call, Corrupt, Fail, Fault, FaultyFiles

MIXED = ("full", "window", "state")
LAST = (len(PROMPT) - 1) // PAGE_TOKENS
KINDS = [
    ("window",),
    ("window", "full"),
    ("state", "full"),
    MIXED,
    ("window", "window", "full"),
    ("state",),
]


def cache(*specs: Any, **more: Any) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a"], **more) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


def test_full_attention_comes_first() -> None:
    found = layer_groups(cache(MambaSpec(), SlidingWindowSpec(), FullAttentionSpec()))
    assert [group.rule.kind for group in found] == ["full", "window", "state"]
    assert [group.rule.table for group in found] == [2, 1, 0]
    assert found[2].rule.handed_over


def test_layers_of_one_kind_and_several_sizes_are_one_group() -> None:
    whole = SimpleNamespace(first_spec=FullAttentionSpec(), block_size=PAGE_TOKENS)
    (group,) = layer_groups(cache(whole))
    assert group.rule == GroupRule("full", 0, PAGE_TOKENS)


def test_caches_of_encoders_are_left_alone() -> None:
    encoder = type("EncoderOnlyAttentionSpec", (), {"block_size": 16})()
    (group,) = layer_groups(cache(encoder, FullAttentionSpec()))
    assert group.rule.table == 1
    with pytest.raises(ModelError, match="no KV cache"):
        layer_groups(cache(encoder))


def test_what_cannot_be_kept_by_prefix_is_refused_with_the_reason() -> None:
    ring = type("CircularBufferSpec", (FullAttentionSpec,), {})()
    unknown = type("CrossAttentionSpec", (), {"block_size": 16})()
    hidden = type("SlidingWindowMLASpec", (SlidingWindowSpec,), {"prefix_cacheable": False})()
    for spec in (ring, unknown, hidden):
        with pytest.raises(ModelError, match=f"{type(spec).__name__}: not a KV cache"):
            layer_groups(cache(FullAttentionSpec(), spec))
    nowhere = MambaSpec()
    nowhere.mamba_cache_mode = "none"
    with pytest.raises(ModelError, match="states of this model at no boundary") as caught:
        layer_groups(cache(nowhere))
    assert "--enable-prefix-caching" in caught.value.hint
    drafted = MambaSpec()
    drafted.num_speculative_blocks = 3
    with pytest.raises(ModelError, match="states beside speculative decoding") as caught:
        layer_groups(cache(FullAttentionSpec(), drafted))
    assert "--speculative-config" in caught.value.hint


def test_what_is_needed_to_go_on() -> None:
    window = GroupRule("window", 0, 16, 100)
    assert [window.first_token(stop) for stop in (50, 100, 160)] == [0, 1, 61]
    assert GroupRule("window", 0, 16, 100, 8).first_token(160) == 53
    chunk = GroupRule("chunk", 0, 16, 64)
    assert [chunk.first_token(stop) for stop in (50, 64, 160)] == [0, 64, 128]
    assert GroupRule("state", 0, 16).first_token(160) == 159
    assert GroupRule("full", 0, 16).first_token(160) == 0


def test_blocks_fit_the_pages_of_all_groups() -> None:
    rules = [GroupRule("full", 0, 16), GroupRule("window", 1, 24, 100)]
    assert grain_tokens(rules, ConnectorConfig()) == 48
    assert grain_tokens(rules, ConnectorConfig(block_tokens=96)) == 96
    with pytest.raises(ConfigError, match="100 is not a multiple of vLLM's block size, 48") as one:
        grain_tokens(rules, ConnectorConfig(block_tokens=100))
    assert "144" in one.value.hint
    assert [block_tokens(rule, 96) for rule in rules] == [96, 24]
    states = [GroupRule("state", 0, 48)]
    assert grain_tokens(states, ConnectorConfig(block_tokens=48)) == 48
    with pytest.raises(ConfigError, match="kept every 48 tokens"):
        grain_tokens(states, ConnectorConfig(block_tokens=96))


def test_checkpoints_are_further_apart_than_what_they_cost() -> None:
    config = ConnectorConfig()
    assert checkpoint_tokens([GroupRule("window", 0, 16, 128)], 16, config) == 1024
    assert checkpoint_tokens([GroupRule("window", 0, 16, 1024)], 256, config) == 4096
    assert checkpoint_tokens([GroupRule("state", 0, 528)], 528, config) == 2112
    wanted = ConnectorConfig(checkpoint_tokens=100)
    assert checkpoint_tokens([GroupRule("window", 0, 16, 128)], 16, wanted) == 112


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_all_groups_are_restored_where_the_prompt_ends(
    open_store: OpenStore, open_engine: OpenEngine, kinds: tuple[str, ...]
) -> None:
    engine = open_engine(open_store(), kinds=kinds)
    assert ask(engine, "cold", PROMPT) == len(PROMPT) + 2
    forget_local(engine)
    assert ask(engine, "warm", PROMPT) == len(PROMPT) - LAST * PAGE_TOKENS + 2


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_a_restart_finds_all_groups_on_disk(
    open_store: OpenStore, open_engine: OpenEngine, kinds: tuple[str, ...]
) -> None:
    engine = open_engine(open_store(), kinds=kinds)
    ask(engine, "cold", PROMPT)
    engine.close()
    again = open_engine(open_store(), kinds=kinds)
    assert ask(again, "warm", PROMPT) == len(PROMPT) - LAST * PAGE_TOKENS + 2


def test_blocks_of_several_pages(open_store: OpenStore, open_engine: OpenEngine) -> None:
    """Windows begin inside them."""
    kinds = ("full", "window")
    engine = open_engine(open_store(), kinds=kinds, settings={"block_tokens": 12})
    ask(engine, "cold", PROMPT)
    forget_local(engine)
    assert ask(engine, "warm", PROMPT) == len(PROMPT) % 12 + 2


def test_a_prompt_that_ends_with_a_page_goes_on_from_the_state_before_it(
    open_store: OpenStore, open_engine: OpenEngine
) -> None:
    engine = open_engine(open_store(), kinds=MIXED)
    ask(engine, "cold", PROMPT[:40])
    forget_local(engine)
    assert ask(engine, "warm", PROMPT[:40], 1) == PAGE_TOKENS


def test_answers_are_hit_by_the_next_turn(open_store: OpenStore, open_engine: OpenEngine) -> None:
    engine = open_engine(open_store(), kinds=MIXED)
    ask(engine, "first", PROMPT, 14)
    forget_local(engine)
    turn = PROMPT + answer_of(PROMPT, 14) + [1, 2]
    known = (len(PROMPT) + 13) // PAGE_TOKENS * PAGE_TOKENS
    assert ask(engine, "second", turn, 1) == len(turn) - known


def blocks_of(engine: ToyEngine, store: Any, prompt: list[int]) -> list[int]:
    """For each group how many blocks of a prompt the depot has."""
    places = range(len(engine.side._spaces[""]))
    return [
        sum(len(store.match([key])) for key in keys_of(engine, place, prompt)) for place in places
    ]


def keys_of(engine: ToyEngine, place: int, prompt: list[int]) -> list[BlockKey]:
    """The keys of a prompt for one group and shard, as the scheduler makes them."""
    rule = engine.side._groups.rules[place // len(engine.side._facts)]
    keys = engine.side._spaces[""][place].keys(prompt)
    return keys if rule.kind == "full" else [without_link(key) for key in keys]


@pytest.mark.parametrize("kinds", [("state", "full"), ("window", "full")])
def test_windows_and_states_inside_an_answer_leave_first(
    open_engine: OpenEngine, kinds: tuple[str, ...]
) -> None:
    """Conversations in a memory that has no room for all they leave behind."""
    computed = [second_turns(open_engine, kinds, told=told) for told in (True, False)]
    assert computed[0] < computed[1]


def second_turns(open_engine: OpenEngine, kinds: tuple[str, ...], *, told: bool) -> int:
    """Tokens that are computed for second turns; `told`: the depot hears what is superseded."""
    dram = {"capacity": "3MiB", "huge_pages": "never", "prefault": False}
    store = assemble(load(overrides={"dram": dram}))
    with pytest.MonkeyPatch.context() as patch, store:
        if not told:
            patch.setattr(TrackedRequest, "superseded", lambda tracked: [])
        engine = open_engine(store, kinds=kinds)
        prompts = [[*[user] * 9, *range(12)] for user in range(6)]
        for user, prompt in enumerate(prompts):
            ask(engine, f"first {user}", prompt, 30)
            engine.settle()
        forget_local(engine)
        turns = [prompt + answer_of(prompt, 30) + [1, 2] for prompt in prompts]
        found = sum(ask(engine, f"second {user}", turn, 1) for user, turn in enumerate(turns))
        engine.close()
        return found


def test_windows_and_states_are_kept_at_few_places(
    open_store: OpenStore, open_engine: OpenEngine
) -> None:
    store = open_store()
    engine = open_engine(store, kinds=MIXED, budget=8)
    ask(engine, "cold", PROMPT, 1)
    full, window, state = blocks_of(engine, store, PROMPT)
    assert full == LAST
    assert window == -(-(WINDOW - 1) // PAGE_TOKENS)
    assert state == 1


def test_checkpoints_serve_prompts_that_part_anywhere(
    open_store: OpenStore, open_engine: OpenEngine
) -> None:
    engine = open_engine(open_store(), kinds=MIXED, settings={"checkpoint_tokens": 8}, budget=8)
    ask(engine, "cold", PROMPT)
    forget_local(engine)
    parted = [*PROMPT[:30], 1, 2, 3]
    assert ask(engine, "parted", parted, 1) == len(parted) - 24


def test_where_prompts_part_windows_are_saved_the_second_time(
    open_store: OpenStore, open_engine: OpenEngine
) -> None:
    engine = open_engine(open_store(), kinds=("full", "window"))
    ask(engine, "cold", PROMPT)
    for number, computed in enumerate((33, 33 - 28, 33 - 28)):
        forget_local(engine)
        parted = [*PROMPT[:30], number, 2, 3]
        assert ask(engine, f"parted {number}", parted, 1) == computed


@pytest.mark.parametrize("lacking", range(3))
def test_the_hit_ends_where_all_groups_have_what_they_need(
    open_store: OpenStore, open_engine: OpenEngine, lacking: int
) -> None:
    store = open_store()
    engine = open_engine(store, kinds=MIXED, settings={"checkpoint_tokens": 8}, budget=8)
    ask(engine, "cold", PROMPT)
    forget_local(engine)
    assert store.remove(keys_of(engine, lacking, PROMPT)[LAST - 1])
    kept = 8 * ((LAST - 1) * PAGE_TOKENS // 8)
    assert ask(engine, "warm", PROMPT) == len(PROMPT) - kept + 2


def test_groups_share_nothing_but_memory(open_store: OpenStore, open_engine: OpenEngine) -> None:
    engine = open_engine(open_store(), kinds=("window", "window", "full"))
    ask(engine, "one", PROMPT)
    tags = {space.tag for space in engine.side._spaces[""]}
    assert len(tags) == 3


def test_shards_of_groups_hit_together(open_store: OpenStore, open_engine: OpenEngine) -> None:
    store = open_store()
    engine = open_engine(store, kinds=MIXED, split=Split(2))
    ask(engine, "cold", PROMPT)
    forget_local(engine)
    assert ask(engine, "warm", PROMPT) == len(PROMPT) - LAST * PAGE_TOKENS + 2
    forget_local(engine)
    state_of_second = keys_of(engine, 5, PROMPT)[LAST - 1]
    assert store.remove(state_of_second)
    assert ask(engine, "one shard lacks its state", PROMPT) == len(PROMPT) + 2


@pytest.mark.parametrize(
    ("kinds", "effect"),
    [
        (MIXED, Fail(errno.EIO)),
        (("window", "full"), Corrupt(at=5000)),
        (("state",), Corrupt(at=5000)),
    ],
)
def test_a_load_that_fails_in_one_group_is_computed_anew_and_saved_again(
    open_store: OpenStore, open_engine: OpenEngine, kinds: tuple[str, ...], effect: Fail | Corrupt
) -> None:
    engine = open_engine(open_store(), kinds=kinds)
    ask(engine, "cold", PROMPT)
    engine.close()
    files = FaultyFiles()
    again = open_engine(open_store(files), kinds=kinds)
    files.add(Fault(Call.RUN_READ, effect, times=1))
    ask(again, "warm", PROMPT)
    assert again.failed_loads == 1
    forget_local(again)
    assert ask(again, "again", PROMPT) == len(PROMPT) - LAST * PAGE_TOKENS + 2


def test_salted_requests_do_not_meet(open_store: OpenStore, open_engine: OpenEngine) -> None:
    engine = open_engine(open_store(), kinds=MIXED)
    ask(engine, "plain", PROMPT)
    assert ask(engine, "salted", PROMPT, cache_salt="s") == len(PROMPT) + 2
    forget_local(engine)
    warm = ask(engine, "same salt", PROMPT, cache_salt="s")
    assert warm == len(PROMPT) - LAST * PAGE_TOKENS + 2


def test_the_toy_notices_a_wrong_state(open_store: OpenStore, open_engine: OpenEngine) -> None:
    engine = open_engine(open_store(), kinds=MIXED)
    engine.add(ToyRequest("r", list(PROMPT), 3))
    engine.step()
    request = engine.requests["r"]
    engine.caches[0][1][request.tables[2][-1], -1, 0, -1] += 1
    with pytest.raises(AssertionError):
        engine.run()


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_many_requests_with_preemptions_aborts_and_faults(
    open_store: OpenStore, open_engine: OpenEngine, seed: int, kinds: tuple[str, ...]
) -> None:
    chance = random.Random(seed)
    files = FaultyFiles()
    store = open_store(files, dram=1 << 20)
    settings = {
        "block_tokens": 0 if "state" in kinds else chance.choice([0, 8]),
        "checkpoint_tokens": chance.choice([0, 8, 16]),
        "decide": chance.random() < 0.3,
    }
    pages = 30 * len(kinds)
    engine = open_engine(
        store, pages=pages, settings=settings, kinds=kinds, split=Split(chance.choice([1, 2]))
    )
    files.add(Fault(Call.RUN_READ, Corrupt(at=4500), skip=20, times=3))
    files.add(Fault(Call.RUN_READ, Fail(errno.EIO), skip=40, times=3))
    answer_at_random(engine, chance, 24, forgets=0.2)
    assert store.stats()["leased"] == 0
