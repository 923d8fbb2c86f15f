"""The side of the proxy that clients connect to: one event loop for all connections.

The loop reads heads and bodies, bounded in number, size and time. A request takes one of a bounded
number of threads when it is whole. Its API key is checked before its body is read. The status and
health checks have threads and connections of their own.

h11 parses and frames every message on both sides. A request is read to its end before it is
answered. If its framing is malformed, the answer is an error and the connection is closed: no byte
after such a request is read as a request.
"""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, Final, TypeVar

import h11

from kvdepot.adapters.llama_cpp.http_relay import (
    RECEIVE_BYTES,
    Exchange,
    HttpPeer,
    api_key,
    path_of,
)
from kvdepot.adapters.llama_cpp.proxy import LlamaProxy
from kvdepot.adapters.llama_cpp.server_watch import FAILURES
from kvdepot.io.acceptor import BACKLOG, Accepted, Acceptor, connections_max

T = TypeVar("T")
_logger = logging.getLogger("kvdepot.llama")
STATUS: Final = b"/kvdepot/status"
_HEALTH: Final = frozenset({b"/health", b"/v1/health"})
"""Passed on with connections and threads of their own; llama-server needs no key for them."""
_REQUESTS: Final = 192
"""Requests that are passed on or wait. Further ones are refused."""
_HEALTH_REQUESTS: Final = 32
_THREADS: Final = 64
"""Requests that are passed on at the same time. Others wait, with their bodies."""
_HEALTH_THREADS: Final = 4
_HEAD_S: Final = 10.0
_IDLE_S: Final = 75.0
_BODY_S: Final = 120.0
_BODY_MAX: Final = 64 << 20
_BODIES_MAX: Final = 128 << 20
"""Bytes of all bodies together, those of _SMALL_BODY bytes left out."""
_SMALL_BODY: Final = 1 << 16
_STEP_BYTES: Final = 1 << 20
_VALUE_BYTES: Final = 64
"""The most memory that one JSON value takes beside its text."""
_LINGER_S: Final = 1.0
_LINGER_READS: Final = 64
_STOP_S: Final = 5.0


class _RefusedError(Exception):
    """A request that is answered with an error, after which the connection is closed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _BodyMemory:
    """The memory for bodies. A body that has none yet waits; one that needs more may take as much
    again, so that bodies do not wait for each other."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit
        self._freed = asyncio.Condition()

    async def take(self, nbytes: int, *, has_some: bool) -> None:
        if nbytes > self._limit or (has_some and nbytes > self._left + self._limit):
            reason = "the body needs more memory than there is"
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
        async with self._freed:
            await self._freed.wait_for(lambda: has_some or nbytes <= self._left)
            self._left -= nbytes

    async def give_back(self, nbytes: int) -> None:
        async with self._freed:
            self._left += nbytes
            self._freed.notify_all()


class _Body:
    """The body of one request, as it arrives, and its share of the memory."""

    def __init__(self, memory: _BodyMemory, limit: int) -> None:
        self._memory = memory
        self._limit = limit
        self._taken = 0
        self._parts: list[bytes] = []
        self._size = 0

    async def expect(self, nbytes: int) -> None:
        """Take memory for this many bytes. Blocks until there is some."""
        if nbytes > max(_SMALL_BODY, self._taken):
            await self._memory.take(nbytes - self._taken, has_some=self._taken > 0)
            self._taken = nbytes

    async def add(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit:
            raise _too_large(self._limit)
        if self._size > max(_SMALL_BODY, self._taken):
            await self.expect(self._size + _STEP_BYTES)
        self._parts.append(data)

    async def whole(self) -> bytes:
        """The body, with memory for what JSON makes of it."""
        body, self._parts = b"".join(self._parts), []
        values = sum(map(body.count, (b",", b"[", b"{")))
        await self.expect(len(body) + values * _VALUE_BYTES)
        return body

    async def release(self) -> None:
        if self._taken:
            await self._memory.give_back(self._taken)
            self._taken = 0


class ProxyServer:
    """Listens for clients, from `serve_forever` until `shutdown`."""

    def __init__(self, address: tuple[str, int], proxy: LlamaProxy) -> None:
        self.proxy = proxy
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listening = socket.create_server(address, family=family, backlog=BACKLOG)
        self.server_address = self._listening.getsockname()
        limit = connections_max()
        self._acceptor = Acceptor(self._listening, limit, self._serve)
        self._requests = asyncio.Semaphore(min(_REQUESTS, limit * 3 // 4))
        """Bounds the requests that are served or wait; health checks have places of their own."""
        self._health = asyncio.Semaphore(min(_HEALTH_REQUESTS, limit // 8))
        self._threads = asyncio.Semaphore(_THREADS)
        self._key_threads = asyncio.Semaphore(_HEALTH_THREADS)
        self._health_threads = asyncio.Semaphore(_HEALTH_THREADS)
        self._status_thread = asyncio.Semaphore(1)
        self._lock = threading.Lock()
        """Guards the two fields below."""
        self._stopping = False
        self._stop: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._ended = threading.Event()

    def __enter__(self) -> "ProxyServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.server_close()

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """Serve clients. Blocks until `shutdown`."""
        try:
            asyncio.run(self._run())
        finally:
            self._ended.set()

    def shutdown(self) -> None:
        """Make `serve_forever` return. Blocks until it has, if it was called."""
        with self._lock:
            self._stopping, stop = True, self._stop
        if stop is not None:
            loop, event = stop
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(event.set)
            self._ended.wait()

    def server_close(self) -> None:
        self._listening.close()

    async def _run(self) -> None:
        stop = asyncio.Event()
        with self._lock:
            self._stop = asyncio.get_running_loop(), stop
            if self._stopping:
                return
        self._memory = _BodyMemory(_BODIES_MAX)
        self._acceptor.start()
        await stop.wait()
        await self._acceptor.stop(_STOP_S)

    async def _serve(self, accepted: Accepted) -> None:
        """One connection of a client."""
        client = _Client(accepted)
        http = client.peer.http
        try:
            while await self._serve_next(client) and http.our_state is http.their_state is h11.DONE:
                http.start_next_cycle()
        except h11.RemoteProtocolError as error:
            await client.fail(error.error_status_hint, f"malformed request: {error}")
        except _RefusedError as error:
            await client.fail(error.status, str(error))
        except OSError as error:
            _logger.debug("a client disconnected: %s", error)
        await client.finish()

    async def _serve_next(self, client: "_Client") -> bool:
        """Read one request and answer it. Returns False if there is no further request."""
        client.accepted.wait()
        request = await client.head()
        if not isinstance(request, h11.Request):
            return False
        client.accepted.work()
        headers = dict(request.headers)
        if b"content-length" in headers and b"transfer-encoding" in headers:
            reason = "the request has both Content-Length and Transfer-Encoding"
            raise _RefusedError(HTTPStatus.BAD_REQUEST, reason)
        if request.method == b"CONNECT":
            raise _RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "CONNECT is not supported")
        path = path_of(request)
        is_health = path == STATUS or path in _HEALTH
        places = self._health if is_health else self._requests
        if places.locked():
            raise _RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests wait")
        async with places, self._body(client, request, is_health=is_health) as body:
            await self._answer(client, request, body)
        return True

    @contextlib.asynccontextmanager
    async def _body(
        self, client: "_Client", request: h11.Request, *, is_health: bool
    ) -> AsyncIterator[bytes]:
        """The request's body, to its end. Its memory is taken until it is answered."""
        headers = dict(request.headers)
        expected = int(headers.get(b"content-length", b"0"))
        limit = _SMALL_BODY if is_health else _BODY_MAX
        if expected > limit:
            raise _too_large(limit)
        if (expected or b"transfer-encoding" in headers) and not is_health:
            await self._check_key(api_key(request))
        body = _Body(self._memory, limit)
        try:
            try:
                async with asyncio.timeout(_BODY_S):
                    await body.expect(expected)
                    while isinstance(event := await client.receive(), h11.Data):
                        await body.add(bytes(event.data))
                    whole = await body.whole()
            except TimeoutError:
                reason = f"the body was not here after {_BODY_S:g} s"
                raise _RefusedError(HTTPStatus.REQUEST_TIMEOUT, reason) from None
            yield whole
        finally:
            await body.release()

    async def _check_key(self, key: bytes) -> None:
        """Refuse a key that llama-server refuses, before anything of the body is kept."""
        try:
            good = await _in_thread(self._key_threads, self.proxy.accepts, key)
        except FAILURES as error:
            # It may be loading its model: the request is passed on, and it answers itself.
            _logger.debug("cannot check an API key: %s", error)
            return
        if not good:
            raise _RefusedError(HTTPStatus.UNAUTHORIZED, "Invalid API Key")

    async def _answer(self, client: "_Client", request: h11.Request, body: bytes) -> None:
        """Answer a request in a thread, which has the socket meanwhile."""
        path = path_of(request)
        threads = self._health_threads if path in _HEALTH else self._threads
        exchange = Exchange(self.proxy, client.peer, request)
        work: Any = (exchange.serve, body)
        if path == STATUS:
            threads = self._status_thread
            work = (exchange.answer, HTTPStatus.OK, self.proxy.status)
        await _in_thread(threads, client.peer.run_blocking, *work)


class _Client:
    """A connection of a client, as the event loop uses it."""

    def __init__(self, accepted: Accepted) -> None:
        self.accepted = accepted
        self.peer = HttpPeer(accepted.socket, h11.SERVER)
        self._loop = asyncio.get_running_loop()
        self._request: h11.Request | None = None
        self._is_new = True

    async def head(self) -> Any:
        """The next request; another event if there is none."""
        self._request = None
        try:
            if not self._is_new and not self.peer.http.trailing_data[0]:
                async with asyncio.timeout(_IDLE_S):
                    await self._more()
            self._is_new = False
            async with asyncio.timeout(_HEAD_S):
                event = await self.receive()
        except TimeoutError as error:
            raise ConnectionAbortedError("no request came") from error
        if isinstance(event, h11.Request):
            self._request = event
        return event

    async def receive(self) -> Any:
        """The next h11 event. Raises OSError and h11.RemoteProtocolError."""
        http = self.peer.http
        while (event := http.next_event()) is h11.NEED_DATA:
            if http.they_are_waiting_for_100_continue:
                going_on = h11.InformationalResponse(status_code=100, headers=[])
                await self._loop.sock_sendall(self.accepted.socket, http.send(going_on) or b"")
            await self._more()
        return event

    async def _more(self) -> None:
        data = await self._loop.sock_recv(self.accepted.socket, RECEIVE_BYTES)
        self.peer.http.receive_data(data)

    async def fail(self, status: int, message: str) -> None:
        """Answer with an error, after which the connection is closed."""
        answer = self.peer.error_answer(self._request, status, message)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await self._loop.sock_sendall(self.accepted.socket, answer)

    async def finish(self) -> None:
        """Read what the client still sends: if the socket were closed with unread bytes, the kernel
        would reset the connection, and the client might lose the answer."""
        self.accepted.wait()
        with contextlib.suppress(OSError, TimeoutError):
            self.accepted.socket.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(_LINGER_S):
                for _ in range(_LINGER_READS):
                    if not await self._loop.sock_recv(self.accepted.socket, RECEIVE_BYTES):
                        break


async def _in_thread(places: asyncio.Semaphore, work: Callable[..., T], *arguments: Any) -> T:
    """Call `work` in a thread, when one of the places is free."""
    async with places:
        thread = ThreadPoolExecutor(1, "kvdepot-llama-request")
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, work, *arguments)
        finally:
            thread.shutdown(wait=False)


def _too_large(limit: int) -> _RefusedError:
    return _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body exceeds {limit} bytes")
