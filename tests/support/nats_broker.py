"""A real NATS server on a free port; it can be killed and started again."""

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.s3_servers import free_ports
from tests.support.waiting import until


def nats_binary() -> str | None:
    beside = Path(sys.executable).with_name("nats-server")
    return str(beside) if beside.exists() else shutil.which("nats-server")


class NatsBroker:
    """One server process."""

    def __init__(self, *options: str, host: str = "127.0.0.1") -> None:
        self.host = host
        (self.port,) = free_ports(1)
        self._options = options
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    def start(self) -> None:
        binary = nats_binary()
        assert binary is not None
        self.process = subprocess.Popen(
            [binary, "-a", self.host, "-p", str(self.port), *self._options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
        until(self._answers)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, "the server ended"
        try:
            with socket.create_connection((self.host, self.port), timeout=5) as one:
                return one.recv(4) == b"INFO"
        except OSError:
            return False


@contextmanager
def nats_broker(*options: str) -> Iterator[NatsBroker]:
    broker = NatsBroker(*options)
    try:
        broker.start()
        yield broker
    finally:
        broker.kill()


def say(broker: NatsBroker, subject: str, payload: bytes) -> None:
    """Publish one message as any program could, without the client's library."""
    with socket.create_connection((broker.host, broker.port), timeout=30) as one:
        stream = one.makefile("rwb")
        stream.readline()
        options = json.dumps({"verbose": False}).encode()
        head = f"PUB {subject} {len(payload)}\r\n".encode()
        stream.write(b"CONNECT " + options + b"\r\n" + head + payload + b"\r\nPING\r\n")
        stream.flush()
        deadline_s = time.monotonic() + 30
        while not stream.readline().startswith(b"PONG"):
            assert time.monotonic() < deadline_s
