"""Being attached to a daemon, and becoming so again after it was gone.

No thread watches: a call that finds the session broken attaches anew, if the last attempt was long
enough ago; otherwise it is answered at once, as a miss.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kvdepot.client.connections import Session
from kvdepot.client.link import DaemonAwayError, Link
from kvdepot.core.clock import Clock
from kvdepot.core.depot import NamespaceHandle
from kvdepot.errors import ConfigError, DaemonError
from kvdepot.wire import messages
from kvdepot.wire.frames import FrameKind

_PAUSE_FIRST_S: Final = 0.05
_PAUSE_MAX_S: Final = 2.0
_SHARE: Final = 10
"""An attempt that took long is followed by a pause this many times as long."""


class Attachment:
    """Thread-safe."""

    def __init__(self, path: str, clock: Clock, call_s: float) -> None:
        self.path = path
        self.call_s = call_s
        """How much longer than asked for an answer may take."""
        self.reason = ""
        """Why there is no session; empty if there is one."""
        self._clock = clock
        self._lock = threading.Lock()
        self._spaces: dict[bytes, NamespaceHandle] = {}
        self._session: Session | None = None
        self._pause_s = _PAUSE_FIRST_S
        self._retry_at = 0.0
        self._counts = {"attached": 0, "lost": 0, "away": 0}

    def begin(self) -> messages.Welcome:
        """Attach for the first time. Raises DaemonError with the reason when that fails."""
        with self._lock:
            try:
                self._session = self._attach()
            except DaemonAwayError as error:
                raise DaemonError(
                    self.path,
                    f"no daemon answers: {error}",
                    hint=f"start one: kvdepot serve --socket {self.path}",
                ) from error
            return self._session.welcome

    def session(self) -> Session:
        """The session in force, or a new one. DaemonAwayError when there is none to be had."""
        with self._lock:
            current = self._session
            if current is not None and current.is_usable():
                return current
            if current is not None:
                self._session = None
                self._counts["lost"] += 1
                current.end()
            if self._clock.now() < self._retry_at:
                raise DaemonAwayError(self.reason)
            self._session = self._try_again()
            return self._session

    @contextmanager
    def link(self) -> Iterator[tuple[Session, Link]]:
        """A connection for one call."""
        session = self.session()
        with session.link() as link:
            yield session, link

    def register(self, space: NamespaceHandle) -> None:
        """Tell the daemon, and every later one, of a namespace. ConfigError when it refuses.

        Without a daemon it is told later.
        """
        try:
            with self.link() as (_, link):
                _register(link, space, self.call_s)
        except DaemonAwayError:
            self.count_away()
        with self._lock:
            self._spaces[space.tag] = space

    def count_away(self) -> None:
        """A call was answered without the daemon."""
        with self._lock:
            self._counts["away"] += 1

    def describe(self) -> dict[str, Any]:
        with self._lock:
            return {
                "socket": self.path,
                "is_attached": self._session is not None,
                "reason": self.reason,
                **self._counts,
            }

    def end(self) -> None:
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.end()

    def _try_again(self) -> Session:
        """Lock held."""
        began = self._clock.now()
        try:
            session = self._attach()
        except (DaemonAwayError, DaemonError) as error:
            self.reason = str(error)
            now = self._clock.now()
            self._retry_at = now + max(self._pause_s, _SHARE * (now - began))
            self._pause_s = min(2 * self._pause_s, _PAUSE_MAX_S)
            raise DaemonAwayError(self.reason) from error
        return session

    def _attach(self) -> Session:
        """Lock held."""
        session = Session(self.path)
        self.reason = ""
        try:
            with session.link() as link:
                for space in self._spaces.values():
                    self._register_again(link, space)
        except DaemonAwayError:
            session.end()
            raise
        self._pause_s = _PAUSE_FIRST_S
        self._counts["attached"] += 1
        return session

    def _register_again(self, link: Link, space: NamespaceHandle) -> None:
        """A new daemon may have less room; it then answers REFUSED and absent by itself."""
        try:
            _register(link, space, self.call_s)
        except ConfigError as error:
            self.reason = str(error)


def _register(link: Link, space: NamespaceHandle, call_s: float) -> None:
    description = json.dumps(space.namespace.description(), sort_keys=True).encode()
    head = messages.Register(space.tag, space.block_bytes, space.chunk_bytes)
    link.number(FrameKind.REGISTER, head.body() + description, call_s)
