"""A model gives the same answers with a depot and without, for every kind of call."""

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from tests.support.tiny_transformers import SERVED, build, llama, padded, tokens, transformers

from kvdepot.adapters.hf import DepotModel, attach
from kvdepot.store.store import Store

BLOCK = 16
NEW = 5
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW}
LIKE_OTHERS = {"gpt2": pytest.mark.slow, "mistral": pytest.mark.slow}
"""One has full attention in all its layers, the other a window in all."""
CLOSE: dict[Any, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.float16: {"rtol": 2e-2, "atol": 5e-2},
    torch.bfloat16: {"rtol": 1e-1, "atol": 3e-1},
}


@pytest.fixture(params=[pytest.param(kind, marks=LIKE_OTHERS.get(kind, ())) for kind in SERVED])
def pair(request: pytest.FixtureRequest, memory: Store) -> Any:
    """A model and the same with a depot."""
    model = build(SERVED[request.param]())
    with attach(model, memory, block_tokens=BLOCK) as depot_model:
        yield model, depot_model
        assert depot_model.last_error is None
        assert not depot_model.counters.offload_failed


def computed(model: DepotModel) -> list[int]:
    return [row.computed_tokens for row in model.last.rows]


def ask_twice(pair: tuple[Any, DepotModel], **call: Any) -> Any:
    """The answer, the same without a depot, with an empty one and with one that knows."""
    model, depot_model = pair
    expected = model.generate(**call)
    for _ in range(2):
        assert torch.equal(depot_model.generate(**call), expected)
        depot_model.flush()
    assert all(row.fetched for row in depot_model.last.rows if row.prompt_tokens > 2 * BLOCK)
    return expected


def test_a_prompt_seen_before_is_fetched(pair: tuple[Any, DepotModel]) -> None:
    ask_twice(pair, input_ids=tokens(100), **GREEDY)
    assert computed(pair[1]) == [100 - 96]


def test_the_next_turn_finds_the_generated_tokens(pair: tuple[Any, DepotModel]) -> None:
    model, depot_model = pair
    history = tokens(60)
    for turn in range(4):
        expected = model.generate(history, **GREEDY)
        assert torch.equal(depot_model.generate(history, **GREEDY), expected)
        depot_model.flush()
        if turn:
            # All but the last answer's last token and the new question, and a part of a block.
            assert computed(depot_model)[0] <= 1 + 11 + BLOCK
        history = torch.cat([expected, tokens(11, seed=turn)], dim=1)


def test_a_prompt_that_is_known_to_its_end_computes_its_last_token(
    pair: tuple[Any, DepotModel],
) -> None:
    ask_twice(pair, input_ids=tokens(6 * BLOCK), **GREEDY)
    assert computed(pair[1]) == [1]


def test_prompts_that_part_in_the_middle_of_a_block(pair: tuple[Any, DepotModel]) -> None:
    model, depot_model = pair
    shared = tokens(3 * BLOCK + 5)
    for seed in (1, 2):
        ids = torch.cat([shared, tokens(40, seed=seed)], dim=1)
        assert torch.equal(depot_model.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
        depot_model.flush()
    assert computed(depot_model) == [3 * BLOCK + 5 + 40 - 3 * BLOCK]


def test_plain_forward(pair: tuple[Any, DepotModel]) -> None:
    model, depot_model = pair
    ids = tokens(90)
    with torch.no_grad():
        expected = model(ids).logits
        first = depot_model(ids)
        depot_model.flush()
        second = depot_model(input_ids=ids, attention_mask=torch.ones_like(ids))
    torch.testing.assert_close(first.logits, expected, **CLOSE[torch.float32])
    assert second.logits.shape[1] == 90 - 80
    torch.testing.assert_close(second.logits, expected[:, 80:], **CLOSE[torch.float32])
    assert second.past_key_values.get_seq_length() == 90


def test_going_on_from_a_plain_forward(pair: tuple[Any, DepotModel]) -> None:
    model, depot_model = pair
    ids = tokens(90)
    with torch.no_grad():
        depot_model(ids)
        depot_model.flush()
        served = depot_model(ids)
        cache = served.past_key_values
        more = tokens(30, seed=5)
        found = depot_model(more, past_key_values=cache).logits
        expected = model(torch.cat([ids, more], dim=1)).logits[:, -30:]
    torch.testing.assert_close(found, expected, **CLOSE[torch.float32])
    assert depot_model.counters.passed == {"continued": 1}


def test_batch_of_different_prefixes_and_lengths(pair: tuple[Any, DepotModel]) -> None:
    model, depot_model = pair
    known = tokens(80, seed=3)
    depot_model.generate(known, **GREEDY)
    depot_model.flush()
    rows = [tokens(90, seed=4), torch.cat([known, tokens(9)], dim=1), tokens(61, seed=6), tokens(5)]
    batch = padded(rows)
    expected = model.generate(**batch, **GREEDY, pad_token_id=0)
    for _ in range(3):
        assert torch.equal(depot_model.generate(**batch, **GREEDY, pad_token_id=0), expected)
        depot_model.flush()
    for index, row in enumerate(rows[:3]):
        ids = torch.cat([row, expected[index : index + 1, batch["input_ids"].shape[1] :]], dim=1)
        again = depot_model.generate(ids, **GREEDY)
        assert torch.equal(again, model.generate(ids, **GREEDY))
        assert computed(depot_model)[0] <= 1 + BLOCK, "what a row computed is there by itself"


def test_padding_of_a_single_prompt(pair: tuple[Any, DepotModel]) -> None:
    batch = padded([tokens(50)])
    batch = {
        "input_ids": torch.nn.functional.pad(batch["input_ids"], (7, 0)),
        "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (7, 0)),
    }
    ask_twice(pair, **batch, **GREEDY, pad_token_id=0)
    pair[1].generate(tokens(50), **GREEDY)
    assert computed(pair[1]) == [50 - 48], "padding has no part in a prompt's keys"


def test_beams(pair: tuple[Any, DepotModel]) -> None:
    batch = padded([tokens(70, seed=2), tokens(50, seed=3)])
    ask_twice(pair, **batch, **GREEDY, num_beams=3, pad_token_id=0)


def test_several_samples_of_a_prompt(pair: tuple[Any, DepotModel]) -> None:
    model, depot_model = pair
    call: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 14}
    ids = tokens(70)
    for _ in range(2):
        torch.manual_seed(5)
        expected = model.generate(ids, **call)
        torch.manual_seed(5)
        found = depot_model.generate(ids, **call)
        assert torch.equal(found, expected)
        depot_model.flush()
    for sample in range(3):
        depot_model.generate(found[sample : sample + 1], **GREEDY)
        assert computed(depot_model)[0] <= 1 + BLOCK


@pytest.mark.parametrize("form", ["named", "given"])
def test_static_cache(pair: tuple[Any, DepotModel], form: str) -> None:
    model, depot_model = pair
    batch = padded([tokens(70, seed=2), tokens(50, seed=3)])
    expected = model.generate(**batch, **GREEDY, pad_token_id=0)
    for _ in range(2):
        cache: dict[str, Any] = {"cache_implementation": "static"}
        if form == "given":
            cache = {"past_key_values": transformers.StaticCache(model.config, max_cache_len=90)}
        found = depot_model.generate(**batch, **GREEDY, **cache, pad_token_id=0)
        assert torch.equal(found, expected)
        depot_model.flush()
    assert all(row.fetched for row in depot_model.last.rows)


def test_static_cache_in_a_plain_forward(pair: tuple[Any, DepotModel]) -> None:
    model, depot_model = pair
    ids, more = tokens(70), tokens(1, seed=9)
    with torch.no_grad():
        expected = model(torch.cat([ids, more], dim=1)).logits[:, -2:]
        for _ in range(2):
            cache = transformers.StaticCache(model.config, max_cache_len=90)
            found = depot_model(ids, past_key_values=cache).logits[:, -1:]
            assert int(cache.get_seq_length()) == 70
            after = model(more, past_key_values=cache).logits
            both = torch.cat([found, after], dim=1)
            torch.testing.assert_close(both, expected, **CLOSE[torch.float32])
            depot_model.flush()
    assert depot_model.last.rows[0].fetched


def test_an_empty_cache_of_the_caller_is_filled(pair: tuple[Any, DepotModel]) -> None:
    model, depot_model = pair
    ids = tokens(70)
    expected = model.generate(ids, **GREEDY)
    for _ in range(2):
        cache = transformers.DynamicCache(config=model.config)
        assert torch.equal(depot_model.generate(ids, past_key_values=cache, **GREEDY), expected)
        assert cache.get_seq_length() == 70 + NEW - 1
        depot_model.flush()
    assert computed(depot_model) == [70 - 64]


@pytest.mark.parametrize("form", ["named", "in a GenerationConfig"])
def test_prefill_in_chunks(pair: tuple[Any, DepotModel], form: str) -> None:
    call: dict[str, Any] = {"input_ids": tokens(75), **GREEDY, "prefill_chunk_size": 13}
    if form != "named":
        chunks = {"max_new_tokens": NEW, "do_sample": False, "prefill_chunk_size": 20}
        settings = transformers.GenerationConfig(**chunks)
        call = {"inputs": tokens(75), "generation_config": settings}
    ask_twice(pair, **call)


def test_sequences_that_end_early(memory: Store) -> None:
    model = build(llama())
    batch = padded([tokens(40, seed=2), tokens(30, seed=3)])
    call: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    free = model.generate(**batch, **call, max_new_tokens=40)
    end = int(free[0, 40 + 20])
    with attach(model, memory, block_tokens=BLOCK) as depot_model:
        expected = model.generate(**batch, **call, max_new_tokens=40, eos_token_id=end)
        found = depot_model.generate(**batch, **call, max_new_tokens=40, eos_token_id=end)
        assert torch.equal(found, expected)
        depot_model.flush()
        blocks = memory.stats()["counters"]["put_stored"]
        assert blocks < 2 * (80 // BLOCK), "nothing is kept of what follows an end"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_types_and_attention(memory: Store, kind: str, dtype: Any, attention: str) -> None:
    model = build(SERVED[kind](attn_implementation=attention), dtype=dtype)
    batch = padded([tokens(70, seed=2), tokens(50, seed=3)])
    with attach(model, memory, block_tokens=BLOCK) as depot_model, torch.no_grad():
        depot_model(**batch)
        depot_model.flush()
        found = depot_model(**batch).logits
        assert all(row.fetched for row in depot_model.last.rows)
        expected = model(**batch).logits[:, -found.shape[1] :]
    torch.testing.assert_close(found, expected, **CLOSE[dtype])


def test_wrong_kv_changes_the_answer(memory: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: wrong KV changes answers."""
    for kind, make in SERVED.items():
        model = build(make())
        ids = tokens(100)
        with attach(model, memory, block_tokens=BLOCK) as depot_model, torch.no_grad():
            expected = depot_model(ids).logits[:, -1]
            depot_model.flush()
            with monkeypatch.context() as patch:
                patch.setattr("kvdepot.native.scatter", lambda records, view: None)
                patch.setattr("torch.empty", torch.zeros)
                found = depot_model(ids).logits[:, -1]
        assert depot_model.last.rows[0].fetched, kind
        assert float((found - expected).abs().max()) > 1e-2, kind
