"""Silent, slow and greedy HTTP clients cost a bounded number of connections, time and lines."""

import asyncio
import logging
import os
import resource
import select
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.support.http_daemon import HttpDaemon, ask
from tests.support.waiting import until

from kvdepot.core.log import RepeatFilter
from kvdepot.daemon.http import connections, guard
from kvdepot.daemon.http.exposition import MetricsPage
from kvdepot.daemon.http.guard import SenderRates
from kvdepot.io import acceptor
from kvdepot.io.acceptor import Accepted, Acceptor, connections_max

TOKEN = "0123456789abcdef-token"
HEAD = b"GET /api/stats HTTP/1.1\r\nhost: 127.0.0.1\r\n"


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60)


@pytest.mark.parametrize("first", [b"", b"GET", HEAD], ids=["silent", "a word", "slow head"])
def test_health_is_answered_while_others_owe_their_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    monkeypatch.setattr(acceptor, "CONNECTIONS_MAX", 8)
    with HttpDaemon(tmp_path) as daemon, ExitStack() as opened:
        before = open_descriptors()
        silent = [opened.enter_context(connect(daemon.url)) for _ in range(100)]
        for one in silent:
            with suppress(OSError):  # its place may have been taken
                one.sendall(first)
        for path in ("/healthz", "/readyz", "/metrics") * 3:
            assert daemon.get(path).status == 200
        # This process has the clients' ends, too.
        assert open_descriptors() <= before + len(silent) + 8 + acceptor._DROPPED_AT_ONCE


def test_the_descriptors_of_the_store_are_not_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ((64, 16), (1024, 256), (1 << 20, 1024), (resource.RLIM_INFINITY, 1024))
    for soft, expected in limits:
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert connections_max() == expected


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"\r\n"], ids=["silent", "slow", "idle"])
def test_a_connection_without_a_request_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "WAIT_S", 0.2)
    monkeypatch.setattr(acceptor, "_SILENT_S", 0.2)
    monkeypatch.setattr(acceptor, "_LOOK_S", 0.1)
    with HttpDaemon(tmp_path) as daemon, connect(daemon.url) as slow:
        slow.sendall(sent)
        with suppress(ConnectionError):
            while slow.recv(1 << 16):
                slow.sendall(b"x")
        assert daemon.get("/healthz").status == 200


def test_a_slow_body_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_S", 0.2)
    head = f"POST /api/hints HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n"
    head += "content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    with HttpDaemon(tmp_path, TOKEN) as daemon, connect(daemon.url) as slow:
        slow.sendall(head.encode())
        answer = b""
        with suppress(ConnectionError):
            while more := slow.recv(1 << 16):  # until the connection is closed
                answer += more
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_client_that_reads_nothing_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SEND_S", 0.2)
    monkeypatch.setattr(connections, "_PIECE_BYTES", 1 << 12)
    with HttpDaemon(tmp_path, TOKEN) as daemon, connect(daemon.url) as deaf:
        long = [{"what": "x" * (16 << 20)}]
        monkeypatch.setattr(daemon.http._served.events, "latest", lambda: long)
        deaf.sendall(
            HEAD.replace(b"stats", b"events") + f"authorization: Bearer {TOKEN}\r\n\r\n".encode()
        )
        ended = select.poll()
        ended.register(deaf, 0)
        until(lambda: bool(ended.poll(0)))
        whole = daemon.get("/api/events").json["events"][0]["what"]
        assert len(whole) == 16 << 20, "one that reads gets all pieces"


def test_requests_beyond_the_places_are_refused_and_health_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "CONNECTIONS_MAX", 8)
    head = f"POST /api/hints HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n"
    head += "content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    with HttpDaemon(tmp_path, TOKEN) as daemon, ExitStack() as opened:
        for _ in range(4):
            opened.enter_context(connect(daemon.url)).sendall(head.encode())
        until(lambda: daemon.get("/api/stats").status == 503)
        assert daemon.get("/api/stats").headers["retry-after"] == "1"
        for path in ("/healthz", "/readyz", "/metrics"):
            assert daemon.get(path).status == 200


def test_strangers_do_not_use_up_the_rate_of_the_token() -> None:
    rates = SenderRates(10.0, lambda: 0.0)
    stranger = [rates.allows("192.0.2.1", trusted=False) for _ in range(21)]
    assert stranger == [True] * 20 + [False]
    assert rates.allows("192.0.2.2", trusted=False)
    for number in range(20):
        assert rates.allows(f"2001:db8::{number}", trusted=False)
    assert not rates.allows("2001:db8::ffff", trusted=False), "one network is one sender"
    assert rates.allows("2001:db8:0:1::", trusted=False)
    assert [rates.allows("192.0.2.1", trusted=True) for _ in range(21)] == stranger


def test_rates_of_a_bounded_number_of_senders_are_known() -> None:
    rates = SenderRates(1.0, lambda: 0.0)
    for number in range(5000):
        rates.allows(f"10.0.{number // 256}.{number % 256}", trusted=False)
    assert len(rates._strangers) == 1024


def test_a_request_with_two_framings_is_refused(tmp_path: Path) -> None:
    smuggled = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    head = b"GET /readyz HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n"
    head += b"content-length: %d\r\n\r\n0\r\n\r\n" % (len(smuggled) + 5)
    with HttpDaemon(tmp_path) as daemon, connect(daemon.url) as client:
        client.sendall(head + smuggled)
        answers = b""
        with suppress(ConnectionError):
            while more := client.recv(1 << 16):
                answers += more
        assert answers.startswith(b"HTTP/1.1 400 ") and answers.count(b"HTTP/1.1") == 1


def test_metrics_are_rendered_once_for_all_who_wait() -> None:
    rendered: list[int] = []
    permitted = [True]

    def render() -> str:
        rendered.append(len(rendered))
        time.sleep(0.01)
        return str(rendered[-1])

    async def ask_often() -> None:
        page = MetricsPage(render, lambda: permitted[0])
        first = asyncio.create_task(page.text())
        while not rendered:
            await asyncio.sleep(0)
        later = await asyncio.gather(*(page.text() for _ in range(50)))
        assert await first == "0" and set(later) == {"1"}
        assert await page.text() == "2"
        permitted[0] = False
        assert await page.text() == "2", "the latest, beyond the rate"
        page.close()

    asyncio.run(ask_often())


def test_lines_of_the_server_are_logged_once_in_a_while(tmp_path: Path) -> None:
    now = [0.0]
    lines = RepeatFilter(lambda: now[0])

    def passes(text: str) -> str | None:
        record = logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, text, (), None)
        return record.getMessage() if lines.filter(record) else None

    assert [passes("bad") for _ in range(3)] == ["bad", None, None]
    now[0] = 10.0
    assert passes("bad") == "bad (2 more like this since the last line)"
    assert sum(passes(f"line {number}") is not None for number in range(5000)) == 256


def test_malformed_requests_are_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with HttpDaemon(tmp_path) as daemon:
        for _ in range(20):
            with connect(daemon.url) as client:
                client.sendall(b"nonsense\r\n\r\n")
                assert client.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
    assert len([one for one in caplog.records if "Invalid HTTP" in one.getMessage()]) == 1


def test_a_body_that_is_malformed_ends_its_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n"
    with HttpDaemon(tmp_path) as daemon:
        for body in (b"x\r\n", b"3\r\nabcXX0\r\n\r\n"):
            with connect(daemon.url) as client:
                client.sendall(head + body + HEAD + b"\r\n")
                answers = b""
                with suppress(ConnectionError):
                    while more := client.recv(1 << 16):
                        answers += more
                assert answers.count(b"HTTP/1.1 ") <= 1, "nothing after it is a request"
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


def test_a_lack_of_descriptors_is_waited_out(caplog: pytest.LogCaptureFixture) -> None:
    """The longest waiting connection gives its descriptor, and the log does not grow."""

    class Exhausted(socket.socket):
        """A listening socket of a process without descriptors."""

        failures = 3

        def accept(self) -> tuple[socket.socket, object]:
            if self.failures:
                self.failures -= 1
                raise OSError(24, "Too many open files")
            return super().accept()

    answered = []

    async def serve(accepted: Accepted) -> None:
        answered.append(await asyncio.get_running_loop().sock_recv(accepted.socket, 1))

    async def run() -> None:
        with Exhausted() as listening, socket.socket() as client:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            listening.setblocking(False)
            accepting = Acceptor(listening, 4, serve)
            accepting.start()
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, listening.getsockname())
            await loop.sock_sendall(client, b"x")
            while not answered:
                await asyncio.sleep(0.01)
            await accepting.stop(1.0)

    asyncio.run(run())
    assert answered == [b"x"]
    assert sum("cannot be accepted" in line for line in caplog.messages) <= 1


def test_a_connection_whose_bytes_were_not_noticed_yet_keeps_its_place() -> None:
    """The loop had no time to look before another connection needed the place."""
    answered = []

    async def serve(accepted: Accepted) -> None:
        answered.append(await asyncio.get_running_loop().sock_recv(accepted.socket, 1))

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as opened:
            accepting = Acceptor(listening, 2, serve)
            accepting.start()
            clients = [
                opened.enter_context(socket.create_connection(listening.getsockname()))
                for _ in range(3)
            ]
            while len(accepting._open) < 2:
                await asyncio.sleep(0)
            clients[0].sendall(b"x")
            accepting._drop_longest_waiting()
            while not answered:
                await asyncio.sleep(0.01)
            await accepting.stop(1.0)

    asyncio.run(run())
    assert answered == [b"x"]


def test_it_stops_while_clients_are_connected(tmp_path: Path) -> None:
    with HttpDaemon(tmp_path) as daemon:
        url = daemon.url
        clients = [connect(url) for _ in range(5)]
        clients[0].sendall(HEAD)
        assert daemon.get("/healthz").status == 200
    for client in clients:
        with client, suppress(ConnectionError):
            assert not client.recv(1)
    with pytest.raises(OSError):
        ask(url, "GET", "/healthz")
