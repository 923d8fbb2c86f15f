"""Draft models: the length of hits, and the identity of their KV."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.toy_engine import (
    PAGE_TOKENS,
    PROMPT,
    ToyEngine,
    Toys,
    ask,
    engine_config,
    forget_local,
)
from tests.support.waiting import until

from kvdepot.adapters.vllm import weights
from kvdepot.adapters.vllm.config import ConnectorConfig
from kvdepot.adapters.vllm.identity import draft_of, drafts_ahead
from kvdepot.adapters.vllm.messages import BlockOrigin
from kvdepot.adapters.vllm.namespaces import known_weights, namespaces
from kvdepot.adapters.vllm.weights import WeightsSource

KINDS = [("full",), ("window", "full"), ("window",)]


def drafting(engine: ToyEngine) -> ToyEngine:
    """As if its draft layers looked one token ahead."""
    engine.side.names.groups = replace(engine.side.names.groups, ahead_blocks=1)
    return engine


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_the_last_block_of_a_hit_is_computed_again(toys: Toys, kinds: tuple[str, ...]) -> None:
    engine = drafting(toys.engine(kinds=kinds))
    assert ask(engine, "cold", PROMPT) == len(PROMPT) + 2
    forget_local(engine)
    whole = len(PROMPT) - (0 if kinds == ("full",) else 1)
    kept = (whole // PAGE_TOKENS - 1) * PAGE_TOKENS
    assert ask(engine, "warm", PROMPT) == len(PROMPT) - kept + 2


def test_the_block_before_prompts_part_is_computed_again(toys: Toys) -> None:
    engine = drafting(toys.engine())
    ask(engine, "one", PROMPT)
    forget_local(engine)
    other = PROMPT[: 3 * PAGE_TOKENS] + [1] * 20
    assert ask(engine, "other", other) == len(other) - 2 * PAGE_TOKENS + 2


def engine_with(method: str, model: str, **config: Any) -> Any:
    hf_config = SimpleNamespace(to_dict=lambda: config, _commit_hash="c")
    draft = SimpleNamespace(model=model, seed=0, hf_config=hf_config)
    engine = engine_config()
    engine.speculative_config = SimpleNamespace(
        method=method, draft_model_config=draft, use_eagle=lambda: method in ("eagle", "mtp")
    )
    return engine


def test_eagle_and_mtp_look_ahead() -> None:
    assert drafts_ahead(engine_with("eagle", "d"))
    assert drafts_ahead(engine_with("mtp", "d"))
    assert not drafts_ahead(engine_with("draft_model", "d"))
    assert not drafts_ahead(engine_config())
    kept = engine_with("eagle", "d")
    kept.speculative_config.disable_eagle_block_drop = True
    assert not drafts_ahead(kept)


def test_drafts_without_layers_change_nothing() -> None:
    assert draft_of(engine_config(), "") == ("", None)
    assert draft_of(engine_with("ngram", "d"), "") == ("", None)


def test_every_draft_model_has_kv_of_its_own() -> None:
    engines = [
        engine_with("eagle", "d"),
        engine_with("draft_model", "d"),
        engine_with("eagle", "d", layers=2),
        engine_with("mtp", engine_config().model_config.model),
    ]
    found = [draft_of(engine, "") for engine in engines]
    assert len(set(found)) == len(found)
    assert not any(weights for _, weights in found)
    assert draft_of(engines[0], "a") != draft_of(engines[0], "b")


def test_the_weights_of_a_draft_model_are_read(
    tmp_path: Path,
    toys: Toys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"one")
    _, files = draft_of(engine_with("eagle", str(tmp_path / "draft")), "")
    assert files == WeightsSource(folder=str(tmp_path / "draft"))
    facts = toys.engine().workers[0].facts
    config = ConnectorConfig(weights=tmp_path / "memo")
    drafted = replace(facts, draft="drafted by eagle", draft_weights=files)
    monkeypatch.setattr(weights, "process_start_ns", time.time_ns)  # the files are older
    until(lambda: bool(known_weights(drafted, config)))
    assert known_weights(drafted, config) != known_weights(facts, config)
    tags = {namespaces(one, config, BlockOrigin())[0][0].tag for one in (facts, drafted)}
    assert len(tags) == 2
