"""Any calls in any order, with blocks going away in between: always the model's own answer."""

import random
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from tests.support.tiny_transformers import SERVED, build, padded, tokens

from kvdepot.adapters.hf import DepotModel, attach
from kvdepot.store.store import Store

CALLS = 5
WINDOWS = (5, 8, 17, 24, 70)


@pytest.mark.parametrize("kind", SERVED)
def test_random_calls(memory: Store, kind: str, seed: int) -> None:
    chance = random.Random(seed)
    changes = {"sliding_window": chance.choice(WINDOWS)} if kind in WINDOWED else {}
    model = build(SERVED[kind](**changes), seed=chance.randrange(1000))
    texts = [tokens(chance.randrange(1, 160), seed=number) for number in range(3)]
    with attach(model, memory, block_tokens=chance.choice([8, 16, 32])) as depot_model:
        for _ in range(CALLS):
            batch, call = random_batch(texts, chance), random_settings(chance)
            torch.manual_seed(seed)
            expected = model.generate(**batch, **{**call, "prefill_chunk_size": None})
            torch.manual_seed(seed)
            assert torch.equal(depot_model.generate(**batch, **call), expected), (batch, call)
            texts[chance.randrange(3)] = without_padding(expected, batch)
            if chance.random() < 0.5:
                forget_something(depot_model, memory, chance.choice(texts), chance)
        assert depot_model.flush()
        assert depot_model.last_error is None
        assert memory.stats()["leased"] == 0
        assert memory.admin.check()


WINDOWED = ("mistral", "gemma3", "gpt_oss")


def random_batch(texts: list[Any], chance: random.Random) -> dict[str, Any]:
    """Prompts that begin as texts do, and go on differently."""
    rows = []
    for _ in range(chance.choice([1, 1, 2, 4])):
        text = chance.choice(texts)
        cut = chance.randrange(1, text.shape[1] + 1)
        rest = tokens(chance.randrange(1, 30), seed=chance.randrange(50))
        rows.append(torch.cat([text[:, :cut], rest], dim=1))
    return padded(rows)


def random_settings(chance: random.Random) -> dict[str, Any]:
    call: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    call["max_new_tokens"] = chance.choice([1, 3, 12])
    call |= chance.choice(
        [{}, {}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}]
    )
    call |= chance.choice(
        [
            {},
            {},
            {"cache_implementation": "static"},
            {"prefill_chunk_size": chance.randrange(1, 40)},
        ]
    )
    return call


def without_padding(sequences: Any, batch: dict[str, Any]) -> Any:
    """The first sequence, as a text that further prompts may begin with."""
    return sequences[:1, int(batch["attention_mask"][0].argmax()) :]


def forget_something(model: DepotModel, store: Store, text: Any, chance: random.Random) -> None:
    """Remove a block of each group, as eviction might."""
    assert model.flush()
    for group in model._parts.binding.groups:
        keys = group.keys(text[0].numpy())
        if keys:
            store.remove(chance.choice(keys))
