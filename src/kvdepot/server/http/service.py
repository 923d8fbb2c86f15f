"""The HTTP server of a daemon: one thread with an event loop, and two for what may block."""

import asyncio
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvdepot.errors import ConfigError, KVDepotError, StateError, StoreClosedError
from kvdepot.server.daemon import Daemon
from kvdepot.server.http.api import ENDPOINTS, Api, ApiCall, Endpoint, NotThereError
from kvdepot.server.http.archives import ARCHIVE_BYTES_MAX, MEDIA, ArchiveMover
from kvdepot.server.http.changes import ChangeRunningError
from kvdepot.server.http.events import RecentEvents
from kvdepot.server.http.guard import BODY_BYTES_MAX, RATE, AccessRules, Guard, refusal
from kvdepot.server.http.schemas import checked_values, openapi, parse_body
from kvdepot.store.metrics import CONTENT_TYPE, render

_TOKEN_BYTES_MIN: Final = 16
_CONNECTIONS_MAX: Final = 64
_STOP_S: Final = 5.0
_HERE: Final = "kvdepot.server.http"
_PAGE: Final[dict[str, tuple[str, list[tuple[str, str]]]]] = {
    "/": ("text/html; charset=utf-8", [(_HERE, "page/index.html")]),
    "/dashboard.js": ("text/javascript; charset=utf-8", [(_HERE, "page/dashboard.js")]),
    "/dashboard.css": (
        "text/css; charset=utf-8",
        [("kvdepot.core", "palette.css"), (_HERE, "page/dashboard.css")],
    ),
}
"""Paths of the dashboard: media type, and the files that make them."""
_log: Final = logging.getLogger("kvdepot.http")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Where to listen, and who may ask."""

    host: str
    port: int
    token_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    requests_per_s: float = RATE
    archive_bytes_max: int = ARCHIVE_BYTES_MAX
    """Of a session that is imported."""

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def token(self) -> bytes:
        """The token in the file; empty where there is no file. ConfigError: it cannot be used."""
        if self.token_file is None:
            if self.is_loopback:
                return b""
            raise ConfigError(
                "--http",
                f"{self.host} can be reached from other machines, and there is no token",
                hint="give --http-token-file FILE, or listen on 127.0.0.1",
            )
        try:
            found = self.token_file.read_bytes().strip()
        except OSError as error:
            reason = f"{self.token_file} cannot be read: {error.strerror or error}"
            raise ConfigError("--http-token-file", reason) from error
        if len(found) < _TOKEN_BYTES_MIN:
            raise ConfigError(
                "--http-token-file",
                f"{self.token_file} has less than {_TOKEN_BYTES_MIN} characters",
                hint="for example: openssl rand -hex 32",
            )
        return found

    def check(self) -> None:
        """Raise ConfigError where it cannot work."""
        self.token()
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError("--http-cert", "a certificate and its key go together")
        for name, path in (("--http-cert", self.cert_file), ("--http-key", self.key_file)):
            if path is not None and not path.is_file():
                raise ConfigError(name, f"{path} is not a file")

    def listen(self) -> socket.socket:
        """A socket that listens there. ConfigError: the address cannot be used."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            opened = socket.socket(family, kind, protocol)
            try:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                opened.bind(address)
                opened.listen(_CONNECTIONS_MAX)
            except OSError:
                opened.close()
                raise
        except OSError as error:
            raise ConfigError(
                "--http",
                f"cannot listen on {self.host} port {self.port}: {error.strerror or error}",
                hint="another port, or port 0 for any that is free",
            ) from error
        return opened


class HttpService:
    """Serves one daemon from `start` to `stop`."""

    def __init__(self, daemon: Daemon, settings: HttpSettings) -> None:
        settings.check()
        self._daemon = daemon
        self._events = RecentEvents()
        self._api = Api(daemon, self._events)
        self._threads = ThreadPoolExecutor(2, "kvdepot-http-call")
        self._archives = ArchiveMover(settings.archive_bytes_max)
        self._socket = settings.listen()
        self.port: int = self._socket.getsockname()[1]
        scheme = "https" if settings.cert_file else "http"
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"{scheme}://{host}:{self.port}"
        token = settings.token()
        hosts = set() if token else {"localhost", "127.0.0.1", "::1", settings.host}
        app = Guard(self._app(), AccessRules(token, frozenset(hosts), settings.requests_per_s))
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http="h11",
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=_CONNECTIONS_MAX,
                backlog=_CONNECTIONS_MAX,
                timeout_graceful_shutdown=1,
                ssl_certfile=settings.cert_file,
                ssl_keyfile=settings.key_file,
            )
        )
        try:
            self._server.config.load()
        except OSError as error:
            self._socket.close()
            raise ConfigError("--http-cert", f"cannot be used: {error}") from error
        self._thread = threading.Thread(target=self._run, name="kvdepot-http", daemon=True)

    def start(self) -> None:
        """Serve from now on, in a thread."""
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        self._events.attach()
        self._thread.start()

    def stop(self) -> None:
        """Serve no more."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self._socket.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._archives.close()
        self._events.detach()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def _app(self) -> Starlette:
        routes = [
            Route("/healthz", _plain(lambda: {"ok": True})),
            Route("/readyz", self._ready),
            Route("/metrics", self._metrics),
            Route("/openapi.json", _plain(openapi)),
        ]
        for path, (media, files) in _PAGE.items():
            parts = [resources.files(at).joinpath(name).read_bytes() for at, name in files]
            routes.append(Route(path, _static(b"".join(parts), media)))
        for endpoint in ENDPOINTS:
            answer = partial(self._answer, endpoint)
            routes.append(Route(endpoint.route, answer, methods=[endpoint.method]))
        handlers = {HTTPException: _refused, KVDepotError: _failed, OSError: _failed}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return app

    async def _call(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _ready(self, _: Request) -> Response:
        if self._daemon.is_stopping:
            return JSONResponse({"ready": False, "why": "the daemon stops"}, 503)
        return JSONResponse({"ready": True})

    async def _metrics(self, _: Request) -> Response:
        text = await self._call(lambda: render(self._api.stats()))
        return Response(text, media_type=None, headers={"content-type": CONTENT_TYPE})

    async def _answer(self, endpoint: Endpoint, request: Request) -> Response:
        """Check a request against the endpoint's fields, and answer it."""
        values = checked_values(endpoint.fields, dict(request.path_params), "path")
        values |= checked_values(endpoint.fields, dict(request.query_params), "query")
        trusted = bool(request.state.trusted)
        if endpoint.private and not trusted:
            raise HTTPException(403, "this needs a token: start with --http-token-file FILE")
        if endpoint.archive:
            return await self._move_archive(endpoint, request, values)
        if endpoint.method != "GET":
            values |= checked_values(endpoint.fields, parse_body(await _body(request)), "body")
        call = ApiCall(values, trusted)
        found = await self._call(lambda: endpoint.answer(self._api, call))
        running = endpoint.method != "GET" and found.get("state") == "running"
        return JSONResponse(found, 202 if running else 200)

    async def _move_archive(
        self, endpoint: Endpoint, request: Request, values: dict[str, Any]
    ) -> Response:
        api = self._api
        if endpoint.method != "GET":
            take = lambda source: endpoint.answer(api, ApiCall(values, True, source))  # noqa: E731
            return JSONResponse(await self._archives.upload(request, take))
        if request.method == "HEAD":
            return Response(media_type=MEDIA)
        call = ApiCall(values, True)
        return await self._archives.download(lambda: endpoint.answer(api, call))


async def _body(request: Request) -> bytes:
    """The body of a request, as far as it is not too large."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "the body must be application/json")
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > BODY_BYTES_MAX:
            raise HTTPException(413, f"the body has more than {BODY_BYTES_MAX} bytes")
        parts.append(part)
    return b"".join(parts)


def _plain(answer: Callable[[], Mapping[str, Any]]) -> Callable[[Request], Any]:
    async def handle(_: Request) -> Response:
        return JSONResponse(dict(answer()))

    return handle


def _static(content: bytes, media: str) -> Callable[[Request], Any]:
    async def handle(_: Request) -> Response:
        return Response(content, headers={"content-type": media})

    return handle


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refusal(error.status_code, str(error.detail), headers=dict(error.headers or {}))


async def _failed(_: Request, error: Exception) -> Response:
    if isinstance(error, StateError):
        _log.error("a bug in kvdepot: %s", error)
        return refusal(500, "a bug in kvdepot: see the daemon's log")
    if isinstance(error, StoreClosedError):
        return refusal(503, "the daemon stops")
    if isinstance(error, NotThereError):
        return refusal(404, str(error), error.hint)
    if isinstance(error, ChangeRunningError):
        return refusal(409, str(error), error.hint)
    return refusal(400, str(error), getattr(error, "hint", ""))
