"""A large fleet by samples: some users on some nodes, several times, and how far that carries."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Final

from kvdepot.errors import ConfigError
from kvdepot.sim.traces.arrivals import MultiTurn

SAMPLES: Final = 4
_STUDENT: Final = 3.182
"""Of the 95 % interval with SAMPLES - 1 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate, and how far off it is at most, 95 times of 100."""

    mean: float
    error: float


def part_of(talks: MultiTurn, nodes: int, share: float, route: str) -> tuple[MultiTurn, int]:
    """The same load on each node, with a share of the users and nodes.

    Raises ConfigError where that would not be the same: a random route sends a user back to the
    same node the more often the fewer nodes there are.
    """
    if not 0.0 < share <= 1.0:
        raise ConfigError("--sample", f"is a share between 0 and 1, got {share:g}")
    if route != "prefix":
        raise ConfigError(
            "--sample",
            "hits depend on the number of nodes with a random route",
            hint="--route prefix, or fewer nodes without --sample",
        )
    part = round(nodes * share)
    users = round(talks.users * part / nodes)
    if part < 1 or users < 1:
        raise ConfigError("--sample", f"{share:g} of {nodes} nodes or {talks.users} users is none")
    return replace(talks, users=users, qps=talks.qps * part / nodes), part


def interval_of(values: Sequence[float]) -> Interval:
    """Of SAMPLES values that were drawn independently."""
    return Interval(mean(values), _STUDENT * stdev(values) / len(values) ** 0.5)
