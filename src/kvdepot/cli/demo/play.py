"""The course of the demo: without a depot, with one, and after each of several kills."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from kvdepot.cli.demo.process import Server
from kvdepot.cli.demo.result import Damage, Pass, Request, Result, Setting, Start, Turn
from kvdepot.cli.demo.script import Conversation, User
from kvdepot.codec.record import HEAD_BYTES, PAGE, record_bytes
from kvdepot.errors import ConfigError

BLOCK_TOKENS: Final = 32
"""Small blocks leave little to compute: at most this much of a known prefix, and the question."""

SSD_BYTES_MIN: Final = 1 << 30
SPARE_BLOCKS: Final = 2
HEAD_SHARE: Final = 1.01
"""A block in memory has a head of one page."""

START_TIMEOUT_S: Final = 600.0
ANSWER_TIMEOUT_S: Final = 300.0
DAMAGE_AT: Final = 0.6
"""How far into the shared document a bit is flipped."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What shall be played."""

    users: int
    turns: int
    new_tokens: int
    directory: Path
    """For the store and for what the processes say."""

    cache: Path
    """Where SmolLM2 is kept between demos."""

    model: Path | None
    """A model folder to use instead."""

    env: Mapping[str, str]
    program: Sequence[str]
    """The serving process; its settings follow as one more argument."""


class Audience(Protocol):
    """Who watches. Called in the order in which things happen."""

    def wait(self, what: str) -> None:
        """Something takes a while; called several times a second."""

    def begin(self, number: Pass, text: str) -> None:
        """The next part begins."""

    def computed(self, number: int, user: str, without: Request) -> None:
        """A turn was answered without the depot."""

    def compared(self, turn: Turn) -> None:
        """A turn was answered with the depot too."""


@dataclass(slots=True)
class Play:
    """One performance. `run` can be called once."""

    plan: Plan
    audience: Audience
    clock: Callable[[], float] = time.monotonic
    starts: list[Start] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    dram_bytes: int = 0
    _began_s: float = 0.0
    _killed_s: float | None = None
    _without: dict[tuple[int, int], Request] = field(default_factory=dict)
    _talks: dict[int, Conversation] = field(default_factory=dict)

    def run(self) -> Result:
        """Play everything. Raises ServerError when a serving process fails."""
        self._began_s = self.clock()
        self._play_without()
        self.dram_bytes = self._choose_dram()
        self._play_with()
        for user in self._users():
            self._play_returned(user)
        damage = flip_bit(self.store_path, self._damage_at())
        self._play_damaged()
        return Result(self._setting(), self.turns, self.starts, damage, self._now())

    @property
    def store_path(self) -> Path:
        return self.plan.directory / "store"

    def _users(self) -> list[User]:
        return [User(number) for number in range(self.plan.users)]

    def _now(self) -> float:
        return self.clock() - self._began_s

    def _play_without(self) -> None:
        """Every turn, also the one after the restart, as a model without a depot answers it."""
        self.audience.begin("without", "without a depot: every turn computes its whole prompt")
        with self._server("without") as server:
            self._check_context()
            for number in range(1, self.plan.turns + 2):
                for user in self._users():
                    request = self._ask(server, "without", user, number)
                    self._without[user.number, number] = request
                    self.audience.computed(number, user.name, request)
        self._talks.clear()

    def _play_with(self) -> None:
        self.audience.begin("with", "with a depot: what was computed before is fetched")
        with self._server("with") as server:
            for number in range(1, self.plan.turns + 1):
                for user in self._users():
                    self._compare(user, number, self._ask(server, "with", user, number))
            self._kill(server)

    def _play_returned(self, user: User) -> None:
        """A new process, so that nobody finds memory warmed by the user before."""
        self.audience.begin("returned", f"killed with SIGKILL; restarted; {user.name} comes back")
        number = self.plan.turns + 1
        with self._server("returned") as server:
            self._compare(user, number, self._ask(server, "returned", user, number))
            self._kill(server)

    def _play_damaged(self) -> None:
        """The last user's question again, so that its right answer is known."""
        user = self._users()[-1]
        text = f"killed; one bit on disk is flipped; restarted; {user.name} asks again"
        self.audience.begin("damaged", text)
        number = self.plan.turns + 1
        del self._talks[user.number].messages[-2:]
        with self._server("damaged") as server:
            self._compare(user, number, self._ask(server, "damaged", user, number))

    @contextmanager
    def _server(self, serves: Pass) -> Iterator[Server]:
        started_s = self._now()
        log = self.plan.directory / f"server-{len(self.starts) + 1}.log"
        settings = {
            "model": str(self.plan.model) if self.plan.model else None,
            "cache": str(self.plan.cache),
            "store": None if serves == "without" else self._store_settings(),
            "block_tokens": BLOCK_TOKENS,
        }
        command = [*self.plan.program, json.dumps(settings)]
        with Server(command, self.plan.env, log, self.audience.wait) as server:
            self.facts = server.ready("a serving process loads the model", START_TIMEOUT_S)
            self.starts.append(Start(started_s, self._now(), serves, self._killed_s))
            yield server

    def _store_settings(self) -> dict[str, Any]:
        everything = self.dram_bytes * (self.plan.users + 1)
        disk = {"path": str(self.store_path), "capacity": max(SSD_BYTES_MIN, 2 * everything)}
        return {"dram": self.dram_bytes, "ssd": disk}

    def _kill(self, server: Server) -> None:
        server.kill()
        self._killed_s = self._now()

    def _ask(self, server: Server, number: Pass, user: User, turn: int) -> Request:
        talk = self._talks.setdefault(user.number, Conversation())
        started_s = self._now()
        messages = talk.ask(user.question(turn))
        request = {"messages": messages, "new_tokens": self.plan.new_tokens}
        answer = server.ask(request, f"turn {turn}: {user.name} waits", ANSWER_TIMEOUT_S)
        del answer["is"]
        talk.hear(answer["text"])
        return Request(number=number, started_s=started_s, **answer)

    def _compare(self, user: User, number: int, served: Request) -> None:
        without = self._without[user.number, number]
        turn = Turn(number, user.name, user.question(number), without, served)
        self.turns.append(turn)
        self.audience.compared(turn)

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

        The document then stays in memory, where everybody needs it, while much of what a user said
        and heard is only on disk when that user's next turn comes: both tiers are at work.
        """
        blocks = -(-self.facts["shared_tokens"] // BLOCK_TOKENS) + SPARE_BLOCKS
        return int(HEAD_SHARE * blocks * BLOCK_TOKENS * self.facts["token_bytes"])

    def _damage_at(self) -> int:
        """The middle of a block's payload; a segment begins with one page of its own."""
        payload: int = BLOCK_TOKENS * self.facts["token_bytes"]
        number = int(DAMAGE_AT * self.facts["shared_tokens"] / BLOCK_TOKENS)
        return PAGE + number * record_bytes(payload) + HEAD_BYTES + payload // 2

    def _setting(self) -> Setting:
        return Setting(
            model=self.facts["model"],
            device=self.facts["device"],
            users=self.plan.users,
            turns=self.plan.turns,
            new_tokens=self.plan.new_tokens,
            shared_tokens=self.facts["shared_tokens"],
            token_bytes=self.facts["token_bytes"],
            block_tokens=BLOCK_TOKENS,
            dram_bytes=self.dram_bytes,
            path=str(self.store_path),
        )


def flip_bit(store: Path, position: int) -> Damage:
    """Change one bit of a store that nobody has open, `position` bytes into what was written first.

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
            return Damage(file.name, position)
        position -= size
    raise ConfigError("path", f"{store} holds less than the shared document")
