"""Calls that the depot has no part in reach the model untouched, and are counted."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from tests.support.tiny_transformers import build, gpt2, llama, padded, tokens, transformers

from kvdepot.adapters.hf import DepotModel, attach
from kvdepot.store.store import Store

BLOCK = 16
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5}
IDS = tokens(50)


@pytest.fixture
def pair(memory: Store) -> Iterator[tuple[Any, DepotModel]]:
    model = build(llama())
    with attach(model, memory, block_tokens=BLOCK) as depot_model:
        yield model, depot_model


def four_dimensions() -> torch.Tensor:
    return torch.ones(50, 50).tril()[None, None].bool()


def hole() -> torch.Tensor:
    mask = torch.ones_like(IDS)
    mask[0, 10:13] = 0
    return mask


FORWARDS: list[tuple[str, dict[str, Any]]] = [
    ("no cache", {"input_ids": IDS, "use_cache": False}),
    ("labels", {"input_ids": IDS, "labels": IDS}),
    ("arguments", {"input_ids": IDS, "output_hidden_states": True}),
    ("arguments", {"inputs_embeds": torch.ones(1, 50, 32)}),
    ("mask", {"input_ids": IDS, "attention_mask": four_dimensions()}),
    ("padding", {"input_ids": IDS, "attention_mask": hole()}),
    (
        "padding",
        {"input_ids": IDS, "attention_mask": 1 - padded([IDS[:, :9], IDS])["attention_mask"][:1]},
    ),
    ("positions", {"input_ids": IDS, "position_ids": torch.arange(50)[None] + 7}),
]


@pytest.mark.parametrize(("reason", "call"), FORWARDS)
def test_forward(pair: tuple[Any, DepotModel], reason: str, call: dict[str, Any]) -> None:
    model, depot_model = pair
    with torch.no_grad():
        for _ in range(2):
            found = depot_model(**call)
            assert depot_model.flush()
        torch.testing.assert_close(found.logits, model(**call).logits, equal_nan=True)
    assert depot_model.last.passed == reason
    assert depot_model.counters.passed == {reason: 2}
    assert not depot_model.counters.offload_stored


OtherCache = type("OtherCache", (transformers.DynamicCache,), {})
"""A cache that is not one of those we know how to fill."""

GENERATIONS: list[tuple[str, dict[str, Any]]] = [
    ("no cache", {"use_cache": False}),
    ("kind of cache", {"past_key_values": OtherCache}),
    ("assisted decoding", {"prompt_lookup_num_tokens": 3}),
    ("arguments", {"output_hidden_states": True, "return_dict_in_generate": True}),
]


@pytest.mark.parametrize(("reason", "call"), GENERATIONS)
def test_generate(pair: tuple[Any, DepotModel], reason: str, call: dict[str, Any]) -> None:
    answers = []
    for each in pair:
        new = {name: kind(config=each.config) for name, kind in call.items() if callable(kind)}
        answer = each.generate(IDS, **GREEDY, **{**call, **new})
        answers.append(answer["sequences"] if isinstance(answer, dict) else answer)
    assert torch.equal(*answers)
    assert pair[1].counters.passed == {reason: 1}


def test_training_and_gradients(pair: tuple[Any, DepotModel]) -> None:
    model, depot_model = pair
    depot_model(IDS).logits.sum().backward()
    assert model.lm_head.weight.grad is not None
    assert depot_model.last.passed == "gradients"
    depot_model.train()
    with torch.no_grad():
        depot_model(IDS)
    assert depot_model.last.passed == "training"
    assert depot_model.eval() is depot_model
    with torch.no_grad():
        depot_model(IDS)
    assert depot_model.last.passed == ""


def test_frozen_weights_need_no_no_grad(pair: tuple[Any, DepotModel]) -> None:
    _, depot_model = pair
    depot_model.requires_grad_(False)
    for _ in range(2):
        logits = depot_model(IDS).logits
        depot_model.flush()
    assert not logits.requires_grad
    assert depot_model.last.rows[0].fetched_tokens == 48


def test_inference_mode(pair: tuple[Any, DepotModel]) -> None:
    model, depot_model = pair
    with torch.inference_mode():
        for _ in range(2):
            output = depot_model(IDS)
            depot_model.flush()
    assert depot_model.last.rows[0].fetched_tokens == 48
    more = tokens(7, seed=3)
    with torch.no_grad():
        found = depot_model(more, past_key_values=output.past_key_values).logits
        expected = model(torch.cat([IDS, more], dim=1)).logits[:, -7:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_learned_positions_count_from_the_padding_in_a_plain_forward(memory: Store) -> None:
    model = build(gpt2())
    batch = padded([IDS, tokens(30, seed=2)])
    with attach(model, memory, block_tokens=BLOCK) as depot_model, torch.no_grad():
        found = depot_model(**batch).logits
        torch.testing.assert_close(found, model(**batch).logits)
        assert depot_model.last.passed == "padding"
        positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        for _ in range(2):
            found = depot_model(**batch, position_ids=positions).logits
            depot_model.flush()
        assert depot_model.last.rows[1].fetched
        expected = model(**batch, position_ids=positions).logits[:, -1]
        torch.testing.assert_close(found[:, -1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_length(memory: Store, kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
        rope["original_max_position_embeddings"] = 64
    model = build(llama(rope_parameters=rope, max_position_embeddings=64))
    with attach(model, memory, block_tokens=BLOCK) as depot_model:
        for count in (60, 60, 100, 60):
            ids = tokens(100)[:, :count]
            expected = model.generate(ids, **GREEDY)
            model.generate(ids[:, :9], **GREEDY)  # it remembers how long its last prompt was
            assert torch.equal(depot_model.generate(ids, **GREEDY), expected)
            assert depot_model.flush()
            assert depot_model.last.passed == ("long rope" if count > 64 else "")
        long = depot_model.generate(ids, do_sample=False, max_new_tokens=30)
        assert torch.equal(long, model.generate(ids, do_sample=False, max_new_tokens=30))
        assert depot_model.flush()
        assert depot_model.counters.offload_stored == 3, "none from beyond the limit"


def test_short_and_empty_prompts(pair: tuple[Any, DepotModel]) -> None:
    model, depot_model = pair
    for count in (1, 3, BLOCK, BLOCK + 1):
        ids = tokens(count)
        for _ in range(2):
            found = depot_model.generate(ids, **GREEDY)
            assert torch.equal(found, model.generate(ids, **GREEDY))
            depot_model.flush()
    empty = torch.zeros((1, 0), dtype=torch.long)
    errors: list[type[BaseException]] = []
    for each in (model, depot_model):
        with pytest.raises((ValueError, RuntimeError, IndexError)) as caught:
            each.generate(empty, **GREEDY)
        errors.append(caught.type)
    assert errors[0] is errors[1], "what transformers says itself"


def test_nothing_at_all_is_the_models_own_error(pair: tuple[Any, DepotModel]) -> None:
    model, depot_model = pair
    for each in (model, depot_model):
        with pytest.raises(ValueError, match="inputs_embeds"):
            each()


def test_a_closed_depot_costs_a_recompute() -> None:
    import kvdepot

    model = build(llama())
    with kvdepot.open(dram={"capacity": "4MiB", "huge_pages": "never"}) as store:
        depot_model = attach(model, store, block_tokens=BLOCK)
    expected = model.generate(IDS, **GREEDY)
    assert torch.equal(depot_model.generate(IDS, **GREEDY), expected)
    assert depot_model.counters.passed == {"closed": 1}


def test_it_works_as_the_model_does(pair: tuple[Any, DepotModel]) -> None:
    model, depot_model = pair
    assert depot_model.config is model.config
    assert depot_model.device == model.device
    assert depot_model.num_parameters() == model.num_parameters()
    settings = transformers.GenerationConfig(max_new_tokens=3, do_sample=False)
    depot_model.generation_config = settings
    assert model.generation_config is settings
    assert depot_model.generate(IDS).shape[1] == 53
    assert "16 tokens" in repr(depot_model)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = depot_model.nonsense
