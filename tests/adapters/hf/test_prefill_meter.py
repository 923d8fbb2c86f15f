"""The reports of transformers on a processor: its prefill speed, and times to first tokens."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.support.tiny_transformers import SERVED, build, tokens

from kvdepot.adapters.hf import attach
from kvdepot.errors import ConfigError
from kvdepot.policy.fetching.speed_models import attention_work
from kvdepot.store.store import Store

BLOCK = 16
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 2}


def test_the_speed_is_reported(memory: Store) -> None:
    ids = tokens(10 * BLOCK + 3)
    with attach(build(SERVED["llama"]()), memory, block_tokens=BLOCK) as served:
        served.generate(ids, **GREEDY)
        served.flush()
        report = served._parts.report
        assert report is not None
        report.report()
        report.reporter.wait(60.0)
        (tag,) = report._tags
        assert memory.admin.ledger()["assumed"]["measured"][tag.hex()]["tokens_per_s"] > 0
        served.generate(ids, **GREEDY)
        total = memory.admin.ledger()["total"]
        assert total["tokens"] == 10 * BLOCK and total["gpu_s"] > 0 == total["untimed_tokens"]


def test_first_tokens_are_reported(memory: Store) -> None:
    ids = tokens(4 * BLOCK + 3)
    with attach(build(SERVED["llama"]()), memory, block_tokens=BLOCK) as served:
        served.generate(ids, **GREEDY)
        served.flush()
        assert not memory.stats()["first_tokens"]["latest"], "the depot had nothing"
        served.generate(ids, **GREEDY)
        (latest,) = memory.stats()["first_tokens"]["latest"]
    assert (latest["prompt_tokens"], latest["fetched_tokens"]) == (4 * BLOCK + 3, 4 * BLOCK)
    assert latest["seconds"] >= 0 and latest["recompute_s"] > 0


def test_a_depot_that_refuses_reports_fails_no_call(
    memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("call", "is not known")

    model, ids = build(SERVED["llama"]()), tokens(4 * BLOCK + 3)
    expected = model.generate(ids, **GREEDY)
    with attach(model, memory, block_tokens=BLOCK) as served:
        monkeypatch.setattr(type(memory.admin), "report_first_token", refuse)
        monkeypatch.setattr(type(memory.admin), "report_prefill_speed", refuse)
        for _ in range(2):
            assert served.generate(ids, **GREEDY).tolist() == expected.tolist()
            served.flush()
        assert served._parts.report is not None
        served._parts.report.reporter.wait(60.0)


def test_chunks_are_steps_of_their_own(memory: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(build(SERVED["llama"]()), memory, block_tokens=BLOCK) as served:
        report, ticks = served._parts.report, itertools.count()
        served._parts = replace(served._parts, clock=lambda: float(next(ticks)))
        seen: list[tuple[int, float, float]] = []
        monkeypatch.setattr(report, "observe", lambda *step: seen.append(step))
        served.generate(tokens(50), prefill_chunk_size=20, **GREEDY)
    contexts = [(20, 0), (20, 20), (9, 40), (1, 49)]
    assert seen == [(new, attention_work(new, context), 1.0) for new, context in contexts]
