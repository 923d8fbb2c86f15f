"""One connection to the daemon: a request, and its answers, at a time."""

import json
import os
import socket
from typing import Any, Final

from kvdepot.codec.record import VERSION as RECORD_VERSION
from kvdepot.core.namespace import FORMAT_VERSION
from kvdepot.errors import ConfigError, DaemonError, WireError
from kvdepot.wire import messages
from kvdepot.wire.channel import Channel
from kvdepot.wire.frames import PROTOCOL, Flag, Frame, FrameKind

HELLO_TIMEOUT_S: Final = 2.0
_SERIALS: Final = 1 << 32
_UNANSWERED: Final = (FrameKind.RELEASE, FrameKind.ABANDON, FrameKind.CANCEL_HINT)


class DaemonAwayError(Exception):
    """The daemon is gone, or does not answer in time. Never leaves this package: a miss instead."""


class Link:
    """A connection that has been greeted. One thread at a time."""

    def __init__(self, channel: Channel, welcome: messages.Welcome) -> None:
        self.welcome = welcome
        self.waiting = 0
        """Requests whose last answer has not been received."""
        self._channel = channel
        self._serial = 0

    def call(self, kind: FrameKind, body: bytes, limit_s: float, flags: int = 0) -> Frame:
        """One request and its one answer. ConfigError when the daemon refuses a setting."""
        serial = self.send(kind, body, flags)
        return self.answer(serial, limit_s)

    def send(self, kind: FrameKind, body: bytes = b"", flags: int = 0) -> int:
        """Send a request. Returns its serial, for `answer`."""
        self._serial = (self._serial + 1) % _SERIALS
        try:
            self._channel.send(kind, self._serial, body, flags)
        except OSError as error:
            raise DaemonAwayError(str(error)) from error
        if kind not in _UNANSWERED:
            self.waiting += 1
        return self._serial

    def follow_up(self, serial: int, kind: FrameKind) -> None:
        """Send something that belongs to a request under way."""
        try:
            self._channel.send(kind, serial)
        except OSError as error:
            raise DaemonAwayError(str(error)) from error

    def answer(self, serial: int, limit_s: float) -> Frame:
        """The next answer to a request."""
        try:
            frame = self._channel.receive(limit_s)
        except (OSError, WireError) as error:
            raise DaemonAwayError(str(error)) from error
        if frame is None:
            raise DaemonAwayError("the daemon has closed the connection")
        if frame.serial != serial:
            raise DaemonAwayError("an answer to another request")
        if frame.kind is not FrameKind.ARRIVED or frame.flags & Flag.LAST:
            self.waiting -= 1
        if frame.kind is FrameKind.REFUSED:
            raise refusal_of(frame)
        return frame

    def number(self, kind: FrameKind, body: bytes, limit_s: float) -> int:
        """The answer to a request that is answered with a number."""
        frame = expect(self.call(kind, body, limit_s), FrameKind.NUMBER)
        return messages.Number.parse(frame.body).value

    def text(self, kind: FrameKind, body: bytes, limit_s: float) -> Any:
        """The answer to a request that is answered with JSON."""
        first = self.call(kind, body, limit_s)
        try:
            return json.loads(self._channel.receive_text(first, limit_s))
        except (OSError, WireError, ValueError) as error:
            raise DaemonAwayError(str(error)) from error

    def is_open(self) -> bool:
        return self._channel.is_open()

    def close(self) -> None:
        self._channel.close()


def expect(frame: Frame, kind: FrameKind) -> Frame:
    """The frame, if it is of a kind."""
    if frame.kind is not kind:
        raise DaemonAwayError(f"{frame.kind.name} instead of {kind.name}")
    return frame


def connect(path: str, token: bytes) -> tuple[Link, list[int]]:
    """A new connection and, if it begins a session, the descriptors of the daemon's memory.

    DaemonAwayError when nobody answers, DaemonError when somebody does who cannot be used.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.settimeout(HELLO_TIMEOUT_S)
        connected.connect(path)
        return _greet(path, Channel(connected), token)
    except (OSError, WireError) as error:
        connected.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise DaemonAwayError(reason) from error
    except DaemonError:
        connected.close()
        raise


def _greet(path: str, channel: Channel, token: bytes) -> tuple[Link, list[int]]:
    hello = messages.Hello(
        messages.MAGIC, PROTOCOL, FORMAT_VERSION, RECORD_VERSION, 0, os.getpid(), token
    )
    channel.send(FrameKind.HELLO, 0, hello.body())
    frame, descriptors = channel.receive_with(HELLO_TIMEOUT_S)
    try:
        welcome = _welcome(path, frame)
        memories = 3 if welcome.cxl_bytes else 2
        _check_descriptors(descriptors, memories if token == messages.NO_TOKEN else 0)
    except (WireError, DaemonError):
        for fd in descriptors:
            os.close(fd)
        raise
    return Link(channel, welcome), descriptors


def _welcome(path: str, frame: Frame | None) -> messages.Welcome:
    if frame is None:
        raise WireError("the daemon hung up")
    if frame.kind is FrameKind.REFUSED:
        raise _refused(path, frame)
    if frame.kind is not FrameKind.WELCOME:
        raise WireError(f"{frame.kind.name} instead of WELCOME")
    return messages.Welcome.parse(frame.body)


def _check_descriptors(descriptors: list[int], expected: int) -> None:
    if len(descriptors) != expected:
        raise WireError(f"{len(descriptors)} descriptors instead of {expected}")


def _refused(path: str, frame: Frame) -> DaemonError:
    said = json_of(frame)
    ours = messages.versions(PROTOCOL, FORMAT_VERSION, RECORD_VERSION)
    theirs = said.get("daemon", "")
    if theirs and theirs != ours:
        return DaemonError(
            path,
            f"the daemon speaks {theirs}; this client speaks {ours}",
            hint="install the same version of kvdepot on both sides, and restart the daemon",
        )
    return DaemonError(path, f"the daemon refused: {said.get('reason', 'no reason given')}")


def refusal_of(frame: Frame) -> ConfigError:
    """What the daemon said about a setting."""
    said = json_of(frame)
    path = str(said.get("path", "daemon"))
    reason = str(said.get("reason", "refused")).removeprefix(f"{path}: ")
    return ConfigError(path, reason, hint=str(said.get("hint", "")))


def json_of(frame: Frame) -> dict[str, Any]:
    try:
        said = json.loads(bytes(frame.body))
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
