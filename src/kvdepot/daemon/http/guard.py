"""Checks every HTTP request: its token, the request rate, its host name, and the places in use.

Without a token file the server listens on the loopback address only. Everyone on the machine may
read, but nothing can be changed and names of sessions are hidden. With one, all requests need the
token, except for the page itself and the health checks. A request for another host name is refused:
it comes from a web page whose site has pointed its name here (DNS rebinding). Bodies are JSON of a
bounded size and time; only archives of sessions may be larger.

Rates are limited for the token, and for each address that sends requests without it. Health checks
and metrics are not limited: they have connections of their own, and answers that are shared.
"""

import asyncio
import hmac
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES_MAX: Final = 1 << 20
BODY_S: Final = 30.0
"""A body must be here after this time."""
RATE: Final = 50.0
"""Requests per second of one sender; bursts may have twice as many."""
REQUESTS_MAX: Final = 128
SCRAPES_MAX: Final = 64
_SENDERS_MAX: Final = 1024
"""Addresses whose rates are known; the one that has sent nothing for longest is forgotten."""
_NETWORK_BITS: Final = 64
"""Addresses of IPv6 that have these bits in common count as one sender."""
OPEN: Final = frozenset({"/", "/dashboard.css", "/dashboard.js", "/healthz", "/readyz"})
"""Paths that need no token: they reveal nothing about the store."""
HEALTH: Final = frozenset({"/healthz", "/readyz"})
METRICS: Final = "/metrics"
IMPORT_PATH: Final = "/api/sessions/import"
"""Accepts archives; the ArchiveMover limits their size."""
PREFIX_PATH: Final = "/api/prefix"
"""Routers call this for every prompt: with the token there is no rate limit."""
CLOSE: Final = {"connection": "close"}
WAIT: Final = {"retry-after": "1"}
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
    requests: int = REQUESTS_MAX
    """Requests that are served at the same time, without health checks and metrics."""
    scrapes: int = SCRAPES_MAX
    """Requests for metrics that are served at the same time."""


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


class SenderRates:
    """One token bucket for requests with the token, and one for each address without it."""

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self._rate, self._clock = rate, clock
        self._trusted = self._new()
        self._strangers: OrderedDict[str, RateLimit] = OrderedDict()

    def _new(self) -> RateLimit:
        return RateLimit(self._rate, 2 * self._rate, self._clock)

    def allows(self, address: str, *, trusted: bool) -> bool:
        if trusted:
            return self._trusted.allows()
        sender = _network_of(address)
        limit = self._strangers.pop(sender, None) or self._new()
        self._strangers[sender] = limit
        if len(self._strangers) > _SENDERS_MAX:
            self._strangers.popitem(last=False)
        return limit.allows()


class Places:
    """Counts requests that are being served, as a scope."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0

    @property
    def are_taken(self) -> bool:
        return self._taken >= self._limit

    def __enter__(self) -> None:
        self._taken += 1

    def __exit__(self, *_: object) -> None:
        self._taken -= 1


class Guard:
    """ASGI middleware. Sets `trusted` in `scope["state"]` if the token is right, and `head_only` if
    only the head of the answer is wanted.
    """

    def __init__(
        self, app: ASGIApp, rules: AccessRules, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._rules = rules
        self._rates = SenderRates(rules.rate, clock)
        self._requests, self._scrapes = Places(rules.requests), Places(rules.scrapes)

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
        if scope["path"] in HEALTH:
            await self._app(scope, receive, send_safely)
            return
        with self._places(scope["path"]):
            await self._app(scope, receive, send_safely)

    def _places(self, path: str) -> Places:
        return self._scrapes if path == METRICS else self._requests

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        """Returns the answer to a request that is refused; None if it is served."""
        path, trusted = scope["path"], self._is_trusted(headers)
        scope.setdefault("state", {})["trusted"] = trusted
        if "content-length" in headers and "transfer-encoding" in headers:
            return refusal(400, "both Content-Length and Transfer-Encoding", "", CLOSE)
        host = _host_of(headers.get("host", ""))
        if self._rules.hosts and host not in self._rules.hosts:
            return refusal(421, f"unknown host {host[:100]!r}", "use the address it listens on")
        served = trusted or not self._rules.token
        limited = path not in HEALTH
        limited &= not (path == METRICS and served) and not (path == PREFIX_PATH and trusted)
        sender = (scope.get("client") or ("", 0))[0]
        if limited and not self._rates.allows(sender, trusted=trusted):
            return refusal(429, "too many requests", "send fewer requests", WAIT | CLOSE)
        if path not in HEALTH and self._places(path).are_taken:
            return refusal(503, "too many requests are being served", "try again", WAIT)
        if scope["method"] in ("GET", "HEAD"):
            return None if served or path in OPEN else _unknown()
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
    """Wraps `receive` to end a request with 413 if its body has more than BODY_BYTES_MAX, and with
    408 if it is not here after BODY_S."""
    left, whole = BODY_BYTES_MAX, False
    deadline = asyncio.get_running_loop().time() + BODY_S

    async def counted() -> Message:
        nonlocal left, whole
        try:
            async with asyncio.timeout_at(None if whole else deadline):
                message = await receive()
        except TimeoutError:
            reason = f"the body was not here after {BODY_S:g} s"
            raise HTTPException(408, reason, CLOSE) from None
        whole = not message.get("more_body", False)
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


def _network_of(address: str) -> str:
    """Returns the sender to count for an address: the address of IPv4, or the network of IPv6."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if found.version == 4:
        return address
    return str(int(found) >> (found.max_prefixlen - _NETWORK_BITS))
