"""Scenarios: a model, the GPUs that serve it, its traffic, and the goal."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final

from kvdepot.config.loader import Unit, load_tree
from kvdepot.core.layout import DEFAULT_BLOCK_TOKENS, DType
from kvdepot.errors import ConfigError
from kvdepot.planner.parts import check_numbers

Seconds = Annotated[float, Unit.SECONDS]
_MAY_BE_ZERO: Final = {
    "system_tokens",
    "history_tokens",
    "return_share",
    "return_gap",
    "retention",
    "gap_spread",
}


@dataclass(frozen=True, slots=True)
class GpuFleet:
    gpu: str = "h100"
    """A name in the parts list."""
    nodes: int = 1
    gpus_per_node: int = 8
    tp: int = 1
    """GPUs that serve one copy of the model together."""

    @property
    def replicas(self) -> int:
        """Copies of the model on one node."""
        return self.gpus_per_node // self.tp


@dataclass(frozen=True, slots=True)
class Traffic:
    """Conversations of several turns: each prompt has all earlier turns, and a new question."""

    requests_per_s: float
    """Requests of the whole fleet in its busy hours."""
    question_tokens: int
    """New tokens in each turn."""
    answer_tokens: int
    turns: int = 10
    """Turns of one conversation."""
    users: int | None = None
    """Users at the same time; gives the gap between turns if `gap` is not set."""
    gap: Annotated[float | None, Unit.SECONDS] = None
    """Mean time from one turn of a conversation to the next."""
    gap_spread: float = 1.0
    """The spread of gaps around their mean: sigma of their logarithm."""
    return_share: float = 0.0
    """Share of turns after a long pause."""
    return_gap: Seconds = 0.0
    """Mean length of long pauses."""
    system_tokens: int = 0
    """Tokens at the head of every prompt, the same for all."""
    history_tokens: int = 0
    """Tokens at the beginning of a conversation, such as documents."""
    busy_share: float = 1.0
    """Share of each day with requests."""

    @property
    def turn_gap_s(self) -> float:
        """Mean time between turns without a long pause."""
        if self.gap is not None:
            return self.gap
        return (self.users or 0) / self.requests_per_s

    def context_tokens(self, turn: int) -> int:
        """Tokens of earlier turns in the prompt of turn `turn`, from 1."""
        earlier = (turn - 1) * (self.question_tokens + self.answer_tokens)
        return self.system_tokens + self.history_tokens + earlier

    @property
    def prompt_tokens(self) -> float:
        """Mean tokens of a prompt."""
        middle = (self.context_tokens(1) + self.context_tokens(self.turns)) / 2
        return middle + self.question_tokens


@dataclass(frozen=True, slots=True)
class Goal:
    ttft_p95: Seconds
    """95 of 100 first tokens within this time."""
    retention: Seconds = 0.0
    """A conversation is kept for this long after its last turn."""


@dataclass(frozen=True, slots=True)
class Scenario:
    model: str
    traffic: Traffic
    goal: Goal
    fleet: GpuFleet = GpuFleet()
    title: str = ""
    dtype: DType | None = None
    """Data type of the KV cache; by default the model's."""
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    weight_bytes: float = 2.0
    """Bytes of one weight in GPU memory."""
    parameters: float | None = None
    """Weights of the model; required for a config.json, which does not have the number."""
    active_parameters: float | None = None
    """Weights that are used for one token; by default all."""


def scenario_names() -> tuple[str, ...]:
    return tuple(_shipped())


def load_scenario(source: str | None, *, overrides: Mapping[str, Any] | None = None) -> Scenario:
    """`source` is the name of a shipped scenario, a TOML or JSON file, or None for overrides alone.

    ConfigError names the invalid or missing setting.
    """
    settings, shipped = dict(overrides or {}), _shipped()
    known = ", ".join(shipped)
    if source is None:
        try:
            return _load(None, settings)
        except ConfigError as error:
            hint = error.hint or f"start from a scenario, which has all settings: {known}"
            reason = str(error).removeprefix(f"{error.path}: ")
            raise ConfigError(error.path, reason, hint=hint) from error
    if Path(source).suffix == ".json":
        return _load(None, {**_read_json(Path(source)), **settings})
    if Path(source).is_file() or source.endswith(".toml"):
        return _load(source, settings)
    if source not in shipped:
        raise ConfigError("scenario", f"{source!r} is neither a file nor one of {known}")
    return _load(None, {**shipped[source], **settings})


def _load(path: str | None, overrides: Mapping[str, Any]) -> Scenario:
    scenario = load_tree(Scenario, path, prefix="", env={}, overrides=overrides)
    check_numbers(scenario, may_be_zero=_MAY_BE_ZERO)
    traffic, fleet = scenario.traffic, scenario.fleet
    if fleet.gpus_per_node % fleet.tp:
        raise ConfigError("fleet.tp", f"{fleet.gpus_per_node} GPUs a node do not divide by it")
    if traffic.users is None and traffic.gap is None:
        raise ConfigError("traffic.users", "missing: give users, or the gap between their turns")
    for name in ("return_share", "busy_share"):
        if getattr(traffic, name) > 1:
            raise ConfigError(f"traffic.{name}", "is a share: at most 1")
    if traffic.return_share and not traffic.return_gap:
        raise ConfigError("traffic.return_gap", "needed if return_share is more than 0")
    return scenario


def _read_json(path: Path) -> dict[str, Any]:
    """A scenario as `kvdepot plan --show --json` prints it."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(str(path), f"is not valid JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(str(path), "is not one JSON object")
    return tree


def _shipped() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("scenarios.toml").read_text("utf-8")
    return tomllib.loads(text)
