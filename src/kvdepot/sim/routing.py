"""Which worker gets a request."""

import random
from collections.abc import Sequence
from typing import Final, Protocol

from kvdepot.sim.requests import Request
from kvdepot.sim.worker import Worker

ROUTES: Final = ("prefix", "random")


class Route(Protocol):
    """Chooses a worker for a request."""

    def __call__(self, request: Request, workers: Sequence[Worker]) -> Worker: ...


def by_prefix(request: Request, workers: Sequence[Worker]) -> Worker:
    """Where the fewest tokens are left to compute, of this prompt and of those that wait."""

    def left(worker: Worker) -> int:
        missing = len(request.blocks) - worker.matched(request.blocks)
        return missing * worker.habits.block_tokens + worker.load_tokens

    return workers[0] if len(workers) == 1 else min(workers, key=left)


class AtRandom:
    """Any of them, from a seed."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def __call__(self, request: Request, workers: Sequence[Worker]) -> Worker:
        return workers[self._draw.randrange(len(workers))]


def route_named(name: str, seed: int) -> Route:
    return by_prefix if name == "prefix" else AtRandom(seed)
