"""Telling a daemon what will be wanted: sessions and hints, in parts that fit in a frame."""

import time
from collections.abc import Sequence
from typing import Final

from kvdepot.core.block import BlockKey
from kvdepot.core.depot import PrefetchHint
from kvdepot.core.keys import Keys
from kvdepot.core.order import SessionState
from kvdepot.daemon.client.connections import Connections, DaemonAwayError, Link, expect
from kvdepot.daemon.client.get import batches, keys_of
from kvdepot.daemon.wire import messages
from kvdepot.daemon.wire.frames import FrameKind

_ASK_S_MAX: Final = 5.0
"""One question waits this long at most, so that a connection is not taken for long."""


class RemoteHint(PrefetchHint):
    """Over when the daemon is gone, or this client. A long prompt, or one in several shards, is
    several hints of the daemon.
    """

    def __init__(self, connections: Connections | None, hinted: list[messages.Hinted]) -> None:
        self.wanted = sum(each.wanted for each in hinted)
        self.resident = sum(each.resident for each in hinted)
        self._connections = connections
        self._left = [each.number for each in hinted if each.number]
        self._brought = dict.fromkeys(self._left, 0)

    @property
    def brought(self) -> int:
        if self._connections is not None:
            self._left = [one for one in self._left if not self._ended(self._connections, one, 0.0)]
        return sum(self._brought.values())

    def cancel(self) -> None:
        if self._connections is not None:
            for number in self._left:
                body = messages.Number(number).body()
                self._connections.tell(FrameKind.CANCEL_HINT, body)

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._left and self._connections is not None:
            left_s = max(0.0, deadline - time.monotonic())
            if self._ended(self._connections, self._left[0], min(left_s, _ASK_S_MAX)):
                self._left.pop(0)
            elif not left_s:
                return False
        return True

    def _ended(self, connections: Connections, number: int, timeout_s: float) -> bool:
        """Ask what has become of a hint, after `timeout_s` or when it is over."""
        body = messages.WaitHint(number, timeout_s).body()
        try:
            with connections.link() as link:
                frame = link.call(FrameKind.AWAIT_HINT, body, timeout_s + connections.call_s)
                said = messages.HintStatus.parse(expect(frame, FrameKind.BROUGHT).body)
        except DaemonAwayError:
            connections.count_away()
            return True
        self._brought[number] = said.brought
        return bool(said.ended)


def tell_session(
    link: Link, tag: bytes, words: Keys | None, name: str, state: SessionState, call_s: float
) -> int:
    """A session's prompt in one namespace. Returns how many of its blocks are there.

    A prompt of many parts is remembered first, and then told of as a whole.
    """

    def tell(raw: bytes, start: int, state: SessionState) -> int:
        encoded = name.encode()
        head = messages.SessionUpdate(tag, state, len(encoded), start)
        return link.number(FrameKind.SESSION, head.body() + encoded + raw, call_s)

    parts = list(batches(words)) if words is not None else []
    if words is None or len(parts) == 1:
        return tell(b"" if words is None else words.tobytes(), 0, state)
    for part in parts:
        tell(words[part.start : part.stop].tobytes(), part.start, SessionState.ALIVE)
    return tell(b"", 0, state)


def hint_keys(
    link: Link, keys: Sequence[BlockKey], deadline_s: float, call_s: float
) -> list[messages.Hinted]:
    """Hint at a prompt, as far as it is there."""
    found = []
    for part in batches(keys):
        body = messages.Seconds(deadline_s).body() + keys_of(keys, part)
        found.append(_hint(link, FrameKind.HINT, body, call_s))
        if found[-1].resident < len(part):
            break
    return found


def hint_sessions(
    link: Link, tags: Sequence[bytes], name: str, deadline_s: float, call_s: float
) -> list[messages.Hinted]:
    """Hint at what a name stands for in each namespace."""
    bodies = [messages.HintBySession(tag, deadline_s).body() + name.encode() for tag in tags]
    return [_hint(link, FrameKind.HINT_SESSION, body, call_s) for body in bodies]


def _hint(link: Link, kind: FrameKind, body: bytes, call_s: float) -> messages.Hinted:
    frame = link.call(kind, body, call_s)
    return messages.Hinted.parse(expect(frame, FrameKind.HINTED).body)
