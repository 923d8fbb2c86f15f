"""The daemon: one process that owns a store, and serves it to the others on a machine.

One thread, the loop, waits for all clients and answers what it can at once, in the order in which
it was asked; threads that share the interpreter would make each other wait. What may take long goes
to a worker thread, together with its connection, until no more requests come. Bytes of blocks move
through memory that the clients map, never through here.
"""

import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import kvdepot
from kvdepot.config.settings import Config
from kvdepot.core.depot import FlushReport
from kvdepot.core.log import RateLimitedLog
from kvdepot.daemon.server.client_resources import ClientLimits, ClientResources, ServerCounters
from kvdepot.daemon.server.connection import Connection
from kvdepot.daemon.server.listener import Listener
from kvdepot.daemon.server.shared_memory import SharedMemory
from kvdepot.daemon.wire.frames import Channel
from kvdepot.daemon.wire.messages import NO_TOKEN
from kvdepot.daemon.wire.versions import PROTOCOL
from kvdepot.store.open import assemble
from kvdepot.store.store import Store

_SWITCH_S: Final = 0.00005
"""How long a thread may keep the interpreter while another wants it. A lookup takes less; with the
usual 5 ms it would wait for whatever else is going on."""
_STOP_S: Final = 30.0
_PAUSE_S: Final = 0.1
_IDLE_S: Final = 5.0
"""A worker thread without work for this long ends."""
Job = Callable[[], None]
_log: Final = RateLimitedLog("kvdepot.server")


class Daemon:
    """Serves the store of `config` on a listener, from `run` until `stop`."""

    def __init__(
        self, config: Config, listener: Listener, limits: ClientLimits | None = None
    ) -> None:
        self.config = replace(config, dram=replace(config.dram, shared=True))
        self.store: Store = assemble(self.config)
        self.memory = SharedMemory(self.store.engine)
        self.limits = limits or ClientLimits()
        self.counters = ServerCounters()
        self.instance = os.urandom(16)
        """Of this run: clients know by it that what they had put to another one may be gone."""
        self.settings_file: Path | None = None
        """Where the settings come from; `kvdepot tiers --save` changes it."""
        self.settings_elsewhere: list[str] = []
        """Settings that this file does not decide: they were given beside it."""
        self._listener = listener
        self._workers = WorkerThreads("kvdepot-client")
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._changed = threading.Condition()
        self._clients: dict[bytes, ClientResources] = {}
        self._connections: set[Connection] = set()
        self._idle: dict[int, Connection] = {}
        """By descriptor; changed by the loop only."""
        self._returned: list[Connection] = []
        self._watched: dict[int, ClientResources] = {}
        """By descriptor of the client's process; changed by the loop only."""
        self._forgotten: list[ClientResources] = []
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
                    if fd == self._wake:
                        self._take_returned()
                    elif fd == self._listener.fileno():
                        self._accept()
                    elif fd in self._watched:
                        self._watched[fd].hang_up(Channel.cut)
                        self._unwatch(fd)
                    elif fd in self._idle:
                        self._idle[fd].on_readable()
        finally:
            sys.setswitchinterval(before)

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    def stop(self) -> None:
        """Make `run` return. May be called from a signal handler, and twice."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    def close(self, timeout_s: float = _STOP_S) -> FlushReport:
        """End all clients' sessions, write everything down, remove the socket."""
        with self._changed:
            idle = [*self._idle.values(), *self._returned]
            others = self._connections.difference(idle)
        for connection in others:
            connection.channel.cut()
        for connection in idle:
            connection.end()
        with self._changed:
            self._changed.wait_for(lambda: not self._connections, timeout_s)
        self._workers.close()
        self._close_forgotten()
        report = self.store.close(timeout_s)
        self._listener.close()
        os.close(self._wake)
        return report

    def join_client(self, token: bytes, channel: Channel, protocol: int) -> ClientResources | None:
        """The client that a new connection belongs to; made if it asks for a new session."""
        with self._changed:
            client = self._clients.get(token)
            if client is not None and client.peer.uid != channel.peer().uid:
                return None
            if token == NO_TOKEN and len(self._clients) < self.limits.clients:
                client = ClientResources(
                    self.store.engine, self.limits, self.counters, channel.peer(), protocol
                )
                self._clients[client.token] = client
                self.counters.count("sessions")
        return client if client is not None and client.join(channel) else None

    def admits(self, channel: Channel) -> bool:
        return self._listener.admits(channel)

    def forget(self, client: ClientResources) -> None:
        with self._changed:
            self._clients.pop(client.token, None)
            self._forgotten.append(client)
        os.eventfd_write(self._wake, 1)

    def ended(self, connection: Connection) -> None:
        with self._changed:
            self._connections.discard(connection)
            self._changed.notify_all()

    def run_in_thread(self, connection: Connection, job: Job) -> None:
        """An idle connection is to be served by a worker thread. Called by the loop."""
        fd = connection.channel.fileno()
        del self._idle[fd]
        self._poll.unregister(fd)
        self._workers.run(job)

    def return_to_loop(self, connection: Connection) -> None:
        """A connection is idle again. Called by the thread that has served it."""
        with self._changed:
            self._returned.append(connection)
        os.eventfd_write(self._wake, 1)

    def describe(self) -> dict[str, Any]:
        """The clients, and what has happened, as plain values."""
        with self._changed:
            clients = list(self._clients.values())
        return {
            "pid": os.getpid(),
            "version": kvdepot.__version__,
            "protocol": PROTOCOL,
            "socket": str(self._listener.path),
            "settings_file": str(self.settings_file) if self.settings_file else None,
            "settings_elsewhere": self.settings_elsewhere,
            "uptime_s": time.monotonic() - self._started,
            "is_prefaulted": self.memory.is_prefaulted(),
            "sessions": [client.describe() for client in clients],
            "counters": self.counters.as_dict(),
        }

    def _take_returned(self) -> None:
        os.eventfd_read(self._wake)
        with self._changed:
            returned, self._returned = self._returned, []
        for connection in returned:
            self._watch(connection.client)
            fd = connection.channel.fileno()
            self._idle[fd] = connection
            self._poll.register(fd, select.POLLIN)

        self._close_forgotten()

    def _close_forgotten(self) -> None:
        with self._changed:
            forgotten, self._forgotten = self._forgotten, []
        for client in forgotten:
            self._unwatch(client.pidfd)
            if client.pidfd >= 0:
                os.close(client.pidfd)

    def _watch(self, client: ClientResources | None) -> None:
        """Notice the end of a client's process, which need not close its sockets."""
        if client is not None and client.pidfd >= 0 and client.pidfd not in self._watched:
            self._watched[client.pidfd] = client
            self._poll.register(client.pidfd, select.POLLIN)

    def _unwatch(self, pidfd: int) -> None:
        if self._watched.pop(pidfd, None) is not None:
            self._poll.unregister(pidfd)

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
            self.counters.count("refused")
            _log.warning("connection refused: %d are open", len(self._connections))
            connected.close()
            return
        self.counters.count("connections")
        self._workers.run(connection.serve_frames)


class WorkerThreads:
    """As many threads as there are jobs at once: starts one for a job unless one is free."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0
        self._closed = False

    def run(self, job: Job) -> None:
        """Have a job done. Does not block."""
        with self._lock:
            needed = not self._free
            if not needed:
                self._free -= 1
        if needed:
            thread = threading.Thread(target=self._work, args=(job,), name=self._name, daemon=True)
            thread.start()
        else:
            self._jobs.put(job)

    def close(self) -> None:
        """Threads end that are free, and those that are not when their job is done."""
        with self._lock:
            free, self._free, self._closed = self._free, 0, True
        for _ in range(free):
            self._jobs.put(None)

    def _work(self, first: Job) -> None:
        job: Job | None = first
        while job is not None:
            try:
                job()
            except Exception as error:  # this thread is counted on, whatever a job does
                _log.error("a job of the daemon failed by a bug in kvdepot", cause=error)
            with self._lock:
                if self._closed:
                    return
                self._free += 1
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._free:
                        self._free -= 1
                        return
                # `run` or `close` has counted on this thread just now.
                job = self._jobs.get()
