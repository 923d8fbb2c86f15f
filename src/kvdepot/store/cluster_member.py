"""A store as a member of a site: it announces changes that it published in the shared tier,
refreshes that tier when others announce changes, and serves their prefetch hints.

A hint names a prompt by keys, tokens or session. Only the node on which a session was named knows
its keys; it forwards them to the node of the hint, if the broker asks for credentials: everyone on
the bus can read them. Blocks that are not in the shared tier yet are looked for again until the
deadline of the hint, more and more rarely while nothing changes.
"""

import secrets
import socket
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.cluster.link import NatsLink
from kvdepot.cluster.messages import (
    KEYS_MAX,
    ChangedMessage,
    HintMessage,
    subject,
)
from kvdepot.config.settings import NatsConfig
from kvdepot.core.block import BlockKey
from kvdepot.core.clock import Clock
from kvdepot.core.log import RateLimitedLog
from kvdepot.store.routing import RoutingCalls
from kvdepot.store.volume_set import VolumeSet, nothing

_OPEN_MAX: Final = 256
"""Most hints of which blocks are still missing."""
_PAUSE_S: Final = (0.2, 5.0)
"""First and longest time between two looks for the blocks of a hint."""
_REFRESH_S: Final = 1.0
"""Shortest time between two requests to list the shared tier because of hints."""
_log: Final = RateLimitedLog("kvdepot.store")


@dataclass(slots=True)
class OpenHint:
    """A hinted prompt of which blocks are still missing."""

    keys: list[BlockKey]
    due_s: float
    look_s: float
    """Time of the next look."""
    pause_s: float = _PAUSE_S[0]

    def wait(self, now_s: float) -> None:
        """Look again later, and twice as late the next time."""
        self.look_s = now_s + self.pause_s
        self.pause_s = min(2 * self.pause_s, _PAUSE_S[1])

    def hurry(self, now_s: float) -> None:
        """Look now: something has changed."""
        self.look_s, self.pause_s = now_s, _PAUSE_S[0]


class ClusterMember:
    """The membership of one store. Messages are handled in the thread of its link."""

    def __init__(
        self,
        config: NatsConfig,
        routing: RoutingCalls,
        volumes: VolumeSet,
        clock: Clock,
    ) -> None:
        self.site, self.node = config.site, config.node or socket.gethostname()
        self._routing = routing
        self._volumes = volumes
        self._clock = clock
        self._has_credentials = bool(config.credentials_file or config.token_file)
        self._refresh_s = 0.0
        """Time from which open hints may request a listing again."""
        self._hints: Counter[str] = Counter()
        self._open: deque[OpenHint] = deque(maxlen=_OPEN_MAX)
        self._changed = ChangedMessage(secrets.token_hex(8)).pack()
        handlers = {
            subject(config.site, "changed"): self._others_changed,
            subject(config.site, "hint"): self._hinted,
        }
        self._link = NatsLink(config, handlers, tick=self._look_again, came=volumes.look)
        volumes.on_published = self._tell

    def describe(self) -> dict[str, Any]:
        """The state and counts for `stats`."""
        names = ("followed", "open", "passed_on", "unknown", "withheld")
        hints = {name: self._hints[name] for name in names}
        facts = {"site": self.site, "node": self.node, "connected": self._link.is_up}
        return {**facts, "messages": dict(self._link.counts), "hints": hints}

    def close(self) -> None:
        self._volumes.on_published = nothing
        self._link.close()

    def _tell(self) -> None:
        self._link.publish(subject(self.site, "changed"), self._changed)

    def _others_changed(self, raw: bytes) -> None:
        ChangedMessage.parse(raw)
        self._volumes.look()
        for one in self._open:
            one.hurry(self._clock.now())

    def _hinted(self, raw: bytes) -> None:
        hint = HintMessage.parse(raw)
        if hint.node in ("", self.node):
            self._follow(hint)
        elif hint.session:
            self._pass_on(hint)

    def _follow(self, hint: HintMessage) -> None:
        prompts = list(self._prompts(hint))
        if not prompts:
            self._hints["unknown"] += 1
        for keys in prompts:
            due_s = self._clock.now() + hint.within_s
            found = self._routing.prefetch(keys, hint.within_s).resident
            self._hints["followed"] += 1
            if found < len(keys) and self._volumes.are_shared:
                self._volumes.look()
                self._open.append(OpenHint(keys[found:], due_s, self._clock.now()))

    def _prompts(self, hint: HintMessage) -> Iterator[list[BlockKey]]:
        if hint.keys:
            yield list(hint.keys)
        elif hint.tokens:
            yield from self._routing.keys_of_tokens(hint.tokens, hint.model)
        else:
            yield from self._routing.keys_of_session(hint.session, hint.tenant)

    def _pass_on(self, hint: HintMessage) -> None:
        """Forward the keys of a session to the node of the hint, if no stranger can read them."""
        for keys in self._routing.keys_of_session(hint.session, hint.tenant):
            if not self._has_credentials:
                self._hints["withheld"] += 1
                _log.warning(
                    "nats: a hint for a session of this node was not forwarded: the broker asks for"
                    " no credentials (nats.credentials_file, nats.token_file)"
                )
                return
            passed = HintMessage(hint.node, hint.within_s, keys=tuple(keys[:KEYS_MAX]))
            self._link.publish(subject(self.site, "hint"), passed.pack())
            self._hints["passed_on"] += 1

    def _look_again(self) -> None:
        """Prefetch blocks of open hints that have arrived in the shared tier."""
        now_s, has_looked = self._clock.now(), False
        for _ in range(len(self._open)):
            one = self._open.popleft()
            left_s = one.due_s - now_s
            if left_s <= 0:
                continue
            if one.look_s <= now_s:
                has_looked = True
                if len(self._routing.match(one.keys[:1])):
                    one.keys = one.keys[self._routing.prefetch(one.keys, left_s).resident :]
                    one.hurry(now_s)
                one.wait(now_s)
            if one.keys:
                self._open.append(one)
        self._hints["open"] = len(self._open)
        if has_looked and now_s >= self._refresh_s:
            self._refresh_s = now_s + _REFRESH_S
            self._volumes.look()
