"""The daemon: one process that owns a store and serves it to the other processes of a machine.

One thread, the loop, waits for all clients and answers short requests in the order of arrival:
several threads would wait for each other's interpreter lock. A request that may take long is passed
with its connection to a worker thread until no more requests follow. The bytes of blocks move
through memory that the clients map, never through sockets.
"""

import contextlib
import json
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import kvdepot
from kvdepot.config.settings import Config
from kvdepot.core.depot import FlushReport
from kvdepot.core.log import RateLimitedLog
from kvdepot.core.namespace import FORMAT_VERSION
from kvdepot.daemon.server.client_resources import (
    HELLO_TIMEOUT_S,
    ClientLimits,
    ClientResources,
    ServerCounters,
    SharedMemory,
)
from kvdepot.daemon.server.listener import Listener
from kvdepot.daemon.server.requests import ClientGoneError, RequestHandler
from kvdepot.daemon.wire import frames
from kvdepot.daemon.wire.frames import NO_TOKEN, Channel, Frame, FrameKind
from kvdepot.daemon.wire.versions import (
    PROTOCOL,
    PROTOCOL_OLDEST,
    REFUSED_FOR_VERSIONS,
    SpokenVersions,
)
from kvdepot.errors import StoreClosedError, WireError
from kvdepot.format.record import VERSION as RECORD_VERSION
from kvdepot.store.open import assemble
from kvdepot.store.store import Store

_SWITCH_S: Final = 0.00005
"""Switch interval of the interpreter. A lookup takes less time; with the default of 5 ms it would
wait for other threads."""
_STOP_S: Final = 30.0
_PAUSE_S: Final = 0.1
_LOOK_S: Final = 1.0
"""Interval at which clients that hold leases for too long, and silent connections, are looked for.
"""
_WAKES_MAX: Final = 4096
_CLOSED: Final = select.POLLHUP | select.POLLERR
_IDLE_S: Final = 5.0
"""A worker thread ends after this time without work."""
QUICK: Final = frozenset(
    {
        FrameKind.MATCH,
        FrameKind.LEASE,
        FrameKind.WHERE,
        FrameKind.RELEASE,
        FrameKind.ABANDON,
        FrameKind.CANCEL_HINT,
    }
)
"""Requests that never wait for a disk, for memory or for the client."""
_STAY_S: Final = 0.02
"""Time for which a worker thread waits for the next request before the loop takes over."""
_BROKEN: Final = (OSError, ClientGoneError, StoreClosedError)
_SPOKEN: Final = SpokenVersions(PROTOCOL_OLDEST, PROTOCOL, FORMAT_VERSION, RECORD_VERSION)
Job = Callable[[], None]
_log: Final = RateLimitedLog("kvdepot.server")


class Connection:
    """One client connection. Used by one thread at a time: the loop, or a worker thread."""

    def __init__(self, daemon: "Daemon", channel: Channel) -> None:
        self.channel = channel
        self.since_s = time.monotonic()
        self._daemon = daemon
        self._pid = channel.peer().pid
        self.client: ClientResources | None = None
        self._handler: RequestHandler | None = None

    @property
    def is_over(self) -> bool:
        """True if its client was disconnected, or its process has ended."""
        return self.client is not None and self.client.over

    def on_readable(self) -> None:
        """Serve a frame, or pass it to a worker. Called by the loop when one arrived. Does not
        block.
        """
        if self._handler is None:
            self._daemon.loop.run_in_thread(self, self.serve_frames)
            return
        try:
            frame = self.channel.receive_now()
            if frame is not None and frame.kind in QUICK:
                self._serve(frame)
                return
            job = self.end if frame is None else partial(self.serve_frames, frame)
        except Exception as error:  # see _drop_client
            job = partial(self._drop_client, error)
        self._daemon.loop.run_in_thread(self, job)

    def end(self) -> None:
        """Close. Release the client's resources if this was its last connection."""
        gone = True
        try:
            self.channel.cut()
            gone = self.client is not None and self.client.leave(self.channel)
        finally:  # a daemon that stops waits for all connections
            if self.client is not None and gone:
                self._daemon.forget(self.client)
                _log.info("client disconnected: process %d", self._pid)
            self.channel.close()
            self._daemon.ended(self)

    def serve_frames(self, frame: Frame | None = None) -> None:
        """Serve a frame or a new client, then the frames that follow soon; then return to the loop.

        Called in a worker thread. Blocks.
        """
        self.channel.is_patient = True
        try:
            if frame is None:
                self._handler = self._greet()
            else:
                self._serve(frame)
            if self._handler is not None and self._serve_on():
                self._return_to_loop()
                return
        except Exception as error:  # see _drop_client
            self._drop_client(error)
        else:
            self.end()

    def _serve_on(self) -> bool:
        """Serve frames until none arrives within _STAY_S. False if the client has closed."""
        with contextlib.suppress(BlockingIOError):
            while not self.is_over:
                frame = self.channel.receive(_STAY_S)
                if frame is None:
                    return False
                self._serve(frame)
        return True

    def _return_to_loop(self) -> None:
        self.channel.is_patient = False
        if not self._daemon.loop.take_back(self):
            self.end()

    def _serve(self, frame: Frame) -> None:
        if self._handler is None or self.is_over:
            return
        self._daemon.counters.count("requests")
        self._handler.serve(frame)

    def _drop_client(self, error: Exception) -> None:
        """End the session after an error. The client keeps what it holds until it has closed its
        connections, or its process has ended: it may be using the memory.

        Called for every exception of a handler, because the client would wait for its answer for
        ever. The request may be half done, so all resources of the client are released in the end.
        """
        if isinstance(error, WireError):
            self._daemon.counters.count("malformed")
            _log.warning("malformed frame from process %d, disconnected: %s", self._pid, error)
        elif isinstance(error, _BROKEN):
            _log.info("process %d disconnected: %s", self._pid, error)
        else:
            self._daemon.counters.count("failed")
            said = "a request of process %d failed by a bug in kvdepot, disconnected"
            _log.error(said, self._pid, cause=error)
        if self.client is None:
            self.end()
        else:
            self.client.hang_up()
            self._return_to_loop()

    def _greet(self) -> RequestHandler | None:
        """Receive HELLO and answer it. Returns the handler of the client; None
        if it was refused.
        """
        frame = self.channel.receive(HELLO_TIMEOUT_S)
        if frame is None:
            return None
        if frame.kind is not FrameKind.HELLO:
            raise WireError(f"{frame.kind.name} instead of HELLO")
        hello = frames.Hello.parse(frame.body)
        if hello.magic != frames.MAGIC:
            raise WireError("a HELLO of another protocol")
        newest = hello.newest or hello.oldest
        theirs = SpokenVersions(hello.oldest, newest, hello.format, hello.record)
        protocol = _SPOKEN.common(theirs)
        if not protocol:
            self._refuse(frame.serial, f"{REFUSED_FOR_VERSIONS}{theirs}")
            return None
        daemon = self._daemon
        if not daemon.listener.admits(self.channel):
            self._refuse(frame.serial, f"user {self.channel.peer().uid} may not use it")
            return None
        client = daemon.join_client(hello.token, self.channel, protocol)
        if client is None:
            self._refuse(frame.serial, "there are too many clients, or the session is over")
            return None
        self.client = client
        is_new = hello.token == frames.NO_TOKEN
        self._welcome(frame.serial, client, is_new=is_new)
        if is_new:
            _log.info("client attached: process %d of user %d", self._pid, client.peer.uid)
        return RequestHandler(
            self.channel, client, daemon.store, daemon.memory, daemon.config, daemon.describe
        )

    def _refuse(self, serial: int, reason: str) -> None:
        self._daemon.counters.count("refused")
        _log.warning("client refused: process %d: %s", self._pid, reason)
        refusal = {"reason": reason, "daemon": str(_SPOKEN), "pid": os.getpid()}
        self.channel.send(FrameKind.REFUSED, serial, json.dumps(refusal).encode())

    def _welcome(self, serial: int, client: ClientResources, *, is_new: bool) -> None:
        config, memory = self._daemon.config, self._daemon.memory
        arena_bytes, *cxl_bytes, staging_bytes = memory.nbytes
        body = frames.Welcome(
            token=client.token,
            instance=self._daemon.instance,
            pid=os.getpid(),
            block_tokens=config.block_tokens,
            read_timeout_s=config.read_timeout,
            put_timeout_s=config.writeback.put_timeout,
            arena_bytes=arena_bytes,
            cxl_bytes=sum(cxl_bytes),
            staging_bytes=staging_bytes,
            verify=config.dram.verify,
            prefault=config.dram.prefault,
            protocol=client.protocol,
        ).body()
        if is_new:
            self.channel.send_with(memory.descriptors, FrameKind.WELCOME, serial, body)
        else:
            self.channel.send(FrameKind.WELCOME, serial, body)


class Loop:
    """Waits for frames on idle connections, for new connections, and for the end of clients'
    processes. Calls what must happen then.
    """

    def __init__(
        self, listener: Listener, workers: "WorkerThreads", on_look: Callable[[], None]
    ) -> None:
        """`on_look` is called every _LOOK_S while there are clients."""
        self._listener = listener
        self._workers = workers
        self._on_look = on_look
        self._woken, self.wake_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """A byte written to `wake_fd` ends the loop's wait."""
        self._lock = threading.Lock()
        """Guards the two lists that other threads append to."""
        self._idle: dict[int, Connection] = {}
        """Idle connections by descriptor. Only the loop changes it."""
        self._silent: dict[int, Connection] = {}
        """Those that have sent nothing, the oldest first. They cost no thread. Only the loop
        changes it."""
        self._returned: list[Connection] = []
        self._watched: dict[int, ClientResources] = {}
        """Clients by pidfd. Only the loop changes it."""
        self._forgotten: list[ClientResources] = []
        self._poll = select.poll()
        self.is_stopping = False
        self._has_ended = False

    def run(self, accept: Callable[[], None]) -> None:
        """Wait and serve until `stop`. `accept` is called for a new connection. Blocks."""
        self._poll.register(self._woken, select.POLLIN)
        self._poll.register(self._listener, select.POLLIN)
        look_s = 0.0
        while not self.is_stopping:
            has_clients = self._idle or self._watched
            events = self._poll.poll(_LOOK_S * 1000 if has_clients else None)
            for fd, event in events:
                if fd == self._woken:
                    self._take_returned()
                elif fd == self._listener.fileno():
                    accept()
                elif fd in self._watched:
                    self._watched[fd].hang_up(Channel.cut)
                    self._unwatch(fd)
                elif fd in self._idle:
                    self._on_event(self._idle[fd], event)
            if has_clients and (now_s := time.monotonic()) >= look_s:
                look_s = now_s + _LOOK_S
                self._on_look()
                while self._silent and self._oldest().since_s < now_s - HELLO_TIMEOUT_S:
                    self.drop_silent()

    def add(self, connection: Connection) -> None:
        """Wait for the HELLO of a new connection. Called by the loop."""
        fd = connection.channel.fileno()
        self._idle[fd] = self._silent[fd] = connection
        self._poll.register(fd, select.POLLIN)

    def drop_silent(self) -> bool:
        """Close the connection that has sent nothing for longest. False: there is none."""
        if not self._silent:
            return False
        connection = self._oldest()
        self._take(connection)
        connection.end()
        return True

    def _oldest(self) -> Connection:
        return next(iter(self._silent.values()))

    def _take(self, connection: Connection) -> None:
        """Do not wait for a connection any more."""
        fd = connection.channel.fileno()
        del self._idle[fd]
        self._silent.pop(fd, None)
        self._poll.unregister(fd)

    def stop(self) -> None:
        self.is_stopping = True
        self._wake()

    def close(self) -> None:
        """Close the descriptors, after all connections have ended."""
        self._close_forgotten()
        os.close(self._woken)
        os.close(self.wake_fd)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the loop is awake
            os.write(self.wake_fd, b"\0")

    def end(self) -> list[Connection]:
        """Take back no more connections. Returns those that no worker thread serves. Called after
        `run`.
        """
        with self._lock:
            self._has_ended = True
            return [*self._idle.values(), *self._returned]

    def run_in_thread(self, connection: Connection, job: Job) -> None:
        """Pass an idle connection to a worker thread. Called by the loop."""
        self._take(connection)
        self._workers.run(job)

    def take_back(self, connection: Connection) -> bool:
        """Wait for frames of a connection; if its client is over, only for the peer to close it.
        Called by the thread that served it. False: the loop has ended.
        """
        with self._lock:
            if self._has_ended:
                return False
            self._returned.append(connection)
        self._wake()
        return True

    def forget(self, client: ClientResources) -> None:
        """Stop watching a client that has ended."""
        with self._lock:
            self._forgotten.append(client)
        self._wake()

    def _on_event(self, connection: Connection, event: int) -> None:
        if event & _CLOSED and connection.channel.fileno() in self._silent:
            self._take(connection)
            connection.end()
        elif not connection.is_over:
            connection.on_readable()
        elif event & _CLOSED:
            self.run_in_thread(connection, connection.end)
        else:  # frames of a client that was disconnected are not read
            self._poll.modify(connection.channel.fileno(), 0)

    def _take_returned(self) -> None:
        os.read(self._woken, _WAKES_MAX)
        with self._lock:
            returned, self._returned = self._returned, []
        for connection in returned:
            self._watch(connection.client)
            fd = connection.channel.fileno()
            self._idle[fd] = connection
            self._poll.register(fd, 0 if connection.is_over else select.POLLIN)
        self._close_forgotten()

    def _close_forgotten(self) -> None:
        with self._lock:
            forgotten, self._forgotten = self._forgotten, []
        for client in forgotten:
            self._unwatch(client.pidfd)
            if client.pidfd >= 0:
                os.close(client.pidfd)

    def _watch(self, client: ClientResources | None) -> None:
        """Watch for the end of a client's process: its child may keep the sockets open."""
        if client is not None and client.pidfd >= 0 and client.pidfd not in self._watched:
            self._watched[client.pidfd] = client
            self._poll.register(client.pidfd, select.POLLIN)

    def _unwatch(self, pidfd: int) -> None:
        if self._watched.pop(pidfd, None) is not None:
            self._poll.unregister(pidfd)


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
        """Identifies this run: clients detect a restart, after which unflushed
        blocks may be lost."""
        self.settings_file: Path | None = None
        """The file of the settings; `kvdepot tiers --save` changes it."""
        self.settings_elsewhere: list[str] = []
        """Settings that were not read from this file, such as those of the command line."""
        self.listener = listener
        self._workers = WorkerThreads("kvdepot-client")
        self.loop = Loop(listener, self._workers, self._end_overdue)
        self._changed = threading.Condition()
        self._clients: dict[bytes, ClientResources] = {}
        self._connections: set[Connection] = set()
        self._started = time.monotonic()

    @property
    def wake_fd(self) -> int:
        """For `signal.set_wakeup_fd`: a signal that another thread receives, or that arrives just
        before the loop waits, does not end the wait by itself.
        """
        return self.loop.wake_fd

    def run(self) -> None:
        """Serve clients until `stop`. Blocks."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        try:
            self.loop.run(self._accept)
        finally:
            sys.setswitchinterval(before)

    def stop(self) -> None:
        """Make `run` return. May be called from a signal handler, and twice."""
        self.loop.stop()

    def close(self, timeout_s: float = _STOP_S) -> FlushReport:
        """End all sessions, flush and close the store, remove the socket.
        Blocks for `timeout_s`.
        """
        idle = self.loop.end()
        with self._changed:
            others = self._connections.difference(idle)
        for connection in others:
            connection.channel.cut()
        for connection in idle:
            connection.end()
        with self._changed:
            self._changed.wait_for(lambda: not self._connections, timeout_s)
        self._workers.close()
        self.store.flush(0.0)  # clients were told of blocks that were evicted unwritten before
        report = self.store.close(timeout_s)
        self.listener.close()
        self.loop.close()
        return report

    def join_client(self, token: bytes, channel: Channel, protocol: int) -> ClientResources | None:
        """Returns the client of a connection; makes one for NO_TOKEN. None if it is refused."""
        with self._changed:
            client = self._clients.get(token)
            if client is not None and client.peer.uid != channel.peer().uid:
                return None
            if token == NO_TOKEN and len(self._clients) < self.limits.clients:
                client = ClientResources(
                    self.store.engine, self.limits, self.counters, channel, protocol
                )
                self._clients[client.token] = client
                self.counters.count("sessions")
        return client if client is not None and client.join(channel) else None

    def forget(self, client: ClientResources) -> None:
        with self._changed:
            self._clients.pop(client.token, None)
        self.loop.forget(client)

    def ended(self, connection: Connection) -> None:
        with self._changed:
            self._connections.discard(connection)
            self._changed.notify_all()

    def describe(self) -> dict[str, Any]:
        """The clients and the counters as plain values."""
        with self._changed:
            clients = list(self._clients.values())
        return {
            "pid": os.getpid(),
            "version": kvdepot.__version__,
            "protocol": PROTOCOL,
            "socket": str(self.listener.path),
            "settings_file": str(self.settings_file) if self.settings_file else None,
            "settings_elsewhere": self.settings_elsewhere,
            "uptime_s": time.monotonic() - self._started,
            "is_prefaulted": self.memory.is_prefaulted(),
            "sessions": [client.describe() for client in clients],
            "counters": self.counters.as_dict(),
        }

    def _end_overdue(self) -> None:
        """Disconnect clients that have held leases or slots for too long."""
        with self._changed:
            clients = list(self._clients.values())
        for client in clients:
            if client.is_overdue():
                self.counters.count("overdue")
                limit_s = self.config.dram.client_time
                _log.warning(
                    "process %d holds leases or slots for more than %g s, disconnected; they are "
                    "free when it has closed its connections or ended",
                    client.peer.pid, limit_s,
                )  # fmt: skip
                client.hang_up()

    def _accept(self) -> None:
        connected = self.listener.accept()
        if connected is None:
            # No free descriptors, or the client has disconnected: the loop must not spin.
            threading.Event().wait(_PAUSE_S)
            return
        limit = self.limits.clients * self.limits.connections
        if len(self._connections) >= limit and not self.loop.drop_silent():
            self.counters.count("refused")
            _log.warning("connection refused: %d connections are open", limit)
            connected.close()
            return
        connection = Connection(self, Channel(connected))
        with self._changed:
            self._connections.add(connection)
        self.counters.count("connections")
        self.loop.add(connection)


class WorkerThreads:
    """A pool without a size limit: a job starts a thread unless one is idle."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0
        self._closed = False

    def run(self, job: Job) -> None:
        """Run a job in a thread. Does not block."""
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
        """Let the threads end: idle ones now, the others after their job. Does not block."""
        with self._lock:
            free, self._free, self._closed = self._free, 0, True
        for _ in range(free):
            self._jobs.put(None)

    def _work(self, first: Job) -> None:
        job: Job | None = first
        while job is not None:
            try:
                job()
            except Exception as error:  # the thread is needed for further jobs
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
                # `run` or `close` has queued a job for this thread since the timeout.
                job = self._jobs.get()
