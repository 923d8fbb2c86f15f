"""The audit in vLLM: a hit one block short, and what the engine computes against what is kept."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.support.swapped_payloads import keys_in
from tests.support.toy_engine import (
    ALL,
    FULL_PAGES,
    PAGE_TOKENS,
    PROMPT,
    REST,
    Split,
    ToyEngine,
    ToyRequest,
    Toys,
    answer_of,
    ask,
    forget_local,
)
from tests.support.waiting import until

from kvdepot.config.settings import AuditConfig
from kvdepot.core.block import BlockKey
from kvdepot.store.store import Store

AUDIT: dict[str, Any] = {"audit": AuditConfig(share=1.0)}


def spoil(store: Store, engine: ToyEngine, key: BlockKey | None = None) -> None:
    """Numbers of another meaning under a key, with good checksums: that of the prompt's last block,
    in the last shard, unless it is given.
    """
    space = engine.spaces()[-1]
    key = key or space.keys(PROMPT)[FULL_PAGES - 1]
    until(lambda: len(store.match([key])) == 1)
    kept = np.empty(space.block_bytes, np.uint8)
    assert store.get_many([key], [kept])[0]
    store.remove(key)
    assert store.put_many([key], [(kept.view(np.float32) + np.float32(30000)).view(np.uint8)])[0]


def compared(store: Store, count: int) -> dict[str, Any]:
    """The audits that are known once this many blocks were compared."""
    until(lambda: store.audits.list()["compared"] >= count)
    return store.audits.list()


@pytest.mark.parametrize("block_tokens", [0, 8])
def test_an_audited_hit_computes_one_block_more(toys: Toys, block_tokens: int) -> None:
    store = toys.store()
    settings = {"audit": AuditConfig(share=0.02), "block_tokens": block_tokens}
    engine = toys.saved(store, settings=settings)
    size = block_tokens or PAGE_TOKENS
    computed = []
    for name in ("first", "second", "third"):
        computed.append(ask(engine, name, PROMPT))
        forget_local(engine)
    rest = len(PROMPT) % size + 2
    assert computed == [rest + size, rest, rest]
    assert compared(store, 1)["mismatched"] == 0


def test_audits_are_off_by_default(toys: Toys) -> None:
    store = toys.store()
    engine = toys.saved(store)
    assert ask(engine, "warm", PROMPT) == REST
    assert store.audits.list()["compared"] == 0


def test_a_mismatch_ends_all_hits(toys: Toys) -> None:
    store = toys.store()
    engine = toys.engine(store, settings=AUDIT)
    ask(engine, "cold", PROMPT)
    spoil(store, engine)
    forget_local(engine)
    assert ask(engine, "audited", PROMPT) == REST + PAGE_TOKENS, "and the answer is right"
    (found,) = compared(store, 1)["quarantined"]
    assert found["made_by"] == found["found_by"] or found["made_by"] == "unknown"
    assert "toy 1" in found["found_by"]
    assert found["error"] > found["tolerance"]
    forget_local(engine)
    assert ask(engine, "after", PROMPT) == ALL


def test_a_block_on_disk_alone(toys: Toys) -> None:
    """It is compared with what the disk has, not with what was just computed."""
    store = toys.store()
    engine = toys.engine(store, settings=AUDIT)
    ask(engine, "cold", PROMPT)
    spoil(store, engine)
    assert store.flush()
    engine.close()
    again = toys.store()
    engine = toys.engine(again, settings=AUDIT)
    assert ask(engine, "audited", PROMPT) == REST + PAGE_TOKENS
    assert compared(again, 1)["mismatched"] == 1


@pytest.mark.parametrize("split", [Split(shards=2), Split(stages=3)], ids=["ranks", "stages"])
def test_every_worker_compares_its_part(toys: Toys, split: Split) -> None:
    store = toys.store()
    engine = toys.saved(store, settings=AUDIT, split=split)
    assert ask(engine, "warm", PROMPT) == REST + PAGE_TOKENS
    count = len(engine.workers)
    known = compared(store, count)
    assert (known["compared"], known["mismatched"]) == (count, 0)
    spoil(store, engine)
    forget_local(engine)
    ask(engine, "spoilt", PROMPT)
    assert compared(store, 2 * count)["mismatched"] == 1


def test_no_audit_while_other_requests_run(toys: Toys) -> None:
    store = toys.store()
    engine = toys.saved(store, settings=AUDIT)
    for number in range(2):
        engine.add(ToyRequest(f"at once {number}", list(PROMPT), 3))
    engine.run()
    assert engine.done["at once 0"].answer == answer_of(PROMPT, 3)
    assert store.audits.list()["compared"] == 0


@pytest.mark.parametrize("kinds", [("full", "window"), ("full", "state")])
def test_models_with_other_layers_too(toys: Toys, kinds: tuple[str, ...]) -> None:
    """From the last boundary that they can go on from; windows are compared, states are not."""
    store = toys.store()
    engine = toys.saved(store, settings=AUDIT, kinds=kinds)
    ask(engine, "warm", PROMPT)
    assert engine.done["warm"].answer == answer_of(PROMPT, 3)
    count = 2 if "window" in kinds else 1
    known = compared(store, count)
    assert (known["compared"], known["mismatched"]) == (count, 0)


def test_windows_of_another_meaning_end_all_hits(toys: Toys) -> None:
    store = toys.store()
    engine = toys.engine(store, settings=AUDIT, kinds=("full", "window"))
    ask(engine, "cold", PROMPT)
    tag = engine.spaces()[-1].tag
    until(lambda: any(key.startswith(tag) for key in keys_in(store)))
    engine.settle()
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
