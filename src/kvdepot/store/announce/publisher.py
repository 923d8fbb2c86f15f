"""A ZMQ publisher of numbered batches, and a replay socket for missed batches.

PUB (here XPUB, which reports new subscribers): topic, sequence (u64, big-endian), batch. ROUTER:
the request is 8 bytes, the first sequence to send; the answers are the kept batches from
there on as on PUB; the end has the sequence -1. For one thread.
"""

import time
from collections import deque
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from kvdepot.config.settings import EventsConfig
from kvdepot.errors import ConfigError
from kvdepot.store.announce.kv_events import Event

_END: Final = (-1).to_bytes(8, "big", signed=True)
_SEQUENCE_BYTES: Final = 8
_SUBSCRIBED: Final = b"\1"
_QUEUED_MAX: Final = 100_000
"""Most batches queued for a subscriber that does not read; further ones are dropped."""


class EventPublisher:
    """The two sockets. Raises ConfigError if an address cannot be used."""

    def __init__(self, config: EventsConfig) -> None:
        self._context = zmq.Context()
        self._config = config
        self._kept: deque[tuple[int, bytes, bytes]] = deque()
        self._kept_bytes = 0
        self._began = self.sequence = time.time_ns() // 1000
        """Number of the next batch. The first is the time in microseconds, so that numbers rise
        over restarts: routers ignore lower ones.
        """
        self._published_s = time.monotonic()
        self.replays = 0
        self.subscriptions = 0
        self.missed = False
        """True if a peer is new, or has requested batches that are not kept any more."""
        try:
            self._publishing = self._bind(zmq.XPUB, "events.endpoint", config.endpoint, _QUEUED_MAX)
            self._replaying: Any = None
            if config.replay:
                self._replaying = self._bind(zmq.ROUTER, "events.replay", config.replay, 0)
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    @property
    def addresses(self) -> dict[str, str]:
        """Addresses of the sockets, with the port that the system chose for port 0."""
        sockets = {"endpoint": self._publishing, "replay": self._replaying}
        return {
            name: one.getsockopt_string(zmq.LAST_ENDPOINT)
            for name, one in sockets.items()
            if one is not None
        }

    def quiet_s(self) -> float:
        """Seconds since the last batch."""
        return time.monotonic() - self._published_s

    @property
    def batches(self) -> int:
        """Number of batches published so far."""
        return self.sequence - self._began

    def publish(self, topic: str, events: list[Event]) -> None:
        """Send a batch to all subscribers. Does not block."""
        batch = msgspec.msgpack.encode([time.time(), events, 0])
        kept = (self.sequence, topic.encode(), batch)
        self._kept.append(kept)
        self._kept_bytes += len(batch)
        while self._kept_bytes > self._config.buffer:
            self._kept_bytes -= len(self._kept.popleft()[2])
        self.sequence += 1
        self._published_s = time.monotonic()
        self._send(kept)

    def _send(self, kept: tuple[int, bytes, bytes]) -> None:
        sequence, topic, batch = kept
        frames = (topic, sequence.to_bytes(_SEQUENCE_BYTES, "big"), batch)
        self._publishing.send_multipart(frames, zmq.DONTWAIT)

    def serve_peers(self, wait_s: float) -> None:
        """Serve new subscribers and replay requests. Blocks for `wait_s` at most."""
        poller = zmq.Poller()
        poller.register(self._publishing, zmq.POLLIN)
        if self._replaying is not None:
            poller.register(self._replaying, zmq.POLLIN)
        for socket, _ in poller.poll(int(wait_s * 1000)):
            frames = socket.recv_multipart()
            if socket is self._publishing:
                if frames[0][:1] == _SUBSCRIBED:
                    self.subscriptions += 1
                    self.missed = True
            elif len(frames) == 3 and len(frames[2]) == _SEQUENCE_BYTES:
                self._replay(frames[0], int.from_bytes(frames[2], "big"))

    def _replay(self, peer: bytes, first: int) -> None:
        assert self._replaying is not None
        self.replays += 1
        oldest = self._kept[0][0] if self._kept else self.sequence
        self.missed = self.missed or max(first, self._began) < oldest
        for sequence, topic, batch in self._kept:
            if sequence >= first:
                number = sequence.to_bytes(_SEQUENCE_BYTES, "big")
                self._replaying.send_multipart((peer, b"", topic, number, batch))
        self._replaying.send_multipart((peer, b"", b"", _END, b""))

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _bind(self, kind: int, setting: str, address: str, queued_max: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, queued_max)
        if kind == zmq.XPUB:
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(setting, f"cannot listen on {address}: {error.strerror}") from error
        path = Path(address.removeprefix("ipc://"))
        if address.startswith("ipc://") and path.is_socket():
            path.chmod(0o600)
        return socket
