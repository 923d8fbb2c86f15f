"""Weights that change in place, and resets: blocks are used only by who computes the same ones."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
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

from kvdepot.adapters.vllm import shared_depot
from kvdepot.adapters.vllm.config import read
from kvdepot.adapters.vllm.loaded_weights import (
    LEAVE_WEIGHTS,
    WatchedWeights,
    digest_in_worker,
    loaded_digest,
)
from kvdepot.errors import ModelError


def blocks(engine: ToyEngine) -> int:
    return int(engine.side._store.stats()["blocks"])


def unserved(engine: ToyEngine) -> dict[str, float]:
    counts = engine.side.metrics() or {}
    return {name: count for name, count in counts.items() if name.startswith("unserved")}


@pytest.mark.parametrize("split", [Split(), Split(2), Split(2, stages=2)])
def test_other_weights_hit_their_own_blocks_and_the_first_ones_come_back(
    toys: Toys, split: Split
) -> None:
    engine = toys.engine(split=split)
    ask(engine, "first weights", PROMPT)
    for turn in ("cold", "warm"):
        engine.call("reload_weights", "second ")
        forget_local(engine)
        assert ask(engine, f"second weights, {turn}", PROMPT) == (ALL if turn == "cold" else REST)
        engine.call("reload_weights", "")
        forget_local(engine)
        assert ask(engine, f"first weights again, {turn}", PROMPT) == REST
    assert (engine.side.metrics() or {})["weight_changes"] == 4


def test_another_engine_with_the_first_weights_never_meets_the_second(toys: Toys) -> None:
    """A page of other weights would fail the toy's attention."""
    store = toys.store()
    changed, other = toys.engine(store), toys.engine(store)
    changed.call("reload_weights", "second ")
    ask(changed, "second weights", PROMPT)
    assert ask(other, "first weights", PROMPT) == ALL
    forget_local(changed)
    assert ask(changed, "second weights again", PROMPT) == REST


def test_every_call_that_may_change_weights_is_followed(toys: Toys) -> None:
    engine = toys.engine()
    for method in ("reload_weights", "wake_up", "a user's method", "apply_model"):
        engine.call(method, f"{method} ")
        forget_local(engine)
        assert ask(engine, method, PROMPT) == ALL


def test_weights_are_read_once_for_many_calls_and_not_for_harmless_ones(toys: Toys) -> None:
    engine = toys.engine()
    ask(engine, "first", PROMPT)
    for method in sorted(LEAVE_WEIGHTS):
        engine.call(method)
    ask(engine, "second", PROMPT)
    assert engine.digests == 0
    for number in range(20):
        engine.call("a user's method", f"{number} ")
    assert engine.digests == 1, "that of the start"
    forget_local(engine)
    ask(engine, "third", PROMPT)
    assert engine.digests == 2


def test_a_call_that_changed_nothing_leaves_running_requests_served(toys: Toys) -> None:
    engine = toys.engine()
    engine.add(ToyRequest("running", list(PROMPT), 3))
    engine.step()
    engine.call("a user's method")
    engine.run()
    assert blocks(engine) == FULL_PAGES + (len(PROMPT) + 2) // PAGE_TOKENS - FULL_PAGES
    assert not unserved(engine)


def test_nothing_is_served_or_saved_between_the_parts_of_an_update(toys: Toys) -> None:
    engine = toys.engine()
    ask(engine, "before", PROMPT)
    stored = blocks(engine)
    engine.call("start_weight_update")
    engine.call("update_weights", "half ")
    forget_local(engine)
    assert ask(engine, "meanwhile", PROMPT) == ALL
    assert (blocks(engine), engine.digests) == (stored, 1)
    assert unserved(engine) == {"unserved_requests:weights_unknown": 1}
    engine.call("finish_weight_update", "second ")
    forget_local(engine)
    assert ask(engine, "after", PROMPT) == ALL
    forget_local(engine)
    assert ask(engine, "after, warm", PROMPT) == REST


def test_weights_are_not_read_while_vllm_sleeps(toys: Toys) -> None:
    engine = toys.engine()
    ask(engine, "before", PROMPT)
    engine.call("sleep", "gone ")
    engine.is_sleeping = True
    engine.add(ToyRequest("asleep", list(PROMPT), 3))
    assert engine.side.weights.settle() and engine.side.weights.name is None
    assert engine.digests == 1
    engine.call("wake_up")
    engine.is_sleeping = False
    engine.call("reload_weights", "")
    forget_local(engine)
    engine.run()
    assert engine.done["asleep"].answer == answer_of(PROMPT, 3)
    assert engine.digests == 2
    assert (engine.side.metrics() or {})["hit_tokens"] == FULL_PAGES * PAGE_TOKENS


def test_vllms_own_cache_of_other_weights_must_go_first(
    toys: Toys, caplog: pytest.LogCaptureFixture
) -> None:
    """What is computed after a hit in it belongs to no weights."""
    engine = toys.engine()
    ask(engine, "before", PROMPT)
    engine.call("reload_weights", "second ")
    stored = blocks(engine)
    longer = [*PROMPT, 1, 2, 3, 4, 5]
    engine.add(ToyRequest("on old pages", list(longer), 1))
    with pytest.raises(AssertionError):
        engine.run()  # the toy finds pages of the first weights, as vLLM would without a word
    assert blocks(engine) == stored
    assert unserved(engine) == {"unserved_requests:stale_prefix_cache": 1}
    assert "before reset_prefix_cache()" in caplog.text
    engine.abort("on old pages")
    forget_local(engine)
    assert ask(engine, "after", PROMPT) == ALL
    assert blocks(engine) > stored


def test_a_request_that_runs_while_weights_change_is_not_saved(toys: Toys, tmp_path: Path) -> None:
    saves = {}
    for weights in ("", "second "):
        engine = toys.engine(toys.store(path=f"{tmp_path}/kv {weights}"))
        engine.add(ToyRequest("running", list(PROMPT), 3))
        engine.step()
        engine.call("reload_weights", weights)
        saves[weights] = engine.side.plan(engine._output(engine._schedule())).saves
    assert saves[""]
    assert not saves["second "]


def test_pages_of_such_a_request_are_kept_while_saves_read_them(toys: Toys) -> None:
    """As on a GPU, where a save may go on when its step is over."""
    engine = toys.engine()
    engine.side.names.workers = [replace(engine.side.names.workers[0], saves_settle_at_once=False)]
    request = ToyRequest("running", list(PROMPT), 3)
    engine.add(request)
    engine.step()
    engine.call("reload_weights", "second ")
    engine.side.plan(engine._output({}))
    assert engine.side.finish(request, tuple(request.tables)), "vLLM must not free them yet"
    assert engine.side.plan(engine._output({})).awaited == ["running"]


def test_a_load_that_is_under_way_when_weights_change_brings_nothing(toys: Toys) -> None:
    engine = toys.saved()
    engine.add(ToyRequest("loading", list(PROMPT), 3))
    while "loading" not in engine.recv_left:
        engine._schedule()
    assert engine.side._plan.loads
    plan = engine.side._plan
    for worker in engine.workers:
        worker.begin(plan)
    engine.side._plan = type(plan)()
    engine.call("reload_weights", "second ")
    engine.run()
    assert engine.done["loading"].answer == answer_of(PROMPT, 3, "second ")


def test_a_reset_ends_this_engines_generation_and_no_other(
    toys: Toys, caplog: pytest.LogCaptureFixture
) -> None:
    store = toys.store()
    engine, other = toys.engine(store), toys.engine(store)
    ask(engine, "before", PROMPT)
    stored = blocks(engine)
    with caplog.at_level("INFO", "vllm.kvdepot"):
        assert engine.side.reset()
    forget_local(engine)
    assert "kvdepot: reset: this engine" in caplog.text
    assert (engine.side.metrics() or {})["resets:done"] == 1
    assert blocks(engine) == stored, "they are other engines' too"
    assert ask(other, "another engine", PROMPT) == REST
    assert ask(engine, "after", PROMPT) == ALL
    forget_local(engine)
    assert ask(engine, "after, warm", PROMPT) == REST
    assert ask(toys.engine(store), "started again", PROMPT) == REST


def test_requests_that_wait_during_a_reset_are_served_after_it(toys: Toys) -> None:
    engine = toys.saved()
    engine.add(ToyRequest("waiting", list(PROMPT), 3))
    assert engine.side.reset()
    stored = blocks(engine)
    engine.run()
    assert "hit_tokens" not in (engine.side.metrics() or {})
    assert blocks(engine) > stored


def test_a_reset_without_a_daemon_fails_and_old_blocks_stay_unused(
    tmp_path: Path, toys: Toys
) -> None:
    config = read(toys.settings() | {"socket": str(tmp_path / "d.sock")})
    held = shared_depot.open_depot(config, one_process=False)
    store: Any = held.store
    engine = toys.engine(store)
    ask(engine, "before", PROMPT)
    assert store.flush(60.0)
    daemon = shared_depot._daemons.pop()
    daemon.kill()
    daemon.wait()
    assert engine.side.reset() is False
    assert (engine.side.metrics() or {})["resets:failed"] == 1
    forget_local(engine)
    shared_depot.start_daemon(tmp_path / "d.sock", config)
    try:
        assert engine.side.reset() is True
        assert ask(engine, "after", PROMPT) == ALL
        forget_local(engine)
        assert ask(toys.engine(store), "started again", PROMPT) == REST
    finally:
        daemon = shared_depot._daemons.pop()
        daemon.kill()
        daemon.wait()
        held.close()


class ToyModel(torch.nn.Module):
    """A layer that shows its weight, a buffer, and a layer whose weight is packed out of sight."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = torch.nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(1))
        self.packed = PackedLinear(torch.arange(15.0).reshape(3, 5))


class PackedLinear(torch.nn.Module):
    """As vLLM's CPU backend leaves a linear layer."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.input_size_per_partition = weight.shape[1]
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.secret = [weight]  # a list: the module does not know it for a tensor

    def cpu_linear(self, given: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        assert not weight.numel() and bias is None
        return given @ self.secret[0].T


def test_every_weight_counts_also_one_that_is_packed_out_of_sight() -> None:
    torch.manual_seed(1)
    model = ToyModel()
    first = loaded_digest([model])
    scale = model.get_buffer("scale")
    for tensor in (model.shown.weight, model.shown.bias, scale, model.packed.secret[0]):
        flat = tensor.detach().view(-1)
        kept = flat[-1].clone()
        flat[-1] += 1
        assert loaded_digest([model]) != first
        flat[-1] = kept
        assert loaded_digest([model]) == first
    assert loaded_digest([model, model]) != first, "a draft model counts too"


def test_unreadable_weights_have_a_new_name_each_time() -> None:
    model = ToyModel()
    model.packed.cpu_linear = None  # type: ignore[assignment,method-assign]
    with pytest.raises(ModelError, match="PackedLinear does not show its weights"):
        loaded_digest([model])
    worker = SimpleNamespace(get_model=lambda: model)
    assert digest_in_worker(worker) == ""
    weights, names = WatchedWeights(), set()
    for _ in range(3):
        weights.about_to_call("reload_weights", None, lambda function: [function(worker)])
        assert weights.settle()
        names.add(weights.name)
    assert len(names) == 3
    assert "" not in names


class ToyExecutor:
    """As vLLM's: calls its one worker."""

    def __init__(self, parallel: object) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.model = torch.nn.Linear(2, 2)
        self.worker = SimpleNamespace(get_model=lambda: self.model)

    def collective_rpc(self, method: Any, timeout: float | None = None) -> list[Any]:
        if callable(method):
            return [method(self.worker)]
        if method == "reload_weights":
            with torch.no_grad():
                self.model.weight += 1
        return []


def test_the_calls_of_this_engine_are_seen_before_they_are_made() -> None:
    class Executor(ToyExecutor):
        pass

    parallel = object()
    weights = WatchedWeights()
    weights.watch(Executor, parallel)
    mine, other = Executor(parallel), Executor(object())
    other.collective_rpc("reload_weights")
    mine.collective_rpc("execute_model")
    assert not weights.settle()
    kept = mine.model.weight.detach().clone()
    mine.collective_rpc("reload_weights")
    assert weights.settle() and str(weights.name).startswith("loaded ")

    def put_back(worker: Any) -> None:
        with torch.no_grad():
            worker.get_model().weight.copy_(kept)

    mine.collective_rpc(put_back)
    assert weights.settle() and weights.name == ""
