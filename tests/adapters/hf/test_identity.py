"""Whose KV it is: models that differ never meet, and one that changes becomes another."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from tests.support.tiny_transformers import build, gpt2, llama, tokens, transformers

from kvdepot.adapters.hf import attach, identity
from kvdepot.adapters.hf.identity import weights_digest
from kvdepot.errors import ModelError
from kvdepot.store.store import Store

BLOCK = 16
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4}
IDS = tokens(90)

ELSEWHERE = """
import sys, transformers, kvdepot
from kvdepot.adapters.hf import attach
transformers.logging.set_verbosity_error()
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
with kvdepot.open(dram={"capacity": "4MiB", "huge_pages": "never"}) as store:
    with attach(model, store, block_tokens=16) as depot_model:
        sys.stdout.write(depot_model.fingerprint)
"""


def fetched(model: Any, ids: Any = IDS) -> int:
    """Tokens that come from the depot; the answer is the model's own."""
    expected = model.wrapped.generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, **GREEDY), expected)
    assert model.flush()
    count: int = model.last.rows[0].fetched_tokens
    return count


@pytest.mark.slow
def test_the_same_after_saving_and_loading_elsewhere(memory: Store, tmp_path: Path) -> None:
    model = build(llama())
    model.save_pretrained(tmp_path)
    with attach(model, memory, block_tokens=BLOCK) as depot_model:
        here = depot_model.fingerprint
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path)]
    there = subprocess.run(command, check=True, capture_output=True, text=True)
    assert there.stdout == here


def test_a_model_loaded_again_knows_its_prompts(memory: Store, tmp_path: Path) -> None:
    model = build(llama())
    with attach(model, memory, block_tokens=BLOCK) as first:
        fetched(first)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with attach(loaded, memory, block_tokens=BLOCK) as second:
        assert fetched(second) == 80


@pytest.mark.parametrize(
    "other",
    [
        lambda: build(llama(), seed=8),
        lambda: build(llama(), dtype=torch.bfloat16),
        lambda: build(llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
        lambda: build(llama(num_key_value_heads=4)),
        lambda: build(gpt2()),
    ],
    ids=["weights", "dtype", "rope", "heads", "architecture"],
)
def test_models_that_differ_never_meet(memory: Store, other: Any) -> None:
    with attach(build(llama()), memory, block_tokens=BLOCK) as first:
        fetched(first)
        with attach(other(), memory, block_tokens=BLOCK) as second:
            second.generate(IDS, **GREEDY)
            assert not second.last.rows[0].fetched
            assert second.flush()
            second.generate(IDS, **GREEDY)
            assert second.last.rows[0].fetched_tokens == 80
        assert fetched(first) == 80


@pytest.mark.parametrize(
    "options", [{"block_tokens": 32}, {"tenant": "b"}, {"secret": b"s" * 16}, {"name": "other"}]
)
def test_other_blocks_and_other_owners_are_a_clean_miss(memory: Store, options: Any) -> None:
    model = build(llama())
    with (
        attach(model, memory, block_tokens=BLOCK) as first,
        attach(model, memory, **{"block_tokens": BLOCK, **options}) as second,
    ):
        fetched(first)
        assert fetched(second) == 0
        assert fetched(second) >= 64


def test_the_attention_implementation_is_no_other_model(memory: Store) -> None:
    with attach(build(llama(attn_implementation="eager")), memory, block_tokens=BLOCK) as first:
        fetched(first)
    with attach(build(llama(attn_implementation="sdpa")), memory, block_tokens=BLOCK) as second:
        assert fetched(second) == 80


def test_every_weight_counts(memory: Store) -> None:
    model = build(llama())
    with attach(model, memory, block_tokens=BLOCK) as depot_model:
        seen = {depot_model.fingerprint}
        for parameter in model.parameters():
            with torch.no_grad():
                parameter.view(-1)[parameter.numel() // 2 + 1] += 0.5
            depot_model.generate(IDS[:, :8], **GREEDY)
            assert depot_model.fingerprint not in seen
            seen.add(depot_model.fingerprint)


@pytest.mark.parametrize("at", [0, 1, 8_191, 100_000, 199_999])
def test_every_byte_of_a_large_tensor_counts_and_its_place(at: int) -> None:
    """Also where words only change places, which a plain sum would not see."""
    weight = torch.arange(1_600_003, dtype=torch.int64).to(torch.uint8)
    model: Any = SimpleNamespace(state_dict=lambda: {"w": weight})
    before = weights_digest(model)
    weight[at * 8 + 3] ^= 64
    assert weights_digest(model) != before
    weight[at * 8 + 3] ^= 64
    assert weights_digest(model) == before
    words, other = weight[:1_600_000].view(torch.int64), (at + 13) % 200_000
    here, there = int(words[at]), int(words[other])
    assert here != there
    words[at], words[other] = there, here
    assert weights_digest(model) != before


def weight_of(model: Any) -> Any:
    return model.model.layers[0].self_attn.k_proj.weight


def step(model: Any, **options: Any) -> None:
    """One step of an optimizer, large enough to change answers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def merge(model: Any) -> None:
    """As PEFT merges an adapter into a weight."""
    delta = torch.full_like(weight_of(model), 0.05)
    weight_of(model).data += delta


def other_weights() -> dict[str, Any]:
    other: dict[str, Any] = build(llama(), seed=8).state_dict()
    return other


WAYS: dict[str, Any] = {
    "an optimizer's step": step,
    "a step of a fused optimizer": lambda model: step(model, fused=True),
    "load_state_dict": lambda model: model.load_state_dict(other_weights()),
    "weights assigned": lambda model: model.load_state_dict(other_weights(), assign=True),
    "a copy behind torch's back": lambda model: weight_of(model).data.copy_(
        weight_of(build(llama(), seed=8)).data
    ),
    "an adapter merged": merge,
    "numpy": lambda model: weight_of(model).detach().numpy().__imul__(1.5),
}


@pytest.mark.parametrize("way", WAYS)
def test_changed_weights_are_another_model_until_they_return(memory: Store, way: str) -> None:
    model = build(llama())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with attach(model, memory, block_tokens=BLOCK) as depot_model:
        fetched(depot_model)
        assert fetched(depot_model) == 80
        WAYS[way](model)
        assert fetched(depot_model) == 0
        assert fetched(depot_model) == 80
        model.load_state_dict(before)
        assert fetched(depot_model) == 80, "nothing of the changed model is under the old name"


def test_a_buffer_that_is_saved_with_the_weights_counts(memory: Store) -> None:
    model = build(llama())
    model.register_buffer("steering", torch.zeros(64))
    with attach(model, memory, block_tokens=BLOCK) as depot_model:
        before = depot_model.fingerprint
        model.steering.data.fill_(0.5)
        fetched(depot_model)
        assert depot_model.fingerprint != before


class ChangesWeights(transformers.LogitsProcessor):  # type: ignore[misc]
    """Writes to a weight in the middle of an answer."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 8:
            weight_of(self.model).data.mul_(1.5)
        return scores


def test_kv_computed_while_weights_changed_is_not_saved(memory: Store) -> None:
    model = build(llama())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with attach(model, memory, block_tokens=BLOCK) as depot_model:
        processors = transformers.LogitsProcessorList([ChangesWeights(model)])
        answer = depot_model.generate(
            IDS, do_sample=False, max_new_tokens=40, logits_processor=processors
        )
        assert depot_model.flush()
        model.load_state_dict(before)
        assert fetched(depot_model, answer) == 80, "the prompt alone, computed before the change"


def test_one_number_written_behind_torchs_back_makes_it_another_model(memory: Store) -> None:
    """As an embedding of one token, which torch does not count and no sample meets."""
    model = build(llama())
    row = model.model.embed_tokens.weight.data[int(IDS[0, 6])]
    with attach(model, memory, block_tokens=BLOCK) as depot_model:
        fetched(depot_model)
        assert fetched(depot_model) == 80
        number = float(row[20])
        row[20] = number + 4.0
        assert fetched(depot_model) == 0
        row[20] = number
        assert fetched(depot_model) == 80


@pytest.mark.parametrize("words", [1, 1023, 1024, 70_000])
def test_on_a_gpu_every_word_and_its_place_are_in_the_sums(words: int) -> None:
    weight = torch.arange(words * 8 + 3, dtype=torch.int64).mul_(2654435761).view(torch.uint8)
    weight = weight[: words * 8 + 3].clone()
    view, before = weight[: words * 8].view(torch.int64), identity._sums(weight)
    for here, there in ((0, words - 1), (0, 1), (3, 1027), (5, 60_001)):
        if there >= words:
            continue
        weight[here * 8 + 3] ^= 64
        assert not torch.equal(identity._sums(weight), before)
        weight[here * 8 + 3] ^= 64
        if here != there:
            first, second = int(view[here]), int(view[there])
            assert first != second
            view[here], view[there] = second, first
            assert not torch.equal(identity._sums(weight), before)
            view[here], view[there] = first, second
    assert torch.equal(identity._sums(weight), before)


def test_a_cast_is_noticed(memory: Store) -> None:
    model = build(llama())
    with attach(model, memory, block_tokens=BLOCK) as depot_model:
        fetched(depot_model)
        assert depot_model.to(torch.bfloat16) is depot_model
        depot_model.generate(IDS, **GREEDY)
        assert not depot_model.last.rows[0].fetched
        assert depot_model._parts.binding.groups[0].space.layout.dtype == "bfloat16"


def test_a_revision_does_not_outlive_the_weights(memory: Store) -> None:
    model = build(llama())
    with attach(model, memory, name="m", revision="abc", block_tokens=BLOCK) as depot_model:
        fetched(depot_model)
        assert fetched(depot_model) == 80
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        with pytest.raises(ModelError, match="have changed") as caught:
            depot_model.generate(IDS, **GREEDY)
        assert "refresh_identity" in caught.value.hint
        with pytest.raises(ModelError, match="attached with a revision"):
            depot_model.refresh_identity()
        depot_model.refresh_identity("abd")
        assert fetched(depot_model) == 0
        with torch.no_grad():
            model.lm_head.weight.div_(2)
        depot_model.refresh_identity("abc")
        assert fetched(depot_model) == 80


class Adapted(torch.nn.Linear):
    """What PEFT puts in the place of a layer, as far as we look at it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=False)
        self.weight = base.weight
        self.on = True
        self.scaling = {"default": 1.0}

    @property
    def active_adapter(self) -> list[str]:
        return ["default"]

    @property
    def disable_adapters(self) -> bool:
        return not self.on

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * (1 + self.scaling["default"] * self.on)


def test_an_adapter_switched_off_makes_it_another_model(memory: Store) -> None:
    model = build(llama())
    attention = model.model.layers[0].self_attn
    attention.k_proj = adapted = Adapted(attention.k_proj)
    with attach(model, memory, block_tokens=BLOCK) as depot_model:
        fetched(depot_model)
        adapted.on = False
        assert fetched(depot_model) == 0
        adapted.scaling["default"] = 0.5
        adapted.on = True
        assert fetched(depot_model) == 0
        adapted.scaling["default"] = 1.0
        assert fetched(depot_model) == 80, "and switched on again it is the first one again"


def test_default_blocks_have_about_a_mebibyte(memory: Store) -> None:
    with attach(build(llama()), memory) as small:
        assert small.block_tokens == 256
    wide = llama(num_attention_heads=16, num_key_value_heads=16, hidden_size=1024)
    with attach(build(wide), memory) as large:
        assert large.block_tokens == 64
        groups = large._parts.binding.groups
        assert groups[0].space.block_bytes == 1 << 20
