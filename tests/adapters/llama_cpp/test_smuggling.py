"""Requests with malformed framing on connections that users share: every answer belongs to the
request that was asked, and nothing inside a body is taken for a request."""

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread

import h11
import pytest
from tests.support.smuggled_requests import (
    LAST,
    MALFORMED,
    SIZE,
    SMUGGLED,
    Echo,
    attempt,
    chunks,
    request,
    talk,
)

import kvdepot
from kvdepot.adapters.llama_cpp import http_front
from kvdepot.adapters.llama_cpp.http_front import ProxyServer
from kvdepot.adapters.llama_cpp.proxy import LlamaProxy
from kvdepot.adapters.llama_cpp.server_link import LinkSettings


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


@pytest.mark.parametrize("connections", [100, pytest.param(800, marks=pytest.mark.slow)])
def test_no_answer_reaches_another_request(
    front: tuple[str, int], echo: Echo, seed: int, connections: int
) -> None:
    """Hundreds of requests of two users, some malformed, on shared connections."""
    tries = 0
    for number in range(seed, seed + connections):
        found, wrong = attempt(front, echo, number)
        assert not wrong, (number, wrong)
        tries += found
    assert tries > 2 * connections
