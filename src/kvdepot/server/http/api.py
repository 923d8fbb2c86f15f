"""What can be asked over HTTP, as one table, and the answers.

The table makes the routes, checks what comes in, and makes /openapi.json.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.core.block import KEY_BYTES
from kvdepot.core.config_loader import show
from kvdepot.core.order import SessionState
from kvdepot.errors import ConfigError, KVDepotError
from kvdepot.policy.placing.write_mode import WriteMode
from kvdepot.server.daemon import Daemon
from kvdepot.server.http.changes import ChangeRunner, StoreChange
from kvdepot.server.http.events import RecentEvents
from kvdepot.server.http.guard import PREFIX_PATH
from kvdepot.server.http.prefixes import PrefixQueries, PrefixQuestion
from kvdepot.site.messages import TOKENS_MAX
from kvdepot.store.alerts import alerts
from kvdepot.store.metrics import gpu_seconds_saved, hit_ratio, joules_saved, served_tokens
from kvdepot.store.sessions.archive import ByteSource
from kvdepot.store.sessions.known import SESSION_ORDERS, state_of
from kvdepot.store.sessions.shared_prefixes import PREFIX_ORDERS
from kvdepot.wire.messages import key_words

LISTED_MAX: Final = 1000
_SHOWN: Final = 5
"""Sessions of each kind on the dashboard."""
_KEYS_MAX: Final = 8192
_HINT_S_MAX: Final = 3600.0
_MOMENT_MAX: Final = 1e11
_KEEP_S_MAX: Final = 1e9
_PATH_MAX: Final = 4096
_NAME_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter or a field of a body."""

    name: str
    schema: Mapping[str, Any]
    """Of JSON Schema: type, and limits."""
    text: str
    required: bool = True
    place: str = "body"
    """body, query or path."""


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request, checked."""

    values: Mapping[str, Any]
    trusted: bool
    """It came with the token."""
    archive: ByteSource | None = None
    """What is imported."""


Answer = dict[str, Any]
Pieces = Iterator[bytes | memoryview]
"""Of an archive that is exported."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One line of the table."""

    method: str
    path: str
    text: str
    answer: Callable[["Api", ApiCall], Any]
    """Returns an Answer, or Pieces."""
    fields: tuple[Field, ...] = ()
    private: bool = False
    """Reading it needs a token also where there is none."""
    archive: bool = False
    """The answer to GET, or the body of POST, is the archive of a session."""

    @property
    def route(self) -> str:
        """The path as Starlette wants it: a session's name may have slashes."""
        return self.path.replace("{session}", "{session:path}")


def _text(limit: int) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": limit}


def _seconds(limit: float) -> dict[str, Any]:
    return {"type": "number", "minimum": 0, "maximum": limit}


TIER: Final = Field("tier", _text(32), "a tier of files: ssd or hdd", place="path")
DRIVE: Final = Field("path", _text(_PATH_MAX), "an absolute directory or block device")
SESSION: Final = Field("session", _text(_NAME_MAX), "the name of a session")
NAMESPACE: Final = Field(
    "namespace",
    {"type": "string", "pattern": "^[0-9a-f]{16}$", "maxLength": 16},
    "the session's namespace; left out, all that have a session of that name",
    required=False,
)


LIMIT: Final = Field(
    "limit",
    {"type": "integer", "minimum": 1, "maximum": LISTED_MAX},
    "how many",
    required=False,
    place="query",
)


def _order(orders: Iterable[str]) -> Field:
    schema = {"type": "string", "enum": sorted(orders)}
    return Field("order", schema, "which come first", required=False, place="query")


class NotThereError(KVDepotError):
    """What a request names does not exist."""


class Api:
    """The answers. Its calls may block for a short while, and may come from several threads."""

    def __init__(self, daemon: Daemon, events: RecentEvents) -> None:
        self._daemon = daemon
        self._store = daemon.store
        self._events = events
        self.changes = ChangeRunner()
        self._prefixes = PrefixQueries(daemon.store)

    def stats(self) -> Answer:
        """What `stats` answers to a client of the daemon."""
        return {**self._store.stats(), "daemon": self._daemon.describe()}

    def overview(self, call: ApiCall) -> Answer:
        stats = self.stats()
        listed = {order: self._list(order, _SHOWN, call) for order in ("busy", "cold")}
        return {
            "stats": stats,
            "derived": {
                "hit_ratio": hit_ratio(stats),
                "tokens": served_tokens(stats),
                "gpu_seconds": gpu_seconds_saved(stats),
                "joules": joules_saved(stats),
            },
            "alerts": [alert.as_dict() for alert in alerts(stats)],
            "events": self._events.latest(),
            "sessions": listed,
            "prefixes": {
                order: self._store.sessions.shared_prefixes(order, _SHOWN)
                for order in PREFIX_ORDERS
            },
            "change": self.changes.last.as_dict(),
            "names_hidden": not call.trusted,
        }

    def tiers(self, _: ApiCall) -> Answer:
        return {"tiers": self._store.stats()["tiers"]}

    def sessions(self, call: ApiCall) -> Answer:
        order, limit = call.values.get("order", "recent"), call.values.get("limit", 100)
        return {"sessions": self._list(order, limit, call), "names_hidden": not call.trusted}

    def prefixes(self, call: ApiCall) -> Answer:
        order, limit = call.values.get("order", "busy"), call.values.get("limit", 100)
        return {"prefixes": self._store.sessions.shared_prefixes(order, limit)}

    def ledger(self, _: ApiCall) -> Answer:
        return self._store.sessions.ledger()

    def _list(self, order: str, limit: int, call: ApiCall) -> list[dict[str, Any]]:
        """Sessions; for those who have no token their names stay private."""
        found = self._store.sessions.known(order, limit)
        if not call.trusted:
            for one in found:
                digest = hashlib.blake2b(
                    f"{one['namespace']} {one['name']}".encode(), key=self._daemon.instance
                )
                one["name"] = f"session {digest.hexdigest()[:8]}"
        return found

    def config(self, _: ApiCall) -> Answer:
        return {"config": show(self._daemon.config)}

    def alerts(self, _: ApiCall) -> Answer:
        return {"alerts": [alert.as_dict() for alert in alerts(self.stats())]}

    def events(self, _: ApiCall) -> Answer:
        return {"events": self._events.latest()}

    def change(self, _: ApiCall) -> Answer:
        return self.changes.last.as_dict()

    def add_drive(self, call: ApiCall) -> Answer:
        tier, path = self._tier(call), _absolute(call.values["path"])
        return self._change(f"add {path} to {tier}", lambda: self._store.add_drive(tier, path))

    def drain(self, call: ApiCall) -> Answer:
        tier, path = self._tier(call), _absolute(call.values["path"])
        return self._change(f"drain {path} of {tier}", lambda: self._store.drain_drive(tier, path))

    def resize(self, call: ApiCall) -> Answer:
        tier, size = self._tier(call), call.values["capacity"]
        return self._change(f"resize {tier} to {size}", lambda: self._store.resize(tier, size))

    def set_mode(self, call: ApiCall) -> Answer:
        tier, mode = self._tier(call), call.values["mode"]
        work = lambda: self._store.set_write_mode(tier, mode)  # noqa: E731
        return self._change(f"set the write mode of {tier} to {mode}", work)

    def _tier(self, call: ApiCall) -> str:
        tier, known = str(call.values["tier"]), self._store.stats()["tiers"]
        if tier not in known:
            raise NotThereError(f"{tier}: no such tier", hint=f"this store has {', '.join(known)}")
        return tier

    def _change(self, what: str, work: Callable[[], int | None]) -> Answer:
        change: StoreChange = self.changes.run(what, work)
        if change.state == "failed":
            raise ConfigError("change", change.error, hint=change.hint)
        return change.as_dict()

    def tell_session(self, call: ApiCall) -> Answer:
        name, state = call.values["session"], state_of(call.values["state"])
        mapped = self._daemon.mapped
        tags = self._tags(name, call)
        found = [mapped.tell(tag, name, None, SessionState(state), 0) for tag in tags]
        return {"namespaces": [tag.hex() for tag in tags], "blocks": sum(found)}

    def session(self, call: ApiCall) -> Answer:
        name, namespace = self._named(call)
        return {"sessions": self._store.sessions.show(name, namespace=namespace)}

    def pin(self, call: ApiCall) -> Answer:
        name, namespace = self._named(call)
        receipt = self._store.sessions.pin(
            name,
            until_s=call.values.get("until_s"),
            for_s=call.values.get("for_s"),
            through_turn=call.values.get("through_turn", "no") == "yes",
            namespace=namespace,
        )
        return receipt.as_dict()

    def unpin(self, call: ApiCall) -> Answer:
        name, namespace = self._named(call)
        return {"contracts_ended": self._store.sessions.unpin(name, namespace=namespace)}

    def park(self, call: ApiCall) -> Answer:
        name, namespace = self._named(call)
        return self._store.sessions.park(name, namespace=namespace)

    def warm(self, call: ApiCall) -> Answer:
        name, namespace = self._named(call)
        deadline_s = call.values.get("deadline_s", 10.0)
        return self._store.sessions.warm(name, deadline_s, namespace=namespace)

    def expire(self, call: ApiCall) -> Answer:
        name, namespace = self._named(call)
        return self._store.sessions.expire(name, namespace=namespace)

    def export(self, call: ApiCall) -> Pieces:
        name, namespace = self._named(call)
        return self._store.sessions.export_pieces(name, namespace=namespace)

    def import_archive(self, call: ApiCall) -> Answer:
        assert call.archive is not None
        return self._store.sessions.import_from(call.archive)

    def _named(self, call: ApiCall) -> tuple[str, str]:
        """The session and the namespace that a call names; NotThereError: there is none."""
        name = call.values["session"]
        self._tags(name, call)
        return name, call.values.get("namespace", "")

    def hint(self, call: ApiCall) -> Answer:
        deadline_s, mapped = call.values["deadline_s"], self._daemon.mapped
        name, keys, tokens = (call.values.get(one) for one in ("session", "keys", "tokens"))
        if sum(one is not None for one in (name, keys, tokens)) != 1:
            raise ConfigError("hint", "give either a session or keys or tokens")
        if keys is not None:
            words = key_words(b"".join(bytes.fromhex(key) for key in keys))
            hints = [mapped.hint(words, deadline_s)]
        elif tokens is not None:
            prompts = self._store.keys_of_tokens(tokens, call.values.get("model", ""))
            brought = [self._store.hint_described(prompt, deadline_s) for prompt in prompts]
            hints = [(hint, hint.resident) for hint in brought]
        else:
            tags = self._tags(str(name), call)
            hints = [mapped.hint_session(tag, str(name), deadline_s) for tag in tags]
        resident = sum(found for _, found in hints)
        return {"resident": resident, "wanted": sum(hint.wanted for hint, _ in hints)}

    def prefix(self, call: ApiCall) -> Answer:
        return self._prefixes.answer(PrefixQuestion(**call.values))

    def _tags(self, name: str, call: ApiCall) -> list[bytes]:
        """Namespaces that have a session of that name; NotThereError if there is none."""
        wanted = call.values.get("namespace")
        tags = self._store.namespaces_of_session(name)
        if wanted is not None:
            tags = [tag for tag in tags if tag.hex() == wanted]
        if not tags:
            raise NotThereError("session: is not known", hint="GET /api/sessions")
        return tags


ENDPOINTS: Final = (
    Endpoint("GET", "/api/overview", "All that the dashboard shows.", Api.overview),
    Endpoint("GET", "/api/stats", "All that is known of the store.", lambda api, _: api.stats()),
    Endpoint("GET", "/api/tiers", "The tiers and their drives.", Api.tiers),
    Endpoint(
        "GET",
        "/api/sessions",
        "Sessions that are remembered. Without the token their names are hidden.",
        Api.sessions,
        (_order(SESSION_ORDERS), LIMIT),
    ),
    Endpoint(
        "GET",
        "/api/prefixes",
        "Prefixes that several sessions begin with: how many, where their blocks are.",
        Api.prefixes,
        (_order(PREFIX_ORDERS), LIMIT),
    ),
    Endpoint(
        "GET",
        "/api/ledger",
        "GPU seconds saved by tenant, bytes times hours held on each tier, and what both are worth "
        "by the prices of the configuration.",
        Api.ledger,
    ),
    Endpoint("GET", "/api/config", "The settings in force; secrets are masked.", Api.config),
    Endpoint("GET", "/api/alerts", "What is wrong, and what to do.", Api.alerts),
    Endpoint("GET", "/api/events", "The latest lines of the daemon's log.", Api.events),
    Endpoint("GET", "/api/change", "The latest change, and what became of it.", Api.change),
    Endpoint(
        "POST", "/api/tiers/{tier}/drives", "Use one more drive.", Api.add_drive, (TIER, DRIVE)
    ),
    Endpoint(
        "POST",
        "/api/tiers/{tier}/drain",
        "Move a drive's blocks to the others and use it no more.",
        Api.drain,
        (TIER, DRIVE),
    ),
    Endpoint(
        "PUT",
        "/api/tiers/{tier}/capacity",
        "Give a tier more or less room.",
        Api.resize,
        (TIER, Field("capacity", _text(32), "of all its drives, as 100TiB")),
    ),
    Endpoint(
        "PUT",
        "/api/tiers/{tier}/write-mode",
        "Change when blocks come to a tier.",
        Api.set_mode,
        (
            TIER,
            Field(
                "mode", {"type": "string", "enum": [mode.value for mode in WriteMode]}, "the mode"
            ),
        ),
    ),
    Endpoint(
        "POST",
        "/api/sessions/state",
        "Tell what becomes of a session.",
        Api.tell_session,
        (
            SESSION,
            NAMESPACE,
            Field(
                "state",
                {"type": "string", "enum": ["alive", "pending", "closed"]},
                "closed: it will not come back",
            ),
        ),
    ),
    Endpoint(
        "POST",
        "/api/sessions/show",
        "All that is known of a session.",
        Api.session,
        (SESSION, NAMESPACE),
    ),
    Endpoint(
        "POST",
        "/api/sessions/pin",
        "Keep a session's blocks until a moment (a week unless given). `kept` is false, with a "
        "reason, where that cannot be promised.",
        Api.pin,
        (
            SESSION,
            NAMESPACE,
            Field("until_s", _seconds(_MOMENT_MAX), "seconds since 1970", required=False),
            Field("for_s", _seconds(_KEEP_S_MAX), "for so many seconds", required=False),
            Field(
                "through_turn",
                {"type": "string", "enum": ["yes", "no"]},
                "yes: only until its next turn, if that comes before",
                required=False,
            ),
        ),
    ),
    Endpoint(
        "POST", "/api/sessions/unpin", "End a session's contract.", Api.unpin, (SESSION, NAMESPACE)
    ),
    Endpoint(
        "POST",
        "/api/sessions/park",
        "A session pauses: write its blocks to drives, and free their memory.",
        Api.park,
        (SESSION, NAMESPACE),
    ),
    Endpoint(
        "POST",
        "/api/sessions/warm",
        "A session comes back soon: bring its blocks to memory.",
        Api.warm,
        (
            SESSION,
            NAMESPACE,
            Field("deadline_s", _seconds(_HINT_S_MAX), "when (10)", required=False),
        ),
    ),
    Endpoint(
        "POST",
        "/api/sessions/expire",
        "A session is over: forget it; its blocks make room first.",
        Api.expire,
        (SESSION, NAMESPACE),
    ),
    Endpoint(
        "GET",
        "/api/sessions/{session}/export",
        "A session with its blocks as an archive, streamed. Needs the token.",
        Api.export,
        (
            Field(SESSION.name, SESSION.schema, SESSION.text, place="path"),
            Field(NAMESPACE.name, NAMESPACE.schema, NAMESPACE.text, required=False, place="query"),
        ),
        private=True,
        archive=True,
    ),
    Endpoint(
        "POST",
        "/api/sessions/import",
        "Take in a session from an archive, as far as it is intact: `complete` and `damage` say "
        "what was left out.",
        Api.import_archive,
        archive=True,
    ),
    Endpoint(
        "POST",
        "/api/hints",
        "Bring the blocks of a session, of keys, or of a prompt's tokens to memory ahead of need.",
        Api.hint,
        (
            Field(SESSION.name, SESSION.schema, SESSION.text, required=False),
            NAMESPACE,
            Field(
                "keys",
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": _KEYS_MAX,
                    "items": {
                        "type": "string",
                        "pattern": f"^[0-9a-f]{{{2 * KEY_BYTES}}}$",
                        "maxLength": 2 * KEY_BYTES,
                    },
                },
                "keys of one prompt, head first",
                required=False,
            ),
            Field(
                "tokens",
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": TOKENS_MAX,
                    "items": {"type": "integer", "minimum": 0, "maximum": (1 << 32) - 1},
                },
                "token ids of a prompt",
                required=False,
            ),
            Field(
                "model", _text(_PATH_MAX), "of the tokens; left out, every model", required=False
            ),
            Field(
                "deadline_s",
                {"type": "number", "minimum": 0, "maximum": _HINT_S_MAX},
                "when they will be wanted",
            ),
        ),
    ),
    Endpoint(
        "POST",
        PREFIX_PATH,
        "The longest prefix of a prompt that is here, by tier, and how long it would take to load. "
        "Changes nothing.",
        Api.prefix,
        (
            Field(
                "token_ids",
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": TOKENS_MAX,
                    "items": {"type": "integer", "minimum": 0, "maximum": (1 << 32) - 1},
                },
                "the prompt",
            ),
            Field("model", _text(_NAME_MAX), "of this model only", required=False),
            Field("tenant", _text(_NAME_MAX), "blocks of this tenant", required=False),
            Field(
                "namespace",
                NAMESPACE.schema,
                "of this namespace only, whatever its model and tenant",
                required=False,
            ),
        ),
    ),
)


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ConfigError("path", "must be absolute: the daemon runs in another directory")
    return path
