"""A hint to a daemon: what it is about to bring to memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvdepot.client.connections import Session
from kvdepot.client.link import DaemonAwayError, Link, expect
from kvdepot.wire import messages
from kvdepot.wire.frames import FrameKind

_ASK_S_MAX: Final = 5.0
"""One question waits this long at most, so that a connection is not taken for long."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One hint as the daemon knows it; a long prompt, or one in several shards, has many."""

    number: int
    wanted: int


class RemoteHint:
    """As kvdepot.store.read.prefetch.Hint. Over when the daemon is gone, or this client."""

    def __init__(
        self,
        session: Session | None,
        asked: list[Asked],
        away: tuple[float, Callable[[], None]],
    ) -> None:
        self.wanted = sum(each.wanted for each in asked)
        self._session = session
        self._call_s, self._count_away = away
        self._left = [each.number for each in asked if each.number]
        self._brought = dict.fromkeys(self._left, 0)

    @property
    def brought(self) -> int:
        """Blocks that are in memory because of it, so far."""
        if self._session is not None:
            ended = [one for one in self._left if self._ask(self._session, one, 0.0)]
            self._left = [one for one in self._left if one not in ended]
        return sum(self._brought.values())

    def cancel(self) -> None:
        """Bring no more; what is under way still arrives. May be called twice."""
        if self._session is not None:
            for number in self._left:
                self._session.tell(FrameKind.CANCEL_HINT, messages.Number(number).body())

    def wait(self, timeout_s: float) -> bool:
        """True once everything was brought, or will not be."""
        deadline = time.monotonic() + timeout_s
        while self._left and self._session is not None:
            left_s = max(0.0, deadline - time.monotonic())
            number = self._left[0]
            ended = self._ask(self._session, number, min(left_s, _ASK_S_MAX))
            if ended:
                self._left.remove(number)
            elif not left_s:
                return False
        return True

    def _ask(self, session: Session, number: int, timeout_s: float) -> bool:
        try:
            with session.link() as link:
                said = ask(link, number, timeout_s, self._call_s)
        except DaemonAwayError:
            self._count_away()
            return True
        self._brought[number] = said.brought
        return bool(said.ended)


def ask(link: Link, number: int, timeout_s: float, call_s: float) -> messages.Brought:
    """What has become of a hint, after `timeout_s` or when it is over."""
    body = messages.AwaitHint(number, timeout_s).body()
    frame = link.call(FrameKind.AWAIT_HINT, body, timeout_s + call_s)
    return messages.Brought.parse(expect(frame, FrameKind.BROUGHT).body)


def hinted_of(link: Link, kind: FrameKind, body: bytes, limit_s: float) -> messages.Hinted:
    """The answer to a hint."""
    frame = link.call(kind, body, limit_s)
    return messages.Hinted.parse(expect(frame, FrameKind.HINTED).body)
