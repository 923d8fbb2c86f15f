"""What a site's hints cost a store that does not have their blocks, and what they reveal."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot.cluster.messages import HintMessage
from kvdepot.config.settings import NatsConfig
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import Match
from kvdepot.store import cluster_member
from kvdepot.store.cluster_member import ClusterMember
from kvdepot.testing.clocks import ManualClock


class Link:
    """Messages that a member sends; nothing comes by itself."""

    is_up = True

    def __init__(
        self, config: NatsConfig, handlers: dict[str, Callable[[bytes], None]], **_: object
    ) -> None:
        self.handlers = handlers
        self.counts: dict[str, int] = {}
        self.sent: list[bytes] = []

    def publish(self, subject: str, payload: bytes) -> None:
        self.sent.append(payload)

    def close(self) -> None:
        pass


class Routing:
    """A store that has these keys."""

    def __init__(self) -> None:
        self.here: set[BlockKey] = set()
        self.asked = 0

    def match(self, keys: Sequence[BlockKey]) -> Match:
        self.asked += len(keys)
        return Match(("object",) * sum(key in self.here for key in keys))

    def prefetch(self, keys: Sequence[BlockKey], deadline_s: float) -> Any:
        return SimpleNamespace(resident=len(self.match(keys)))

    def keys_of_session(self, name: str, tenant: str = "") -> list[list[BlockKey]]:
        return [keys(7)] if name == "chat" else []


class Volumes:
    are_shared = True
    on_published = None

    def __init__(self) -> None:
        self.looks = 0

    def look(self) -> None:
        self.looks += 1


def keys(number: int, blocks: int = 100) -> list[BlockKey]:
    return [BlockKey(bytes([number, at]).ljust(32)) for at in range(blocks)]


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        monkeypatch.setattr(cluster_member, "NatsLink", Link)
        self.time, self.routing, self.volumes = ManualClock(), Routing(), Volumes()
        config = NatsConfig(servers=("nats://a:1",), node="here", **settings)
        parts: Any = (self.routing, self.volumes, self.time)
        self.member = ClusterMember(config, *parts)
        self.link: Any = self.member._link

    def say(self, hint: HintMessage) -> None:
        self.link.handlers["kvdepot.default.hint"](hint.pack())

    def ticks(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.2)):
            self.time.advance(0.2)
            self.member._look_again()

    @property
    def hints(self) -> dict[str, int]:
        found: dict[str, int] = self.member.describe()["hints"]
        return found


def test_hints_for_unknown_keys_cost_almost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    for number in range(250):
        world.say(HintMessage("here", 3600.0, keys=tuple(keys(number))))
    world.routing.asked = world.volumes.looks = 0
    world.ticks(60.0)
    assert world.hints["open"] == 250
    assert world.routing.asked < 250 * 20, "looks for one key, a few times"
    assert world.volumes.looks <= 61
    world.ticks(3600.0)
    assert world.hints["open"] == 0


def test_blocks_that_come_late_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.say(HintMessage("here", 3600.0, keys=tuple(keys(1))))
    world.ticks(60.0)
    world.routing.here.update(keys(1, 50))
    world.ticks(5.2)
    assert world.hints["open"] == 1
    world.routing.here.update(keys(1))
    world.ticks(0.4)
    assert world.hints["open"] == 0
    world.say(HintMessage("here", 3600.0, keys=tuple(keys(2))))
    world.ticks(60.0)
    world.routing.here.update(keys(2))
    world.link.handlers["kvdepot.default.changed"](b'{"v":1,"from":"there"}')
    world.ticks(0.2)
    assert world.hints["open"] == 0, "at once when another node says so"


def test_a_stranger_is_not_told_the_keys_of_a_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = HintMessage("elsewhere", 60.0, session="chat")
    world = World(monkeypatch)
    world.say(asked)
    assert world.link.sent == []
    assert world.hints["withheld"] == 1 and world.hints["passed_on"] == 0
    token = tmp_path / "token"
    token.write_text("secret")
    guarded = World(monkeypatch, token_file=token)
    guarded.say(asked)
    (passed,) = guarded.link.sent
    assert HintMessage.parse(passed).keys == tuple(keys(7))
    assert guarded.hints["passed_on"] == 1
