"""The daemon: one process that owns a store, and serves it to the others on a machine.

One thread, the loop, waits for all clients and answers what it can at once, in the order in which
it was asked; threads that share the interpreter would make each other wait. What may take long goes
to a thread of the crew, together with its connection, until that is at rest again. Nobody polls.
Bytes of blocks move through memory that the clients map, never through here.

Admin requests and a dashboard would be another listener beside this one; they need `describe` and
the store.
"""

import os
import select
import sys
import threading
import time
from dataclasses import replace
from typing import Any, Final

import kvdepot
from kvdepot.core.config import Config
from kvdepot.core.depot import FlushReport
from kvdepot.server.client_holdings import Session
from kvdepot.server.connection import Connection
from kvdepot.server.limits import Limits, Tally
from kvdepot.server.listener import Listener
from kvdepot.server.threads import Crew, Job
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.wire.channel import Channel
from kvdepot.wire.frames import PROTOCOL
from kvdepot.wire.messages import NO_TOKEN

_SWITCH_S: Final = 0.0002
"""How long a thread may keep the interpreter while another wants it. A lookup takes less; with the
usual 5 ms it would wait for whatever else is going on."""
_STOP_S: Final = 30.0
_PAUSE_S: Final = 0.1


def shared(config: Config) -> Config:
    """The configuration with memory that other processes can map."""
    return replace(config, dram=replace(config.dram, shared=True))


class Daemon:
    """Serves the store of `config` on a listener, from `run` until `stop`."""

    def __init__(self, config: Config, listener: Listener, limits: Limits | None = None) -> None:
        self.config = shared(config)
        self.store: Store = assemble(self.config)
        self.places = self.store.mapped()
        self.limits = limits or Limits()
        self.tally = Tally()
        self._listener = listener
        self._crew = Crew("kvdepot-client")
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._changed = threading.Condition()
        self._sessions: dict[bytes, Session] = {}
        self._connections: set[Connection] = set()
        self._at_rest: dict[int, Connection] = {}
        """By descriptor; changed by the loop only."""
        self._returned: list[Connection] = []
        self._poll = select.poll()
        self._stopping = False
        self._started = time.monotonic()

    def run(self) -> None:
        """Serve clients until `stop`. Blocks."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        self._poll.register(self._wake, select.POLLIN)
        self._poll.register(self._listener, select.POLLIN)
        try:
            while not self._stopping:
                for fd, _ in self._poll.poll():
                    self._attend(fd)
        finally:
            sys.setswitchinterval(before)

    def stop(self) -> None:
        """Make `run` return. May be called from a signal handler, and twice."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    def close(self, timeout_s: float = _STOP_S) -> FlushReport:
        """End all sessions, write everything down, remove the socket."""
        with self._changed:
            resting = [*self._at_rest.values(), *self._returned]
            others = self._connections.difference(resting)
        for connection in others:
            connection.channel.cut()
        for connection in resting:
            connection.end()
        with self._changed:
            self._changed.wait_for(lambda: not self._connections, timeout_s)
        report = self.store.close(timeout_s)
        self._listener.close()
        os.close(self._wake)
        return report

    def session(self, token: bytes, channel: Channel) -> Session | None:
        """The session that a new connection is in; made if it asks for a new one."""
        with self._changed:
            session = self._sessions.get(token)
            if token == NO_TOKEN and len(self._sessions) < self.limits.clients:
                session = Session(self.places, self.limits, self.tally, channel.peer())
                self._sessions[session.token] = session
                self.tally.count("sessions")
        if session is None or not session.join(channel):
            return None
        return session

    def forget(self, session: Session) -> None:
        """A session has ended."""
        with self._changed:
            self._sessions.pop(session.token, None)

    def ended(self, connection: Connection) -> None:
        """Nothing is left of a connection."""
        with self._changed:
            self._connections.discard(connection)
            self._changed.notify_all()

    def hand_over(self, connection: Connection, job: Job) -> None:
        """A connection at rest is to be served by a thread. Called by the loop."""
        fd = connection.channel.fileno()
        del self._at_rest[fd]
        self._poll.unregister(fd)
        self._crew.do(job)

    def take_back(self, connection: Connection) -> None:
        """A connection is at rest again. Called by the thread that has served it."""
        with self._changed:
            self._returned.append(connection)
        os.eventfd_write(self._wake, 1)

    def describe(self) -> dict[str, Any]:
        """Who is here, and what has happened, as plain values."""
        with self._changed:
            sessions = list(self._sessions.values())
        return {
            "pid": os.getpid(),
            "version": kvdepot.__version__,
            "protocol": PROTOCOL,
            "socket": str(self._listener.path),
            "uptime_s": time.monotonic() - self._started,
            "is_prefaulted": self.places.is_prefaulted(),
            "sessions": [session.describe() for session in sessions],
            "counters": self.tally.as_dict(),
        }

    def _attend(self, fd: int) -> None:
        """See to what the loop was woken for."""
        if fd == self._wake:
            self._take_in()
        elif fd == self._listener.fileno():
            self._accept()
        elif fd in self._at_rest:
            self._at_rest[fd].take_turn()

    def _take_in(self) -> None:
        os.eventfd_read(self._wake)
        with self._changed:
            returned, self._returned = self._returned, []
        for connection in returned:
            fd = connection.channel.fileno()
            self._at_rest[fd] = connection
            self._poll.register(fd, select.POLLIN)

    def _accept(self) -> None:
        connected = self._listener.accept()
        if connected is None:
            # No descriptors are left, or the client went: neither may make this loop spin.
            threading.Event().wait(_PAUSE_S)
            return
        with self._changed:
            full = len(self._connections) >= self.limits.clients * self.limits.connections
            if not full:
                connection = Connection(self, Channel(connected))
                self._connections.add(connection)
        if full:
            self.tally.count("refused")
            connected.close()
            return
        self.tally.count("connections")
        self._crew.do(connection.meet)
