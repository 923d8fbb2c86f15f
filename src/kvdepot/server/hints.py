"""What a client knows of the future: blocks that will be wanted, and what becomes of sessions."""

from collections.abc import Callable
from typing import Final

import numpy as np

from kvdepot.core.order import SessionState
from kvdepot.errors import ConfigError, WireError
from kvdepot.server.client_holdings import ClientHoldings
from kvdepot.store.mapped import MappedStore
from kvdepot.store.read.prefetch import Hint
from kvdepot.store.sessions import checked_name
from kvdepot.wire import messages
from kvdepot.wire.frames import Channel, Frame, FrameKind

_WAIT_S_MAX: Final = 10.0
"""A thread waits this long for a hint at most; the client asks again."""


class HintRequests:
    """Serves the hints and sessions of one connection."""

    def __init__(self, channel: Channel, client: ClientHoldings, mapped: MappedStore) -> None:
        self._channel = channel
        self._client = client
        self._mapped = mapped
        self.handlers: Final[dict[FrameKind, Callable[[Frame], None]]] = {
            FrameKind.HINT: self._hint,
            FrameKind.HINT_SESSION: self._hint_session,
            FrameKind.AWAIT_HINT: self._await,
            FrameKind.CANCEL_HINT: self._cancel,
            FrameKind.SESSION: self._tell,
        }

    def _hint(self, frame: Frame) -> None:
        head, raw = messages.split(messages.Seconds, frame.body)
        deadline_s = messages.checked_timeout(head.timeout_s)
        keys = messages.KeyBatch(raw).words()
        may = self._client.may_hint()
        self._hinted(frame, *(self._mapped.hint(keys, deadline_s) if may else (None, 0)))

    def _hint_session(self, frame: Frame) -> None:
        head, raw = messages.split(messages.Named, frame.body)
        deadline_s = messages.checked_timeout(head.deadline_s)
        name = _name(raw)
        may = self._client.may_hint()
        answer = self._mapped.hint_session(head.tag, name, deadline_s) if may else (None, 0)
        self._hinted(frame, *answer)

    def _hinted(self, frame: Frame, hint: Hint | None, resident: int) -> None:
        number = self._client.keep_hint(hint) if hint is not None else 0
        wanted = hint.wanted if hint is not None else 0
        answer = messages.Hinted(number, resident, wanted)
        self._channel.send(FrameKind.HINTED, frame.serial, answer.body())

    def _await(self, frame: Frame) -> None:
        asked = messages.AwaitHint.parse(frame.body)
        timeout_s = min(_WAIT_S_MAX, messages.checked_timeout(asked.timeout_s))
        hint = self._client.hint(asked.number)
        ended = hint is None or hint.wait(timeout_s)
        answer = messages.Brought(ended, 0 if hint is None else hint.brought)
        self._channel.send(FrameKind.BROUGHT, frame.serial, answer.body())

    def _cancel(self, frame: Frame) -> None:
        hint = self._client.hint(messages.Number.parse(frame.body).value)
        if hint is not None:
            hint.cancel()

    def _tell(self, frame: Frame) -> None:
        head, raw = messages.split(messages.Told, frame.body)
        if head.state not in (SessionState.ALIVE, SessionState.PENDING, SessionState.CLOSED):
            raise WireError(f"a session in state {head.state}")
        name = _name(raw[: head.name_bytes])
        keys = messages.KeyBatch(raw[head.name_bytes :])
        words = keys.words() if keys else None
        if words is not None and (words[:, 0] != np.frombuffer(head.tag, np.uint64)).any():
            raise WireError("a session with keys of another namespace")
        count = self._mapped.tell(head.tag, name, words, SessionState(head.state), head.start)
        self._channel.send(FrameKind.NUMBER, frame.serial, messages.Number(count).body())


def _name(raw: bytes) -> str:
    try:
        return checked_name(messages.checked_text(raw, "a session's name"))
    except ConfigError as error:
        raise WireError(str(error)) from error
