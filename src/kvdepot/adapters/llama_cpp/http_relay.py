"""The HTTP side of the proxy: passes requests of clients to llama-server, and its answers back.

h11 parses and frames every message on both sides. A request is read to its end before it is
answered. If its framing is malformed, the answer is an error and the connection is closed: no byte
after such a request is read as a request.
"""

import contextlib
import json
import logging
import select
import socket
import socketserver
from http import HTTPStatus
from typing import Any, Final

import h11

from kvdepot.adapters.llama_cpp.proxy import CHAT, COMPLETION, LlamaProxy, PreparedRequest

_logger = logging.getLogger("kvdepot.llama")
STATUS: Final = b"/kvdepot/status"
_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_HEAD_MAX: Final = 1 << 16
_BODY_MAX: Final = 1 << 30
_RECEIVE_BYTES: Final = 1 << 16
_TAIL_BYTES: Final = 1 << 14
"""The last bytes of an answer, which contain its timings."""
_LINGER_S: Final = 1.0
_LINGER_READS: Final = 64


class _ClientGoneError(Exception):
    """The client closed its connection before it had its answer."""


class _RefusedError(Exception):
    """A request that is answered with an error, after which the connection is closed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Peer:
    """One end of an HTTP connection: a socket and its h11 state."""

    def __init__(self, sock: socket.socket, role: type[h11.CLIENT] | type[h11.SERVER]) -> None:
        self.socket = sock
        self.http = h11.Connection(role, max_incomplete_event_size=_HEAD_MAX)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(self) -> Any:
        """The next h11 event. Raises OSError and h11.RemoteProtocolError."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            if self.http.they_are_waiting_for_100_continue:
                self.send(h11.InformationalResponse(status_code=100, headers=[]))
            self.http.receive_data(self.socket.recv(_RECEIVE_BYTES))
        return event

    def send(self, *events: h11.Event) -> None:
        self.socket.sendall(b"".join(self.http.send(event) or b"" for event in events))


class ProxyServer(socketserver.ThreadingTCPServer):
    """Listens for clients, with one thread for each connection."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], proxy: LlamaProxy) -> None:
        self.proxy = proxy
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The handler catches disconnects; every other error is a fault of the proxy."""
        _logger.exception("the proxy failed to answer %s", client_address)


class _Handler(socketserver.BaseRequestHandler):
    """One connection of a client."""

    server: ProxyServer
    _client: _Peer
    _request: h11.Request | None
    """The request that is being answered; None before its head has been read."""

    def handle(self) -> None:
        self._client = _Peer(self.request, h11.SERVER)
        http = self._client.http
        try:
            while self._serve_next() and http.our_state is http.their_state is h11.DONE:
                http.start_next_cycle()
        except h11.RemoteProtocolError as error:
            self._fail(error.error_status_hint, f"malformed request: {error}")
        except _RefusedError as error:
            self._fail(error.status, str(error))
        except OSError as error:
            _logger.debug("a client disconnected: %s", error)

    def finish(self) -> None:
        """Read what the client still sends: if the socket were closed with unread bytes, the kernel
        would reset the connection, and the client might lose the answer."""
        with contextlib.suppress(OSError):
            self.request.shutdown(socket.SHUT_WR)
            self.request.settimeout(_LINGER_S)
            for _ in range(_LINGER_READS):
                if not self.request.recv(_RECEIVE_BYTES):
                    break

    def _serve_next(self) -> bool:
        """Read one request and answer it. Returns False if there is no further request."""
        self._request = None
        request = self._client.receive()
        if not isinstance(request, h11.Request):
            return False
        self._request = request
        body = self._read_body(request)
        proxy = self.server.proxy
        path = request.target.partition(b"?")[0]
        if path == STATUS:
            self._answer(HTTPStatus.OK, proxy.status())
            return True
        proxy.counters.add(requests=1)
        if request.method != b"POST":
            self._pass_on(request, body)
            return True
        with proxy.watch.request():
            self._post(request, path.decode(), body)
        return True

    def _read_body(self, request: h11.Request) -> bytes:
        """The request's body, to its end."""
        headers = dict(request.headers)
        if b"content-length" in headers and b"transfer-encoding" in headers:
            reason = "the request has both Content-Length and Transfer-Encoding"
            raise _RefusedError(HTTPStatus.BAD_REQUEST, reason)
        if request.method == b"CONNECT":
            raise _RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "CONNECT is not supported")
        expected, body = int(headers.get(b"content-length", b"0")), bytearray()
        while expected <= _BODY_MAX:
            event = self._client.receive()
            if not isinstance(event, h11.Data):
                return bytes(body)
            body += event.data
            expected = max(expected, len(body))
        reason = f"the body exceeds {_BODY_MAX} bytes"
        raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)

    def _post(self, request: h11.Request, path: str, body: bytes) -> None:
        """Pass on a request that may use a slot."""
        proxy, key = self.server.proxy, api_key(request)
        plain = proxy.keep_apart(key, body)
        ready = proxy.prepare(path, body, key) if path in CHAT | COMPLETION else None
        if ready is None:
            proxy.disturb(path, key)
            tail, _ = self._pass_on(request, plain)
            proxy.look_for_shift(proxy.watch.served(), tail)
            return
        tail, good = b"", False
        try:
            tail, good = self._pass_on(request, plain, ready)
        finally:
            proxy.finish(ready, tail, good=good)

    def _pass_on(
        self, request: h11.Request, body: bytes, ready: PreparedRequest | None = None
    ) -> tuple[bytes, bool]:
        """Send a request to the server and its answer to the client. If the server refuses a
        request that is `ready`, send it with `body` and without a slot. Returns the last bytes of
        the answer, and whether the server answered the ready request well and completely."""
        proxy = self.server.proxy
        link = proxy.link
        try:
            with socket.create_connection((link.host, link.port)) as connected:
                server = _Peer(connected, h11.CLIENT)
                response = self._ask(server, request, body, ready)
                if ready is None or response.status_code < HTTPStatus.BAD_REQUEST:
                    return self._relay(server, response)
        except _ClientGoneError:
            return b"", False
        except (OSError, h11.RemoteProtocolError) as error:
            text = f"llama-server at {link.settings.url} did not answer: {error!r}"
            self._fail(HTTPStatus.BAD_GATEWAY, text)
            return b"", False
        proxy.disturb("", api_key(request))
        return self._pass_on(request, body)[0], False

    def _ask(
        self, server: _Peer, request: h11.Request, body: bytes, ready: PreparedRequest | None
    ) -> h11.Response:
        """Send a request, and wait for the head of the answer."""
        if ready is not None:
            body = ready.body
        headers = _end_to_end(request, {b"content-length", b"expect"})
        if not any(name.lower() == b"host" for name, _ in headers):  # HTTP/1.0
            headers.append((b"Host", self.server.proxy.link.host.encode()))
        if body or request.method in (b"POST", b"PUT", b"PATCH"):
            headers.append((b"Content-Length", b"%d" % len(body)))
        start = h11.Request(method=request.method, target=request.target, headers=headers)
        server.send(start, h11.Data(data=body), h11.EndOfMessage())
        if ready is not None:
            self.server.proxy.launched(ready, lambda: _has_begun(server.socket))
        self._wait(server.socket)
        while isinstance(response := server.receive(), h11.InformationalResponse):
            pass
        if not isinstance(response, h11.Response):
            raise h11.RemoteProtocolError("the connection ended without an answer")
        return response

    def _wait(self, upstream: socket.socket) -> None:
        """Wait until the server has sent something. Raises _ClientGoneError if the client closes
        its connection before."""
        client, poll = self._client.socket, select.poll()
        poll.register(upstream, select.POLLIN)
        poll.register(client, select.POLLIN)
        while upstream.fileno() not in dict(poll.poll()):
            if not client.recv(1, socket.MSG_PEEK):
                raise _ClientGoneError
            poll.unregister(client)  # it has already sent its next request

    def _relay(self, server: _Peer, response: h11.Response) -> tuple[bytes, bool]:
        # With chunked encoding a Content-Length is ignored: it may be wrong.
        chunked = any(name == b"transfer-encoding" for name, _ in response.headers)
        headers = _end_to_end(response, {b"content-length"} if chunked else set())
        start = h11.Response(
            status_code=response.status_code, headers=headers, reason=response.reason
        )
        tail = b""
        try:
            self._client.send(start)
            while isinstance(event := server.receive(), h11.Data):
                self._client.send(event)
                tail = (tail + bytes(event.data))[-_TAIL_BYTES:]
            self._client.send(h11.EndOfMessage())
        except (OSError, h11.ProtocolError):
            # One side disconnected within the answer: the other's connection is closed too.
            return tail, False
        return tail, response.status_code == HTTPStatus.OK

    def _fail(self, status: int, message: str) -> None:
        """Answer with an error, after which the connection is closed."""
        error = {"code": int(status), "message": message, "type": "proxy_error"}
        with contextlib.suppress(OSError):
            self._answer(status, {"error": error}, [(b"Connection", b"close")])

    def _answer(
        self, status: int, value: dict[str, Any], more: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        content = json.dumps(value).encode()
        headers = [
            (b"Content-Type", b"application/json"),
            (b"Content-Length", b"%d" % len(content)),
            *(more or []),
        ]
        if self._request is not None and self._request.method == b"HEAD":
            content = b""
        self._client.send(
            h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase),
            h11.Data(data=content),
            h11.EndOfMessage(),
        )


def api_key(request: h11.Request) -> bytes:
    """The API key of a request, read as llama-server reads it; empty if there is none."""
    headers = dict(reversed(list(request.headers)))  # the first of several counts
    found = headers.get(b"authorization") or headers.get(b"x-api-key") or b""
    return bytes(found).removeprefix(b"Bearer ")


def _end_to_end(
    message: h11.Request | h11.Response, without: set[bytes]
) -> list[tuple[bytes, bytes]]:
    """The headers of a message that are not about one connection."""
    dropped = _HOP_BY_HOP | without
    for name, value in message.headers:
        if name == b"connection":
            dropped |= {option.strip().lower() for option in value.split(b",")}
    raw = message.headers.raw_items()
    return [(name, value) for name, value in raw if name.lower() not in dropped]


def _has_begun(upstream: socket.socket) -> bool:
    """Returns True if the server has begun to answer."""
    poll = select.poll()
    poll.register(upstream, select.POLLIN)
    return bool(poll.poll(0))
