"""Requests with malformed framing on connections that users share: every answer belongs to the
request that was asked, and nothing inside a body is taken for a request."""

import json
import random
import socket
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import h11
import pytest

import kvdepot
from kvdepot.adapters.llama_cpp import http_front
from kvdepot.adapters.llama_cpp.http_front import ProxyServer
from kvdepot.adapters.llama_cpp.proxy import LlamaProxy
from kvdepot.adapters.llama_cpp.server_link import LinkSettings

Answer = tuple[int, Any]
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer mallory\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
FUZZ_CONNECTIONS = 800


class Echo(ThreadingHTTPServer):
    """A server whose answers say which request they answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _EchoHandler)
        self.asked: list[str] = []
        """The paths of all requests that did not come from the proxy itself."""
        self.instead = b""
        """The bytes of every answer to a path below /raw."""


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
            self.wfile.write(content.encode())


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    with Echo() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def front(echo: Echo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Where a proxy before that server listens."""
    slots: Path = tmp_path_factory.mktemp("slots")
    slots.chmod(0o700)
    dram = {"capacity": "2MiB", "prefault": False, "huge_pages": "never"}
    with kvdepot.open(dram=dram) as depot:
        proxy = LlamaProxy(LinkSettings(f"http://127.0.0.1:{echo.server_address[1]}", slots), depot)
        with ProxyServer(("127.0.0.1", 0), proxy) as server:
            thread = Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            yield "127.0.0.1", int(server.server_address[1])
            server.shutdown()
            thread.join()
        proxy.close()


def talk(front: tuple[str, int], *pieces: bytes, methods: str = "") -> list[Answer]:
    """Send bytes on one connection, and read answers until the proxy closes it. `methods` are
    those of the requests if an answer's length depends on them."""
    with closing(socket.create_connection(front, timeout=120)) as connection:
        for piece in pieces:
            connection.sendall(piece)
        received = b""
        while more := connection.recv(1 << 16):
            received += more
    return list(answers(received, methods.split()))


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
        yield status, json.loads(content or b"null")
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


@pytest.mark.parametrize("path", ["/kvdepot/status", "/completion", "/other"])
@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_framing_is_refused_and_ends_the_connection(
    kind: str, path: str, front: tuple[str, int], echo: Echo
) -> None:
    echo.asked.clear()
    ((status, answer),) = talk(front, request(path, *MALFORMED[kind]), LAST)
    assert status in (400, 501)
    assert answer["error"]["type"] == "proxy_error"
    assert not echo.asked


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "DELETE"])
@pytest.mark.parametrize("chunked", [False, True])
def test_the_body_of_a_status_request_is_no_request(
    method: str, chunked: bool, front: tuple[str, int]
) -> None:
    framing, body = f"Content-Length: {SIZE}\r\n", SMUGGLED
    if chunked:
        framing, body = "Transfer-Encoding: chunked\r\n", chunks(SMUGGLED)
    asked = request("/kvdepot/status", framing, body, method)
    first, last = talk(front, asked, LAST, methods=method)
    assert first[0] == 200
    assert method == "HEAD" or "ready" in first[1]
    assert last[1]["path"] == "/last"


@pytest.mark.parametrize(
    "framing",
    [
        f"Content-Length: {SIZE}\r\nContent-Length: {SIZE}\r\n",
        f"X: a\r\n b\r\nContent-Length: {SIZE}\r\n",
        f"Content-Length:\r\n {SIZE}\r\n",
        f"Content-Length: {SIZE}\n",
        f"X: a\nContent-Length: {SIZE}\r\n",
    ],
    ids=["the same length twice", "folded line", "folded length", "line feed", "line feeds"],
)
def test_lenient_framing_is_one_request_or_refused(framing: str, front: tuple[str, int]) -> None:
    """RFC 9112 lets a server refuse these or read them in one way; both are right."""
    first, *more = talk(front, request("/lenient", framing, SMUGGLED), LAST)
    if first[0] == 400:
        assert not more
    else:
        assert (first[1]["path"], first[1]["body"]) == ("/lenient", SMUGGLED.decode())
        assert [answer["path"] for _, answer in more] == ["/last"]


def test_long_heads_are_refused(front: tuple[str, int]) -> None:
    long = f"X: {'y' * (1 << 20)}\r\n"
    ((status, _),) = talk(front, request("/long", long, b""), LAST)
    assert status == 431


def test_long_bodies_are_refused(front: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_front, "_BODY_MAX", 1000)
    ((status, _),) = talk(front, request("/long", "Content-Length: 1001\r\n", SMUGGLED), LAST)
    assert status == 413
    many = chunks(*[SMUGGLED] * 20)
    ((status, _),) = talk(front, request("/long", "Transfer-Encoding: chunked\r\n", many), LAST)
    assert status == 413


def test_other_forms_of_requests(front: tuple[str, int]) -> None:
    old = b"GET /old HTTP/1.0\r\n\r\n"
    assert talk(front, old, LAST) == [(200, {"path": "/old", "user": "", "body": ""})]
    ((status, _),) = talk(front, b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", LAST)
    assert status == 405
    upgrade = request("/up", "Connection: upgrade\r\nUpgrade: h2c\r\n", b"", "GET")
    assert [answer["path"] for _, answer in talk(front, upgrade, LAST)] == ["/up", "/last"]
    waits = request("/waits", "Expect: 100-continue\r\nContent-Length: 2\r\n", b"")
    with closing(socket.create_connection(front, timeout=120)) as connection:
        connection.sendall(waits)
        assert connection.recv(1 << 10).startswith(b"HTTP/1.1 100")
        connection.sendall(b"{}")
        assert connection.recv(1 << 10).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "instead",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nContent-Length: 5\r\n\r\nabcde",
        b"HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\nabcde",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: xchunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n",
        b"no HTTP\r\n\r\n",
        b"",
    ],
    ids=["two lengths", "+ length", "xchunked", "switch", "no HTTP", "nothing"],
)
def test_a_malformed_answer_of_the_server_is_a_bad_gateway(
    instead: bytes, front: tuple[str, int], echo: Echo
) -> None:
    echo.instead = instead
    ((status, _),) = talk(front, request("/raw", "", b"", "GET"), LAST)
    assert status == 502


@pytest.mark.parametrize(
    "instead",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nabcde",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcdeXX0\r\n\r\n",
    ],
    ids=["short", "without the last chunk", "malformed chunk"],
)
def test_an_answer_that_breaks_off_ends_the_connection(
    instead: bytes, front: tuple[str, int], echo: Echo
) -> None:
    """The client sees that it is not complete, and no other answer follows it."""
    echo.instead = instead
    with pytest.raises(h11.RemoteProtocolError):
        talk(front, request("/raw", "", b"", "GET"), LAST)


def test_an_answer_with_chunks_and_a_length_has_one_framing(
    front: tuple[str, int], echo: Echo
) -> None:
    echo.instead = (
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunks(b"17")
    )
    first, last = talk(front, request("/raw", "", b"", "GET"), LAST)
    assert (first, last[1]["path"]) == ((200, 17), "/last")


class Pool:
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


def test_no_answer_reaches_another_request(front: tuple[str, int], echo: Echo) -> None:
    """Thousands of requests of two users, some malformed, on shared connections."""
    tries = 0
    for seed in range(FUZZ_CONNECTIONS):
        pool = Pool(seed)
        echo.asked.clear()
        found = talk(front, *pool.pieces(), methods=" ".join(pool.methods))
        refused = pool.expected.index(None) if None in pool.expected else len(pool.expected)
        good, bad = found[:refused], found[refused:]
        assert len(bad) == (refused < len(pool.expected)), seed
        assert all(status in (400, 501) for status, _ in bad), seed
        for at, (status, answer) in enumerate(good):
            expected = pool.expected[at]
            assert expected is not None
            assert status == 200, (seed, at)
            if pool.methods[at] != "HEAD" and expected[0] != "/kvdepot/status":
                assert (answer["path"], answer["user"]) == expected, (seed, at)
        asked = [one[0] for one in pool.expected[:refused] if one is not None]
        assert echo.asked == [one for one in asked if one not in ("/kvdepot/status", "/last")], seed
        tries += len(found)
    assert tries > 2000
