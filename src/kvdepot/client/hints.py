"""Telling a daemon of the future: sessions and hints, in parts that fit in a frame."""

from collections.abc import Sequence

from kvdepot.client.get import batches, keys_of
from kvdepot.client.hint import Asked, hinted_of
from kvdepot.client.link import Link
from kvdepot.core.block import BlockKey
from kvdepot.core.order import SessionState
from kvdepot.index.table import Keys
from kvdepot.wire import messages
from kvdepot.wire.frames import FrameKind


class Teller:
    """Tells of one session over one connection."""

    def __init__(self, link: Link, name: str, state: SessionState, call_s: float) -> None:
        self._link = link
        self._name = name.encode()
        self._state = state
        self._call_s = call_s

    def tell(self, tag: bytes, words: Keys | None) -> int:
        """The session's prompt in one namespace. Returns how many of its blocks are there.

        A prompt of many parts is remembered first, and then told of as a whole.
        """
        parts = list(batches(words)) if words is not None else []
        if words is None or len(parts) == 1:
            return self._say(tag, b"" if words is None else words.tobytes(), 0, self._state)
        for part in parts:
            raw = words[part.start : part.stop].tobytes()
            self._say(tag, raw, part.start, SessionState.ALIVE)
        return self._say(tag, b"", 0, self._state)

    def _say(self, tag: bytes, raw: bytes, start: int, state: SessionState) -> int:
        head = messages.Told(tag, state, len(self._name), start)
        return self._link.number(FrameKind.SESSION, head.body() + self._name + raw, self._call_s)


def hint_keys(
    link: Link, keys: Sequence[BlockKey], deadline_s: float, call_s: float
) -> list[Asked]:
    """Hint at a prompt, as far as it is there."""
    asked = []
    for part in batches(keys):
        body = messages.Seconds(deadline_s).body() + keys_of(keys, part)
        said = hinted_of(link, FrameKind.HINT, body, call_s)
        asked.append(Asked(said.number, said.wanted))
        if said.resident < len(part):
            break
    return asked


def hint_sessions(
    link: Link, tags: Sequence[bytes], name: str, deadline_s: float, call_s: float
) -> list[Asked]:
    """Hint at what a name stands for in each namespace."""
    asked = []
    for tag in tags:
        body = messages.Named(tag, deadline_s).body() + name.encode()
        said = hinted_of(link, FrameKind.HINT_SESSION, body, call_s)
        asked.append(Asked(said.number, said.wanted))
    return asked
