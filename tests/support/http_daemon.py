"""A daemon with HTTP in this process: quick to start, and the test can reach its store."""

import http.client
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.store_contract import small

from kvdepot.config.settings import load
from kvdepot.core.private import write_private_file
from kvdepot.daemon.http.service import HttpService, HttpSettings
from kvdepot.daemon.server.daemon import Daemon
from kvdepot.daemon.server.listener import Listener
from kvdepot.errors import ConfigError
from kvdepot.store.store import Store


class Reply:
    """What came back for one request."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


def ask(url: str, method: str, path: str, body: Any = None, **headers: str) -> Reply:
    """One request. `body` is sent as JSON, bytes as they are, an iterator's bytes in chunks; `_` in
    names of headers is `-`.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    content = body
    if body is not None and not isinstance(body, bytes | Iterator):
        content = json.dumps(body).encode()
        sent.setdefault("content-type", "application/json")
    try:
        connection.request(method, path, content, sent)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Reply(answer.status, found, answer.read())
    finally:
        connection.close()


class HttpDaemon:
    """Serves the store of the contract's settings, from the start of the scope to its end."""

    def __init__(
        self,
        folder: Path,
        token: str = "",
        tls: tuple[Path | None, Path | None] = (None, None),
        archive_max: int = 1 << 30,
        **settings: Any,
    ) -> None:
        """`tls`: a certificate and its key. `archive_max`: bytes of a session that is imported."""
        token_file = None
        if token:
            token_file = folder / "token"
            write_private_file(token_file, f"{token}\n".encode())
        # A socket's path is short: the test's folder may be too long for it.
        self._place = tempfile.TemporaryDirectory()
        config = load(overrides={**small(folder / "kv"), **settings})
        self.daemon = Daemon(config, Listener(Path(self._place.name) / "s", ""))
        settings_of_http = HttpSettings("127.0.0.1", 0, token_file, *tls, 1e6, archive_max)
        try:
            self.http = HttpService(self.daemon, settings_of_http)
        except ConfigError:
            self._close_daemon()
            raise
        self._token = token

    @property
    def url(self) -> str:
        return self.http.url

    @property
    def store(self) -> Store:
        return self.daemon.store

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """One request, with the token if there is one."""
        if self._token:
            headers.setdefault("authorization", f"Bearer {self._token}")
        return ask(self.url, method, path, body, **headers)

    def get(self, path: str) -> Reply:
        return self.ask("GET", path)

    def __enter__(self) -> "HttpDaemon":
        self.http.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.stop()
        self._close_daemon()

    def _close_daemon(self) -> None:
        self.daemon.close()
        self._place.cleanup()
