"""The course of the demo: without a depot, with one, and after each of several kills.

`Demo.run` plays it; `DemoResult` is what happened, as plain values, and what follows from it.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, Protocol

from kvdepot.adapters.demo.chat import Reply
from kvdepot.cli.demo.script import Conversation, User
from kvdepot.cli.demo.server import Server
from kvdepot.codec.record import HEAD_BYTES, PAGE, record_bytes
from kvdepot.errors import ConfigError

TIERS: Final = ("dram", "ssd")
BLOCK_TOKENS: Final = 32
"""Small blocks leave little to compute: at most this much of a known prefix, and the question."""
SSD_BYTES_MIN: Final = 1 << 30
SPARE_BLOCKS: Final = 2
HEAD_SHARE: Final = 1.01
"""A block in memory has a head of one page."""
START_TIMEOUT_S: Final = 600.0
ANSWER_TIMEOUT_S: Final = 300.0
SLOW: Final = 2.0
"""A turn that is less than so many times sooner is explained."""
DAMAGE_AT: Final = 0.6
"""How far into the shared document a bit is flipped."""
Stage = Literal["without", "with", "returned", "damaged"]
"""No depot; with one; back after a kill; back after a kill and a flipped bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Reply):
    """One question as one serving process answered it."""

    stage: Stage
    started_s: float
    """Since the demo began."""
    again_s: tuple[float, ...] = ()
    """Times to the first token of the same prompt, asked again."""

    @property
    def ttfts_s(self) -> list[float]:
        """Of all times that it was asked, the shortest first."""
        return sorted([self.ttft_s, *self.again_s])

    @property
    def median_ttft_s(self) -> float:
        return median(self.ttfts_s)

    @property
    def fetched_tokens(self) -> int:
        return sum(self.fetched.values())

    @property
    def tier(self) -> str:
        """The tier that most of the fetched tokens came from; empty when most were computed."""
        if self.fetched_tokens <= self.computed_tokens:
            return ""
        return max(self.fetched, key=lambda tier: self.fetched[tier])


@dataclass(frozen=True, slots=True)
class ComparedTurn:
    """One question of one user, answered without the depot and with it."""

    number: int
    user: str
    question: str
    without: Answer
    with_depot: Answer

    @property
    def identical(self) -> bool:
        return self.without.ids == self.with_depot.ids

    @property
    def ratio(self) -> float:
        """TTFT with the depot, of that without."""
        return self.with_depot.ttft_s / self.without.median_ttft_s

    @property
    def speedup(self) -> float:
        return self.without.median_ttft_s / self.with_depot.ttft_s

    @property
    def after_restart(self) -> bool:
        return self.with_depot.stage != "with"


@dataclass(frozen=True, slots=True)
class ServerStart:
    """A serving process began. `kill_s` is when the one before it was killed, if it was."""

    started_s: float
    ready_s: float
    serves: Stage
    kill_s: float | None = None


@dataclass(frozen=True, slots=True)
class FlippedBit:
    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class DemoSetting:
    model: str
    device: str
    users: int
    turns: int
    new_tokens: int
    repeats: int
    shared_tokens: int
    token_bytes: int
    block_tokens: int
    dram_bytes: int
    path: str


@dataclass(slots=True)
class DemoResult:
    setting: DemoSetting
    turns: list[ComparedTurn]
    starts: list[ServerStart]
    damage: FlippedBit
    seconds: float
    machine: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    report: str = ""

    @property
    def identical(self) -> bool:
        return all(turn.identical for turn in self.turns)

    @property
    def returned(self) -> list[ComparedTurn]:
        return [turn for turn in self.turns if turn.with_depot.stage == "returned"]

    @property
    def damaged(self) -> ComparedTurn:
        return next(turn for turn in self.turns if turn.with_depot.stage == "damaged")

    @property
    def recomputed_tokens(self) -> int:
        """What the damage cost: the same question had been answered without it just before."""
        return (
            self.damaged.with_depot.computed_tokens - self.returned[-1].with_depot.computed_tokens
        )

    def document(self) -> dict[str, Any]:
        return {
            "identical": self.identical,
            "turns": [
                turn_document(turn) | {"why_slow": slow_reason(turn, self.turns)}
                for turn in self.turns
            ],
            "ttft_ratio_by_tier": ratio_by_tier(self.turns),
            "after_restart": self._after_restart(),
            "damage": {
                "file": self.damage.file,
                "offset": self.damage.offset,
                "misses": self.damaged.with_depot.misses,
                "recomputed_tokens": self.recomputed_tokens,
                "identical": self.damaged.identical,
            },
            "report": self.report,
            "setting": self.setting,
            "machine": self.machine,
            "command": self.command,
            "seconds": round(self.seconds, 1),
        }

    def _after_restart(self) -> dict[str, Any]:
        restarts = [start for start in self.starts if start.kill_s is not None]
        return {
            "kills": len(restarts),
            "restart_s": median(start.ready_s - start.started_s for start in restarts),
            "turns": len(self.returned),
            "identical": all(turn.identical for turn in self.returned),
            "fetched": fetched_by_tier(self.returned),
            "computed_tokens": sum(turn.with_depot.computed_tokens for turn in self.returned),
            "ttft_ratio": median(turn.ratio for turn in self.returned),
        }


def slow_reason(turn: ComparedTurn, turns: Sequence[ComparedTurn]) -> str:
    """Why a turn gained little, less than SLOW or half of what the turns do; empty: it did not."""
    served = turn.with_depot
    computed, prompt = served.computed_tokens, served.prompt_tokens
    if served.stage == "damaged":
        return f"a damaged block was noticed: {computed:,} of {prompt:,} tokens were computed"
    typical = median(each.speedup for each in turns)
    if turn.speedup >= max(SLOW, typical / 2):
        return ""
    if not served.fetched_tokens:
        return f"the depot had nothing of it yet: all {prompt:,} tokens were computed, and kept"
    if computed > served.fetched_tokens:
        return f"{computed:,} of {prompt:,} tokens were new to the depot"
    if served.stage == "returned" and served.fetched.get("ssd"):
        return (
            f"a process that has just started read {served.fetched['ssd']:,} tokens from disk, and "
            f"computed {computed:,}"
        )
    return f"only {computed:,} tokens were computed: the rest is what else the machine was doing"


def ratio_by_tier(turns: Sequence[ComparedTurn]) -> dict[str, float | None]:
    """Median of TTFT with / without over the turns that mostly came from a tier; None: no such.

    The turn after the damage is left out: it had to compute what an undamaged one fetches.
    """
    sound = [turn for turn in turns if turn.with_depot.stage != "damaged"]
    ratios: dict[str, float | None] = {}
    for tier in TIERS:
        found = [turn.ratio for turn in sound if turn.with_depot.tier == tier]
        ratios[tier] = median(found) if found else None
    return ratios


def fetched_by_tier(turns: Sequence[ComparedTurn]) -> dict[str, int]:
    return {tier: sum(turn.with_depot.fetched.get(tier, 0) for turn in turns) for tier in TIERS}


def turn_document(turn: ComparedTurn) -> dict[str, Any]:
    served = turn.with_depot
    return {
        "turn": turn.number,
        "user": turn.user,
        "pass": served.stage,
        "after_restart": turn.after_restart,
        "question": turn.question,
        "answer": served.text,
        "identical": turn.identical,
        "prompt_tokens": served.prompt_tokens,
        "fetched": {tier: served.fetched.get(tier, 0) for tier in TIERS},
        "computed_tokens": served.computed_tokens,
        "misses": served.misses,
        "ttft_without_s": round(turn.without.median_ttft_s, 4),
        "ttfts_without_s": [round(each, 4) for each in turn.without.ttfts_s],
        "ttft_with_s": round(served.ttft_s, 4),
        "speedup": round(turn.speedup, 2),
    }


@dataclass(frozen=True, slots=True)
class DemoPlan:
    users: int
    turns: int
    new_tokens: int
    repeats: int
    """How often the first token without the depot is measured."""
    directory: Path
    """For the store and for what the processes say."""
    cache: Path
    """Where SmolLM2 is kept between demos."""
    model: Path | None
    """A model folder to use instead."""
    env: Mapping[str, str]
    program: Sequence[str]
    """The serving process; its settings follow as one more argument."""


class Display(Protocol):
    """Shows the demo as it goes. Called in the order in which things happen."""

    def wait(self, what: str) -> None:
        """Something takes a while; called several times a second."""

    def begin(self, stage: Stage, text: str) -> None:
        """The next part begins."""

    def computed(self, number: int, user: str, without: Answer) -> None:
        """A turn was answered without the depot."""

    def compared(self, turn: ComparedTurn) -> None:
        """A turn was answered with the depot too."""


@dataclass(slots=True)
class Demo:
    """`run` can be called once."""

    plan: DemoPlan
    display: Display
    clock: Callable[[], float] = time.monotonic
    starts: list[ServerStart] = field(default_factory=list)
    turns: list[ComparedTurn] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    dram_bytes: int = 0
    _began_s: float = 0.0
    _killed_s: float | None = None
    _without: dict[tuple[int, int], Answer] = field(default_factory=dict)
    _talks: dict[int, Conversation] = field(default_factory=dict)

    def run(self) -> DemoResult:
        """Demo everything. Raises ServerError when a serving process fails."""
        self._began_s = self.clock()
        self._play_without()
        self.dram_bytes = self._choose_dram()
        self._play_with()
        for user in self._users():
            self._play_returned(user)
        damage = flip_bit(self.store_path, self._damage_at())
        self._play_damaged()
        return DemoResult(self._setting(), self.turns, self.starts, damage, self._now())

    @property
    def store_path(self) -> Path:
        return self.plan.directory / "store"

    def _users(self) -> list[User]:
        return [User(number) for number in range(self.plan.users)]

    def _now(self) -> float:
        return self.clock() - self._began_s

    def _play_without(self) -> None:
        """Every turn, also the one after the restart, as a model without a depot answers it."""
        self.display.begin("without", "without a depot: every turn computes its whole prompt")
        with self._server("without") as server:
            self._check_context()
            for number in range(1, self.plan.turns + 2):
                for user in self._users():
                    request = self._ask_repeatedly(server, user, number)
                    self._without[user.number, number] = request
                    self.display.computed(number, user.name, request)
        self._talks.clear()

    def _play_with(self) -> None:
        self.display.begin("with", "with a depot: what was computed before is fetched")
        with self._server("with") as server:
            for number in range(1, self.plan.turns + 1):
                for user in self._users():
                    self._compare(user, number, self._ask(server, "with", user, number))
            self._kill(server)

    def _play_returned(self, user: User) -> None:
        """A new process for each user: memory holds nothing of the user before."""
        self.display.begin("returned", f"killed with SIGKILL; restarted; {user.name} comes back")
        number = self.plan.turns + 1
        with self._server("returned") as server:
            self._compare(user, number, self._ask(server, "returned", user, number))
            self._kill(server)

    def _play_damaged(self) -> None:
        """The last user's question again, so that its right answer is known."""
        user = self._users()[-1]
        text = f"killed; one bit on disk is flipped; restarted; {user.name} asks again"
        self.display.begin("damaged", text)
        number = self.plan.turns + 1
        del self._talks[user.number].messages[-2:]
        with self._server("damaged") as server:
            self._compare(user, number, self._ask(server, "damaged", user, number))

    @contextmanager
    def _server(self, serves: Stage) -> Iterator[Server]:
        started_s = self._now()
        log = self.plan.directory / f"server-{len(self.starts) + 1}.log"
        settings = {
            "model": str(self.plan.model) if self.plan.model else None,
            "cache": str(self.plan.cache),
            "store": None if serves == "without" else self._store_settings(),
            "block_tokens": BLOCK_TOKENS,
        }
        command = [*self.plan.program, json.dumps(settings)]
        with Server(command, self.plan.env, log, self.display.wait) as server:
            self.facts = server.ready("a serving process loads the model", START_TIMEOUT_S)
            self.starts.append(ServerStart(started_s, self._now(), serves, self._killed_s))
            yield server

    def _store_settings(self) -> dict[str, Any]:
        everything = self.dram_bytes * (self.plan.users + 1)
        disk = {"path": str(self.store_path), "capacity": max(SSD_BYTES_MIN, 2 * everything)}
        return {"dram": self.dram_bytes, "ssd": disk}

    def _kill(self, server: Server) -> None:
        server.kill()
        self._killed_s = self._now()

    def _ask(self, server: Server, stage: Stage, user: User, turn: int) -> Answer:
        talk = self._talks.setdefault(user.number, Conversation())
        started_s = self._now()
        messages = talk.ask(user.question(turn))
        request = {"messages": messages, "new_tokens": self.plan.new_tokens}
        answer = server.ask(request, f"turn {turn}: {user.name} waits", ANSWER_TIMEOUT_S)
        del answer["is"]
        talk.hear(answer["text"])
        return Answer(stage=stage, started_s=started_s, **answer)

    def _ask_repeatedly(self, server: Server, user: User, turn: int) -> Answer:
        """Without the depot, and the first token of the same prompt some times more."""
        answer = self._ask(server, "without", user, turn)
        messages = self._talks[user.number].messages[:-1]
        request = {"messages": messages, "new_tokens": 1}
        words = f"turn {turn}: {user.name}'s first token again"
        times = []
        for _ in range(self.plan.repeats - 1):
            times.append(server.ask(request, words, ANSWER_TIMEOUT_S)["ttft_s"])
        return replace(answer, again_s=tuple(times))

    def _compare(self, user: User, number: int, served: Answer) -> None:
        without = self._without[user.number, number]
        turn = ComparedTurn(number, user.name, user.question(number), without, served)
        self.turns.append(turn)
        self.display.compared(turn)

    def _check_context(self) -> None:
        """A turn takes a question of at most 24 tokens, its frame, and the answer."""
        turn_tokens = self.plan.new_tokens + 40
        needed = self.facts["shared_tokens"] + (self.plan.turns + 1) * turn_tokens
        if needed > self.facts["context_tokens"]:
            raise ConfigError(
                "turns",
                f"{self.plan.turns} turns need about {needed} tokens of context, the model has "
                f"{self.facts['context_tokens']}",
                hint="give fewer --turns or --new-tokens",
            )

    def _choose_dram(self) -> int:
        """Memory for the shared document and very little else.

        The document, which all turns need, then stays in memory; much of what a user said and heard
        is only on disk when that user's next turn comes. Both tiers are at work.
        """
        blocks = -(-self.facts["shared_tokens"] // BLOCK_TOKENS) + SPARE_BLOCKS
        return int(HEAD_SHARE * blocks * BLOCK_TOKENS * self.facts["token_bytes"])

    def _damage_at(self) -> int:
        """The middle of a block's payload; a segment begins with one page of its own."""
        payload: int = BLOCK_TOKENS * self.facts["token_bytes"]
        number = int(DAMAGE_AT * self.facts["shared_tokens"] / BLOCK_TOKENS)
        return PAGE + number * record_bytes(payload) + HEAD_BYTES + payload // 2

    def _setting(self) -> DemoSetting:
        return DemoSetting(
            model=self.facts["model"],
            device=self.facts["device"],
            users=self.plan.users,
            turns=self.plan.turns,
            new_tokens=self.plan.new_tokens,
            repeats=self.plan.repeats,
            shared_tokens=self.facts["shared_tokens"],
            token_bytes=self.facts["token_bytes"],
            block_tokens=BLOCK_TOKENS,
            dram_bytes=self.dram_bytes,
            path=str(self.store_path),
        )


def flip_bit(store: Path, position: int) -> FlippedBit:
    """Change one bit of a store that is not open, `position` bytes into what was written first.

    Segments are filled in the order of their names, and the shared document went there first.
    """
    for file in sorted(store.glob("*.kvs")):
        size = file.stat().st_size
        if position < size:
            with file.open("r+b") as handle:
                handle.seek(position)
                (byte,) = handle.read(1)
                handle.seek(position)
                handle.write(bytes([byte ^ 1]))
                handle.flush()
                os.fsync(handle.fileno())
            return FlippedBit(file.name, position)
        position -= size
    raise ConfigError("path", f"{store} holds less than the shared document")
