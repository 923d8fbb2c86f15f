"""vLLM's releases: the interface is checked before anything starts, differences are made up for."""

import ast
import inspect
import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.toy_engine import (
    OpenStore,
    ToyEngine,
    answer_at_random,
    ask,
    forget_local,
)

from kvdepot.adapters.vllm import releases
from kvdepot.adapters.vllm.config import ConnectorConfig
from kvdepot.adapters.vllm.groups import GroupRule
from kvdepot.adapters.vllm.messages import StepPlan
from kvdepot.adapters.vllm.releases import (
    ALTERNATIVES,
    ATTRIBUTES,
    HOOKS,
    LATER_HOOKS,
    EngineRelease,
    check_release,
    finish_step,
    missing,
)
from kvdepot.adapters.vllm.worker import ConnectorWorker, FinishedTransfers
from kvdepot.errors import ConfigError, ModelError

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def call(*names: str) -> Any:
    """A method with these arguments."""
    made: Any = lambda self, *given: None  # noqa: E731
    parts = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    made.__signature__ = inspect.Signature(parts)
    return made


class StandIn:
    """Modules of a vLLM that has all that is needed, in the form of the newest release."""

    def __init__(self, version: str = "0.32.0") -> None:
        self.classes: dict[str, Any] = {
            place: type(place.partition(":")[2], (), dict.fromkeys(names))
            for place, names in ATTRIBUTES.items()
        }
        self.base = self.classes[f"{BASE}:KVConnectorBase_V1"]
        for name, wanted in {**HOOKS, **LATER_HOOKS}.items():
            setattr(self.base, name, call(*wanted))
        for place, _, name in (newer.rpartition(".") for newer, _ in ALTERNATIVES):
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
    check_release(StandIn())


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_a_call_that_is_gone_is_named(name: str) -> None:
    engine = StandIn()
    delattr(engine.base, name)
    assert f"KVConnectorBase_V1.{name}" in [each.partition("(")[0] for each in missing(engine)]


@pytest.mark.parametrize("name", sorted({**HOOKS, **LATER_HOOKS}))
def test_a_call_with_another_argument_is_named(name: str) -> None:
    engine = StandIn()
    setattr(engine.base, name, call(*HOOKS.get(name, ()), "something_new"))
    (named,) = missing(engine)
    assert named.startswith(f"KVConnectorBase_V1.{name}(")


@pytest.mark.parametrize("place", sorted(ATTRIBUTES))
def test_a_class_that_is_gone_is_named(place: str) -> None:
    engine = StandIn()
    del engine.classes[place]
    assert place.replace(":", ".") in list(missing(engine))


@pytest.mark.parametrize("place", sorted(place for place in ATTRIBUTES if ATTRIBUTES[place]))
def test_an_attribute_that_is_gone_is_named(place: str) -> None:
    for gone in ATTRIBUTES[place]:
        engine = StandIn()
        delattr(engine.classes[place], gone)
        assert list(missing(engine)) == [f"{place.partition(':')[2]}.{gone}"]


@pytest.mark.parametrize("newer", [newer for newer, _ in ALTERNATIVES])
def test_one_of_two_ways_is_needed(newer: str) -> None:
    engine = StandIn()
    place, _, name = newer.rpartition(".")
    delattr(engine.classes[place], name)
    for older in (older for one, older in ALTERNATIVES if one == newer):
        at, _, gone = older.rpartition(".")
        had = hasattr(engine.classes[at], gone)
        setattr(engine.classes[at], gone, call())
        assert not list(missing(engine))
        if not had:
            delattr(engine.classes[at], gone)
            assert len(list(missing(engine))) == 1


def test_a_new_abstract_method_is_named() -> None:
    engine = StandIn()
    engine.base.__abstractmethods__ = frozenset({"wait_for_save", "something_new"})
    assert [each for each in missing(engine) if each.endswith(" something_new")]


def test_attributes_that_instances_are_given_when_made_count() -> None:
    class Request:
        def __init__(self) -> None:
            self.request_id = self.num_tokens = 1

    engine = StandIn()
    engine.classes["vllm.v1.request:Request"] = Request
    named = list(missing(engine))
    assert "Request.cache_salt" in named
    assert "Request.request_id" not in named


def test_an_unknown_release_is_refused_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    engine = StandIn("0.40.1")
    del engine.base.wait_for_save
    with (
        caplog.at_level(logging.ERROR, "vllm.kvdepot"),
        pytest.raises(ConfigError, match=r"^vllm 0\.40\.1: .*KVConnectorBase_V1\.wait_for_save"),
    ):
        check_release(engine)
    (said,) = caplog.messages
    assert "\n" not in said
    assert "0.29, 0.31, 0.32" in said


def test_one_that_is_all_different_is_refused_in_one_line_too() -> None:
    def nothing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    with pytest.raises(ConfigError, match=r"and [0-9]+ more") as refused:
        check_release(nothing)
    assert len(str(refused.value)) < 400


def test_an_untried_release_is_served_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.kvdepot"):
        EngineRelease(StandIn("0.33.0"))
        EngineRelease(StandIn("0.31.2"))
    (said,) = caplog.messages
    assert "0.33.0 has not been tried" in said


def test_the_list_has_all_that_the_connector_implements() -> None:
    """Read from its source: the module itself needs vLLM."""
    source = Path(inspect.getfile(releases)).with_name("connector.py").read_text()
    (connector,) = [
        each
        for each in ast.parse(source).body
        if isinstance(each, ast.ClassDef) and each.name == "KVDepotConnector"
    ]
    own = {"request_finished_all_groups", "requires_kv_delivery", "scheduler_side", "worker_side"}
    found = {
        each.name: tuple(one.arg for one in each.args.args[1:])
        for each in connector.body
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")
    }
    assert {name: found[name] for name in found if name not in own} == {**HOOKS, **LATER_HOOKS}


def test_before_0_31_models_with_one_group_of_full_attention_are_served() -> None:
    early, late = early_release(), EngineRelease(StandIn())
    full, window = GroupRule("full", 0, 16), GroupRule("window", 0, 16, 64)
    early.check_groups([full], 1)
    for rules, tables in (([window], 1), ([full, full], 1), ([full, window], 2), ([full], 2)):
        late.check_groups(rules, tables)
        with pytest.raises(ModelError, match="several KV groups") as refused:
            early.check_groups(rules, tables)
        assert "0.31" in refused.value.hint


def early_release() -> EngineRelease:
    engine = StandIn("0.29.0")
    del engine.classes[f"{BASE}:KVConnectorTransferResults"]
    return EngineRelease(engine)


class EarlyToyEngine(ToyEngine):
    """As vLLM 0.29: pages are told when there are new ones, and steps that compute nothing do not
    save."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.release = early_release()
        self.told: dict[str, tuple[list[int], ...]] = {}

    def _output(self, scheduled: dict[str, int]) -> Any:
        output = super()._output(scheduled)
        state = output.kv_connector_block_state
        now = {name: state.get_block_ids(name) for name in scheduled}
        fresh = {name: table for name, table in now.items() if self.told.get(name) != table}
        output.finished_req_ids = {name for name in self.told if name in self.done}
        self.told.update(fresh)
        for name in output.finished_req_ids:
            del self.told[name]
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
def early_engine(open_store: OpenStore) -> Any:
    engine = EarlyToyEngine(
        open_store(), ConnectorConfig(load_timeout=20.0, decide=False), budget=24
    )
    yield engine
    engine.close()


def test_prompts_and_answers_come_back_before_0_31(early_engine: EarlyToyEngine) -> None:
    prompt = list(range(42))
    assert ask(early_engine, "a", prompt, 11) == 52
    forget_local(early_engine)
    again = prompt + early_engine.done["a"].answer
    assert ask(early_engine, "b", again, 1) == len(again) - 52


def test_before_0_31_steps_that_compute_nothing_save_where_finished_is_asked() -> None:
    class Worker:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def save(self, plan: StepPlan) -> None:
            self.calls.append("save")

        def finished(self, plan: StepPlan) -> FinishedTransfers:
            self.calls.append("finished")
            return FinishedTransfers({"a"}, {"b"})

    for idle, calls in ((True, ["save", "finished"]), (False, ["finished"])):
        worker: Any = Worker()
        assert finish_step(worker, StepPlan(idle=idle)) == ({"a"}, {"b"})
        assert worker.calls == calls


def test_random_traffic_before_0_31(early_engine: EarlyToyEngine, seed: int) -> None:
    answer_at_random(early_engine, random.Random(seed), 12, forgets=0.2)
    assert not early_engine.release._tables.keys() - early_engine.told.keys()
