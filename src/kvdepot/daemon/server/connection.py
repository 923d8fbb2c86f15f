"""One connection of a client: idle in the daemon's loop, or served by a thread while requests come.

A client's death is noticed here: its sockets close, and with the last one all it holds is released.
"""

import contextlib
import json
import os
from functools import partial
from typing import TYPE_CHECKING, Final

from kvdepot.core.log import RateLimitedLog
from kvdepot.core.namespace import FORMAT_VERSION
from kvdepot.daemon.server.client_resources import HELLO_TIMEOUT_S, LINGER_S, ClientResources
from kvdepot.daemon.server.requests import ClientGoneError, RequestHandler
from kvdepot.daemon.wire import messages
from kvdepot.daemon.wire.frames import Channel, Frame, FrameKind
from kvdepot.daemon.wire.versions import (
    PROTOCOL,
    PROTOCOL_OLDEST,
    REFUSED_FOR_VERSIONS,
    SpokenVersions,
)
from kvdepot.errors import StoreClosedError, WireError
from kvdepot.format.record import VERSION as RECORD_VERSION

if TYPE_CHECKING:
    from kvdepot.daemon.server.daemon import Daemon

QUICK: Final = frozenset(
    {
        FrameKind.MATCH,
        FrameKind.LEASE,
        FrameKind.WHERE,
        FrameKind.RELEASE,
        FrameKind.TOUCH,
        FrameKind.ABANDON,
        FrameKind.CANCEL_HINT,
    }
)
"""Requests that never wait for a disk, for room or for the client."""
_STAY_S: Final = 0.02
"""A thread that has served a request waits this long for the next, before the loop takes over."""
_BROKEN: Final = (OSError, ClientGoneError, StoreClosedError)
_SPOKEN: Final = SpokenVersions(PROTOCOL_OLDEST, PROTOCOL, FORMAT_VERSION, RECORD_VERSION)
_log: Final = RateLimitedLog("kvdepot.server")


class Connection:
    """Used by one thread at a time: the loop's, or the worker that the loop has passed it to."""

    def __init__(self, daemon: "Daemon", channel: Channel) -> None:
        self.channel = channel
        self._daemon = daemon
        self._pid = channel.peer().pid
        self._client: ClientResources | None = None
        self._handler: RequestHandler | None = None

    @property
    def client(self) -> ClientResources | None:
        return self._client

    def on_readable(self) -> None:
        """The loop has seen that a frame has come, or the end. Does not block."""
        try:
            frame = self.channel.receive_now()
            if frame is not None and frame.kind in QUICK:
                self._serve(frame)
                return
            job = self.end if frame is None else partial(self.serve_frames, frame)
        except Exception as error:  # see _drop_client
            job = partial(self._drop_client, error)
        self._daemon.run_in_thread(self, job)

    def end(self) -> None:
        """Close, and release what the client holds if this was its last connection."""
        gone = True
        try:
            self.channel.cut()
            gone = self._client is not None and self._client.leave(self.channel)
        finally:  # a daemon that stops waits for all connections
            if self._client is not None and gone:
                self._daemon.forget(self._client)
                _log.info("client gone: process %d", self._pid)
            self.channel.close()
            self._daemon.ended(self)

    def serve_frames(self, frame: Frame | None = None) -> None:
        """Serve a frame, or greet a new client, then what follows soon; then back to the loop.

        Blocks; in a worker thread.
        """
        self.channel.is_patient = True
        try:
            if frame is None:
                self._handler = self._greet()
            else:
                self._serve(frame)
            if self._handler is not None and self._serve_on():
                self.channel.is_patient = False
                self._daemon.return_to_loop(self)
                return
        except Exception as error:  # see _drop_client
            self._drop_client(error)
        else:
            self.end()

    def _serve_on(self) -> bool:
        """Serve while requests keep coming. False: the client has closed."""
        with contextlib.suppress(BlockingIOError):
            while (frame := self.channel.receive(_STAY_S)) is not None:
                self._serve(frame)
            return False
        return True

    def _serve(self, frame: Frame) -> None:
        if self._client is None or self._handler is None or self._client.over:
            return
        self._daemon.counters.count("requests")
        self._handler.serve(frame)

    def _drop_client(self, error: Exception) -> None:
        """Hang up, and give the client time to let go of memory that will be used again.

        Whatever a handler raises comes here: the client would wait for ever for an answer. What it
        asked for may be half done, so its whole session ends and all that it holds is released.
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
        if self._client is not None:
            self._client.hang_up()
            self.channel.drain(LINGER_S)
            self._client.hang_up(Channel.cut)
        self.end()

    def _greet(self) -> RequestHandler | None:
        """What serves a new client. None: it was refused, and has been told why."""
        frame = self.channel.receive(HELLO_TIMEOUT_S)
        if frame is None:
            return None
        if frame.kind is not FrameKind.HELLO:
            raise WireError(f"{frame.kind.name} instead of HELLO")
        hello = messages.Hello.parse(frame.body)
        if hello.magic != messages.MAGIC:
            raise WireError("a HELLO of another protocol")
        newest = hello.newest or hello.oldest
        theirs = SpokenVersions(hello.oldest, newest, hello.format, hello.record)
        protocol = _SPOKEN.common(theirs)
        if not protocol:
            self._refuse(frame.serial, f"{REFUSED_FOR_VERSIONS}{theirs}", _SPOKEN)
            return None
        daemon = self._daemon
        if not daemon.admits(self.channel):
            self._refuse(frame.serial, f"user {self.channel.peer().uid} may not use it", theirs)
            return None
        client = daemon.join_client(hello.token, self.channel, protocol)
        if client is None:
            reason = "there are too many clients, or the session is over"
            self._refuse(frame.serial, reason, theirs)
            return None
        self._client = client
        is_new = hello.token == messages.NO_TOKEN
        self._welcome(frame.serial, client, is_new=is_new)
        if is_new:
            _log.info("client attached: process %d of user %d", self._pid, client.peer.uid)
        return RequestHandler(
            self.channel, client, daemon.store, daemon.memory, daemon.config, daemon.describe
        )

    def _refuse(self, serial: int, reason: str, spoken: SpokenVersions) -> None:
        """Clients of protocol 5 take any other `spoken` than their own for the reason."""
        self._daemon.counters.count("refused")
        _log.warning("client refused: process %d: %s", self._pid, reason)
        refusal = {"reason": reason, "daemon": str(spoken), "pid": os.getpid()}
        self.channel.send(FrameKind.REFUSED, serial, json.dumps(refusal).encode())

    def _welcome(self, serial: int, client: ClientResources, *, is_new: bool) -> None:
        config, memory = self._daemon.config, self._daemon.memory
        arena_bytes, *cxl_bytes, staging_bytes = memory.nbytes
        body = messages.Welcome(
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
