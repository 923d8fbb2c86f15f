"""One request to the proxy: passes it to llama-server, and the answer back, in a thread."""

import contextlib
import json
import select
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import h11

from kvdepot.adapters.llama_cpp.proxy import CHAT, COMPLETION, LlamaProxy, PreparedRequest

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
RECEIVE_BYTES: Final = 1 << 16
_TAIL_BYTES: Final = 1 << 14
"""The last bytes of an answer, which contain its timings."""
SEND_S: Final = 60.0
"""A client that reads nothing for this time is disconnected."""


class _ClientGoneError(Exception):
    """The client closed its connection before it had its answer."""


class HttpPeer:
    """One end of an HTTP connection: a socket and its h11 state."""

    def __init__(self, sock: socket.socket, role: type[h11.CLIENT] | type[h11.SERVER]) -> None:
        self.socket = sock
        self.http = h11.Connection(role, max_incomplete_event_size=_HEAD_MAX)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(self) -> Any:
        """The next h11 event. Raises OSError and h11.RemoteProtocolError."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(self.socket.recv(RECEIVE_BYTES))
        return event

    def send(self, *events: h11.Event) -> None:
        for event in events:
            # Not joined: bodies are large.
            self.socket.sendall(self.http.send(event) or b"")

    def run_blocking(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run `work` in this thread, with a socket that blocks for SEND_S at most."""
        self.socket.settimeout(SEND_S)
        try:
            work(*arguments)
        finally:
            self.socket.setblocking(False)

    def error_answer(self, request: h11.Request | None, status: int, message: str) -> bytes:
        """The bytes of an answer with an error, after which the connection is closed."""
        error = {"code": int(status), "message": message, "type": "proxy_error"}
        closes = [(b"Connection", b"close")]
        try:
            events = _json_answer(request, status, {"error": error}, closes)
            return b"".join(self.http.send(event) or b"" for event in events)
        except h11.LocalProtocolError:  # an answer has begun
            return b""


class Exchange:
    """One request of a client and its answer."""

    def __init__(self, proxy: LlamaProxy, client: HttpPeer, request: h11.Request) -> None:
        self._proxy = proxy
        self._client = client
        self._request = request

    def serve(self, body: bytes) -> None:
        """Answer a request with this body."""
        request, proxy = self._request, self._proxy
        proxy.counters.add(requests=1)
        if request.method != b"POST":
            self._pass_on(request, body)
            return
        with proxy.watch.request():
            self._post(request, path_of(request).decode(), body)

    def answer(self, status: int, value: Callable[[], dict[str, Any]]) -> None:
        self._client.send(*_json_answer(self._request, status, value()))

    def _post(self, request: h11.Request, path: str, body: bytes) -> None:
        """Pass on a request that may use a slot."""
        proxy, key = self._proxy, api_key(request)
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
        proxy = self._proxy
        link = proxy.link
        try:
            with socket.create_connection((link.host, link.port)) as connected:
                server = HttpPeer(connected, h11.CLIENT)
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
        self, server: HttpPeer, request: h11.Request, body: bytes, ready: PreparedRequest | None
    ) -> h11.Response:
        """Send a request, and wait for the head of the answer."""
        if ready is not None:
            body = ready.body
        headers = _end_to_end(request, {b"content-length", b"expect"})
        if not any(name.lower() == b"host" for name, _ in headers):  # HTTP/1.0
            headers.append((b"Host", self._proxy.link.host.encode()))
        if body or request.method in (b"POST", b"PUT", b"PATCH"):
            headers.append((b"Content-Length", b"%d" % len(body)))
        start = h11.Request(method=request.method, target=request.target, headers=headers)
        server.send(start, h11.Data(data=body), h11.EndOfMessage())
        if ready is not None:
            self._proxy.launched(ready, lambda: _has_begun(server.socket))
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

    def _relay(self, server: HttpPeer, response: h11.Response) -> tuple[bytes, bool]:
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
        with contextlib.suppress(OSError):
            self._client.socket.sendall(self._client.error_answer(self._request, status, message))


def path_of(request: h11.Request) -> bytes:
    return bytes(request.target.partition(b"?")[0])


def _json_answer(
    request: h11.Request | None,
    status: int,
    value: dict[str, Any],
    more: list[tuple[bytes, bytes]] | None = None,
) -> tuple[h11.Event, ...]:
    content = json.dumps(value).encode()
    headers = [
        (b"Content-Type", b"application/json"),
        (b"Content-Length", b"%d" % len(content)),
        *(more or []),
    ]
    if request is not None and request.method == b"HEAD":
        content = b""
    start = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase)
    return start, h11.Data(data=content), h11.EndOfMessage()


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
