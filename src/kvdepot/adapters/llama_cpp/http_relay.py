"""The HTTP side of the proxy: clients' requests to llama-server, its answers as they come."""

import contextlib
import http.client
import json
import logging
import select
import socket
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from kvdepot.adapters.llama_cpp.proxy import CHAT, COMPLETION, LlamaProxy, Prepared

_logger = logging.getLogger("kvdepot.llama")
STATUS: Final = "/kvdepot/status"
_ADAPTERS: Final = "/lora-adapters"
_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_BODY_MAX: Final = 1 << 30
_PIECE: Final = 1 << 16
_TAIL: Final = 1 << 14
"""The timings of an answer are in its last bytes."""


class _ClientGone(Exception):
    """The client closed its connection before it had its answer."""


class ProxyServer(ThreadingHTTPServer):
    """Listens for clients; one thread for each connection."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], proxy: LlamaProxy) -> None:
        self.proxy = proxy
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error of ours."""
        _logger.debug("a connection from %s has ended", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    server: ProxyServer
    disable_nagle_algorithm = True
    wbufsize = 0

    def log_message(self, format: str, *args: Any) -> None:
        _logger.debug(format, *args)

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self._serve
        raise AttributeError(name)

    def _serve(self) -> None:
        proxy = self.server.proxy
        path = self.path.partition("?")[0]
        if path == STATUS:
            self._answer(HTTPStatus.OK, proxy.status())
            return
        body = self._read_body()
        if body is None:
            return
        proxy.counters.add(requests=1)
        if self.command != "POST":
            self._pass_on(body)
        elif path in CHAT or path in COMPLETION:
            with proxy.passing():
                self._complete(path, body)
        else:
            served = proxy.served() if path == _ADAPTERS else None
            if served is not None:
                served.spoiled = "LoRAs were changed while llama-server ran: restart it"
            with proxy.passing():
                tail, _ = self._pass_on(body)
            proxy.look_for_shift(proxy.served(), tail)

    def _complete(self, path: str, body: bytes) -> None:
        proxy = self.server.proxy
        ready = proxy.prepare(path, body)
        if ready is None:
            tail, _ = self._pass_on(body)
            proxy.look_for_shift(proxy.served(), tail)
            return
        tail, good = b"", False
        try:
            tail, good = self._pass_on(ready.body, ready, body)
        finally:
            proxy.finish(ready, tail, good=good)

    def _pass_on(
        self, body: bytes, ready: Prepared | None = None, instead: bytes = b""
    ) -> tuple[bytes, bool]:
        """Send a request to the server and its answer to the client; if the server refuses one that
        was made `ready`, send `instead`. Returns the last bytes of the answer, and whether it was
        good and whole."""
        connection = self.server.proxy.link.connection(None)
        with contextlib.closing(connection):
            try:
                response = self._ask(connection, body, ready)
                if response.status >= HTTPStatus.BAD_REQUEST and ready is not None:
                    response.read()
                    return self._pass_on(instead)[0], False
            except _ClientGone:
                self.close_connection = True
                return b"", False
            except (OSError, http.client.HTTPException) as error:
                url = self.server.proxy.link.settings.url
                text = f"llama-server at {url} did not answer: {error!r}"
                self._fail(HTTPStatus.BAD_GATEWAY, text)
                return b"", False
            return self._relay(connection, response)

    def _ask(
        self, connection: http.client.HTTPConnection, body: bytes, ready: Prepared | None
    ) -> http.client.HTTPResponse:
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _HOP_BY_HOP | {"content-length", "expect"}:
                connection.putheader(name, value)
        if body or self.command in ("POST", "PUT", "PATCH"):
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body or None)
        if ready is not None:
            upstream = connection.sock
            self.server.proxy.launched(ready, lambda: bool(select.select([upstream], [], [], 0)[0]))
        self._wait(connection)
        return connection.getresponse()

    def _wait(self, connection: http.client.HTTPConnection) -> None:
        """Until the server has sent something. A client that closes its connection ends it."""
        upstream, client = connection.sock, self.connection
        watched = [upstream, client]
        while True:
            readable, _, _ = select.select(watched, [], [])
            if upstream in readable:
                return
            if not client.recv(1, socket.MSG_PEEK):
                raise _ClientGone
            watched = [upstream]  # it has sent its next request already

    def _relay(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> tuple[bytes, bool]:
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        length = response.getheader("content-length")
        empty = self.command == "HEAD" or response.status in (204, 304)
        chunked = length is None and not empty and self.request_version != "HTTP/1.0"
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif length is None:
            self.close_connection = True
            self.send_header("Connection", "close")
        tail = b""
        try:
            self.end_headers()
            while not empty and (piece := response.read1(_PIECE)):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
                tail = (tail + piece)[-_TAIL:]
            if chunked:
                self.wfile.write(b"0\r\n\r\n")
        except (OSError, http.client.HTTPException):
            # Either side went away: the other sees it too.
            self.close_connection = True
            return tail, False
        whole = length is None or response.length in (None, 0)
        self.close_connection |= not whole
        return tail, whole and response.status == HTTPStatus.OK

    def _read_body(self) -> bytes | None:
        """The request's body; None if it makes no sense, which the client is told."""
        try:
            if "chunked" in self.headers.get("transfer-encoding", "").lower():
                return self._read_chunks()
            length = int(self.headers.get("content-length", "0"))
            body = self.rfile.read(length) if 0 <= length <= _BODY_MAX else None
        except (ValueError, http.client.HTTPException):
            self._fail(HTTPStatus.BAD_REQUEST, "the length of the request makes no sense")
            return None
        if body is None:
            self._fail(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the request has {length} bytes")
        elif len(body) < length:
            body = None
            self.close_connection = True
        return body

    def _read_chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline(1 << 10).partition(b";")[0], 16):
            if not 0 < size <= _BODY_MAX - len(content):
                raise ValueError(size)
            content += self.rfile.read(size)
            self.rfile.readline(1 << 10)
        while self.rfile.readline(1 << 16).strip():
            pass
        return content

    def _fail(self, status: HTTPStatus, message: str) -> None:
        self.close_connection = True
        error = {"code": int(status), "message": message, "type": "proxy_error"}
        with contextlib.suppress(OSError):
            self._answer(status, {"error": error})

    def _answer(self, status: HTTPStatus, value: dict[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
