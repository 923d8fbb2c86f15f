"""vLLM's releases: the interface is checked before anything starts, differences are made up for."""

import inspect
import logging
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.toy_engine import ToyEngine, Toys, answer_at_random, ask, forget_local

from kvdepot.adapters.vllm.config import ConnectorConfig
from kvdepot.adapters.vllm.groups import GroupRule
from kvdepot.adapters.vllm.messages import StepPlan
from kvdepot.adapters.vllm.releases import (
    ALTERNATIVES,
    BASE,
    EngineRelease,
    attributes,
    finish_step,
    missing,
    missing_hooks,
    refuse_without,
)
from kvdepot.adapters.vllm.worker import ConnectorWorker, FinishedTransfers
from kvdepot.errors import ConfigError, ModelError

RESULTS = BASE.replace("KVConnectorBase_V1", "KVConnectorTransferResults")


class StandIn:
    """Modules of a vLLM that has all that is needed, in the form of the newest release."""

    def __init__(self, version: str = "0.32.0") -> None:
        self.classes: dict[str, Any] = {
            place: type(place.partition(":")[2], (), dict.fromkeys(names))
            for place, names in attributes().items()
        }
        for (place, name), _ in ALTERNATIVES:
            owner = self.classes.setdefault(place, type(place.partition(":")[2], (), {}))
            setattr(owner, name, None)
        self.classes["vllm.version:__version__"] = version

    def __call__(self, module: str) -> Any:
        found = {
            place.partition(":")[2]: each
            for place, each in self.classes.items()
            if place.startswith(f"{module}:")
        }
        if not found:
            raise ModuleNotFoundError(module)
        return SimpleNamespace(**found)


def test_a_vllm_that_has_everything_is_served() -> None:
    assert not list(missing(StandIn()))


def test_missing_classes_and_attributes_are_named() -> None:
    for place, names in attributes().items():
        engine = StandIn()
        del engine.classes[place]
        assert place.replace(":", ".") in list(missing(engine))
        for name in names:
            engine = StandIn()
            delattr(engine.classes[place], name)
            assert list(missing(engine)) == [f"{place.partition(':')[2]}.{name}"]


@pytest.mark.parametrize("pair", ALTERNATIVES)
def test_one_of_two_ways_is_needed(pair: tuple[tuple[str, str], tuple[str, str]]) -> None:
    engine = StandIn()
    (newer, name), (older, other) = pair
    delattr(engine.classes[newer], name)
    assert len(list(missing(engine))) == 1
    setattr(engine.classes[older], other, None)
    assert not list(missing(engine))


def test_attributes_that_instances_get_when_made_count() -> None:
    class Request:
        def __init__(self) -> None:
            self.request_id = self.num_tokens = 1

    engine = StandIn()
    engine.classes["vllm.v1.request:Request"] = Request
    named = list(missing(engine))
    assert "Request.cache_salt" in named
    assert "Request.request_id" not in named


def method(*names: str) -> Any:
    made: Any = lambda self, *given: None  # noqa: E731
    parts = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    made.__signature__ = inspect.Signature(parts)
    return made


def connector(**of_vllm: Any) -> type:
    """A connector with two methods, over a base with these."""
    own = {
        "wait_for_save": method(),
        "on_new_request": method("request"),
        "get_transfer_results": method("finished_req_ids"),
        "own": property(lambda self: None),
    }
    return type("Connector", (type("Base", (), of_vllm),), own)


def test_the_methods_of_the_connector_are_compared_with_vllms() -> None:
    same = {"wait_for_save": method(), "on_new_request": method("request")}
    assert not list(missing_hooks(connector(**same)))
    later = {"get_transfer_results": method("finished_req_ids")}
    assert not list(missing_hooks(connector(**same, **later)))
    assert list(missing_hooks(connector(wait_for_save=method()))) == [
        "KVConnectorBase_V1.on_new_request"
    ]
    changed = same | {"on_new_request": method("request", "something_new")}
    assert list(missing_hooks(connector(**changed))) == [
        "KVConnectorBase_V1.on_new_request(request)"
    ]
    abstract: Any = connector(**same)
    abstract.__abstractmethods__ = frozenset({"something_new"})
    (named,) = missing_hooks(abstract)
    assert named.endswith(" something_new")


def test_an_unknown_release_is_refused_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    engine = StandIn("0.40.1")
    del engine.classes["vllm.config:ModelConfig"]
    with (
        caplog.at_level(logging.ERROR, "vllm.kvdepot"),
        pytest.raises(ConfigError, match=r"^vllm 0\.40\.1: .*vllm\.config\.ModelConfig"),
    ):
        refuse_without(list(missing(engine)), engine)
    (line,) = caplog.messages
    assert "\n" not in line
    assert "0.29, 0.31, 0.32" in line


def test_an_entirely_different_vllm_is_refused_in_one_line_too() -> None:
    def nothing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    with pytest.raises(ConfigError, match=r"and [0-9]+ more") as refused:
        refuse_without(list(missing(nothing)), nothing)
    assert len(str(refused.value)) < 400


def test_an_untried_release_is_served_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.kvdepot"):
        EngineRelease(StandIn("0.34.0"))
        EngineRelease(StandIn("0.31.2"))
    (line,) = caplog.messages
    assert "0.34.0 has not been tried" in line


def early_release() -> EngineRelease:
    engine = StandIn("0.29.0")
    del engine.classes[RESULTS]
    return EngineRelease(engine)


def test_before_0_31_models_with_one_group_of_full_attention_are_served() -> None:
    early, late = early_release(), EngineRelease(StandIn())
    full, window = GroupRule("full", 0, 16), GroupRule("window", 0, 16, 64)
    early.check_groups([full], 1)
    for rules, tables in (([window], 1), ([full, full], 1), ([full, window], 2), ([full], 2)):
        late.check_groups(rules, tables)
        with pytest.raises(ModelError, match="several KV groups") as refused:
            early.check_groups(rules, tables)
        assert "0.31" in refused.value.hint


class EarlyToyEngine(ToyEngine):
    """As vLLM 0.29: pages are reported when they are new, and steps that compute nothing do not
    save."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.release = early_release()
        self.reported: dict[str, tuple[list[int], ...]] = {}

    def _output(self, scheduled: dict[str, int]) -> Any:
        output = super()._output(scheduled)
        state = output.kv_connector_block_state
        now = {name: state.get_block_ids(name) for name in scheduled}
        fresh = {name: table for name, table in now.items() if self.reported.get(name) != table}
        output.finished_req_ids = {name for name in self.reported if name in self.done}
        self.reported.update(fresh)
        for name in output.finished_req_ids:
            del self.reported[name]
        offers = state.boundary_state_offloads
        output.kv_connector_block_state = SimpleNamespace(
            block_ids=fresh, boundary_state_offloads=offers
        )
        return self.release.step_output(output)

    def _end_step(self, worker: ConnectorWorker, plan: StepPlan) -> FinishedTransfers:
        if not plan.idle:
            worker.save(plan)
        return FinishedTransfers(*finish_step(worker, plan))


@pytest.fixture
def early_engine(toys: Toys) -> Iterator[EarlyToyEngine]:
    settings = ConnectorConfig(load_timeout=20.0, decide=False)
    engine = EarlyToyEngine(toys.store(), settings, budget=24)
    yield engine
    engine.close()


def test_prompts_and_answers_come_back_before_0_31(early_engine: EarlyToyEngine) -> None:
    prompt = list(range(42))
    assert ask(early_engine, "a", prompt, 11) == 52
    forget_local(early_engine)
    again = prompt + early_engine.done["a"].answer
    assert ask(early_engine, "b", again, 1) == len(again) - 52


def test_random_traffic_before_0_31(early_engine: EarlyToyEngine, seed: int) -> None:
    answer_at_random(early_engine, random.Random(seed), 12, forgets=0.2)
    assert not early_engine.release._tables.keys() - early_engine.reported.keys()


@pytest.mark.parametrize(("idle", "calls"), [(True, ["save", "finished"]), (False, ["finished"])])
def test_before_0_31_steps_that_compute_nothing_save_when_finished_is_asked(
    idle: bool, calls: list[str]
) -> None:
    made: list[str] = []

    def finished(plan: StepPlan) -> FinishedTransfers:
        made.append("finished")
        return FinishedTransfers({"a"}, {"b"})

    worker: Any = SimpleNamespace(save=lambda plan: made.append("save"), finished=finished)
    assert finish_step(worker, StepPlan(idle=idle)) == ({"a"}, {"b"})
    assert made == calls
