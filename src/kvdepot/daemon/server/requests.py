"""Serves the requests of one connection, one after the other."""

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from kvdepot.config.settings import Config
from kvdepot.core.block import ANSWERS, TAG_BYTES, GetResult
from kvdepot.core.depot import DURABILITY, Durability
from kvdepot.core.keys import Keys
from kvdepot.core.requests import BLOCK_DTYPE, Array, Arrived, BlockSize
from kvdepot.core.sessions import SessionState, checked_name
from kvdepot.daemon.server.client_resources import (
    NO_LEASE,
    TAKE_TIMEOUT_S,
    ClientResources,
    SharedMemory,
)
from kvdepot.daemon.server.services import ServiceCalls
from kvdepot.daemon.wire import frames
from kvdepot.daemon.wire.frames import Channel, Flag, Frame, FrameKind
from kvdepot.errors import ConfigError, KVDepotError, StateError, WireError
from kvdepot.store.read.prefetch import Hint
from kvdepot.store.state.state import BlockLease
from kvdepot.store.store import Store

_BUSY: Final = ANSWERS.index(GetResult(None, "busy"))
_HINT_WAIT_S_MAX: Final = 10.0
"""Longest wait of a thread for a hint; the client sends the request again."""
_LISTED: Final = 5
"""Sessions of each kind in the answer to STATS."""
_ANY_TAG: Final = bytes(TAG_BYTES)
_INDEX: Final = np.dtype("<u4")
_LEASE: Final = np.dtype("<u8")
_NAMES: Final = {kind: kind.name.lower() for kind in FrameKind}


class ClientGoneError(KVDepotError):
    """The client closed its connection in the middle of an answer."""


class HintRequests:
    """One connection's requests about prefetches and sessions."""

    def __init__(self, channel: Channel, client: ClientResources, store: Store) -> None:
        self._channel = channel
        self._client = client
        self._store = store
        self.handlers: Final = {
            FrameKind.HINT: self._hint,
            FrameKind.HINT_SESSION: self._hint_session,
            FrameKind.AWAIT_HINT: self._await_hint,
            FrameKind.CANCEL_HINT: self._cancel_hint,
            FrameKind.SESSION: self._session,
        }

    def _hint(self, frame: Frame) -> None:
        head, raw = frames.split(frames.Seconds, frame.body)
        deadline_s = frames.checked_timeout(head.timeout_s)
        keys = frames.key_words(raw)
        may = self._client.may_hint()
        caller = self._client.caller
        self._hinted(
            frame, self._store.engine.prefetch(caller, [keys], deadline_s) if may else None
        )

    def _hint_session(self, frame: Frame) -> None:
        head, raw = frames.split(frames.HintBySession, frame.body)
        deadline_s = frames.checked_timeout(head.deadline_s)
        name = _session_name(raw)
        may = self._client.may_hint()
        sessions = self._store.sessions
        tags = sessions.namespaces_of(name) if head.tag == _ANY_TAG else [head.tag]
        is_owner = self._channel.peer().uid in (0, os.getuid())
        caller = self._store.routing.caller if is_owner else self._client.caller
        hint = sessions.hint(caller, tags, name, deadline_s) if may else None
        self._hinted(frame, hint)

    def _hinted(self, frame: Frame, hint: Hint | None) -> None:
        answer, flags = frames.Hinted(0, 0, 0), 0
        if hint is not None:
            flags = 0 if hint.may_come else Flag.NONE_COMES
            answer = frames.Hinted(self._client.keep_hint(hint), hint.resident, hint.wanted)
        self._channel.send(FrameKind.HINTED, frame.serial, answer.body(), flags)

    def _await_hint(self, frame: Frame) -> None:
        asked = frames.WaitHint.parse(frame.body)
        timeout_s = min(_HINT_WAIT_S_MAX, frames.checked_timeout(asked.timeout_s))
        hint = self._client.hint(asked.number)
        ended = hint is None or hint.wait(timeout_s)
        answer = frames.HintStatus(ended, 0 if hint is None else hint.brought)
        self._channel.send(FrameKind.BROUGHT, frame.serial, answer.body())

    def _cancel_hint(self, frame: Frame) -> None:
        hint = self._client.hint(frames.Number.parse(frame.body).value)
        if hint is not None:
            hint.cancel()

    def _session(self, frame: Frame) -> None:
        head, raw = frames.split(frames.SessionUpdate, frame.body)
        if head.state not in (SessionState.ALIVE, SessionState.PENDING, SessionState.CLOSED):
            raise WireError(f"a session in state {head.state}")
        name = _session_name(raw[: head.name_bytes])
        words = frames.key_words(raw[head.name_bytes :])
        if (words[:, 0] != np.frombuffer(head.tag, np.uint64)).any():
            raise WireError("a session with keys of another namespace")
        keys = words if len(words) else None
        state = SessionState(head.state)
        known = 0
        if self._client.has_registered(head.tag):
            known = self._store.sessions.update(head.tag, name, keys, state, head.start)
        self._channel.send(FrameKind.NUMBER, frame.serial, frames.Number(known).body())


class RequestHandler:
    """One connection's requests and answers."""

    def __init__(
        self,
        channel: Channel,
        client: ClientResources,
        store: Store,
        memory: SharedMemory,
        config: Config,
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._channel = channel
        self._client = client
        self._store = store
        self._engine = store.engine
        self._memory = memory
        self._config = config
        self._describe = describe
        self._took: Final = store.engine.state.events.took
        self._handlers: Final = {
            FrameKind.REGISTER: self._register,
            FrameKind.MATCH: self._match,
            FrameKind.LEASE: self._lease,
            FrameKind.WHERE: self._where,
            FrameKind.RELEASE: self._release,
            FrameKind.DELIVER: self._deliver,
            FrameKind.FETCH: self._fetch,
            FrameKind.RESERVE: self._reserve,
            FrameKind.SEAL: self._seal,
            FrameKind.ABANDON: self._abandon,
            FrameKind.REMOVE: self._remove,
            FrameKind.REMOVE_NAMESPACE: self._remove_namespace,
            FrameKind.FLUSH: self._flush,
            FrameKind.STATS: self._stats,
            FrameKind.HAS_SECRET: self._has_secret,
            FrameKind.SERVICE: self._service,
            FrameKind.FIRST_TOKEN: self._first_token,
            **HintRequests(channel, client, store).handlers,
        }
        self._services = ServiceCalls(store, client, channel.peer())

    def serve(self, frame: Frame) -> None:
        """Answer one request. WireError if it is malformed: the client must be disconnected."""
        verb = self._handlers.get(frame.kind)
        if verb is None:
            raise WireError(f"{frame.kind.name} is not a request")
        began_s = time.monotonic()
        verb(frame)
        self._took("request", time.monotonic() - began_s, _NAMES[frame.kind])

    def _number(self, frame: Frame, value: int) -> None:
        self._channel.send(FrameKind.NUMBER, frame.serial, frames.Number(value).body())

    def _register(self, frame: Frame) -> None:
        head, description = frames.split(frames.Register, frame.body)
        size = BlockSize(head.block_bytes, head.chunk_bytes)
        try:
            json.loads(description)
        except (ValueError, RecursionError) as error:
            raise WireError("a description that is not JSON") from error
        try:
            self._client.register(head.tag, size, description)
        except ConfigError as error:
            self._refuse(frame, error.path, error)
        else:
            self._number(frame, 1)

    def _match(self, frame: Frame) -> None:
        keys = frames.key_words(bytes(frame.body))
        tiers = self._engine.match(self._client.caller, keys)
        self._channel.send(FrameKind.TIERS, frame.serial, tiers)

    def _lease(self, frame: Frame) -> None:
        number, lease = self._client.lease(frames.key_words(bytes(frame.body)))
        self._send_places(frame, number, lease)

    def _where(self, frame: Frame) -> None:
        number = frames.Number.parse(frame.body).value
        self._send_places(frame, number, self._client.held(number))

    def _send_places(self, frame: Frame, number: int, lease: BlockLease) -> None:
        addresses, nbytes = lease.places()
        protected = len(addresses)
        rows = np.zeros(len(lease.words), frames.PLACE_DTYPE)
        rows["location"] = frames.NOWHERE
        rows["location"][:protected] = self._memory.places(addresses)[0]
        rows["nbytes"][:protected] = nbytes
        self._channel.send(FrameKind.LEASED, frame.serial, frames.with_table(number, rows))

    def _release(self, frame: Frame) -> None:
        if len(frame.body) % _LEASE.itemsize:
            raise WireError("RELEASE with a part of a number")
        self._client.release(np.frombuffer(bytes(frame.body), _LEASE).tolist())

    def _deliver(self, frame: Frame) -> None:
        asked = frames.Deliver.parse(frame.body)
        lease = self._client.held(asked.lease)
        blocks = _blocks(lease.words[asked.start : asked.stop])

        def arrive(arrived: Arrived) -> None:
            self._send_arrived(frame.serial, arrived, lent=not arrived.is_lasting.all())

        answers = self._engine.deliver(
            self._client.caller,
            lease,
            blocks,
            frames.checked_timeout(asked.timeout_s),
            arrive,
            first=asked.start,
            verify_concurrently=bool(asked.verify_concurrently),
        )
        self._done(frame, asked.lease, answers)

    def _fetch(self, frame: Frame) -> None:
        head, raw = frames.split(frames.Fetch, frame.body)
        keys = frames.key_words(raw)
        span = (head.start, head.stop)
        if span != (0, 0) and head.start >= head.stop:
            raise WireError(f"bytes {head.start} to {head.stop}")
        timeout_s = frames.checked_timeout(head.timeout_s)
        if not self._client.may_lease():
            self._done(frame, NO_LEASE, bytes([_BUSY]) * len(keys))
            return
        lease, number = self._client.new_lease(), 0

        def arrive(arrived: Arrived) -> None:
            nonlocal number
            if not lease.fits():
                self._send_arrived(frame.serial, arrived, lent=True)
                lease.release()  # the client has taken all blocks so far
                return
            if not arrived.is_verified and len(arrived.indices) == len(keys):
                number = self._client.keep(lease)  # all are in memory: this is the only frame
            self._send_arrived(frame.serial, arrived, number)

        try:
            answers = self._engine.read(
                self._client.caller,
                _blocks(keys, span),
                timeout_s,
                keep=lease,
                sink=arrive,
                verify=bool(head.verify),
            )
            if number:
                return
            number = self._client.keep(lease)
        finally:
            if not number:
                lease.release()
        self._done(frame, number, answers)

    def _send_arrived(
        self, serial: int, arrived: Arrived, number: int = 0, *, lent: bool = False
    ) -> None:
        """Send the places of blocks that can be read. If some do not stay in memory, or with
        `lent`, wait until the client has taken them. `number`: a lease, set in the last frame of
        an answer.
        """
        rows = np.empty(len(arrived.indices), frames.ARRIVAL_DTYPE)
        rows["index"] = arrived.indices
        rows["location"], rows["staged"] = self._memory.places(arrived.addresses)
        lent = lent or bool(rows["staged"].any())
        flags = (Flag.LENT if lent else 0) | (Flag.LAST if number else 0)
        flags |= Flag.VERIFIED if arrived.is_verified else 0
        self._channel.send(FrameKind.ARRIVED, serial, frames.with_table(number, rows), flags)
        if not lent:
            return
        answer = self._channel.receive(TAKE_TIMEOUT_S)
        if answer is None:
            raise ClientGoneError("the client has disconnected")
        if answer.kind is not FrameKind.TAKEN or answer.serial != serial:
            raise WireError(f"{answer.kind.name} instead of TAKEN")

    def _done(self, frame: Frame, number: int, answers: bytes) -> None:
        body = frames.Number(number).body() + answers
        self._channel.send(FrameKind.DONE, frame.serial, body)

    def _reserve(self, frame: Frame) -> None:
        head, raw = frames.split(frames.Seconds, frame.body)
        timeout_s = frames.checked_timeout(head.timeout_s)
        pad = bool(frame.flags & Flag.PAD)
        number, offers, answers = self._client.reserve(frames.key_words(raw), timeout_s, pad=pad)
        rows = np.empty(len(answers), frames.SLOT_DTYPE)
        rows["outcome"] = [frames.PUT_CODES[answer] for answer in answers]
        rows["location"] = [
            frames.NOWHERE if offer is None else offer.slot for offer in offers[: len(answers)]
        ]
        self._channel.send(FrameKind.RESERVED, frame.serial, frames.with_table(number, rows))

    def _seal(self, frame: Frame) -> None:
        number, indices = frames.table(frame.body, _INDEX)
        tokens, producer = bool(frame.flags & Flag.TOKENS), bool(frame.flags & Flag.PRODUCER)
        self._client.seal(number, indices.tolist(), tokens=tokens, producer=producer)
        self._number(frame, len(indices))

    def _abandon(self, frame: Frame) -> None:
        self._client.abandon(frames.Number.parse(frame.body).value)

    def _remove(self, frame: Frame) -> None:
        self._number(
            frame, self._engine.remove(self._client.caller, frames.key_words(bytes(frame.body)))
        )

    def _remove_namespace(self, frame: Frame) -> None:
        self._number(
            frame,
            self._engine.remove(self._client.caller, tag=frames.checked_tag(bytes(frame.body))),
        )

    def _flush(self, frame: Frame) -> None:
        head, raw = frames.split(frames.Seconds, frame.body)
        timeout_s = frames.checked_timeout(head.timeout_s)
        keys = frames.key_words(raw) if raw else None
        report = self._store.flush_for(self._client.caller, timeout_s, keys)
        body = frames.Flushed(report.complete).body()
        if raw:
            body += bytes(map(DURABILITY.index, report.blocks))
        else:
            counts = {Durability.DURABLE: report.durable, **report.not_durable}
            body += np.array([counts.get(why, 0) for why in DURABILITY], "<u8").tobytes()
        self._channel.send(FrameKind.FLUSHED, frame.serial, body + frames.pack_tiers(report.tiers))

    def _stats(self, frame: Frame) -> None:
        if frame.body:
            raise WireError("STATS with a body")
        listed = {order: self._store.sessions.list(order, _LISTED) for order in ("busy", "cold")}
        stats = {
            **self._store.stats(),
            "daemon": dict(self._describe()),
            "sessions_shown": listed,
        }
        self._channel.send_text(frame.serial, json.dumps(stats, default=str).encode())

    def _has_secret(self, frame: Frame) -> None:
        tenant = frames.checked_text(bytes(frame.body), "a tenant's name")
        known = self._config.tenants.get(tenant)
        secret = known is not None and (known.secret_file is not None or known.secret_hex)
        self._number(frame, int(bool(secret)))

    def _service(self, frame: Frame) -> None:
        """Serve a call in JSON. The answer to an invalid call is REFUSED."""
        try:
            answer = self._services.serve(bytes(frame.body))
        except (StateError, WireError):
            raise
        except (KVDepotError, OSError, LookupError, ValueError, TypeError) as error:
            self._refuse(frame, getattr(error, "path", "") or "daemon", error)
        else:
            self._channel.send_text(frame.serial, answer)

    def _first_token(self, frame: Frame) -> None:
        self._store.admin.report_first_token(frames.FirstTokenReport.parse(frame.body).value())

    def _refuse(self, frame: Frame, path: str, error: Exception) -> None:
        hint = getattr(error, "hint", "")
        refusal = {"path": str(path), "reason": str(error)[:2000], "hint": hint}
        self._channel.send(FrameKind.REFUSED, frame.serial, json.dumps(refusal).encode())


def _blocks(keys: Keys, span: tuple[int, int] = (0, 0)) -> Array:
    """Blocks, or bytes start to stop of each, as rows of BLOCK_DTYPE."""
    rows = np.zeros(len(keys), BLOCK_DTYPE)
    rows["key"] = keys
    rows["start"], rows["stop"] = span
    return rows


def _session_name(raw: bytes) -> str:
    try:
        return checked_name(frames.checked_text(raw, "a session's name"))
    except ConfigError as error:
        raise WireError(str(error)) from error
