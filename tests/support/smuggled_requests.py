"""Requests with malformed framing on connections that users share, and a server that says which
request each answer is for."""

import json
import random
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import h11

Answer = tuple[int, Any]
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer mallory\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class Echo(ThreadingHTTPServer):
    """A server whose answers say which request they answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _EchoHandler)
        self.asked: list[str] = []
        """The paths of all requests that did not come from the proxy itself."""
        self.instead = b""
        """The bytes of every answer to a path below /raw."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A proxy that hangs up is not worth a line."""


class _EchoHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Echo

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self.echo
        raise AttributeError(name)

    def echo(self) -> None:
        assert "transfer-encoding" not in self.headers
        lengths = self.headers.get_all("content-length", [])
        assert len(lengths) < 2
        body = self.rfile.read(int(lengths[0]) if lengths else 0)
        if self.headers.get("x-asked"):
            self.server.asked.append(self.path)
        if self.path.startswith("/raw"):
            self.wfile.write(self.server.instead)
            self.close_connection = True
            return
        user = self.headers.get("authorization", "")
        content = json.dumps({"path": self.path, "user": user, "body": body.decode("latin-1")})
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(OSError):
                self.wfile.write(content.encode())


def talk(
    front: tuple[str, int], *pieces: bytes, methods: str = "", resets: bool = False
) -> list[Answer]:
    """Send bytes on one connection, and read answers until the server closes it. `methods` are
    those of the requests if an answer's length depends on them. `resets`: the server may reset the
    connection, after which its last answers are lost."""
    lost = (ConnectionError,) if resets else ()
    received = b""
    with closing(socket.create_connection(front, timeout=120)) as connection, suppress(*lost):
        for piece in pieces:
            connection.sendall(piece)
        while more := connection.recv(1 << 16):
            received += more
    found: list[Answer] = []
    with suppress(*((h11.RemoteProtocolError,) if resets else ())):
        found.extend(answers(received, methods.split()))
    return found


def answers(received: bytes, methods: list[str]) -> Iterator[Answer]:
    """The answers in what a connection has brought; the whole of it must be answers."""
    while received:
        reader = h11.Connection(h11.CLIENT)
        method = methods.pop(0) if methods else "GET"
        reader.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
        reader.send(h11.EndOfMessage())
        reader.receive_data(received)
        reader.receive_data(b"")
        status, content = 0, b""
        while not isinstance(event := reader.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                content += event.data
            elif isinstance(event, h11.Response):
                status = event.status_code
        is_json = content[:1] in (b"{", b"[") or content.isdigit()
        yield status, json.loads(content) if is_json else content.decode() or None
        received = reader.trailing_data[0]


def request(path: str, framing: str, body: bytes, method: str = "POST", user: str = "a") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nX-Asked: 1\r\nAuthorization: Bearer {user}\r\n"
    return head.encode() + framing.encode("latin-1") + b"\r\n" + body


def chunks(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


SIZE = len(SMUGGLED)
MALFORMED: dict[str, tuple[str, bytes]] = {
    "two lengths": (f"Content-Length: 0\r\nContent-Length: {SIZE}\r\n", SMUGGLED),
    "two lengths, the other way round": (
        f"Content-Length: {SIZE}\r\nContent-Length: 0\r\n",
        SMUGGLED,
    ),
    "two lengths in one": (f"Content-Length: {SIZE}, 0\r\n", SMUGGLED),
    "length and chunks": (
        f"Content-Length: {SIZE + 5}\r\nTransfer-Encoding: chunked\r\n",
        b"0\r\n\r\n" + SMUGGLED,
    ),
    "chunks and length": (
        "Transfer-Encoding: chunked\r\nContent-Length: 0\r\n",
        chunks(SMUGGLED),
    ),
    "xchunked": (f"Transfer-Encoding: xchunked\r\nContent-Length: {SIZE}\r\n", SMUGGLED),
    "xchunked alone": ("Transfer-Encoding: xchunked\r\n", chunks(SMUGGLED)),
    "chunked, identity": ("Transfer-Encoding: chunked, identity\r\n", chunks(SMUGGLED)),
    "two encodings": (
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        chunks(SMUGGLED),
    ),
    "encoding with a control character": ("Transfer-Encoding: \x0bchunked\r\n", chunks(SMUGGLED)),
    "blank before the colon": ("Transfer-Encoding : chunked\r\n", chunks(SMUGGLED)),
    "blank before the colon of a length": (f"Content-Length : {SIZE}\r\n", SMUGGLED),
    "+ length": (f"Content-Length: +{SIZE}\r\n", SMUGGLED),
    "- length": (f"Content-Length: -{SIZE}\r\n", SMUGGLED),
    "0_ length": (f"Content-Length: 0_{SIZE}\r\n", SMUGGLED),
    "0x length": (f"Content-Length: {SIZE:#x}\r\n", SMUGGLED),
    "length with a fraction": (f"Content-Length: {SIZE}.0\r\n", SMUGGLED),
    "empty length": ("Content-Length:\r\n", SMUGGLED),
    "length in other digits": ("Content-Length: \xb2\r\n", SMUGGLED),
    "length of 30 digits": (f"Content-Length: {SIZE:030}\r\n", SMUGGLED),
    "+ chunk": ("Transfer-Encoding: chunked\r\n", b"+" + chunks(SMUGGLED)),
    "- chunk": ("Transfer-Encoding: chunked\r\n", b"-" + chunks(SMUGGLED)),
    "0x chunk": ("Transfer-Encoding: chunked\r\n", b"0x" + chunks(SMUGGLED)),
    "0_ chunk": ("Transfer-Encoding: chunked\r\n", b"0_" + chunks(SMUGGLED)),
    "blank before a chunk": ("Transfer-Encoding: chunked\r\n", b" " + chunks(SMUGGLED)),
    "chunk longer than its size": (
        "Transfer-Encoding: chunked\r\n",
        b"3\r\nabcXX0\r\n\r\n" + SMUGGLED,
    ),
    "chunk that ends in a line feed": (
        "Transfer-Encoding: chunked\r\n",
        b"3\r\nabc\n0\r\n\r\n" + SMUGGLED,
    ),
    "chunk size of 30 digits": ("Transfer-Encoding: chunked\r\n", b"0" * 30 + chunks(SMUGGLED)),
    "NUL in a header": (f"X: \0\r\nContent-Length: {SIZE}\r\n", SMUGGLED),
    "carriage return in a header": (f"X: a\rb\r\nContent-Length: {SIZE}\r\n", SMUGGLED),
    "header without a colon": (f"X\r\nContent-Length: {SIZE}\r\n", SMUGGLED),
    "two hosts": (f"Host: y\r\nContent-Length: {SIZE}\r\n", SMUGGLED),
}
"""Header lines and the bytes after them. A body that one reader sees contains a request that
another reader would answer."""


class PooledRequests:
    """Requests of two users that a load balancer sends on one connection, some malformed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sent = b""
        self.methods: list[str] = []
        self.expected: list[tuple[str, str] | None] = []
        """For each request its path and user; None for one that must be refused, after which
        nothing may be answered."""
        for number in range(self.random.randint(1, 6)):
            self.add(f"/{seed}/{number}")
        self.sent += LAST
        self.methods.append("GET")
        self.expected.append(("/last", ""))

    def add(self, path: str) -> None:
        choice = self.random
        user, method = choice.choice("ab"), choice.choice(["GET", "POST", "PUT", "HEAD"])
        status = choice.random() < 0.3
        body = SMUGGLED * choice.randint(0, 2)
        malformed = choice.random() < 0.25
        if malformed:
            # The proxy does not know the method of a malformed head, so its answer has a body.
            method = "POST"
            framing, body = MALFORMED[choice.choice(list(MALFORMED))]
        elif choice.random() < 0.5:
            cuts = sorted(choice.randrange(len(body) + 1) for _ in range(choice.randint(0, 4)))
            ends = [*cuts, len(body)]
            parts = [body[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
            framing = "Transfer-Encoding: chunked\r\n"
            body = chunks(*filter(None, parts))
        else:
            framing = f"Content-Length: {len(body)}\r\n"
        for _ in range(choice.randint(0, 2)):
            framing += f"X-{choice.randrange(10)}: {choice.randbytes(4).hex()}\r\n"
        told = "/kvdepot/status" if status else path
        self.sent += request(told, framing, body, method, user)
        self.methods.append(method)
        self.expected.append(None if malformed else (told, f"Bearer {user}"))

    def pieces(self) -> Iterator[bytes]:
        """The bytes to send, cut at random."""
        rest = self.sent
        while rest:
            size = self.random.randint(1, len(rest))
            yield rest[:size]
            rest = rest[size:]


def attempt(front: tuple[str, int], echo: Echo, seed: int) -> tuple[int, str]:
    """Send one connection's requests to a proxy before `echo`, which has no other client. Returns
    the number of answers, and what was wrong with them."""
    pool = PooledRequests(seed)
    echo.asked.clear()
    found = talk(front, *pool.pieces(), methods=" ".join(pool.methods))
    refused = pool.expected.index(None) if None in pool.expected else len(pool.expected)
    good, bad = found[:refused], found[refused:]
    if len(bad) != (refused < len(pool.expected)):
        return len(found), f"{len(found)} answers to {len(pool.expected)} requests"
    if any(status not in (400, 501) for status, _ in bad):
        return len(found), f"a malformed request was answered: {bad}"
    for at, (status, answer) in enumerate(good):
        expected = pool.expected[at]
        if status != 200 or expected is None:
            return len(found), f"{status} for request {at}"
        is_named = pool.methods[at] != "HEAD" and expected[0] != "/kvdepot/status"
        if is_named and (answer["path"], answer["user"]) != expected:
            return len(found), f"{answer} for {expected}"
    asked = [one[0] for one in pool.expected[:refused] if one is not None]
    if echo.asked != [one for one in asked if one not in ("/kvdepot/status", "/last")]:
        return len(found), f"the server was asked {echo.asked}"
    return len(found), ""


class DaemonRequests(PooledRequests):
    """The same for the HTTP server of a daemon, whose errors name the field that a request has
    and that is unknown."""

    def __init__(self, seed: int, token: str) -> None:
        self._token = token
        super().__init__(seed)

    def add(self, path: str) -> None:
        choice, field = self.random, "r" + path.replace("/", "_")
        method, body = choice.choice(["GET", "POST", "HEAD"]), SMUGGLED * choice.randint(0, 2)
        media, path = "", f"/api/sessions?{field}=1"
        malformed = choice.random() < 0.25
        if method == "POST":
            media, path = "Content-Type: application/json\r\n", "/api/prefix"
            body = json.dumps({"token_ids": [1], field: body.decode()}).encode()
        if malformed:
            method = "POST"
            framing, body = MALFORMED[choice.choice(list(MALFORMED))]
        elif choice.random() < 0.5:
            framing = "Transfer-Encoding: chunked\r\n"
            at = choice.randrange(len(body) + 1)
            body = chunks(*filter(None, (body[:at], body[at:])))
        else:
            framing = f"Content-Length: {len(body)}\r\n"
        self.sent += request(path, media + framing, body, method, self._token)
        self.methods.append(method)
        self.expected.append(None if malformed else (field, method))


def attempt_at_daemon(address: tuple[str, int], token: str, seed: int) -> tuple[int, str]:
    """Send one connection's requests to a daemon. Returns as `attempt` does."""
    pool = DaemonRequests(seed, token)
    breaks = None in pool.expected
    found = talk(address, *pool.pieces(), methods=" ".join(pool.methods), resets=breaks)
    good = pool.expected.index(None) if breaks else len(pool.expected) - 1
    if len(found) > good + 1 or (len(found) < good + 1 and not breaks):
        return len(found), f"{len(found)} answers to {len(pool.expected)} requests"
    for (status, answer), expected in zip(found[:good], pool.expected, strict=False):
        assert expected is not None
        field, method = expected
        if status != 400 or (method != "HEAD" and field != answer["error"].split(":")[0]):
            return len(found), f"{status} {answer} for {expected}"
    # The last request has no token. A head without a fault is answered before its body is read, if
    # that comes later: 415, because it is no JSON.
    if len(found) > good and found[good][0] not in ((400, 415) if breaks else (401,)):
        return len(found), f"{found[good]} for a malformed request, or the last one"
    return len(found), ""
