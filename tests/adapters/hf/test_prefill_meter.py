"""What transformers tells the ledger and the dashboard: its prefill speed, and first tokens."""

import itertools
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.support.tiny_transformers import SERVED, build, tokens

from kvdepot.adapters.hf import attach
from kvdepot.adapters.hf.prefill_meter import PrefillMeter
from kvdepot.errors import ConfigError
from kvdepot.store.store import Store

BLOCK = 16
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 2}


def test_the_ledger_knows_the_speed(memory: Store) -> None:
    ids = tokens(10 * BLOCK + 3)
    with attach(build(SERVED["llama"]()), memory, block_tokens=BLOCK) as served:
        served.generate(ids, **GREEDY)
        served.flush()
        meter = served._parts.meter
        meter.tell()
        meter.teller.wait(60.0)
        (tag,) = meter._tags
        assert memory.sessions.ledger()["assumed"]["measured"][tag.hex()]["tokens_per_s"] > 0
        served.generate(ids, **GREEDY)
        total = memory.sessions.ledger()["total"]
        assert total["tokens"] == 10 * BLOCK and total["gpu_s"] > 0 == total["untimed_tokens"]


def test_the_page_knows_first_tokens(memory: Store) -> None:
    ids = tokens(4 * BLOCK + 3)
    with attach(build(SERVED["llama"]()), memory, block_tokens=BLOCK) as served:
        served.generate(ids, **GREEDY)
        served.flush()
        assert not memory.stats()["first_tokens"]["latest"], "the depot had nothing"
        served.generate(ids, **GREEDY)
        (latest,) = memory.stats()["first_tokens"]["latest"]
    assert (latest["prompt_tokens"], latest["fetched_tokens"]) == (4 * BLOCK + 3, 4 * BLOCK)
    assert latest["seconds"] >= 0 and latest["recompute_s"] > 0


def test_a_step_is_scaled_from_its_layers(memory: Store) -> None:
    """From the first layer's update to the last's is the work of all layers but one."""
    meter = PrefillMeter(memory, [b"x" * 8], 4)
    for context in (0, 100, 200, 400) * 8:
        meter.step(1, 100, context, 3 * (100 * 2e-3 + 1e-5 * 100 * (context + 50)))
    pace = meter.model.pace()
    assert pace is not None
    whole = pace.step_s + pace.token_s * 100 + pace.pair_s * 100 * 150
    assert whole == pytest.approx(4 * (100 * 2e-3 + 1e-5 * 100 * 150), rel=0.1)


def test_one_layer_cannot_be_timed(memory: Store) -> None:
    assert not PrefillMeter(memory, [b"x" * 8], 1).times_steps
    assert not PrefillMeter(memory, [], 4).times_steps


def test_a_depot_that_cannot_be_told_fails_no_call(
    memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("call", "is not known")

    model, ids = build(SERVED["llama"]()), tokens(4 * BLOCK + 3)
    expected = model.generate(ids, **GREEDY)
    with attach(model, memory, block_tokens=BLOCK) as served:
        monkeypatch.setattr(type(memory), "report_first_token", refuse)
        monkeypatch.setattr(type(memory.sessions), "tell_prefill", refuse)
        for _ in range(2):
            assert served.generate(ids, **GREEDY).tolist() == expected.tolist()
            served.flush()
        served._parts.meter.teller.wait(60.0)


def test_chunks_are_steps_of_their_own(memory: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(build(SERVED["llama"]()), memory, block_tokens=BLOCK) as served:
        meter, ticks = served._parts.meter, itertools.count()
        meter.clock = lambda: float(next(ticks))
        seen: list[tuple[int, int, int, float]] = []

        def step(rows: int, new_tokens: int, context: int, seconds: float) -> None:
            seen.append((rows, new_tokens, context, seconds))

        monkeypatch.setattr(meter, "step", step)
        served.generate(tokens(50), prefill_chunk_size=20, **GREEDY)
    assert [(new, context) for _, new, context, _ in seen] == [(20, 0), (20, 20), (9, 40), (1, 49)]
    assert {seconds for *_, seconds in seen} == {1.0}
