"""A store's connection to a NATS server: one thread, which reconnects by itself.

No call waits for it. Messages that cannot be sent are dropped and counted; the queue is bounded.
After a failure the servers are tried again after growing, random pauses.
"""

import asyncio
import importlib
import random
import ssl
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvdepot.cluster.messages import MalformedMessageError
from kvdepot.config.settings import NatsConfig
from kvdepot.core.log import RateLimitedLog
from kvdepot.errors import ConfigError, ExtraMissingError, KVDepotError

_WAITING_MAX: Final = 256
"""Messages that wait to be sent."""
_PENDING_MAX: Final = 1024
"""Received messages that wait to be handled."""
_PENDING_BYTES_MAX: Final = 16 << 20
_CONNECT_S: Final = 2
_PING_S: Final = 10
_RETRY_S: Final = (0.1, 5.0)
"""First and longest pause before the servers are tried again."""
_TICK_S: Final = 0.2
_STOP_S: Final = 5.0
_log = RateLimitedLog("kvdepot.store")


class LinkError(KVDepotError):
    """No NATS server can be used."""

    hint = "see nats.servers and its credentials"


Handler = Callable[[bytes], None]
"""Handles a message. Raises MalformedMessageError if it is malformed."""


def connect_options(config: NatsConfig) -> dict[str, Any]:
    """The options of the NATS client. Raises ConfigError if a file cannot be read, and
    ExtraMissingError.
    """
    _client_class()
    options: dict[str, Any] = {"servers": list(config.servers), "connect_timeout": _CONNECT_S}
    options |= {"ping_interval": _PING_S, "no_echo": True}
    # One try of each server: NatsLink reconnects.
    options |= {"allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0.01}
    if config.credentials_file is not None:
        _import("nkeys")
        try:
            config.credentials_file.read_bytes()
        except OSError as error:
            reason = f"{config.credentials_file} cannot be read: {error.strerror}"
            raise ConfigError("nats.credentials_file", reason) from error
        options["user_credentials"] = str(config.credentials_file)
    if token := config.token():
        options["token"] = token
    if config.tls_ca is not None or any(one.startswith("tls:") for one in config.servers):
        try:
            options["tls"] = ssl.create_default_context(cafile=config.tls_ca)
        except OSError as error:
            raise ConfigError("nats.tls_ca", "cannot be read, or has no certificate") from error
    return options


async def connected(options: Mapping[str, Any], **more: Any) -> Any:
    """Connect a client. Raises OSError, TimeoutError and the errors of the client."""
    client = _client_class()()
    try:
        await client.connect(**{**options, **more})
    except BaseException:
        await client.close()
        raise
    return client


def link_errors() -> tuple[type[Exception], ...]:
    """The exceptions of the client if a server cannot be reached or refuses it."""
    found: type[Exception] = _import("nats.errors").Error
    return (found, OSError, TimeoutError, asyncio.TimeoutError, ValueError)


def publish_once(config: NatsConfig, subject: str, payload: bytes) -> None:
    """Send one message. Returns when a server has it; LinkError if none can be used."""

    async def send() -> None:
        client = await connected(options, error_cb=_report)
        try:
            await client.publish(subject, payload)
            await client.flush(_CONNECT_S)
        finally:
            await client.close()

    options = connect_options(config)
    try:
        asyncio.run(send())
    except link_errors() as error:
        raise LinkError(f"nats: no server can be used ({_named(error)})") from None


class NatsLink:
    """One store's connection. `publish` and `close` may be called from any thread.

    The link's thread calls the handler of each message by its subject, `tick` periodically, and
    `came` after each connection, because messages sent before it were missed.
    """

    def __init__(
        self,
        config: NatsConfig,
        handlers: Mapping[str, Handler],
        *,
        tick: Callable[[], None],
        came: Callable[[], None],
    ) -> None:
        self._options = connect_options(config)
        self._handlers = handlers
        self._tick = tick
        self._came = came
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._stopping = asyncio.Event()
        self.is_up = False
        self.counts = dict.fromkeys(("sent", "received", "refused", "dropped", "connected"), 0)
        self._thread = threading.Thread(target=self._run, name="kvdepot-nats", daemon=True)
        self._thread.start()

    def publish(self, subject: str, payload: bytes) -> None:
        """Queue a message, or drop it if no server is connected. Does not block."""
        with self._lock:
            if not self.is_up or len(self._waiting) >= _WAITING_MAX:
                self.counts["dropped"] += 1
                return
            same = (subject, payload) in self._waiting
            if not same:
                self._waiting.append((subject, payload))
        if not same:
            self._call(self._news.set)

    def close(self) -> None:
        """End the connection and its thread. May be called twice."""
        self._call(self._stopping.set)
        self._thread.join(_STOP_S)

    def _call(self, what: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop has ended
            return

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._stay_connected())
        finally:
            self.is_up = False
            self._loop.close()

    async def _stay_connected(self) -> None:
        pause_s, errors = _RETRY_S[0], link_errors()
        while not self._stopping.is_set():
            try:
                await self._serve()
                pause_s = _RETRY_S[0]
            except errors as error:
                _log.warning("nats: no server can be used (%s); going on without", _named(error))
            finally:
                with self._lock:
                    self.is_up = False
                    self.counts["dropped"] += len(self._waiting)
                    self._waiting.clear()
            await _wait(self._stopping, pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _RETRY_S[1])

    async def _serve(self) -> None:
        """Connect, then serve the connection until it ends."""
        ended = asyncio.Event()

        async def closed() -> None:
            ended.set()
            self._news.set()

        client = await self._connected(closed)
        if client is None:
            return
        try:
            for subject, handler in self._handlers.items():
                await client.subscribe(
                    subject,
                    cb=self._received(handler),
                    pending_msgs_limit=_PENDING_MAX,
                    pending_bytes_limit=_PENDING_BYTES_MAX,
                )
            await client.flush(_CONNECT_S)
            with self._lock:
                self.is_up = True
                self.counts["connected"] += 1
            _log.info("nats: connected")
            self._came()
            stopping = asyncio.ensure_future(self._stopping.wait())
            stopping.add_done_callback(lambda _: self._news.set())
            while not (ended.is_set() or self._stopping.is_set()):
                await _wait(self._news, _TICK_S)
                self._news.clear()
                await self._send(client)
                self._tick()
            stopping.cancel()
        finally:
            if not client.is_closed:
                await client.close()

    async def _connected(self, closed: Callable[[], Any]) -> Any:
        """Connect a client. None if the link is being closed."""
        trying = asyncio.ensure_future(connected(self._options, closed_cb=closed, error_cb=_report))
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({trying, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if trying.done():
            return trying.result()
        trying.cancel()
        await asyncio.wait({trying})
        return None

    async def _send(self, client: Any) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                subject, payload = self._waiting.popleft()
                self.counts["sent"] += 1
            await client.publish(subject, payload)

    def _received(self, handler: Handler) -> Callable[[Any], Any]:
        async def received(message: Any) -> None:
            with self._lock:
                self.counts["received"] += 1
            try:
                handler(message.data)
            except MalformedMessageError as error:
                with self._lock:
                    self.counts["refused"] += 1
                _log.warning("nats: a message was ignored: it %s", error)

        return received


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return


async def _report(error: Exception) -> None:
    """Log an error that the client reports and does not raise."""
    _log.warning("nats: %s", _named(error))


def _named(error: Exception) -> str:
    """The name of an error, without addresses and contents of messages."""
    return type(error).__name__


def _client_class() -> Any:
    return _import("nats.aio.client").Client


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ExtraMissingError("nats", name.partition(".")[0]) from error
