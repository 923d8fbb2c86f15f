"""The audit in vLLM: a hit one block short, and what the engine computes against what is kept."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.support.swapped_payloads import keys_in
from tests.support.toy_engine import (
    FULL_PAGES,
    PAGE_TOKENS,
    PROMPT,
    OpenEngine,
    OpenStore,
    Split,
    ToyEngine,
    ToyRequest,
    answer_of,
    ask,
    forget_local,
)
from tests.support.waiting import until

from kvdepot.adapters.vllm import config
from kvdepot.config.settings import AuditConfig
from kvdepot.core.block import BlockKey
from kvdepot.errors import ConfigError
from kvdepot.store.store import Store

AUDIT: dict[str, Any] = {"audit": AuditConfig(share=1.0)}
WARM = len(PROMPT) % PAGE_TOKENS + 2
"""Tokens that a warm request computes, with two of the answer."""


def spoil(store: Store, engine: ToyEngine, key: BlockKey | None = None) -> None:
    """Numbers of another meaning under a key, with good checksums: that of the prompt's last block,
    in the last shard, unless it is given.
    """
    space = engine.side._spaces_of("")[-1]
    key = key or space.keys(PROMPT)[FULL_PAGES - 1]
    until(lambda: len(store.match([key])) == 1)
    kept = np.empty(space.block_bytes, np.uint8)
    assert store.get(key, kept)
    store.remove(key)
    assert store.put(key, (kept.view(np.float32) + np.float32(30000)).view(np.uint8))


def compared(store: Store, count: int) -> dict[str, Any]:
    """What is known once so many blocks were compared, beside the engine."""
    until(lambda: store.audits.known()["compared"] >= count)
    return store.audits.known()


@pytest.mark.parametrize("block_tokens", [0, 8])
def test_an_audited_hit_computes_one_block_more(
    open_store: OpenStore, open_engine: OpenEngine, block_tokens: int
) -> None:
    store = open_store()
    settings = {"audit": AuditConfig(share=0.02), "block_tokens": block_tokens}
    engine = open_engine(store, settings=settings)
    size = block_tokens or PAGE_TOKENS
    ask(engine, "cold", PROMPT)
    computed = []
    for name in ("first", "second", "third"):
        forget_local(engine)
        computed.append(ask(engine, name, PROMPT))
    rest = len(PROMPT) % size + 2
    assert computed == [rest + size, rest, rest]
    assert compared(store, 1)["mismatched"] == 0


def test_off_unless_asked_for(open_store: OpenStore, open_engine: OpenEngine) -> None:
    store = open_store()
    engine = open_engine(store)
    ask(engine, "cold", PROMPT)
    forget_local(engine)
    assert ask(engine, "warm", PROMPT) == WARM
    assert store.audits.known()["compared"] == 0


def test_a_mismatch_ends_all_hits(open_store: OpenStore, open_engine: OpenEngine) -> None:
    store = open_store()
    engine = open_engine(store, settings=AUDIT)
    ask(engine, "cold", PROMPT)
    spoil(store, engine)
    forget_local(engine)
    assert ask(engine, "audited", PROMPT) == WARM + PAGE_TOKENS, "and the answer is right"
    (found,) = compared(store, 1)["quarantined"]
    assert found["made_by"] == found["found_by"] or found["made_by"] == "unknown"
    assert "toy 1" in found["found_by"]
    assert found["error"] > found["tolerance"]
    forget_local(engine)
    assert ask(engine, "after", PROMPT) == len(PROMPT) + 2


def test_a_block_on_disk_alone(open_store: OpenStore, open_engine: OpenEngine) -> None:
    """It is compared with what the disk has, not with what was just computed."""
    store = open_store()
    engine = open_engine(store, settings=AUDIT)
    ask(engine, "cold", PROMPT)
    spoil(store, engine)
    assert store.flush()
    engine.close()
    again = open_store()
    engine = open_engine(again, settings=AUDIT)
    assert ask(engine, "audited", PROMPT) == WARM + PAGE_TOKENS
    assert compared(again, 1)["mismatched"] == 1


@pytest.mark.parametrize("split", [Split(shards=2), Split(stages=3)], ids=["ranks", "stages"])
def test_every_worker_compares_its_part(
    open_store: OpenStore, open_engine: OpenEngine, split: Split
) -> None:
    store = open_store()
    engine = open_engine(store, settings=AUDIT, split=split)
    ask(engine, "cold", PROMPT)
    forget_local(engine)
    assert ask(engine, "warm", PROMPT) == WARM + PAGE_TOKENS
    count = len(engine.workers)
    known = compared(store, count)
    assert (known["compared"], known["mismatched"]) == (count, 0)
    spoil(store, engine)
    forget_local(engine)
    ask(engine, "spoilt", PROMPT)
    assert compared(store, 2 * count)["mismatched"] == 1


def test_not_beside_other_requests(open_store: OpenStore, open_engine: OpenEngine) -> None:
    store = open_store()
    engine = open_engine(store, settings=AUDIT)
    ask(engine, "cold", PROMPT)
    forget_local(engine)
    for number in range(2):
        engine.add(ToyRequest(f"at once {number}", list(PROMPT), 3))
    engine.run()
    assert engine.done["at once 0"].answer == answer_of(PROMPT, 3)
    assert store.audits.known()["compared"] == 0


@pytest.mark.parametrize("kinds", [("full", "window"), ("full", "state")])
def test_models_with_other_layers_too(
    open_store: OpenStore, open_engine: OpenEngine, kinds: tuple[str, ...]
) -> None:
    """From the last boundary that they can go on from; windows are compared, states are not."""
    store = open_store()
    engine = open_engine(store, settings=AUDIT, kinds=kinds)
    ask(engine, "cold", PROMPT)
    forget_local(engine)
    ask(engine, "warm", PROMPT)
    assert engine.done["warm"].answer == answer_of(PROMPT, 3)
    count = 2 if "window" in kinds else 1
    known = compared(store, count)
    assert (known["compared"], known["mismatched"]) == (count, 0)


def test_windows_of_another_meaning_end_all_hits(
    open_store: OpenStore, open_engine: OpenEngine
) -> None:
    store = open_store()
    engine = open_engine(store, settings=AUDIT, kinds=("full", "window"))
    ask(engine, "cold", PROMPT)
    tag = engine.side._spaces_of("")[-1].tag
    until(lambda: any(key.startswith(tag) for key in keys_in(store)))
    saver = engine.workers[0]._saver
    assert saver is not None
    saver.wait()
    for key in keys_in(store):
        if key.startswith(tag):
            spoil(store, engine, key)
    forget_local(engine)
    ask(engine, "audited", PROMPT)
    assert engine.done["audited"].answer == answer_of(PROMPT, 3)
    known = compared(store, 2)
    assert known["mismatched"] == 1
    (found,) = known["quarantined"]
    assert found["namespace"] == tag.hex()
    forget_local(engine)
    ask(engine, "after", PROMPT)
    assert engine.done["after"].answer == answer_of(PROMPT, 3)


def test_a_setting_that_makes_no_sense() -> None:
    with pytest.raises(ConfigError) as error:
        config.read({"audit": {"share": 7}})
    assert "audit.share" in error.value.path
    assert config.read({"audit": {"tolerance": {"bfloat16": 0.2}}}).audit.tolerance == {
        "bfloat16": 0.2
    }
