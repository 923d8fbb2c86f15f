"""The HTTP server of a daemon: a thread with an event loop, and two for calls that may block."""

import logging
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import uvicorn
from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import kvdepot
from kvdepot.config.settings import is_loopback
from kvdepot.core.log import RateLimitedLog, RepeatFilter
from kvdepot.daemon.http import api
from kvdepot.daemon.http.archives import ARCHIVE_BYTES_MAX, ArchiveMover
from kvdepot.daemon.http.changes import ChangeRunningError
from kvdepot.daemon.http.connections import BoundedServer
from kvdepot.daemon.http.guard import (
    RATE,
    REQUESTS_MAX,
    SCRAPES_MAX,
    AccessRules,
    Guard,
    refusal,
)
from kvdepot.daemon.server.daemon import Daemon
from kvdepot.errors import ConfigError, KVDepotError, StateError, StoreClosedError
from kvdepot.io.acceptor import BACKLOG, connections_max

_TOKEN_BYTES_MIN: Final = 16
_OPEN_TO_OTHERS: Final = stat.S_IRWXO | stat.S_IWGRP
_STOP_S: Final = 5.0
_THREADS: Final = 2
"""Threads for calls that may block, except for those of archives."""
_NAME_SHOWN: Final = 100
"""Most characters of a field's name in an error: the sender may have chosen it."""
_HERE: Final = "kvdepot.daemon.http"
_PAGE: Final[dict[str, tuple[str, list[tuple[str, str]]]]] = {
    "/": ("text/html; charset=utf-8", [(_HERE, "page/index.html")]),
    "/dashboard.js": ("text/javascript; charset=utf-8", [(_HERE, "page/dashboard.js")]),
    "/dashboard.css": (
        "text/css; charset=utf-8",
        [("kvdepot.core", "palette.css"), (_HERE, "page/dashboard.css")],
    ),
}
"""Paths of the dashboard: media type, and the files that make them."""
_log: Final = RateLimitedLog("kvdepot.http")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Address, TLS files and access token of the HTTP server."""

    host: str
    port: int
    token_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    requests_per_s: float = RATE
    archive_bytes_max: int = ARCHIVE_BYTES_MAX
    """Largest archive that can be imported."""

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    def token(self) -> bytes:
        """Read the token; empty without a token file. ConfigError if it cannot be used."""
        if self.token_file is None:
            if self.is_loopback:
                return b""
            raise ConfigError(
                "--http",
                f"{self.host} can be reached from other machines, which needs a token",
                hint="give --http-token-file FILE, or listen on 127.0.0.1",
            )
        found = _read_secret("--http-token-file", self.token_file).strip()
        if len(found) < _TOKEN_BYTES_MIN:
            raise ConfigError(
                "--http-token-file",
                f"{self.token_file} has less than {_TOKEN_BYTES_MIN} characters",
                hint="for example: openssl rand -hex 32",
            )
        return found

    def check(self) -> None:
        """Raise ConfigError if the settings cannot be used."""
        self.token()
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError("--http-cert", "needs both --http-cert and --http-key")
        for name, path in (("--http-cert", self.cert_file), ("--http-key", self.key_file)):
            if path is not None and not path.is_file():
                raise ConfigError(name, f"{path} is not a file")
        if self.key_file is not None:
            _read_secret("--http-key", self.key_file)

    def warn(self) -> None:
        """Log what is unsafe and permitted."""
        if not self.is_loopback and self.cert_file is None:
            _log.warning(
                "--http %s has no certificate: the token can be read on its way, and used "
                "(give --http-cert and --http-key, or listen on 127.0.0.1)",
                self.host,
            )

    def listen(self) -> socket.socket:
        """Open a listening socket. ConfigError if the address cannot be used."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            opened = socket.socket(family, kind, protocol)
            try:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                opened.bind(address)
                opened.listen(BACKLOG)
            except OSError:
                opened.close()
                raise
        except OSError as error:
            raise ConfigError(
                "--http",
                f"cannot listen on {self.host} port {self.port}: {error.strerror or error}",
                hint="choose another port, or port 0 for any free one",
            ) from error
        return opened


def _read_secret(option: str, path: Path) -> bytes:
    """The content of a file that only its owner and group may access. ConfigError otherwise."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & _OPEN_TO_OTHERS:
                raise ConfigError(
                    option,
                    f"{path} may be accessed by other users (mode {mode:04o})",
                    hint=f"chmod 600 {path}",
                )
            return file.read()
    except OSError as error:
        reason = f"{path} cannot be read: {error.strerror or error}"
        raise ConfigError(option, reason) from error


class HttpService:
    """Serves one daemon from `start` to `stop`."""

    def __init__(self, daemon: Daemon, settings: HttpSettings) -> None:
        settings.check()
        token, rate = settings.token(), settings.requests_per_s
        archives = ArchiveMover(settings.archive_bytes_max)
        self._served = api.Served.of(daemon, archives, rate, hides_names=not token)
        self._settings = settings
        self._socket = settings.listen()
        self.port: int = self._socket.getsockname()[1]
        scheme = "https" if settings.cert_file else "http"
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"{scheme}://{host}:{self.port}"
        hosts = set() if token else {"localhost", "127.0.0.1", "::1", settings.host}
        limit = connections_max()
        places = min(REQUESTS_MAX, limit // 2), min(SCRAPES_MAX, limit // 4)
        rules = AccessRules(token, frozenset(hosts), rate, *places)
        server = uvicorn.Config(
            Guard(make_app(self._served), rules),
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=1,
            ssl_certfile=settings.cert_file,
            ssl_keyfile=settings.key_file,
        )
        self._server = BoundedServer(server, self._socket, limit)
        self._repeats = RepeatFilter()
        try:
            server.load()
        except OSError as error:
            self._socket.close()
            raise ConfigError("--http-cert", f"cannot be used: {error}") from error
        self._thread = threading.Thread(target=self._server.run, name="kvdepot-http", daemon=True)

    def start(self) -> None:
        """Start the thread of the server. Does not block."""
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        logging.getLogger("uvicorn.error").addFilter(self._repeats)
        self._served.events.attach()
        self._settings.warn()
        self._thread.start()

    def stop(self) -> None:
        """Stop the server. Blocks until its thread has ended, _STOP_S at most."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
        self._socket.close()
        logging.getLogger("uvicorn.error").removeFilter(self._repeats)
        self._served.archives.close()
        self._served.metrics.close()
        self._served.events.detach()


class Refusal(BaseModel):
    """The error of a refused request, and a hint."""

    error: str
    hint: str = ""


def described() -> dict[str, Any]:
    """The OpenAPI description that `/openapi.json` returns."""
    return _app().openapi()


def make_app(served: api.Served) -> FastAPI:
    """Make the application: paths and error handlers, without the Guard."""
    app = _app()
    app.state.served = served
    for path, (media, files) in _PAGE.items():
        parts = [resources.files(at).joinpath(name).read_bytes() for at, name in files]
        app.router.routes.append(Route(path, _static(b"".join(parts), media)))
    return app


def _app() -> FastAPI:
    app = FastAPI(
        title="kvdepot",
        version=kvdepot.__version__,
        description="Watch and change a daemon's store. docs/daemon.md",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_limited_threads,
        responses={"4XX": {"model": Refusal}, "5XX": {"model": Refusal}},
        exception_handlers={
            HTTPException: _refused,
            RequestValidationError: _malformed,
            KVDepotError: _failed,
            OSError: _failed,
        },
    )
    for router in (api.health, api.router, api.changes):
        app.include_router(router)
    return app


@asynccontextmanager
async def _limited_threads(_: FastAPI) -> AsyncIterator[None]:
    current_default_thread_limiter().total_tokens = _THREADS
    yield


def _static(content: bytes, media: str) -> Callable[[Request], Any]:
    async def handle(_: Request) -> Response:
        return Response(content, headers={"content-type": media})

    return handle


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refusal(error.status_code, str(error.detail), headers=dict(error.headers or {}))


async def _malformed(_: Request, error: Exception) -> Response:
    """Names the first invalid field, but not its value."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"][1:]))[:_NAME_SHOWN] or str(first["loc"][0])
    return refusal(400, f"{place}: {first['msg']}", "GET /openapi.json has the fields")


async def _failed(_: Request, error: Exception) -> Response:
    if isinstance(error, StateError):
        _log.error("a bug in kvdepot: %s", error)
        return refusal(500, "a bug in kvdepot: see the daemon's log")
    if isinstance(error, StoreClosedError):
        return refusal(503, "the daemon is stopping")
    if isinstance(error, api.NotThereError):
        return refusal(404, str(error), error.hint)
    if isinstance(error, ChangeRunningError):
        return refusal(409, str(error), error.hint)
    return refusal(400, str(error), getattr(error, "hint", ""))
