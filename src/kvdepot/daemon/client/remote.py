"""The store of a daemon, as a program talks to it. Thread-safe.

The answers and the errors for a caller's mistake are those of core.depot.Depot; the docstrings here
say what is different. While the daemon is gone, nothing is found and nothing is stored, at once or
within `call_timeout`, and `stats` counts it; when it is back, the next call attaches anew.
"""

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from kvdepot.config.settings import TenantConfig
from kvdepot.core.block import BlockKey, GetResult, PutResult
from kvdepot.core.depot import (
    CLOSE_TIMEOUT_S,
    DURABILITY,
    CheckReport,
    Depot,
    Durability,
    FlushReport,
    Layout,
    Match,
    NamespaceHandle,
    checked_deadline,
)
from kvdepot.core.first_token import FirstToken
from kvdepot.core.keys import Keys, TokenIds
from kvdepot.core.namespace import Namespace
from kvdepot.core.sessions import by_tag, checked_name, state_of
from kvdepot.core.volume import TIER_NAMES
from kvdepot.daemon.client.audits import RemoteAudits
from kvdepot.daemon.client.connections import (
    Connections,
    DaemonAwayError,
    Link,
    Reconnector,
    expect,
)
from kvdepot.daemon.client.get import AWAY, Getter, batches, keys_of
from kvdepot.daemon.client.hints import RemoteHint, hint_keys, hint_sessions, tell_session
from kvdepot.daemon.client.lease import RemoteLease, lease_blocks
from kvdepot.daemon.client.put import RemotePutter, RemoteReservation, reserve
from kvdepot.daemon.client.sessions import RemoteSessions
from kvdepot.daemon.wire import messages
from kvdepot.daemon.wire.frames import FrameKind
from kvdepot.daemon.wire.versions import SINCE
from kvdepot.errors import ConfigError, DaemonError, StoreClosedError
from kvdepot.format.requests import Namespaces, check_block_bytes, checked, make_namespace

_LONG_S: Final = 3600.0
"""For what may take long, and cannot be given up: removals and checks."""
_CHANGE_S: Final = 30 * 86400.0
"""To take everything off a drive may take days. A daemon that dies closes the connection."""
Answer = TypeVar("Answer")


class RemoteStore(Depot):
    """A depot in another process. Made by `kvdepot.open("unix:…")`."""

    def __init__(self, daemon: Reconnector, tenants: Mapping[str, TenantConfig]) -> None:
        self._daemon = daemon
        self._tenants = tenants
        self._welcome = daemon.begin()
        self._namespaces = Namespaces()
        self._closed = False

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<kvdepot.RemoteStore, unix:{self._daemon.path}{state}>"

    def namespace(
        self,
        *,
        model: str,
        layout: Layout,
        tenant: str = "",
        secret: bytes | None = None,
        **fields: Any,
    ) -> NamespaceHandle:
        """The daemon keeps its tenants' secrets to itself: for a tenant that has one there, pass
        `secret`, or name it in this store's own `tenants`.
        """
        self._check_open()
        if secret is None and tenant and tenant not in self._tenants:
            self._check_no_secret(tenant)
        fields = {**fields, "tenant": tenant, "secret": secret}
        block_tokens = self._welcome.block_tokens
        return self.register(make_namespace(model, layout, block_tokens, self._tenants, fields))

    def register(self, namespace: Namespace) -> NamespaceHandle:
        self._check_open()
        check_block_bytes(namespace.layout.block_bytes)
        self._daemon.register(NamespaceHandle(namespace))
        return self._namespaces.add(namespace)

    def put_many(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[Any],
        *,
        timeout_s: float | None = None,
        token_ids: TokenIds | None = None,
    ) -> list[PutResult]:
        """THROTTLED without a daemon."""
        self._check_open()
        keys, buffers = list(keys), list(buffers)
        offer = self._namespaces.offer(keys, buffers, token_ids)
        limit_s = self._welcome.put_timeout_s if timeout_s is None else timeout_s
        outcomes: list[PutResult] = []
        try:
            with self._daemon.link() as (connections, link):
                try:
                    RemotePutter(connections, link, limit_s).store(offer, outcomes)
                finally:
                    connections.count_stored(sum(map(bool, outcomes)))
        except DaemonAwayError:
            self._daemon.count_away()
        return outcomes + [PutResult.THROTTLED] * (len(keys) - len(outcomes))

    def reserve(
        self,
        keys: Sequence[BlockKey],
        *,
        timeout_s: float | None = None,
        token_ids: TokenIds | None = None,
    ) -> RemoteReservation:
        """All THROTTLED without a daemon."""
        self._check_open()
        limit_s = self._welcome.put_timeout_s if timeout_s is None else timeout_s
        offer = self._namespaces.offer(keys, None, token_ids)

        def ask(connections: Connections, link: Link) -> RemoteReservation:
            outcomes, found = reserve(connections, link, offer.blocks, limit_s)
            if found:
                connections.enter()
            return RemoteReservation(connections if found else None, offer, outcomes, found)

        throttled = [PutResult.THROTTLED] * len(keys)
        return self._ask(ask, RemoteReservation(None, offer, throttled, []))

    @property
    def memory(self) -> tuple[memoryview, ...]:
        """After the daemon was restarted it is other memory; without one there is none."""
        self._check_open()
        try:
            connections = self._daemon.connections()
        except DaemonAwayError:
            return ()
        return connections.arena.view, connections.staging.view

    def get_many(
        self,
        keys: Sequence[BlockKey],
        intos: Sequence[Any],
        *,
        layers: range | None = None,
        timeout_s: float | None = None,
    ) -> list[GetResult]:
        """Misses without a daemon."""
        self._check_open()
        keys, intos = list(keys), list(intos)
        blocks = self._namespaces.targets(keys, intos, layers)
        limit_s = self._welcome.read_timeout_s if timeout_s is None else timeout_s
        if not keys:
            return []
        away = [AWAY] * len(keys)
        return self._ask(lambda to, link: Getter(to, link, limit_s).fetch(blocks), away)

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """Empty without a daemon."""
        self._check_open()
        checked(keys)

        def ask(_: Connections, link: Link) -> Match:
            found = b""
            for part in batches(keys):
                frame = link.call(FrameKind.MATCH, keys_of(keys, part), self._call_s)
                codes = bytes(expect(frame, FrameKind.TIERS).body)
                if codes and max(codes) >= len(TIER_NAMES):
                    raise DaemonAwayError("tiers that make no sense")
                found += codes
                if len(codes) < len(part):
                    break
            return Match.of(found)

        return self._ask(ask, Match(()))

    def lease(self, keys: Sequence[BlockKey]) -> RemoteLease:
        """Of nothing without a daemon."""
        self._check_open()
        checked(keys)
        nothing = RemoteLease([], [], None, self._namespaces, self._check_open)

        def ask(connections: Connections, link: Link) -> RemoteLease:
            parts = lease_blocks(connections, link, keys)
            if not parts:
                return nothing
            connections.enter()
            held = list(keys[: parts[-1].stop])
            return RemoteLease(held, parts, connections, self._namespaces, self._check_open)

        return self._ask(ask, nothing)

    def touch(self, keys: Sequence[BlockKey]) -> int:
        """0 without a daemon."""
        self._check_open()
        checked(keys)

        def ask(_: Connections, link: Link) -> int:
            total = 0
            for part in batches(keys):
                total += link.number(FrameKind.TOUCH, keys_of(keys, part), self._call_s)
                if total < part.stop:
                    break
            return total

        return self._ask(ask, 0)

    def session(
        self,
        name: str,
        keys: Sequence[BlockKey] | None = None,
        state: str = "alive",
        *,
        tenant: str = "",
    ) -> int:
        """0 without a daemon. The daemon has the names, for all clients of the same namespaces."""
        self._check_open()
        session_state, name = state_of(state), checked_name(name)
        self._namespaces.check(checked(keys or ()))
        parts: Mapping[bytes, Keys | None]
        parts = by_tag(keys) if keys else dict.fromkeys(self._namespaces.tags_of(tenant))

        def ask(_: Connections, link: Link) -> int:
            return sum(
                tell_session(link, tag, words, name, session_state, self._call_s)
                for tag, words in parts.items()
            )

        return self._ask(ask, 0)

    @property
    def sessions(self) -> RemoteSessions:
        return RemoteSessions(self._daemon, self._check_open)

    @property
    def audits(self) -> RemoteAudits:
        return RemoteAudits(self._daemon, self._check_open)

    def hint(
        self, keys: Sequence[BlockKey] | str, deadline_s: float, *, tenant: str = ""
    ) -> RemoteHint:
        """Brings nothing without a daemon, and no more when this client is gone."""
        self._check_open()
        deadline_s = min(checked_deadline(deadline_s), messages.TIMEOUT_S_MAX)
        if isinstance(keys, str):
            name, tags = checked_name(keys), self._namespaces.tags_of(tenant)
        elif keys:
            self._namespaces.check(checked(keys))

        def ask(connections: Connections, link: Link) -> RemoteHint:
            if isinstance(keys, str):
                hinted = hint_sessions(link, tags, name, deadline_s, self._call_s)
            else:
                hinted = hint_keys(link, keys, deadline_s, self._call_s)
            return RemoteHint(connections, hinted)

        return self._ask(ask, RemoteHint(None, []))

    def report_first_token(self, first: FirstToken) -> None:
        """Lost without a daemon, and with one from before this call; does not wait for it."""
        self._check_open()
        first.check()
        try:
            connections = self._daemon.connections()
        except DaemonAwayError:
            self._daemon.count_away()
            return
        if connections.welcome.protocol >= SINCE[FrameKind.FIRST_TOKEN]:
            connections.tell(FrameKind.FIRST_TOKEN, messages.FirstTokenTold.of(first).body())

    def remove(self, keys: BlockKey | Sequence[BlockKey]) -> int:
        """0 without a daemon, and then nothing is removed."""
        self._check_open()
        wanted = checked([keys] if isinstance(keys, bytes) else list(keys))

        def ask(_: Connections, link: Link) -> int:
            parts = (keys_of(wanted, part) for part in batches(wanted))
            return sum(link.number(FrameKind.REMOVE, part, _LONG_S) for part in parts)

        return self._ask(ask, 0)

    def remove_tag(self, tag: bytes) -> int:
        self._check_open()
        return self._ask(lambda _, link: link.number(FrameKind.REMOVE_NAMESPACE, tag, _LONG_S), 0)

    def set_write_mode(self, tier: str, mode: str) -> None:
        """For the daemon's user and root; so are the next three.

        They raise DaemonError when no daemon answers: a change that was not made must be known.
        """
        self._change("set_write_mode", tier, mode)

    def add_drive(self, tier: str, path: str | os.PathLike[str]) -> None:
        """A path is seen from here."""
        self._change("add_drive", tier, os.path.abspath(path))

    def drain_drive(self, tier: str, path: str | os.PathLike[str]) -> int:
        """Goes on in the daemon if this client ends before."""
        return self._change("drain_drive", tier, os.path.abspath(path))

    def resize(self, tier: str, capacity: int | str) -> None:
        self._change("resize", tier, str(capacity))

    def record(self, path: str | os.PathLike[str]) -> None:
        """The daemon writes the file. For its user and root."""
        self._change("record", "", os.path.abspath(path))

    def stop_recording(self) -> int:
        return self._change("stop_recording", "", "")

    def flush(
        self, timeout_s: float = CLOSE_TIMEOUT_S, *, keys: Sequence[BlockKey] | None = None
    ) -> FlushReport:
        """For what all clients have put; false without a daemon, and once after it was restarted:
        what this one had put to it and not flushed may have gone with it.
        """
        self._check_open()
        if keys is None:
            return self._flush(timeout_s)
        wanted = checked(list(keys))
        parts = [self._flush_keys(wanted, part, timeout_s) for part in batches(wanted)]
        return FlushReport.of(itertools.chain(*parts))

    def check(self, *, deep: bool = True) -> CheckReport:
        """One finding without a daemon."""
        self._check_open()
        nowhere = CheckReport()
        nowhere.add(self._daemon.path, "the daemon does not answer")

        def ask(_: Connections, link: Link) -> CheckReport:
            said = link.text(FrameKind.CHECK, messages.Number(int(deep)).body(), _LONG_S)
            report = CheckReport(said["blocks"], said["bytes"])
            for finding in said["findings"]:
                report.add(finding["where"], finding["what"])
            return report

        return self._ask(ask, nowhere)

    def stats(self) -> dict[str, Any]:
        """For the daemon's store; `daemon` tells of the daemon and its clients,
        `client` of this one. Without a daemon there is only that.
        """
        self._check_open()
        nothing: dict[str, Any] = {}
        found = self._ask(lambda _, link: link.text(FrameKind.STATS, b"", self._call_s), nothing)
        return {**found, "client": self._daemon.describe()}

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> FlushReport:
        if self._closed:
            return FlushReport(True)
        report = self._flush(timeout_s)
        self._closed = True
        self._daemon.end()
        return report

    @property
    def _call_s(self) -> float:
        return self._daemon.call_s

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed")

    def _ask(self, call: Callable[[Connections, Link], Answer], away: Answer) -> Answer:
        try:
            with self._daemon.link() as (connections, link):
                return call(connections, link)
        except DaemonAwayError:
            self._daemon.count_away()
            return away

    def _change(self, call: str, tier: str, value: str) -> int:
        self._check_open()
        body = json.dumps({"call": call, "tier": str(tier), "value": value}).encode()
        try:
            with self._daemon.link() as (_, link):
                return link.number(FrameKind.CHANGE, body, _CHANGE_S)
        except DaemonAwayError as error:
            self._daemon.count_away()
            raise DaemonError(
                self._daemon.path,
                f"the daemon did not answer: {error}",
                hint="see what became of it: kvdepot tiers list",
            ) from error

    def _flush(self, timeout_s: float) -> FlushReport:
        def ask(connections: Connections, link: Link) -> FlushReport:
            mine, others = self._daemon.unflushed(connections)
            complete, raw = self._ask_flush(link, timeout_s, b"")
            if len(raw) != 8 * len(DURABILITY):
                raise DaemonAwayError("counts that make no sense")
            totals = np.frombuffer(raw, "<u8").tolist()
            counts = Counter(dict(zip(DURABILITY, totals, strict=True)))
            durable = counts.pop(Durability.DURABLE)
            counts[Durability.DAEMON] += others
            report = FlushReport(complete and not others, durable, +counts)
            self._daemon.told(connections, mine if report.ok else 0)
            return report

        return self._ask(ask, FlushReport(False))

    def _flush_keys(
        self, keys: Sequence[BlockKey], part: range, timeout_s: float
    ) -> list[Durability]:
        """Of a batch of keys; that no daemon answers counts as a failure."""

        def ask(_: Connections, link: Link) -> list[Durability]:
            codes = self._ask_flush(link, timeout_s, keys_of(keys, part))[1]
            if len(codes) != len(part) or max(codes, default=0) >= len(DURABILITY):
                raise DaemonAwayError("answers that make no sense")
            return [DURABILITY[code] for code in codes]

        return self._ask(ask, [Durability.DAEMON] * len(part))

    def _ask_flush(self, link: Link, timeout_s: float, keys: bytes) -> tuple[bool, bytes]:
        body = messages.Seconds(timeout_s).body() + keys
        frame = link.call(FrameKind.FLUSH, body, timeout_s + CLOSE_TIMEOUT_S)
        head, rest = messages.split(messages.Flushed, expect(frame, FrameKind.FLUSHED).body)
        return bool(head.complete), rest

    def _check_no_secret(self, tenant: str) -> None:
        """Never make keys without a secret for a tenant that has one."""
        try:
            with self._daemon.link() as (_, link):
                has_one = link.number(FrameKind.HAS_SECRET, str(tenant).encode(), self._call_s)
        except DaemonAwayError as error:
            raise DaemonError(
                self._daemon.path,
                f"cannot tell whether tenant {tenant!r} has a secret: {error}",
                hint='pass secret=…, or secret=b"" for a tenant without one',
            ) from error
        if has_one:
            raise ConfigError(
                f"tenants.{tenant}",
                "has a secret, which the daemon keeps to itself",
                hint="pass secret=…, or tenants={…} to kvdepot.open",
            )
