"""Checks every HTTP request: its host name, the request rate, and its token.

Without a token file the server listens on the loopback address only. Everyone on the machine may
read, but nothing can be changed and names of sessions are hidden. With one, all requests need the
token, except for the page itself and the health checks. A request for another host name is refused:
it comes from a web page whose site has pointed its name here (DNS rebinding). Bodies are JSON of a
bounded size; only archives of sessions may be larger.
"""

import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES_MAX: Final = 1 << 20
RATE: Final = 50.0
"""Requests per second of all senders together; bursts may have twice as many."""
OPEN: Final = frozenset({"/", "/dashboard.css", "/dashboard.js", "/healthz", "/readyz"})
"""Paths that need no token: they reveal nothing about the store."""
UNCOUNTED: Final = frozenset({"/healthz", "/readyz"})
IMPORT_PATH: Final = "/api/sessions/import"
"""Accepts archives; the ArchiveMover limits their size."""
PREFIX_PATH: Final = "/api/prefix"
"""Routers call this for every prompt: with the token there is no rate limit."""
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class AccessRules:
    """The token and the host names that requests must have."""

    token: bytes = b""
    """If empty, everyone may read, and no changes are allowed."""
    hosts: frozenset[str] = frozenset()
    """Accepted host names; if empty, any."""
    rate: float = RATE


class RateLimit:
    """A token bucket of requests. For one thread."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._left, self._at_s = burst, clock()

    def allows(self) -> bool:
        now_s = self._clock()
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Guard:
    """ASGI middleware. Sets `trusted` in `scope["state"]` if the token is right, and `head_only` if
    only the head of the answer is wanted.
    """

    def __init__(
        self, app: ASGIApp, rules: AccessRules, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._rules = rules
        self._limit = RateLimit(rules.rate, 2 * rules.rate, clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(scope, Headers(scope=scope))
        if refusal is not None:
            await refusal(scope, receive, send_safely)
            return
        scope["state"]["head_only"] = scope["method"] == "HEAD"
        if scope["method"] == "HEAD":
            # FastAPI has no routes for HEAD. The server keeps its own scope, and drops the body.
            scope = {**scope, "method": "GET"}
        if scope["path"] != IMPORT_PATH:
            receive = _bounded(receive)
        await self._app(scope, receive, send_safely)

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        """Returns the answer to a request that is refused; None if it is served."""
        path = scope["path"]
        trusted = self._is_trusted(headers)
        counted = path not in UNCOUNTED and not (trusted and path == PREFIX_PATH)
        if counted and not self._limit.allows():
            return refusal(429, "too many requests", "send fewer requests", {"retry-after": "1"})
        host = _host_of(headers.get("host", ""))
        if self._rules.hosts and host not in self._rules.hosts:
            return refusal(421, f"unknown host {host[:100]!r}", "use the address it listens on")
        scope.setdefault("state", {})["trusted"] = trusted
        if scope["method"] in ("GET", "HEAD"):
            if self._rules.token and not trusted and path not in OPEN:
                return _unknown()
            return None
        if not self._rules.token:
            return refusal(
                403,
                "changes need a token",
                "start with --http-token-file FILE, or use kvdepot tiers",
            )
        return _refused_body(path, headers) if trusted else _unknown()

    def _is_trusted(self, headers: Headers) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        token = self._rules.token
        same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), token)
        return bool(token) and kind.lower() == "bearer" and same


def refusal(
    status: int, error: str, hint: str = "", headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse({"error": error, "hint": hint}, status, headers)


def _unknown() -> JSONResponse:
    hint = "send Authorization: Bearer TOKEN, as in the file given with --http-token-file"
    return refusal(401, "a token is needed", hint, {"www-authenticate": "Bearer"})


def _refused_body(path: str, headers: Headers) -> JSONResponse | None:
    """Returns the answer to a request whose body is refused; None if it is read."""
    media = "application/octet-stream" if path == IMPORT_PATH else "application/json"
    if headers.get("content-type", "").partition(";")[0].strip() != media:
        return refusal(415, f"the body must be {media}")
    return None


def _bounded(receive: Receive) -> Receive:
    """Wraps `receive` to end a request with 413 if its body has more than BODY_BYTES_MAX."""
    left = BODY_BYTES_MAX

    async def counted() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise HTTPException(413, f"the body has more than {BODY_BYTES_MAX} bytes")
        return message

    return counted


def _host_of(header: str) -> str:
    """The name in a Host header, without its port."""
    if header.startswith("["):
        return header.partition("]")[0][1:].lower()
    return header.partition(":")[0].lower()
