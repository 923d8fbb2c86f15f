"""Clients that do not keep to the protocol: a bare socket and what to say on it."""

import json
import os
import socket
from pathlib import Path

from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.namespace import FORMAT_VERSION
from kvdepot.daemon.wire.frames import (
    FRAME_BYTES_MAX,
    MAGIC,
    NO_TOKEN,
    Frame,
    FrameKind,
    Hello,
    Register,
    pack,
    parse,
)
from kvdepot.daemon.wire.versions import PROTOCOL
from kvdepot.format.record import VERSION as RECORD_VERSION

TIMEOUT_S = 60.0


def hello(
    magic: bytes = MAGIC,
    protocol: int = PROTOCOL,
    newest: int = 0,
    store_format: int = FORMAT_VERSION,
    record: int = RECORD_VERSION,
    token: bytes = NO_TOKEN,
) -> bytes:
    return Hello(magic, protocol, store_format, record, newest, os.getpid(), token).body()


class RawClient:
    """A connection that says what it is told to."""

    def __init__(self, path: Path, *, greeted: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(str(path))
        if greeted:
            answer = self.ask(FrameKind.HELLO, hello())
            assert answer is not None and answer.kind is FrameKind.WELCOME

    def say(self, data: bytes) -> None:
        """Send bytes; that nobody listens any more is no news."""
        try:
            self.socket.send(data)
        except (BrokenPipeError, ConnectionResetError):
            return

    def send(self, kind: FrameKind, body: bytes = b"", flags: int = 0, serial: int = 7) -> None:
        self.say(pack(kind, serial, body, flags))

    def hear(self) -> Frame | None:
        """The next frame, None when the daemon has hung up."""
        try:
            data = self.socket.recv(FRAME_BYTES_MAX + 1)
        except ConnectionResetError:
            return None
        return parse(memoryview(data)) if data else None

    def ask(self, kind: FrameKind, body: bytes = b"", flags: int = 0) -> Frame | None:
        self.send(kind, body, flags)
        return self.hear()

    def heard_out(self) -> list[FrameKind]:
        """Kinds of all frames until the daemon hangs up, which it must."""
        kinds = []
        while (frame := self.hear()) is not None:
            kinds.append(frame.kind)
        return kinds

    def register(self, space: NamespaceHandle) -> None:
        """Register a namespace, as a client must before it reads or puts its blocks."""
        head = Register(space.tag, space.layout.block_bytes, space.layout.chunk_bytes)
        description = json.dumps(space.namespace.description(), sort_keys=True).encode()
        answer = self.ask(FrameKind.REGISTER, head.body() + description)
        assert answer is not None and answer.kind is FrameKind.NUMBER

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
