"""Made-up loads to try eviction orders on: what traces of two services do not show.

Each is drawn from a seed and small enough for seconds of simulation. Prompts are chains of full
blocks. `HELD_OUT` names those that no constant of an order was chosen by.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

import numpy as np

from kvdepot.errors import ConfigError
from kvdepot.sim.workload import NO_PARENT, Ints, PromptRequest, Workload

BLOCK_TOKENS: Final = 512
_LONGEST_BLOCKS: Final = 160
"""A conversation starts anew when it has grown to this."""

NextPrompt = Callable[[], Ints]
"""The blocks of the next prompt."""


@dataclass(slots=True)
class Conversation:
    """A conversation: what was said so far."""

    workload: Workload
    head: Ints
    blocks: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def more(self, count: int) -> Ints:
        """The prompt of the next turn, `count` blocks longer."""
        if len(self.blocks) + count > _LONGEST_BLOCKS or not len(self.blocks):
            self.blocks = self.head
        last = int(self.blocks[-1]) if len(self.blocks) else NO_PARENT
        self.blocks = np.concatenate((self.blocks, self.workload.new_blocks(last, count)))
        return self.blocks


class LoadMaker:
    """A workload being drawn."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.workload = Workload(BLOCK_TOKENS)
        self.nothing: Ints = np.zeros(0, dtype=np.int64)

    def fresh(self, count: int) -> Ints:
        """Blocks of a prompt that shares nothing."""
        return self.workload.new_blocks(NO_PARENT, count)

    def after(self, head: Ints, count: int) -> Ints:
        """A prompt that continues `head` in a way of its own."""
        last = int(head[-1]) if len(head) else NO_PARENT
        return np.concatenate((head, self.workload.new_blocks(last, count)))

    def about(self, mean: int) -> int:
        """A length with this mean, widely spread, at least 1."""
        return 1 + int(self.draw.expovariate(1.0 / max(mean - 0.5, 0.5)))

    def ask(self, blocks: Ints) -> None:
        number = float(len(self.workload))
        self.workload.add(PromptRequest(number, len(blocks) * BLOCK_TOKENS, 0, blocks))

    def zipf(self, count: int, skew: float) -> Callable[[], int]:
        """Draws from `count` things, the first ones most often."""
        sums = list(accumulate((rank + 1) ** -skew for rank in range(count)))
        everyone = range(count)
        return lambda: self.draw.choices(everyone, cum_weights=sums)[0]


def _users(maker: LoadMaker, users: int, skew: float, grows: int = 3) -> NextPrompt:
    """Users come back by Zipf's law with what they said before and some more."""
    who = maker.zipf(users, skew)
    talks = [Conversation(maker.workload, maker.nothing) for _ in range(users)]
    for talk in talks:
        talk.head = maker.fresh(maker.about(8))
    return lambda: talks[who()].more(maker.about(grows))


def _loop(maker: LoadMaker, prompts: int, blocks: int) -> NextPrompt:
    """The same prompts again and again, one after the other."""
    chains = [maker.fresh(blocks) for _ in range(prompts)]
    numbers = _forever(prompts)
    return lambda: chains[next(numbers)]


def _forever(count: int) -> Iterator[int]:
    while True:
        yield from range(count)


def _documents(maker: LoadMaker, documents: int, skew: float, mean: int) -> NextPrompt:
    """Questions about documents, by Zipf's law; each question is new."""
    which = maker.zipf(documents, skew)
    heads = [maker.fresh(maker.about(mean)) for _ in range(documents)]
    return lambda: maker.after(heads[which()], maker.about(2))


def _one_off(maker: LoadMaker, mean: int) -> NextPrompt:
    """Long prompts that do not come again."""
    return lambda: maker.fresh(maker.about(mean))


def _agents(maker: LoadMaker, at_once: int, turns: int, heads: int) -> NextPrompt:
    """Agents that call tools: quick turns on a growing context, then gone for good."""
    tools = [maker.fresh(12) for _ in range(heads)]

    def start() -> tuple[Conversation, int]:
        return Conversation(maker.workload, maker.draw.choice(tools)), maker.about(turns)

    running = [start() for _ in range(at_once)]

    def step() -> Ints:
        at = maker.draw.randrange(at_once)
        talk, left = running[at]
        running[at] = (talk, left - 1) if left > 1 else start()
        return talk.more(maker.about(3))

    return step


def _bursts(maker: LoadMaker, sessions: int, burst: int) -> NextPrompt:
    """A few users ask quickly, then are silent for long, and some of them come back."""
    talks = [Conversation(maker.workload, maker.nothing) for _ in range(sessions)]
    active: list[tuple[Conversation, int]] = []

    def step() -> Ints:
        while len(active) < 4:
            active.append((maker.draw.choice(talks), maker.about(burst)))
        at = maker.draw.randrange(len(active))
        talk, left = active.pop(at)
        if left > 1:
            active.append((talk, left - 1))
        elif maker.draw.random() < 0.5:
            talk.blocks = maker.nothing
        return talk.more(maker.about(4))

    return step


def _templates(maker: LoadMaker, width: int, depth: int) -> NextPrompt:
    """Prompts put together from a tree of shared parts, with a tail of their own."""
    which = maker.zipf(width, 0.8)
    parts: dict[tuple[int, ...], Ints] = {(): maker.nothing}

    def step() -> Ints:
        path: tuple[int, ...] = ()
        for _ in range(maker.draw.randint(1, depth)):
            longer = (*path, which())
            if longer not in parts:
                parts[longer] = maker.after(parts[path], 6)
            path = longer
        return maker.after(parts[path], maker.about(3))

    return step


def _batches(maker: LoadMaker, blocks: int, length: int) -> NextPrompt:
    """Jobs that send many prompts with one long head, a few jobs at a time, each a while."""
    jobs = [maker.fresh(maker.about(blocks)) for _ in range(5)]

    def step() -> Ints:
        at = maker.draw.randrange(len(jobs))
        if maker.draw.random() < 1.0 / length:
            jobs[at] = maker.fresh(maker.about(blocks))
        return maker.after(jobs[at], maker.about(2))

    return step


def _office(maker: LoadMaker) -> list[NextPrompt]:
    """Users by day and a batch that reads everything by night, in turn."""
    day, night = _users(maker, 300, 0.9), _loop(maker, 200, 40)
    return [day, night, day, night, day]


def _mixed(maker: LoadMaker, *shares: tuple[float, NextPrompt]) -> NextPrompt:
    """Each prompt from one of several loads."""
    weights, steps = [share for share, _ in shares], [step for _, step in shares]
    return lambda: maker.draw.choices(steps, weights=weights)[0]()


@dataclass(frozen=True, slots=True)
class SyntheticLoad:
    """A load by name. `make` gives one step, or several that follow each other."""

    make: Callable[[LoadMaker], list[NextPrompt]]
    requests: int
    held_out: bool

    def workload(self, seed: int = 0) -> Workload:
        maker = LoadMaker(seed)
        steps = self.make(maker)
        for step in steps:
            for _ in range(self.requests // len(steps)):
                maker.ask(step())
        return maker.workload


def _chat(maker: LoadMaker) -> NextPrompt:
    return _users(maker, 600, 0.9)


LOADS: Final[dict[str, SyntheticLoad]] = {
    "zipf users": SyntheticLoad(lambda m: [_users(m, 600, 0.9)], 8000, held_out=False),
    "zipf documents": SyntheticLoad(
        lambda m: [_documents(m, 2000, 1.0, 30)], 10000, held_out=False
    ),
    "loop": SyntheticLoad(lambda m: [_loop(m, 300, 32)], 9000, held_out=False),
    "system prompts": SyntheticLoad(
        lambda m: [_mixed(m, (0.7, _documents(m, 40, 0.7, 40)), (0.3, _one_off(m, 30)))],
        8000,
        held_out=False,
    ),
    "bursts": SyntheticLoad(lambda m: [_bursts(m, 1200, 6)], 9000, held_out=False),
    "agents": SyntheticLoad(lambda m: [_agents(m, 60, 15, 6)], 8000, held_out=False),
    "agents, then users": SyntheticLoad(
        lambda m: [_agents(m, 60, 15, 6), _chat(m)], 12000, held_out=False
    ),
    "flat users": SyntheticLoad(lambda m: [_users(m, 300, 0.0)], 8000, held_out=False),
    "users and scans": SyntheticLoad(
        lambda m: [_mixed(m, (0.8, _users(m, 400, 1.1)), (0.2, _one_off(m, 100)))],
        8000,
        held_out=False,
    ),
    "templates": SyntheticLoad(lambda m: [_templates(m, 12, 5)], 12000, held_out=False),
    "loop and agents": SyntheticLoad(
        lambda m: [_mixed(m, (0.5, _loop(m, 200, 40)), (0.5, _agents(m, 30, 10, 4)))],
        8000,
        held_out=False,
    ),
    "five phases": SyntheticLoad(
        lambda m: [
            _documents(m, 800, 0.8, 25),
            _loop(m, 150, 40),
            _bursts(m, 500, 8),
            _users(m, 300, 1.0),
            _documents(m, 800, 0.8, 25),
        ],
        15000,
        held_out=False,
    ),
    "mixture": SyntheticLoad(
        lambda m: [
            _mixed(
                m,
                (0.3, _users(m, 300, 0.8)),
                (0.3, _agents(m, 20, 12, 4)),
                (0.2, _documents(m, 500, 1.0, 30)),
                (0.1, _loop(m, 60, 40)),
                (0.1, _one_off(m, 60)),
            )
        ],
        10000,
        held_out=False,
    ),
    "office hours": SyntheticLoad(_office, 10000, held_out=True),
    "batches": SyntheticLoad(
        lambda m: [_mixed(m, (0.7, _batches(m, 60, 80)), (0.3, _users(m, 200, 0.5)))],
        10000,
        held_out=True,
    ),
    "many tenants": SyntheticLoad(
        lambda m: [
            _mixed(
                m,
                (0.4, _documents(m, 1500, 0.6, 12)),
                (0.3, _agents(m, 25, 8, 3)),
                (0.3, _templates(m, 6, 4)),
            )
        ],
        10000,
        held_out=True,
    ),
    "deep agents": SyntheticLoad(
        lambda m: [_agents(m, 12, 40, 2), _mixed(m, (0.5, _agents(m, 80, 5, 8)), (0.5, _chat(m)))],
        9000,
        held_out=True,
    ),
}


def load_named(name: str) -> SyntheticLoad:
    """Raises ConfigError for a name that is none."""
    if name not in LOADS:
        raise ConfigError("load", f"{name!r} is not a load", hint=" | ".join(LOADS))
    return LOADS[name]
