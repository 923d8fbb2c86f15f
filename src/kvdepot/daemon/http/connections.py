"""Limits of the HTTP server's connections, which uvicorn does not have: their number, the time of a
request's head, and the time that a client takes to read an answer.
"""

import asyncio
import socket
import ssl
import struct
from typing import Any, Final

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvdepot.core.log import RateLimitedLog
from kvdepot.io.acceptor import Accepted, Acceptor

WAIT_S: Final = 10.0
"""A connection is closed if it has no whole head of a request after this time, or has not read an
answer this long after it was complete."""
SEND_S: Final = 10.0
"""A client must read _PIECE_BYTES of an answer in this time."""
_PIECE_BYTES: Final = 1 << 16
_STOP_S: Final = 1.0
_DROP_UNSENT: Final = struct.pack("ii", 1, 0)
_log: Final = RateLimitedLog("kvdepot.http")


class BoundedProtocol(H11Protocol):
    """One connection: tells the acceptor when it waits for a request, and ends it in time."""

    def __init__(self, accepted: Accepted, server: uvicorn.Server) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self.ended = asyncio.Event()
        self._accepted = accepted
        self._application: ASGIApp = self.app
        self.app = self._serve
        self._serving = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._end_in(WAIT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_in(None)
        self.ended.set()

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request, also one whose head was right and which is being served."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. The next of the same connection may begin before this has ended."""
        self._serving += 1
        self._accepted.work()
        self._end_in(None)
        try:
            await self._application(scope, receive, lambda message: self._send(send, message))
        finally:
            self._serving -= 1
            if not self._serving and not self.ended.is_set():
                self._accepted.wait()
                self._end_in(WAIT_S)

    async def _send(self, send: Send, message: Message) -> None:
        """Send in pieces, each of which waits until the client has read most of what was sent."""
        body = message.get("body", b"")
        for at in range(0, len(body) - _PIECE_BYTES, _PIECE_BYTES):
            piece = body[at : at + _PIECE_BYTES]
            await self._send_in_time(send, {**message, "body": piece, "more_body": True})
        if len(body) > _PIECE_BYTES:
            rest = (len(body) - 1) // _PIECE_BYTES * _PIECE_BYTES
            message = {**message, "body": body[rest:]}
        await self._send_in_time(send, message)

    async def _send_in_time(self, send: Send, message: Message) -> None:
        late = self.loop.call_later(SEND_S, self._reset)
        try:
            await send(message)
        finally:
            late.cancel()

    def _end_in(self, seconds: float | None) -> None:
        """Reset the connection after this time; None: not for now."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self._reset)

    def _reset(self) -> None:
        """Close the connection and drop what the client has not read, also in the kernel."""
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_UNSENT)
        self.transport.abort()


class BoundedServer(uvicorn.Server):
    """Serves a listening socket, which it accepts connections from itself."""

    def __init__(self, config: uvicorn.Config, listening: socket.socket, limit: int) -> None:
        super().__init__(config)
        self._acceptor = Acceptor(listening, limit, self._serve_connection)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_log_fault)
        await super().startup(sockets=[])
        self._acceptor.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._acceptor.pause()
        await super().shutdown(sockets=[])
        await self._acceptor.stop(_STOP_S)

    async def _serve_connection(self, accepted: Accepted) -> None:
        context = self.config.ssl
        try:
            transport, protocol = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: BoundedProtocol(accepted, self),
                accepted.socket,
                ssl=context,
                ssl_handshake_timeout=WAIT_S if isinstance(context, ssl.SSLContext) else None,
            )
        except OSError as error:  # such as a client that does not speak TLS
            _log.info("a connection ended before a request: %s", error)
            return
        try:
            await protocol.ended.wait()
        finally:
            transport.abort()


def _log_fault(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what asyncio reports of connections, at a limited rate."""
    _log.error(f"connection: {context['message']}", cause=context.get("exception"))
