"""Serves the requests of one connection, one after the other."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np

from kvdepot.config.settings import Config
from kvdepot.core.audit import PRODUCER_TEXT_MAX, AuditFinding
from kvdepot.core.block import ANSWERS, TAG_BYTES, GetResult
from kvdepot.core.depot import DURABILITY, Durability
from kvdepot.core.keys import Keys, check_key
from kvdepot.core.order import SessionState
from kvdepot.core.requests import BLOCK_DTYPE, Array, Arrived, BlockSize
from kvdepot.core.sessions import RetentionReceipt, checked_name
from kvdepot.daemon.server.client_resources import NO_LEASE, TAKE_TIMEOUT_S, ClientResources
from kvdepot.daemon.server.shared_memory import SharedMemory
from kvdepot.daemon.wire import messages
from kvdepot.daemon.wire.frames import Channel, Flag, Frame, FrameKind
from kvdepot.daemon.wire.versions import answers_for, tiers_for
from kvdepot.errors import ConfigError, KVDepotError, StateError, WireError
from kvdepot.store.read.lease import BlockLease
from kvdepot.store.read.prefetch import Hint
from kvdepot.store.store import Store

_BUSY: Final = ANSWERS.index(GetResult(None, "busy"))
_HINT_WAIT_S_MAX: Final = 10.0
"""A thread waits this long for a hint at most; the client asks again."""
_LISTED: Final = 5
"""Sessions of each kind that STATS names."""
_NAME: Final[dict[str, tuple[type, ...]]] = {"name": (str,), "namespace": (str,)}
_SECONDS: Final = (int, float)
_CALLS: Final[dict[str, dict[str, tuple[type, ...]]]] = {
    "known": {"order": (str,), "limit": (int,)},
    "shared_prefixes": {"order": (str,), "limit": (int,)},
    "show": _NAME,
    "pin": {**_NAME, "until_s": _SECONDS, "for_s": _SECONDS, "through_turn": (bool,)},
    "unpin": _NAME,
    "park": _NAME,
    "warm": {**_NAME, "deadline_s": _SECONDS},
    "expire": _NAME,
    "ledger": {},
    "tell_prefill": {"namespace": (str,), "token_s": _SECONDS, "pair_s": _SECONDS},
    "export": {**_NAME, "path": (str,)},
    "import_file": {"path": (str,)},
}
"""Calls of DepotSessions, and of which types their arguments may be."""
_ASKING: Final = ("known", "shared_prefixes", "show", "ledger")
_AUDIT_CALLS: Final[dict[str, dict[str, tuple[type, ...]]]] = {
    "known": {},
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
}
"""The same of DepotAudits."""
_WITH_FILES: Final = ("export", "import_file")
_INDEX: Final = np.dtype("<u4")
_LEASE: Final = np.dtype("<u8")
_NAMES: Final = {kind: kind.name.lower() for kind in FrameKind}


class ClientGoneError(KVDepotError):
    """The client closed its connection in the middle of an answer."""


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
            FrameKind.TOUCH: self._touch,
            FrameKind.REMOVE: self._remove,
            FrameKind.REMOVE_NAMESPACE: self._remove_namespace,
            FrameKind.FLUSH: self._flush,
            FrameKind.CHECK: self._check,
            FrameKind.STATS: self._stats,
            FrameKind.HAS_SECRET: self._has_secret,
            FrameKind.HINT: self._hint,
            FrameKind.HINT_SESSION: self._hint_session,
            FrameKind.AWAIT_HINT: self._await_hint,
            FrameKind.CANCEL_HINT: self._cancel_hint,
            FrameKind.SESSION: self._session,
            FrameKind.CHANGE: self._change,
            FrameKind.SESSIONS: self._sessions,
            FrameKind.AUDITS: self._audits,
            FrameKind.FIRST_TOKEN: self._first_token,
        }
        self._changes: Final[dict[str, Callable[[str, str], int | None]]] = {
            "set_write_mode": store.set_write_mode,
            "add_drive": store.add_drive,
            "drain_drive": store.drain_drive,
            "resize": store.resize,
            "record": lambda _, path: store.record(path),
            "stop_recording": lambda *_: store.stop_recording(),
        }

    def serve(self, frame: Frame) -> None:
        """Answer one request. WireError: it makes no sense, and the client must go."""
        verb = self._handlers.get(frame.kind)
        if verb is None:
            raise WireError(f"{frame.kind.name} is not a request")
        began_s = time.monotonic()
        verb(frame)
        self._took("request", time.monotonic() - began_s, _NAMES[frame.kind])

    def _number(self, frame: Frame, value: int) -> None:
        self._channel.send(FrameKind.NUMBER, frame.serial, messages.Number(value).body())

    def _register(self, frame: Frame) -> None:
        head, description = messages.split(messages.Register, frame.body)
        size = BlockSize(head.block_bytes, head.chunk_bytes)
        try:
            _parse_json(description, "a description")
            self._client.register(head.tag, size, description)
        except ConfigError as error:
            self._refuse(frame, error.path, error)
        else:
            self._number(frame, 1)

    def _match(self, frame: Frame) -> None:
        keys = messages.key_words(bytes(frame.body))
        tiers = self._engine.match(self._client.caller, keys)
        self._channel.send(FrameKind.TIERS, frame.serial, tiers_for(self._client.protocol, tiers))

    def _lease(self, frame: Frame) -> None:
        number, lease = self._client.lease(messages.key_words(bytes(frame.body)))
        self._send_places(frame, number, lease)

    def _where(self, frame: Frame) -> None:
        number = messages.Number.parse(frame.body).value
        self._send_places(frame, number, self._client.held(number))

    def _send_places(self, frame: Frame, number: int, lease: BlockLease) -> None:
        addresses, nbytes = lease.places()
        rows = np.empty(len(addresses), messages.PLACE_DTYPE)
        rows["location"], rows["nbytes"] = self._memory.places(addresses)[0], nbytes
        self._channel.send(FrameKind.LEASED, frame.serial, messages.with_table(number, rows))

    def _release(self, frame: Frame) -> None:
        if len(frame.body) % _LEASE.itemsize:
            raise WireError("leases of odd length")
        self._client.release(np.frombuffer(bytes(frame.body), _LEASE).tolist())

    def _deliver(self, frame: Frame) -> None:
        asked = messages.Deliver.parse(frame.body)
        lease = self._client.held(asked.lease)
        blocks = _blocks(lease.words[asked.start : asked.stop])
        answers = self._engine.deliver(
            self._client.caller,
            lease,
            blocks,
            messages.checked_timeout(asked.timeout_s),
            partial(self._send_arrived, frame.serial),
            verify_concurrently=bool(asked.beside),
        )
        self._done(frame, asked.lease, answers)

    def _fetch(self, frame: Frame) -> None:
        head, raw = messages.split(messages.Fetch, frame.body)
        keys = messages.key_words(raw)
        span = (head.start, head.stop)
        if span != (0, 0) and head.start >= head.stop:
            raise WireError(f"bytes {head.start} to {head.stop}")
        timeout_s = messages.checked_timeout(head.timeout_s)
        if not self._client.may_hold():
            self._done(frame, NO_LEASE, bytes([_BUSY]) * len(keys))
            return
        lease, number = self._client.new_lease(), 0

        def arrive(arrived: Arrived) -> None:
            nonlocal number
            if not arrived.is_verified and len(arrived.indices) == len(keys):
                number = self._client.keep(lease)  # all are in memory: one frame is enough
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

    def _send_arrived(self, serial: int, arrived: Arrived, number: int = 0) -> None:
        """Send the places of blocks that have come; wait while the client takes those that do not
        stay. With a number, that of a lease, no other blocks will come.
        """
        rows = np.empty(len(arrived.indices), messages.ARRIVAL_DTYPE)
        rows["index"] = arrived.indices
        rows["location"], rows["staged"] = self._memory.places(arrived.addresses)
        lent = bool(rows["staged"].any())
        flags = (Flag.LENT if lent else 0) | (Flag.LAST if number else 0)
        flags |= Flag.VERIFIED if arrived.is_verified else 0
        self._channel.send(FrameKind.ARRIVED, serial, messages.with_table(number, rows), flags)
        if not lent:
            return
        answer = self._channel.receive(TAKE_TIMEOUT_S)
        if answer is None:
            raise ClientGoneError("the client is gone")
        if answer.kind is not FrameKind.TAKEN or answer.serial != serial:
            raise WireError(f"{answer.kind.name} instead of TAKEN")

    def _done(self, frame: Frame, number: int, answers: bytes) -> None:
        body = messages.Number(number).body() + answers_for(self._client.protocol, answers)
        self._channel.send(FrameKind.DONE, frame.serial, body)

    def _reserve(self, frame: Frame) -> None:
        head, raw = messages.split(messages.Seconds, frame.body)
        timeout_s = messages.checked_timeout(head.timeout_s)
        pad = bool(frame.flags & Flag.PAD)
        number, offers, answers = self._client.reserve(messages.key_words(raw), timeout_s, pad=pad)
        rows = np.empty(len(answers), messages.SLOT_DTYPE)
        rows["outcome"] = [messages.PUT_CODES[answer] for answer in answers]
        rows["location"] = [
            messages.NOWHERE if offer is None else offer.slot for offer in offers[: len(answers)]
        ]
        self._channel.send(FrameKind.RESERVED, frame.serial, messages.with_table(number, rows))

    def _seal(self, frame: Frame) -> None:
        number, indices = messages.table(frame.body, _INDEX)
        tokens, producer = bool(frame.flags & Flag.TOKENS), bool(frame.flags & Flag.PRODUCER)
        self._client.seal(number, indices.tolist(), tokens=tokens, producer=producer)
        self._number(frame, len(indices))

    def _abandon(self, frame: Frame) -> None:
        self._client.abandon(messages.Number.parse(frame.body).value)

    def _touch(self, frame: Frame) -> None:
        self._number(frame, self._store.touch(messages.key_list(bytes(frame.body))))

    def _remove(self, frame: Frame) -> None:
        self._number(frame, self._store.remove(messages.key_list(bytes(frame.body))))

    def _remove_namespace(self, frame: Frame) -> None:
        self._number(frame, self._store.remove_tag(messages.checked_tag(bytes(frame.body))))

    def _flush(self, frame: Frame) -> None:
        head, raw = messages.split(messages.Seconds, frame.body)
        timeout_s = messages.checked_timeout(head.timeout_s)
        report = self._store.flush(timeout_s, keys=messages.key_list(raw) if raw else None)
        body = messages.Flushed(report.complete).body()
        if raw:
            body += bytes(map(DURABILITY.index, report.blocks))
        else:
            counts = {Durability.DURABLE: report.durable, **report.not_durable}
            body += np.array([counts.get(why, 0) for why in DURABILITY], "<u8").tobytes()
        self._channel.send(FrameKind.FLUSHED, frame.serial, body)

    def _check(self, frame: Frame) -> None:
        report = self._store.check(deep=bool(messages.Number.parse(frame.body).value))
        self._channel.send_text(frame.serial, json.dumps(report.as_dict()).encode())

    def _stats(self, frame: Frame) -> None:
        if frame.body:
            raise WireError("STATS with a body")
        listed = {order: self._store.sessions.known(order, _LISTED) for order in ("busy", "cold")}
        shared = self._store.sessions.shared_prefixes("busy", _LISTED)
        stats = {
            **self._store.stats(),
            "daemon": dict(self._describe()),
            "sessions_shown": listed,
            "prefixes_shown": shared,
        }
        self._channel.send_text(frame.serial, json.dumps(stats, default=str).encode())

    def _has_secret(self, frame: Frame) -> None:
        tenant = messages.checked_text(bytes(frame.body), "a tenant's name")
        known = self._config.tenants.get(tenant)
        secret = known is not None and (known.secret_file is not None or known.secret_hex)
        self._number(frame, int(bool(secret)))

    def _hint(self, frame: Frame) -> None:
        head, raw = messages.split(messages.Seconds, frame.body)
        deadline_s = messages.checked_timeout(head.timeout_s)
        keys = messages.key_words(raw)
        may = self._client.may_hint()
        caller = self._client.caller
        self._hinted(frame, self._engine.prefetch(caller, [keys], deadline_s) if may else None)

    def _hint_session(self, frame: Frame) -> None:
        head, raw = messages.split(messages.HintBySession, frame.body)
        deadline_s = messages.checked_timeout(head.deadline_s)
        name = _session_name(raw)
        may = self._client.may_hint()
        hint = self._store.sessions.hint(self._client.caller, [head.tag], name, deadline_s)
        self._hinted(frame, hint if may else None)

    def _hinted(self, frame: Frame, hint: Hint | None) -> None:
        answer = messages.Hinted(0, 0, 0)
        if hint is not None:
            answer = messages.Hinted(self._client.keep_hint(hint), hint.resident, hint.wanted)
        self._channel.send(FrameKind.HINTED, frame.serial, answer.body())

    def _await_hint(self, frame: Frame) -> None:
        asked = messages.WaitHint.parse(frame.body)
        timeout_s = min(_HINT_WAIT_S_MAX, messages.checked_timeout(asked.timeout_s))
        hint = self._client.hint(asked.number)
        ended = hint is None or hint.wait(timeout_s)
        answer = messages.HintStatus(ended, 0 if hint is None else hint.brought)
        self._channel.send(FrameKind.BROUGHT, frame.serial, answer.body())

    def _cancel_hint(self, frame: Frame) -> None:
        hint = self._client.hint(messages.Number.parse(frame.body).value)
        if hint is not None:
            hint.cancel()

    def _session(self, frame: Frame) -> None:
        head, raw = messages.split(messages.SessionUpdate, frame.body)
        if head.state not in (SessionState.ALIVE, SessionState.PENDING, SessionState.CLOSED):
            raise WireError(f"a session in state {head.state}")
        name = _session_name(raw[: head.name_bytes])
        words = messages.key_words(raw[head.name_bytes :])
        if (words[:, 0] != np.frombuffer(head.tag, np.uint64)).any():
            raise WireError("a session with keys of another namespace")
        keys = words if len(words) else None
        state = SessionState(head.state)
        if not self._client.has_registered(head.tag):
            self._number(frame, 0)
            return
        self._number(frame, self._store.sessions.update(head.tag, name, keys, state, head.start))

    def _change(self, frame: Frame) -> None:
        """Change the store. For the daemon's own user and root only."""
        said = _parse_json(bytes(frame.body), "a change")
        if not isinstance(said, dict) or set(said) != {"call", "tier", "value"}:
            raise WireError("a change of another form")
        if not all(isinstance(part, str) for part in said.values()):
            raise WireError("a change of another form")
        if said["call"] not in self._changes:
            raise WireError(f"an unknown change {said['call']!r:.40}")
        try:
            self._check_may_change()
            result = self._changes[said["call"]](said["tier"], said["value"])
        except StateError:
            raise
        except (KVDepotError, OSError, ValueError) as error:
            self._refuse(frame, getattr(error, "path", "") or said["tier"], error)
        else:
            self._number(frame, result or 0)

    def _sessions(self, frame: Frame) -> None:
        """Ask or do something about sessions."""
        call, given = _parse_call(frame, _CALLS)
        try:
            self._check_may_call(call, given)
            found = getattr(self._store.sessions, call)(**given)
        except StateError:
            raise
        except (KVDepotError, OSError, ValueError, TypeError) as error:
            self._refuse(frame, getattr(error, "path", "") or "session", error)
        else:
            answer = found.as_dict() if isinstance(found, RetentionReceipt) else found
            self._channel.send_text(frame.serial, json.dumps(answer, default=str).encode())

    def _audits(self, frame: Frame) -> None:
        """Ask or do something about audits. A client that has registered a namespace may report of
        it; to end a quarantine is for the daemon's user and root.
        """
        call, given = _parse_call(frame, _AUDIT_CALLS)
        found: Any = None
        try:
            if call == "report":
                finding = _finding(given)
                if not self._client.has_registered(finding.key[:TAG_BYTES]):
                    self._check_may_change()
                self._store.audits.report(finding)
            else:
                if call in ("lift", "purge"):
                    self._check_may_change()
                found = getattr(self._store.audits, call)(**given)
        except StateError:
            raise
        except (KVDepotError, OSError, ValueError, TypeError) as error:
            self._refuse(frame, getattr(error, "path", "") or "audit", error)
        else:
            self._channel.send_text(frame.serial, json.dumps(found).encode())

    def _first_token(self, frame: Frame) -> None:
        self._store.report_first_token(messages.FirstTokenTold.parse(frame.body).value())

    def _check_may_call(self, call: str, given: Mapping[str, Any]) -> None:
        """What changes a session is for the daemon's user and root, and for clients that have
        registered its namespaces; files are for the first two.
        """
        if call in _ASKING or self._is_owner():
            return
        if call == "tell_prefill" and self._client.has_registered(_tag(given.get("namespace"))):
            return
        name = given.get("name")
        if call in _WITH_FILES or name is None:
            self._check_may_change()
            return
        wanted = given.get("namespace") or ""
        tags = self._store.sessions.namespaces_of(name)
        tags = [tag for tag in tags if not wanted or tag.hex() == wanted]
        if not all(map(self._client.has_registered, tags)):
            self._check_may_change()

    def _is_owner(self) -> bool:
        return self._channel.peer().uid in (0, os.getuid())

    def _check_may_change(self) -> None:
        """By the user at the other end, as the kernel knows it."""
        peer = self._channel.peer()
        if not self._is_owner():
            raise ConfigError(
                "daemon",
                f"user {peer.uid} may use the store, not change its tiers",
                hint=f"ask as root, or as the daemon's user ({os.getuid()})",
            )

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


def _parse_json(text: bytes, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"{what} that is no JSON") from error


def _parse_call(
    frame: Frame, calls: Mapping[str, Mapping[str, tuple[type, ...]]]
) -> tuple[str, dict[str, Any]]:
    """One of these calls, and what it is given."""
    said = _parse_json(bytes(frame.body), "a call")
    if not isinstance(said, dict) or set(said) != {"call", "given"}:
        raise WireError("a call of another form")
    call, given = said["call"], said["given"]
    known = calls.get(call) if isinstance(call, str) else None
    if known is None or not isinstance(given, dict):
        raise WireError("an unknown call")
    if any(name not in known or type(given[name]) not in known[name] for name in given):
        raise WireError(f"{call}: given what it does not take")
    return call, given


def _finding(given: Mapping[str, Any]) -> AuditFinding:
    """ValueError or TypeError: it is none."""
    numbers = (given.get("error"), given.get("tolerance"))
    if not all(isinstance(one, int | float) and math.isfinite(one) for one in numbers):
        raise ValueError("a finding without numbers")
    key = check_key(bytes.fromhex(given.get("key", "")))
    producer = str(given.get("producer", ""))[:PRODUCER_TEXT_MAX]
    return AuditFinding(**{**given, "key": key, "producer": producer})


def _tag(text: Any) -> bytes:
    """Of a namespace; none where the text is no tag."""
    try:
        return bytes.fromhex(text or "")
    except ValueError:
        return b""


def _session_name(raw: bytes) -> str:
    try:
        return checked_name(messages.checked_text(raw, "a session's name"))
    except ConfigError as error:
        raise WireError(str(error)) from error
