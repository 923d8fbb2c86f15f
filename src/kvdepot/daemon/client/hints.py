"""Sends sessions and prefetch hints to a daemon, in parts that fit in a frame."""

import time
from typing import Final

from kvdepot.core.block import TAG_BYTES
from kvdepot.core.depot import PrefetchHint
from kvdepot.core.keys import Keys, tag_from_hex
from kvdepot.core.sessions import SessionState
from kvdepot.daemon.client.connections import (
    Connections,
    DaemonAwayError,
    Link,
    batches,
    expect,
    keys_of,
)
from kvdepot.daemon.wire import frames
from kvdepot.daemon.wire.frames import Flag, FrameKind

_ASK_S_MAX: Final = 5.0
"""Longest wait of one request, so that a connection is soon free again."""


class RemoteHint(PrefetchHint):
    """Prefetch in a daemon; ends with the daemon or this client.

    A long prompt, or one in several shards, is several hints of the daemon.
    """

    def __init__(
        self,
        connections: Connections | None,
        hinted: list[frames.Hinted],
        *,
        may_come: bool = True,
    ) -> None:
        self.wanted = sum(each.wanted for each in hinted)
        self.resident = sum(each.resident for each in hinted)
        self.may_come = may_come
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
                body = frames.Number(number).body()
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
        """Wait up to `timeout_s` for a hint to end. True if it has, or no daemon answers."""
        body = frames.WaitHint(number, timeout_s).body()
        try:
            with connections.link() as link:
                frame = link.call(FrameKind.AWAIT_HINT, body, timeout_s + connections.call_s)
                said = frames.HintStatus.parse(expect(frame, FrameKind.BROUGHT).body)
        except DaemonAwayError:
            connections.count_away()
            return True
        self._brought[number] = said.brought
        return bool(said.ended)


def tell_session(
    link: Link, tag: bytes, words: Keys | None, name: str, state: SessionState, call_s: float
) -> int:
    """Send a session's prompt in one namespace and its state. Returns how many blocks are stored.

    The parts of a long prompt are sent first, then the state of the whole session.
    """

    def send(raw: bytes, start: int, state: SessionState) -> int:
        encoded = name.encode()
        head = frames.SessionUpdate(tag, state, len(encoded), start)
        return link.number(FrameKind.SESSION, head.body() + encoded + raw, call_s)

    parts = list(batches(words)) if words is not None else []
    if words is None or len(parts) == 1:
        return send(b"" if words is None else words.tobytes(), 0, state)
    for part in parts:
        send(words[part.start : part.stop].tobytes(), part.start, SessionState.ALIVE)
    return send(b"", 0, state)


def hint_keys(
    link: Link, keys: Keys, deadline_s: float, call_s: float
) -> tuple[list[frames.Hinted], bool]:
    """Prefetch the stored blocks of a prompt, up to the first missing one. Also returns whether
    missing ones may come from other nodes.
    """
    found, may_come = [], True
    for part in batches(keys):
        body = frames.Seconds(deadline_s).body() + keys_of(keys, part)
        hinted, flags = _hint(link, FrameKind.HINT, body, call_s)
        found.append(hinted)
        may_come = not flags & Flag.NONE_COMES
        if hinted.resident < len(part):
            break
    return found, may_come


def hint_session(
    link: Link, namespace: str, name: str, deadline_s: float, call_s: float
) -> frames.Hinted:
    """Prefetch the prompts of a session, in one namespace or all that have it."""
    tag = tag_from_hex(namespace) if namespace else bytes(TAG_BYTES)
    body = frames.HintBySession(tag, deadline_s).body() + name.encode()
    return _hint(link, FrameKind.HINT_SESSION, body, call_s)[0]


def _hint(link: Link, kind: FrameKind, body: bytes, call_s: float) -> tuple[frames.Hinted, int]:
    """The answer, and the flags of its frame."""
    frame = link.call(kind, body, call_s)
    return frames.Hinted.parse(expect(frame, FrameKind.HINTED).body), frame.flags
