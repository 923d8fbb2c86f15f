"""The paths of the HTTP interface. FastAPI makes /openapi.json from these functions.

Functions that are not coroutines may block: they run in threads.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from kvdepot.config.loader import show
from kvdepot.core.sessions import SessionState, state_of
from kvdepot.daemon.http import bodies
from kvdepot.daemon.http.archives import ARCHIVE, MEDIA, ArchiveMover
from kvdepot.daemon.http.changes import ChangeRunner
from kvdepot.daemon.http.events import RecentEvents
from kvdepot.daemon.http.exposition import CONTENT_TYPE, MetricsPage, render
from kvdepot.daemon.http.guard import IMPORT_PATH, PREFIX_PATH, RateLimit
from kvdepot.daemon.http.hidden_names import NameHider
from kvdepot.daemon.http.prefixes import longest_prefixes
from kvdepot.daemon.server.daemon import Daemon
from kvdepot.daemon.wire.frames import key_words
from kvdepot.errors import ConfigError, KVDepotError
from kvdepot.store.alerts import alerts as alerts_of
from kvdepot.store.metrics import derived
from kvdepot.store.sessions.service import SessionService
from kvdepot.store.store import Store

_SHOWN: Final = 5
"""Sessions of each kind on the dashboard."""
Answer = dict[str, Any]


class NotThereError(KVDepotError):
    """The object that a request names does not exist."""


@dataclass(frozen=True, slots=True)
class Served:
    """The daemon whose store is served, and the state of the HTTP server."""

    daemon: Daemon
    archives: ArchiveMover
    metrics: MetricsPage
    hides_names: bool
    """Without a token names of sessions and tenants, paths and log lines are hidden."""
    events: RecentEvents = field(default_factory=RecentEvents)
    changes: ChangeRunner = field(default_factory=ChangeRunner)

    @classmethod
    def of(
        cls, daemon: Daemon, archives: ArchiveMover, rate: float, *, hides_names: bool
    ) -> "Served":
        """The daemon, with metrics that are rendered `rate` times a second at most."""
        limit = RateLimit(rate, 2 * rate, time.monotonic)
        made: Served
        metrics = MetricsPage(lambda: render(made.show(made.stats())), limit.allows)
        made = cls(daemon, archives, metrics, hides_names)
        return made

    @property
    def store(self) -> Store:
        return self.daemon.store

    @property
    def sessions(self) -> SessionService:
        return self.daemon.store.sessions

    def stats(self) -> Answer:
        """The statistics that a client of the daemon gets."""
        return {**self.store.stats(), "daemon": self.daemon.describe()}

    def show(self, answer: Answer) -> Answer:
        """The answer, with pseudonyms in place of names if these are hidden."""
        if not self.hides_names:
            return answer
        shown: Answer = NameHider(self.daemon.instance).hidden(answer)
        return shown

    def log_lines(self) -> list[Answer]:
        return [] if self.hides_names else self.events.latest()

    def tags(self, name: str, namespace: str | None) -> list[bytes]:
        """Tags of the namespaces that have the session. NotThereError if there is none."""
        found = self.sessions.namespaces_of(name)
        tags = [tag for tag in found if namespace in (None, tag.hex())]
        if not tags:
            raise NotThereError("session: not found", hint="GET /api/sessions")
        return tags

    def named(self, said: bodies.SessionName) -> tuple[str, str]:
        """The session and the namespace that a body names, or NotThereError."""
        self.tags(said.session, said.namespace)
        return said.session, said.namespace or ""


async def _served(request: Request) -> Served:
    found: Served = request.app.state.served
    return found


async def _need_token(request: Request) -> None:
    if not request.state.trusted:
        raise HTTPException(403, "this needs a token: start with --http-token-file FILE")


TOKEN: Final = Depends(HTTPBearer(scheme_name="token", auto_error=False))
"""Declares in /openapi.json that a path takes the token. The Guard checks it."""
Here = Annotated[Served, Depends(_served)]
Tier = Annotated[str, Path(max_length=32)]
health = APIRouter()
router = APIRouter(dependencies=[TOKEN])


@health.get("/healthz")
async def healthz() -> Answer:
    """The daemon is running."""
    return {"ok": True}


@health.get("/readyz", responses={503: {"description": "The daemon is stopping."}})
async def readyz(here: Here, response: Response) -> Answer:
    """The daemon accepts clients."""
    if here.daemon.loop.is_stopping:
        response.status_code = 503
        return {"ready": False, "why": "the daemon is stopping"}
    return {"ready": True}


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(here: Here) -> Response:
    """The metrics as Prometheus text."""
    return Response(await here.metrics.text(), headers={"content-type": CONTENT_TYPE})


@router.get("/api/overview")
def overview(here: Here) -> Answer:
    """The data of the dashboard. Without a token, names and log lines are hidden."""
    stats = here.stats()
    answer = {
        "stats": stats,
        "derived": derived(stats),
        "alerts": [alert.as_dict() for alert in alerts_of(stats)],
        "events": here.log_lines(),
        "sessions": {order: here.sessions.list(order, _SHOWN) for order in ("busy", "cold")},
        "change": here.changes.last.as_dict(),
        "names_hidden": here.hides_names,
    }
    return here.show(answer)


@router.get("/api/stats")
def stats(here: Here) -> Answer:
    """The statistics of the store. Without a token, tenants and paths are hidden."""
    return here.show(here.stats())


@router.get("/api/tiers")
def tiers(here: Here) -> Answer:
    """The tiers and their drives. Without a token, paths are hidden."""
    return here.show({"tiers": here.store.stats()["tiers"]})


@router.get("/api/sessions")
def sessions(here: Here, asked: Annotated[bodies.SessionList, Query()]) -> Answer:
    """The known sessions. Without a token, names of sessions and tenants are hidden."""
    found = here.sessions.list(asked.order, asked.limit)
    return here.show({"sessions": found, "names_hidden": here.hides_names})


@router.get("/api/ledger")
def ledger(here: Here) -> Answer:
    """Tokens served and GPU seconds saved, by tenant and session, and their value. Without a
    token, names of sessions and tenants are hidden.
    """
    return here.show(here.store.admin.ledger())


@router.get("/api/config")
def config(here: Here) -> Answer:
    """The settings in force; secrets are masked. Without a token, tenants, paths and addresses are
    hidden.
    """
    return here.show({"config": show(here.daemon.config)})


@router.get("/api/alerts")
def alerts(here: Here) -> Answer:
    """The present faults, each with an action. Without a token, paths are hidden."""
    return here.show({"alerts": [alert.as_dict() for alert in alerts_of(here.stats())]})


@router.get("/api/events")
def events(here: Here) -> Answer:
    """The latest lines of the daemon's log. Without a token there are none."""
    return {"events": here.log_lines()}


@router.get("/api/change")
def change(here: Here) -> Answer:
    """The latest change and its result. Without a token, paths are hidden."""
    return here.show(here.changes.last.as_dict())


changes = APIRouter(
    prefix="/api/tiers/{tier}",
    dependencies=[TOKEN],
    responses={202: {"description": "The change is still running: see GET /api/change."}},
)


@changes.post("/drives")
def add_drive(here: Here, tier: Tier, said: bodies.DriveBody, response: Response) -> Answer:
    """Add a drive to a tier."""
    work = partial(here.store.volumes.add, tier, said.path)
    return _change(here, tier, f"add {said.path} to {tier}", work, response)


@changes.post("/drain")
def drain(here: Here, tier: Tier, said: bodies.DriveBody, response: Response) -> Answer:
    """Move a drive's blocks to the other drives, then remove it from the tier."""
    work = partial(here.store.volumes.drain, tier, said.path)
    return _change(here, tier, f"drain {said.path} of {tier}", work, response)


@changes.put("/capacity")
def resize(here: Here, tier: Tier, said: bodies.CapacityBody, response: Response) -> Answer:
    """Change the capacity of a tier."""
    work = partial(here.store.volumes.resize, tier, said.capacity)
    return _change(here, tier, f"resize {tier} to {said.capacity}", work, response)


@changes.put("/write-mode")
def set_mode(here: Here, tier: Tier, said: bodies.Mode, response: Response) -> Answer:
    """Change the write mode of a tier."""
    mode = said.mode.value
    work = partial(here.store.volumes.set_write_mode, tier, mode)
    return _change(here, tier, f"set the write mode of {tier} to {mode}", work, response)


def _change(
    here: Served, tier: str, what: str, work: Callable[[], int | None], response: Response
) -> Answer:
    """Begin a change. The status is 202 while it is running."""
    known = here.store.stats()["tiers"]
    if tier not in known:
        raise NotThereError(f"{tier}: no such tier", hint=f"this store has {', '.join(known)}")
    found = here.changes.run(what, work)
    if found.state == "failed":
        raise ConfigError("change", found.error, hint=found.hint)
    if found.state == "running":
        response.status_code = 202
    return found.as_dict()


@router.post("/api/sessions/state")
def tell_session(here: Here, said: bodies.SessionTold) -> Answer:
    """Set the state of a session."""
    state, name = SessionState(state_of(said.state)), said.session
    tags = here.tags(name, said.namespace)
    blocks = sum(here.sessions.update(tag, name, None, state) for tag in tags)
    return {"namespaces": [tag.hex() for tag in tags], "blocks": blocks}


@router.post("/api/sessions/show")
def session(here: Here, said: bodies.SessionName) -> Answer:
    """The details of a session, one entry for each namespace that has it."""
    name, namespace = here.named(said)
    return {"sessions": here.sessions.show(name, namespace=namespace)}


@router.post("/api/sessions/pin")
def pin(here: Here, said: bodies.PinBody) -> Answer:
    """Pin a session's blocks until a time. If that is refused, `kept` is false and has a reason."""
    name, namespace = here.named(said)
    receipt = here.sessions.pin(
        name,
        until_s=said.until_s,
        for_s=said.for_s,
        namespace=namespace,
    )
    return receipt.as_dict()


@router.post("/api/sessions/unpin")
def unpin(here: Here, said: bodies.SessionName) -> Answer:
    """End a session's pin."""
    name, namespace = here.named(said)
    return {"pins_ended": here.sessions.unpin(name, namespace=namespace)}


@router.post("/api/sessions/evict-to-disk")
def evict_to_disk(here: Here, said: bodies.SessionName) -> Answer:
    """Write a session's blocks to drives, and free their memory."""
    name, namespace = here.named(said)
    return here.sessions.evict_to_disk(name, namespace=namespace)


@router.post("/api/sessions/prefetch")
def prefetch(here: Here, said: bodies.Prefetch) -> Answer:
    """Bring a session's blocks to memory in the background."""
    name, namespace = here.named(said)
    hint = here.sessions.prefetch(name, said.deadline_s, namespace=namespace)
    return {"session": name, "resident": hint.resident, "wanted": hint.wanted}


@router.get(
    "/api/sessions/{session:path}/export",
    dependencies=[Depends(_need_token)],
    response_class=Response,
    responses={200: {"content": ARCHIVE}},
)
async def export(
    here: Here,
    request: Request,
    session: Annotated[bodies.Name, Path()],
    asked: Annotated[bodies.ExportQuery, Query()],
) -> Response:
    """Export a session with its blocks as an archive, streamed. Needs the token."""
    if request.state.head_only:
        return Response(media_type=MEDIA)

    def begin() -> Any:
        here.tags(session, asked.namespace)
        return here.sessions.export_pieces(session, namespace=asked.namespace or "")

    return await here.archives.download(begin)


@router.post(IMPORT_PATH, openapi_extra={"requestBody": {"required": True, "content": ARCHIVE}})
async def import_archive(here: Here, request: Request) -> Answer:
    """Import a session from an archive. Blocks before the first damage are imported; `complete` and
    `damage` report what was left out.
    """
    return await here.archives.upload(request, here.sessions.import_from)


@router.post("/api/hints")
def hint(here: Here, said: bodies.HintBody) -> Answer:
    """Prefetch the blocks of a session, of keys or of a prompt's tokens into memory."""
    deadline_s = said.deadline_s
    caller, prefetch = here.store.routing.caller, here.store.engine.prefetch
    if sum(one is not None for one in (said.session, said.keys, said.tokens)) != 1:
        raise ConfigError("hint", "give one of session, keys and tokens")
    if said.keys is not None:
        words = key_words(b"".join(bytes.fromhex(key) for key in said.keys))
        hints = [prefetch(caller, [words], deadline_s)]
    elif said.tokens is not None:
        prompts = here.store.routing.keys_of_tokens(said.tokens, said.model or "")
        hints = [here.store.routing.prefetch(prompt, deadline_s) for prompt in prompts]
    else:
        name = str(said.session)
        tags = here.tags(name, said.namespace)
        hints = [here.sessions.hint(caller, tags, name, deadline_s)]
    resident = sum(one.resident for one in hints)
    return {"resident": resident, "wanted": sum(one.wanted for one in hints)}


@router.post(PREFIX_PATH)
def prefix(here: Here, said: bodies.PrefixQuestion) -> Answer:
    """The longest stored prefix of a prompt, by tier, and the expected time to load it. Does not
    count as a use.
    """
    return longest_prefixes(here.store, said)
