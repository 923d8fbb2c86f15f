"""The store of a daemon, as a program talks to it. Thread-safe.

Every method is that of kvdepot.store.store.Store, with the same answers and the same errors for a
caller's mistake. While the daemon is gone, nothing is found and nothing is stored, at once or
within `call_timeout`, and `stats` counts it; when it is back, the next call attaches anew.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from kvdepot.client.connections import Session
from kvdepot.client.get import AWAY, Getter, batches, keys_of
from kvdepot.client.hint import RemoteHint
from kvdepot.client.hints import Teller, hint_keys, hint_sessions
from kvdepot.client.lease import Part, RemoteLease, Terms, places_of
from kvdepot.client.link import DaemonAwayError, Link, expect
from kvdepot.client.put import Putter, reserved_of
from kvdepot.client.reconnect import Attachment
from kvdepot.client.reservation import Batch, RemoteReservation
from kvdepot.core.block import BlockKey, Got, Put
from kvdepot.core.config import TenantConfig
from kvdepot.core.depot import (
    CLOSE_TIMEOUT_S,
    CheckReport,
    Depot,
    FlushReport,
    Layout,
    Match,
    NamespaceHandle,
)
from kvdepot.core.namespace import Namespace
from kvdepot.core.tier import TIER_NAMES
from kvdepot.errors import ConfigError, DaemonError, StoreClosedError
from kvdepot.index.table import Keys
from kvdepot.store.namespaces import Namespaces, check_block_bytes, checked, make_namespace
from kvdepot.store.read.prefetch import checked_deadline
from kvdepot.store.sessions import by_tag, checked_name, state_of
from kvdepot.store.write.put import NewBlock
from kvdepot.wire import messages
from kvdepot.wire.frames import Flag, FrameKind

_LONG_S: Final = 3600.0
"""For what may take long, and cannot be given up: removals and checks."""
_CHANGE_S: Final = 30 * 86400.0
"""To take everything off a drive may take days. A daemon that dies closes the connection."""
Answer = TypeVar("Answer")


class RemoteStore(Depot):
    """Made by `kvdepot.open("unix:…")`; use as a context manager or call `close`."""

    def __init__(self, attachment: Attachment, tenants: Mapping[str, TenantConfig]) -> None:
        self._attachment = attachment
        self._tenants = tenants
        self._welcome = attachment.begin()
        self._spaces = Namespaces()
        self._closed = False

    def namespace(
        self,
        *,
        model: str,
        layout: Layout,
        tenant: str = "",
        secret: bytes | None = None,
        **fields: Any,
    ) -> NamespaceHandle:
        """As Store.namespace. The daemon keeps its tenants' secrets to itself: for a tenant that
        has one there, pass `secret`, or name it in this store's own `tenants`.
        """
        self._check_open()
        if secret is None and tenant and tenant not in self._tenants:
            self._check_no_secret(tenant)
        fields = {**fields, "tenant": tenant, "secret": secret}
        block_tokens = self._welcome.block_tokens
        return self.register(make_namespace(model, layout, block_tokens, self._tenants, fields))

    def register(self, namespace: Namespace) -> NamespaceHandle:
        """`namespace` for a Namespace that exists already."""
        self._check_open()
        check_block_bytes(namespace.layout.block_bytes)
        self._attachment.register(NamespaceHandle(namespace))
        return self._spaces.add(namespace)

    def put(self, key: BlockKey, buffer: Any, *, timeout_s: float | None = None) -> Put:
        """Offload one block. See put_many."""
        return self.put_many([key], [buffer], timeout_s=timeout_s)[0]

    def put_many(
        self, keys: Sequence[BlockKey], buffers: Sequence[Any], *, timeout_s: float | None = None
    ) -> list[Put]:
        """As Store.put_many; THROTTLED without a daemon."""
        self._check_open()
        keys, buffers = list(keys), list(buffers)
        offers = self._spaces.new_blocks(keys, buffers)
        if timeout_s is None:
            timeout_s = self._welcome.put_timeout_s
        outcomes: list[Put] = []
        try:
            with self._attachment.link() as (session, link):
                Putter(session, link, timeout_s, self._call_s).store(offers, outcomes)
        except DaemonAwayError:
            self._attachment.count_away()
        return outcomes + [Put.THROTTLED] * (len(offers) - len(outcomes))

    def reserve(
        self, keys: Sequence[BlockKey], *, timeout_s: float | None = None
    ) -> RemoteReservation:
        """As Store.reserve; all THROTTLED without a daemon."""
        self._check_open()
        if timeout_s is None:
            timeout_s = self._welcome.put_timeout_s
        offers = self._spaces.empty_blocks(keys)
        away = (self._call_s, self._attachment.count_away)
        try:
            with self._attachment.link() as (session, link):
                outcomes, parts = self._reserve(link, offers, timeout_s)
                if parts:
                    session.enter()
        except DaemonAwayError:
            self._attachment.count_away()
            return RemoteReservation(None, offers, [Put.THROTTLED] * len(offers), [], away)
        return RemoteReservation(session if parts else None, offers, outcomes, parts, away)

    @property
    def memory(self) -> tuple[memoryview, ...]:
        """As Store.memory. After the daemon was restarted it is other memory; without one there
        is none.
        """
        self._check_open()
        try:
            session = self._attachment.session()
        except DaemonAwayError:
            return ()
        return session.arena.view, session.staging.view

    def get(
        self,
        key: BlockKey,
        into: Any,
        *,
        layers: range | None = None,
        timeout_s: float | None = None,
    ) -> Got:
        """Onboard one block. See get_many."""
        return self.get_many([key], [into], layers=layers, timeout_s=timeout_s)[0]

    def get_many(
        self,
        keys: Sequence[BlockKey],
        intos: Sequence[Any],
        *,
        layers: range | None = None,
        timeout_s: float | None = None,
    ) -> list[Got]:
        """As Store.get_many; misses without a daemon."""
        self._check_open()
        keys, intos = list(keys), list(intos)
        wants = self._spaces.reads(keys, intos, layers)
        if timeout_s is None:
            timeout_s = self._welcome.read_timeout_s

        def fetch(session: Session, link: Link) -> list[Got]:
            return Getter(session, link, timeout_s, self._call_s).fetch(wants)

        return self._ask(fetch, [AWAY] * len(wants)) if wants else []

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """As Store.match; empty without a daemon."""
        self._check_open()
        checked(keys)

        def ask(_: Session, link: Link) -> Match:
            tiers: list[str] = []
            for part in batches(keys):
                frame = link.call(FrameKind.MATCH, keys_of(keys, part), self._call_s)
                codes = bytes(expect(frame, FrameKind.TIERS).body)
                tiers += _tiers_of(codes)
                if len(codes) < len(part):
                    break
            return Match(tuple(tiers))

        return self._ask(ask, Match(()))

    def lease(self, keys: Sequence[BlockKey]) -> RemoteLease:
        """As Store.lease; of nothing without a daemon."""
        self._check_open()
        checked(keys)
        terms = Terms(
            self._spaces,
            self._call_s,
            self._welcome.read_timeout_s,
            self._check_open,
            self._attachment.count_away,
        )
        try:
            with self._attachment.link() as (session, link):
                parts = self._lease(link, keys)
                if parts:
                    session.enter()
        except DaemonAwayError:
            self._attachment.count_away()
            return RemoteLease([], [], None, terms)
        count = parts[-1].stop if parts else 0
        return RemoteLease(list(keys[:count]), parts, session if parts else None, terms)

    def touch(self, keys: Sequence[BlockKey]) -> int:
        """As Store.touch; 0 without a daemon."""
        self._check_open()
        checked(keys)

        def ask(_: Session, link: Link) -> int:
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
        """As Store.session; 0 without a daemon. Names are the daemon's, for all its clients that
        have the same namespaces; they outlive this client, not the daemon.
        """
        self._check_open()
        hint, name = state_of(state), checked_name(name)
        for key in checked(keys or ()):
            self._spaces.of(key)
        parts: Mapping[bytes, Keys | None]
        parts = by_tag(keys) if keys else dict.fromkeys(self._spaces.tags_of(tenant))

        def ask(_: Session, link: Link) -> int:
            teller = Teller(link, name, hint, self._call_s)
            return sum(teller.tell(tag, words) for tag, words in parts.items())

        return self._ask(ask, 0)

    def hint(
        self, keys: Sequence[BlockKey] | str, deadline_s: float, *, tenant: str = ""
    ) -> RemoteHint:
        """As Store.hint; brings nothing without a daemon, and no more when this client is gone."""
        self._check_open()
        deadline_s = min(checked_deadline(deadline_s), messages.TIMEOUT_S_MAX)
        if isinstance(keys, str):
            name, tags = checked_name(keys), self._spaces.tags_of(tenant)
        elif keys:
            self._spaces.whole_reads(checked(keys))

        def ask(session: Session, link: Link) -> RemoteHint:
            if isinstance(keys, str):
                asked = hint_sessions(link, tags, name, deadline_s, self._call_s)
            else:
                asked = hint_keys(link, keys, deadline_s, self._call_s)
            return RemoteHint(session, asked, away)

        away = (self._call_s, self._attachment.count_away)
        return self._ask(ask, RemoteHint(None, [], away))

    def remove(self, keys: BlockKey | Sequence[BlockKey]) -> int:
        """As Store.remove; 0 without a daemon, and then nothing is removed."""
        self._check_open()
        wanted = checked([keys] if isinstance(keys, bytes) else list(keys))

        def ask(_: Session, link: Link) -> int:
            parts = (keys_of(wanted, part) for part in batches(wanted))
            return sum(link.number(FrameKind.REMOVE, part, _LONG_S) for part in parts)

        return self._ask(ask, 0)

    def remove_namespace(self, space: NamespaceHandle) -> int:
        """As Store.remove_namespace; 0 without a daemon, and then nothing is removed."""
        return self.remove_tag(space.tag)

    def remove_tag(self, tag: bytes) -> int:
        """`remove_namespace` by the first bytes of its keys."""
        self._check_open()
        return self._ask(lambda _, link: link.number(FrameKind.REMOVE_NAMESPACE, tag, _LONG_S), 0)

    def set_write_mode(self, tier: str, mode: str) -> None:
        """As Store.set_write_mode. For the daemon's user and root; so are the next three.

        They raise DaemonError when no daemon answers: a change that was not made must be known.
        """
        self._change("set_write_mode", tier, mode)

    def add_drive(self, tier: str, path: str | os.PathLike[str]) -> None:
        """As Store.add_drive; a path is seen from here."""
        self._change("add_drive", tier, os.path.abspath(path))

    def drain_drive(self, tier: str, path: str | os.PathLike[str]) -> int:
        """As Store.drain_drive. Goes on in the daemon if this client ends before."""
        return self._change("drain_drive", tier, os.path.abspath(path))

    def resize(self, tier: str, capacity: int | str) -> None:
        """As Store.resize."""
        self._change("resize", tier, str(capacity))

    def record(self, path: str | os.PathLike[str]) -> None:
        """As Store.record: the daemon writes the file. For its user and root."""
        self._change("record", "", os.path.abspath(path))

    def stop_recording(self) -> int:
        """As Store.stop_recording."""
        return self._change("stop_recording", "", "")

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> FlushReport:
        """As Store.flush, for what all clients have put; false without a daemon."""
        self._check_open()
        return self._flush(timeout_s)

    def check(self, *, deep: bool = True) -> CheckReport:
        """As Store.check; one finding without a daemon."""
        self._check_open()
        nowhere = CheckReport()
        nowhere.add(self._attachment.path, "the daemon does not answer")

        def ask(_: Session, link: Link) -> CheckReport:
            said = link.text(FrameKind.CHECK, messages.Number(int(deep)).body(), _LONG_S)
            report = CheckReport(said["blocks"], said["bytes"])
            for finding in said["findings"]:
                report.add(finding["where"], finding["what"])
            return report

        return self._ask(ask, nowhere)

    def stats(self) -> dict[str, Any]:
        """As Store.stats, for the daemon's store; `daemon` tells of the daemon and its clients,
        `client` of this one. Without a daemon there is only that.
        """
        self._check_open()
        nothing: dict[str, Any] = {}
        found = self._ask(lambda _, link: link.text(FrameKind.STATS, b"", self._call_s), nothing)
        return {**found, "client": self._attachment.describe()}

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> FlushReport:
        """Wait until what waits is on disk, and detach. May be called twice."""
        if self._closed:
            return FlushReport(True, 0, 0)
        report = self._flush(timeout_s)
        self._closed = True
        self._attachment.end()
        return report

    def __enter__(self) -> "RemoteStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _call_s(self) -> float:
        return self._attachment.call_s

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed")

    def _ask(self, call: Callable[[Session, Link], Answer], away: Answer) -> Answer:
        """The daemon's answer, or that for when it is away."""
        try:
            with self._attachment.link() as (session, link):
                return call(session, link)
        except DaemonAwayError:
            self._attachment.count_away()
            return away

    def _change(self, call: str, tier: str, value: str) -> int:
        self._check_open()
        body = json.dumps({"call": call, "tier": str(tier), "value": value}).encode()
        try:
            with self._attachment.link() as (_, link):
                return link.number(FrameKind.CHANGE, body, _CHANGE_S)
        except DaemonAwayError as error:
            self._attachment.count_away()
            raise DaemonError(
                self._attachment.path,
                f"the daemon did not answer: {error}",
                hint="see what became of it: kvdepot tiers list",
            ) from error

    def _flush(self, timeout_s: float) -> FlushReport:
        def ask(_: Session, link: Link) -> FlushReport:
            body = messages.Seconds(timeout_s).body()
            frame = link.call(FrameKind.FLUSH, body, timeout_s + CLOSE_TIMEOUT_S)
            said = messages.Flushed.parse(expect(frame, FrameKind.FLUSHED).body)
            return FlushReport(bool(said.ok), said.waiting, said.given_up)

        return self._ask(ask, FlushReport(False, 0, 0))

    def _reserve(
        self, link: Link, offers: Sequence[NewBlock], timeout_s: float
    ) -> tuple[list[Put], list[Batch]]:
        """Outcomes of all offers. Where one frame found no room the next is not asked for."""
        outcomes: list[Put] = []
        parts = []
        for part in batches(offers):
            body = messages.Seconds(timeout_s if not outcomes else 0.0).body()
            body += b"".join([offers[index].key for index in part])
            frame = link.call(FrameKind.RESERVE, body, timeout_s + self._call_s, Flag.PAD)
            number, found, slots = reserved_of(expect(frame, FrameKind.RESERVED), len(part))
            outcomes += found
            if slots:
                parts.append(Batch(number, part.start, slots))
            if Put.THROTTLED in found:
                break
        return outcomes + [Put.THROTTLED] * (len(offers) - len(outcomes)), parts

    def _lease(self, link: Link, keys: Sequence[BlockKey]) -> list[Part]:
        parts = []
        for part in batches(keys):
            frame = link.call(FrameKind.LEASE, keys_of(keys, part), self._call_s)
            number, rows = messages.table(
                expect(frame, FrameKind.LEASED).body, messages.PLACE_DTYPE
            )
            if len(rows) > len(part):
                raise DaemonAwayError("more blocks than were asked for")
            if len(rows):
                parts.append(Part(number, part.start, places_of(frame, len(rows))))
            if len(rows) < len(part):
                break
        return parts

    def _check_no_secret(self, tenant: str) -> None:
        """Never make keys without a secret for a tenant that has one."""
        try:
            with self._attachment.link() as (_, link):
                has_one = link.number(FrameKind.HAS_SECRET, str(tenant).encode(), self._call_s)
        except DaemonAwayError as error:
            raise DaemonError(
                self._attachment.path,
                f"cannot tell whether tenant {tenant!r} has a secret: {error}",
                hint='pass secret=…, or secret=b"" for a tenant without one',
            ) from error
        if has_one:
            raise ConfigError(
                f"tenants.{tenant}",
                "has a secret, which the daemon keeps to itself",
                hint="pass secret=…, or tenants={…} to kvdepot.open",
            )


def _tiers_of(codes: bytes) -> list[str]:
    """Tiers by name; most often they are all the same."""
    if codes and max(codes) >= len(TIER_NAMES):
        raise DaemonAwayError("tiers that make no sense")
    for code, name in enumerate(TIER_NAMES):
        if codes.count(code) == len(codes):
            return [name] * len(codes)
    return [TIER_NAMES[code] for code in codes]
