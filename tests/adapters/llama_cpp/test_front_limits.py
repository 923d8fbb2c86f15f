"""Silent, slow, large and unauthorised requests cost the proxy a bounded amount of everything."""

import json
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from tests.support.fake_llama import FakeLlama
from tests.support.waiting import until

import kvdepot
from kvdepot.adapters.llama_cpp import http_front, http_relay
from kvdepot.adapters.llama_cpp.http_front import ProxyServer
from kvdepot.adapters.llama_cpp.proxy import LlamaProxy
from kvdepot.adapters.llama_cpp.server_link import LinkSettings
from kvdepot.io import acceptor

POST = "POST /completion HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"


class Front:
    """A proxy before a stand-in for llama-server."""

    def __init__(self, fake: FakeLlama, slots: Path, depot: kvdepot.Depot) -> None:
        self.fake = fake
        self.proxy = LlamaProxy(LinkSettings(fake.url, slots), depot)
        self.server = ProxyServer(("127.0.0.1", 0), self.proxy)
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()
        self.proxy.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.server.server_address[:2], timeout=60)

    def ask(self, request: bytes) -> bytes:
        """All that comes back for these bytes until the proxy closes the connection."""
        with closing(self.connect()) as client:
            client.sendall(request)
            received = b""
            with suppress(ConnectionError):
                while more := client.recv(1 << 16):
                    received += more
            return received

    def is_answering(self) -> bool:
        answer = self.ask(b"GET /kvdepot/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return answer.startswith(b"HTTP/1.1 200 ")

    def complete(self, prompt: str) -> bytes:
        body = json.dumps({"prompt": prompt}).encode()
        head = POST.format(key="good") + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        return self.ask(head.encode() + body)


@pytest.fixture
def front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    monkeypatch.setattr(acceptor, "CONNECTIONS_MAX", 16)
    slots = tmp_path / "slots"
    slots.mkdir(mode=0o700)
    model = tmp_path / "m.gguf"
    model.write_bytes(b"weights")
    dram = {"capacity": "2MiB", "prefault": False, "huge_pages": "never"}
    with kvdepot.open(dram=dram) as depot, closing(FakeLlama(model, slots)) as fake:
        fake.hold.set()
        fake.keys = {"good"}
        made = Front(fake, slots, depot)
        yield made
        made.close()


@pytest.mark.parametrize("sent", ["", "GET /a HT", POST], ids=["silent", "a word", "slow head"])
def test_connections_without_a_request_have_no_threads(front: Front, sent: str) -> None:
    before = threading.active_count()
    with ExitStack() as opened:
        for _ in range(200):
            client = opened.enter_context(front.connect())
            with suppress(OSError):  # its place may have been taken
                client.sendall(sent.encode())
        assert all(front.is_answering() for _ in range(3))
        assert front.complete("abc").startswith(b"HTTP/1.1 200 ")
        assert threading.active_count() < before + 20


@pytest.mark.parametrize("framing", ["Content-Length: 50000000", "Transfer-Encoding: chunked"])
def test_a_key_is_checked_before_the_body(front: Front, framing: str) -> None:
    for key in ("bad", ""):
        answer = front.ask(f"{POST.format(key=key)}{framing}\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 401 "), "although no byte of the body was sent"
    assert "/completion" not in [path for path, _ in front.fake.seen]


def test_a_key_is_asked_about_once_in_a_while(front: Front) -> None:
    for _ in range(5):
        assert front.complete("abc").startswith(b"HTTP/1.1 200 ")
    assert front.fake.seen.count(("/tokenize", {"content": ""})) == 1


def test_the_server_is_asked_while_many_files_are_open(front: Front) -> None:
    """Each segment of a depot's drives is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    null = os.open("/dev/null", os.O_RDONLY)
    many = [null]
    try:
        while many[-1] < 1100:
            many.append(os.dup(null))
        assert front.proxy.link.call("/props", give_up=lambda: False)
    finally:
        for descriptor in many:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_bodies_share_a_bounded_memory(front: Front) -> None:
    until(lambda: hasattr(front.server, "_memory"))
    front.server._memory._left = front.server._memory._limit = 3 << 20
    with ExitStack() as opened:
        head = POST.format(key="good") + f"Content-Length: {2 << 20}\r\n\r\n"
        clients = [opened.enter_context(front.connect()) for _ in range(4)]
        for client in clients:
            client.sendall(head.encode() + b" " * 1000)
        until(lambda: front.server._memory._left == 1 << 20)
        # The other three wait; small bodies and the status do not.
        assert front.complete("abc").startswith(b"HTTP/1.1 200 ")
        assert front.is_answering()
        assert front.server._memory._left == 1 << 20
        clients[0].close()
        until(lambda: front.server._memory._left == 1 << 20)
    until(lambda: front.server._memory._left == 3 << 20)


def test_values_of_a_body_count_as_memory(front: Front) -> None:
    until(lambda: hasattr(front.server, "_memory"))
    front.server._memory._left = front.server._memory._limit = 3 << 20
    body = b"[" + b"[]," * 100_000 + b"[]]"
    head = POST.format(key="good") + f"Content-Length: {len(body)}\r\n\r\n"
    assert front.ask(head.encode() + body).startswith(b"HTTP/1.1 413 ")
    assert front.server._memory._left == 3 << 20


@pytest.mark.parametrize("sent", [b"", b"GET /a HTTP/1.1\r\n"], ids=["silent", "slow"])
def test_a_head_that_does_not_come_ends_the_connection(
    front: Front, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_front, "_HEAD_S", 0.2)
    monkeypatch.setattr(acceptor, "_SILENT_S", 0.2)
    assert front.ask(sent) == b""


def test_an_idle_connection_ends(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_front, "_IDLE_S", 0.2)
    answer = front.ask(b"GET /kvdepot/status HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_body_that_does_not_come_is_refused(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_front, "_BODY_S", 0.5)
    head = POST.format(key="good") + "Content-Length: 100\r\n\r\n{"
    assert front.ask(head.encode()).startswith(b"HTTP/1.1 408 ")


def test_requests_beyond_the_places_are_refused_and_the_status_is_not(front: Front) -> None:
    head = POST.format(key="good") + "Content-Length: 100\r\n\r\n{"
    with ExitStack() as opened:
        for _ in range(12):
            opened.enter_context(front.connect()).sendall(head.encode())
        until(lambda: front.complete("abc").startswith(b"HTTP/1.1 503 "))
        assert all(front.is_answering() for _ in range(5))
    until(lambda: front.complete("abc").startswith(b"HTTP/1.1 200 "))


def test_a_client_that_reads_nothing_is_disconnected(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_relay, "SEND_S", 0.2)
    monkeypatch.setattr(
        front.fake, "complete", lambda *_: {"content": "x" * (32 << 20), "timings": {}}
    )
    body = json.dumps({"prompt": "abc"}).encode()
    head = POST.format(key="good") + f"Content-Length: {len(body)}\r\n\r\n"
    with closing(front.connect()) as deaf:
        deaf.sendall(head.encode() + body)
        until(lambda: front.proxy.counters.requests == 1)
        until(lambda: front.proxy.watch._requests == 0)
    assert front.is_answering()


def test_it_stops_while_clients_are_connected(front: Front) -> None:
    with ExitStack() as opened:
        clients = []
        for sent in ("", POST, POST.format(key="good") + "Content-Length: 100\r\n\r\n{"):
            clients.append(opened.enter_context(front.connect()))
            clients[-1].sendall(sent.encode())
        assert front.is_answering()
        front.server.shutdown()
        for client in clients:
            with suppress(ConnectionError):
                while client.recv(1 << 16):
                    pass
