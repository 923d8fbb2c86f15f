"""Calls in JSON to the services of the store: sessions, volumes, audits, admin.

Every client may make read-only calls. A client may change a session if it has registered the
namespaces of it. All other calls are for root and the user of the daemon (SO_PEERCRED).
"""

import json
import math
import os
from collections.abc import Mapping
from typing import Any, Final

from kvdepot.core.audit import PRODUCER_TEXT_MAX, AuditFinding
from kvdepot.core.block import TAG_BYTES
from kvdepot.core.keys import check_key, tag_from_hex
from kvdepot.daemon.server.client_resources import ClientResources
from kvdepot.daemon.wire.frames import Peer
from kvdepot.errors import ConfigError, WireError
from kvdepot.store.store import Store

Types = tuple[type, ...]
_NAME: Final[dict[str, Types]] = {"name": (str,), "namespace": (str,)}
_SECONDS: Final = (int, float)
_CALLS: Final[dict[str, dict[str, dict[str, Types]]]] = {
    "sessions": {
        "list": {"order": (str,), "limit": (int,)},
        "show": _NAME,
        "pin": {**_NAME, "until_s": _SECONDS, "for_s": _SECONDS},
        "unpin": _NAME,
        "evict_to_disk": _NAME,
        "export": {**_NAME, "path": (str,)},
        "import_file": {"path": (str,)},
    },
    "volumes": {
        "set_write_mode": {"tier": (str,), "mode": (str,)},
        "add": {"tier": (str,), "path": (str,)},
        "drain": {"tier": (str,), "path": (str,)},
        "resize": {"tier": (str,), "capacity": (str,)},
    },
    "audits": {
        "list": {},
        "producer": {"text": (str,)},
        "report": {
            "key": (str,),
            "matches": (bool,),
            "error": _SECONDS,
            "tolerance": _SECONDS,
            "layer": (int,),
            "producer": (str,),
        },
        "lift": {"namespace": (str,)},
        "purge": {"namespace": (str,)},
    },
    "admin": {
        "check": {"deep": (bool,)},
        "record": {"path": (str,)},
        "stop_recording": {},
        "ledger": {},
        "report_prefill_speed": {"namespace": (str,), "token_s": _SECONDS, "pair_s": _SECONDS},
    },
}
"""The types of the arguments, by service, call and argument."""
_FOR_ALL: Final = {
    ("sessions", "list"), ("sessions", "show"), ("audits", "list"), ("audits", "producer"),
    ("admin", "check"), ("admin", "ledger"),
}  # fmt: skip
"""Calls that change nothing."""


class ServiceCalls:
    """The services of a store, for one client."""

    def __init__(self, store: Store, client: ClientResources, peer: Peer) -> None:
        self._store = store
        self._client = client
        self._peer = peer

    def serve(self, body: bytes) -> bytes:
        """Make a call and return its answer. Raises WireError if it is malformed, ConfigError if
        the client may not make it, and the errors of the service.
        """
        service, call, given = _parse_call(body)
        if (service, call) not in _FOR_ALL:
            self._check_may(service, call, given)
        if (service, call) == ("audits", "report"):
            given = {"finding": _finding(given)}
        elif (service, call) == ("sessions", "pin"):
            call, given = "pin_for", {**given, "uid": self._peer.uid}
        answer = getattr(getattr(self._store, service), call)(**given)
        answer = answer.as_dict() if hasattr(answer, "as_dict") else answer
        return json.dumps(answer, default=str).encode()

    def _check_may(self, service: str, call: str, given: Mapping[str, Any]) -> None:
        if self._peer.uid in (0, os.getuid()):
            return
        registered = self._client.has_registered
        if service == "audits" and call == "report":
            if registered(check_key(bytes.fromhex(given["key"]))[:TAG_BYTES]):
                return
        elif call == "report_prefill_speed":
            if registered(tag_from_hex(given.get("namespace", ""))):
                return
        elif service == "sessions" and "path" not in given:
            tags = self._store.sessions.namespaces_of(given.get("name", ""))
            wanted = given.get("namespace") or ""
            if all(registered(tag) for tag in tags if wanted in ("", tag.hex())):
                return
        raise ConfigError(
            "daemon",
            f"user {self._peer.uid} may use the store, but not change it",
            hint=f"run the command as root or as the daemon's user ({os.getuid()})",
        )


def _parse_call(body: bytes) -> tuple[str, str, dict[str, Any]]:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError("a service call that is not JSON") from error
    if not isinstance(asked, dict) or set(asked) != {"service", "call", "given"}:
        raise WireError("a call of another form")
    service, call, given = asked["service"], asked["call"], asked["given"]
    if not (isinstance(service, str) and isinstance(call, str) and isinstance(given, dict)):
        raise WireError("a call of another form")
    known = _CALLS.get(service, {}).get(call)
    if known is None:
        raise WireError("an unknown service call")
    if any(name not in known or type(given[name]) not in known[name] for name in given):
        raise WireError(f"{call}: invalid arguments")
    return service, call, given


def _finding(given: Mapping[str, Any]) -> AuditFinding:
    """Parse a finding. Raises ValueError or TypeError if it is invalid."""
    numbers = (given.get("error"), given.get("tolerance"))
    if not all(isinstance(one, int | float) and math.isfinite(one) for one in numbers):
        raise ValueError("a finding without finite numbers")
    key = check_key(bytes.fromhex(given.get("key", "")))
    producer = str(given.get("producer", ""))[:PRODUCER_TEXT_MAX]
    return AuditFinding(**{**given, "key": key, "producer": producer})
