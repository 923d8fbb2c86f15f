"""A depot whose store is in a daemon. Thread-safe.

Answers and errors are those of kvdepot.depot.Depot, except where a docstring here says otherwise.
Without a daemon, calls find and store nothing, return at once or within `call_timeout`, and are
counted by `stats`. When the daemon is back, the next call attaches again.
"""

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from kvdepot.config.settings import TenantConfig
from kvdepot.core.block import PutResult
from kvdepot.core.depot import (
    CLOSE_TIMEOUT_S,
    DURABILITY,
    Durability,
    FlushReport,
    NamespaceHandle,
    TierReport,
)
from kvdepot.core.keys import Keys, as_keys
from kvdepot.core.requests import Array, Offer
from kvdepot.core.volume import TIER_NAMES
from kvdepot.daemon.client.connections import (
    ABSENT,
    AWAY,
    CORRUPT,
    FROM_CXL,
    FROM_DRAM,
    Codes,
    Connections,
    DaemonAwayError,
    Link,
    Reconnector,
    answers_of,
    arrivals_of,
    batches,
    expect,
    keys_of,
    slots_in,
)
from kvdepot.daemon.client.hints import RemoteHint, hint_keys
from kvdepot.daemon.client.lease import RemoteLease, lease_blocks
from kvdepot.daemon.client.put import RemotePutter, RemoteReservation, reserve
from kvdepot.daemon.client.services import (
    RemoteAdmin,
    RemoteAudits,
    RemoteSessions,
    RemoteVolumes,
)
from kvdepot.daemon.wire import frames
from kvdepot.daemon.wire.frames import Flag, FrameKind
from kvdepot.depot import Depot, DepotCalls, DepotDefaults, Namespaces
from kvdepot.errors import ConfigError, DaemonError, StoreClosedError, WireError
from kvdepot.native import copy_out

_LONG_S: Final = 3600.0
"""Timeout of removals, which may take long and must not be given up."""


class RemoteStore(Depot):
    """A depot in another process. Made by `kvdepot.open("unix:…")`."""

    def __init__(self, daemon: Reconnector, tenants: Mapping[str, TenantConfig]) -> None:
        self._daemon = daemon
        self._tenants = tenants
        self._closed = False
        welcome = daemon.begin()
        super().__init__(
            DepotCalls(
                register=self._register,
                match=self._match,
                lease=self._lease,
                read=self._read,
                put=self._put,
                reserve=self._reserve,
                prefetch=self._prefetch,
                remove=self._remove,
                flush=self._flush,
            ),
            DepotDefaults(
                welcome.block_tokens, welcome.put_timeout_s, welcome.read_timeout_s, tenants
            ),
        )
        self.sessions = RemoteSessions(daemon, self._check_open, self._namespaces)
        self.volumes = RemoteVolumes(daemon, self._check_open)
        self.audits = RemoteAudits(daemon, self._check_open)
        self.admin = RemoteAdmin(daemon, self._check_open)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<kvdepot.RemoteStore, unix:{self._daemon.path}{state}>"

    @property
    def memory(self) -> tuple[memoryview, ...]:
        """Differs after a restart of the daemon; empty if none is connected."""
        self._check_open()
        try:
            connections = self._daemon.connections()
        except DaemonAwayError:
            return ()
        return connections.arena.view, connections.staging.view

    def stats(self) -> dict[str, Any]:
        """The daemon's statistics; `daemon` describes the daemon and its clients, `client` this
        client. Without a daemon only `client` is present.
        """
        self._check_open()
        nothing: dict[str, Any] = {}
        call_s = self._daemon.call_s
        found = self._daemon.ask(lambda _, link: link.text(FrameKind.STATS, b"", call_s), nothing)
        return {**found, "client": self._daemon.describe()}

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> FlushReport:
        if self._closed:
            return FlushReport(True)
        report = self._flush(timeout_s, None)
        self._closed = True
        self._daemon.end()
        return report

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed")

    def _register(self, space: NamespaceHandle) -> None:
        """Register a namespace. ConfigError if the tenant has a secret in the daemon and none was
        given here (`secret`, or the `tenants` of this store): the daemon does not reveal secrets.
        """
        self._check_open()
        namespace = space.namespace
        if not namespace.secret and namespace.tenant and namespace.tenant not in self._tenants:
            self._check_no_secret(namespace.tenant)
        self._daemon.register(space)

    def _put(self, offer: Offer, timeout_s: float) -> list[PutResult]:
        """Answers THROTTLED without a daemon."""
        self._check_open()
        outcomes: list[PutResult] = []
        try:
            with self._daemon.link() as (connections, link):
                try:
                    RemotePutter(connections, link, timeout_s).store(offer, outcomes)
                finally:
                    connections.count_stored(sum(map(bool, outcomes)))
        except DaemonAwayError:
            self._daemon.count_away()
        return outcomes + [PutResult.THROTTLED] * (len(offer.blocks) - len(outcomes))

    def _reserve(self, offer: Offer, timeout_s: float) -> RemoteReservation:
        """All outcomes are THROTTLED without a daemon."""
        self._check_open()

        def ask(connections: Connections, link: Link) -> RemoteReservation:
            outcomes, found = reserve(connections, link, offer.blocks, timeout_s)
            if found:
                connections.enter()
            return RemoteReservation(connections if found else None, offer, outcomes, found)

        throttled = [PutResult.THROTTLED] * len(offer.blocks)
        return self._daemon.ask(ask, RemoteReservation(None, offer, throttled, []))

    def _read(self, blocks: Array, timeout_s: float) -> bytes:
        """Answers with misses without a daemon."""
        self._check_open()
        if not len(blocks):
            return b""
        away = bytes([AWAY]) * len(blocks)
        return self._daemon.ask(lambda to, link: Getter(to, link, timeout_s).fetch(blocks), away)

    def _match(self, keys: Keys) -> bytes:
        """Matches nothing without a daemon."""
        self._check_open()
        call_s = self._daemon.call_s

        def ask(_: Connections, link: Link) -> bytes:
            found = b""
            for part in batches(keys):
                frame = link.call(FrameKind.MATCH, keys_of(keys, part), call_s)
                codes = bytes(expect(frame, FrameKind.TIERS).body)
                if codes and max(codes) >= len(TIER_NAMES):
                    raise DaemonAwayError("malformed tiers")
                found += codes
                if len(codes) < len(part):
                    break
            return found

        return self._daemon.ask(ask, b"")

    def _lease(self, keys: Keys, namespaces: Namespaces) -> RemoteLease:
        """Returns an empty lease without a daemon."""
        self._check_open()
        nothing = RemoteLease([], [], None, namespaces, self._check_open)

        def ask(connections: Connections, link: Link) -> RemoteLease:
            parts = lease_blocks(connections, link, keys)
            if not parts:
                return nothing
            connections.enter()
            held = as_keys(keys[: parts[-1].stop])
            return RemoteLease(held, parts, connections, namespaces, self._check_open)

        return self._daemon.ask(ask, nothing)

    def _prefetch(self, keys: Keys, deadline_s: float) -> RemoteHint:
        """Prefetches nothing without a daemon. The hint ends with this client."""
        self._check_open()
        limit_s = min(deadline_s, frames.TIMEOUT_S_MAX)

        def ask(connections: Connections, link: Link) -> RemoteHint:
            hinted, may_come = hint_keys(link, keys, limit_s, self._daemon.call_s)
            return RemoteHint(connections, hinted, may_come=may_come)

        return self._daemon.ask(ask, RemoteHint(None, []))

    def _remove(self, keys: Keys | None, tag: bytes) -> int:
        """Without a daemon nothing is removed and the result is 0."""
        self._check_open()

        def ask(_: Connections, link: Link) -> int:
            if keys is None:
                return link.number(FrameKind.REMOVE_NAMESPACE, tag, _LONG_S)
            parts = (keys_of(keys, part) for part in batches(keys))
            return sum(link.number(FrameKind.REMOVE, part, _LONG_S) for part in parts)

        return self._daemon.ask(ask, 0)

    def _flush(self, timeout_s: float, keys: Keys | None) -> FlushReport:
        """Flushes the blocks of all clients. The report is false without a daemon, and once after a
        restart of it if this client had blocks that were not flushed: they may be lost.
        """
        self._check_open()
        if keys is None:
            return self._flush_all(timeout_s)
        parts = [self._flush_keys(keys, part, timeout_s) for part in batches(keys)]
        tiers: dict[str, TierReport] = {}
        for _, found in parts:
            for name, one in found.items():
                tiers[name] = tiers.get(name, TierReport()) + one
        return FlushReport.of(itertools.chain(*(codes for codes, _ in parts)), tiers)

    def _flush_all(self, timeout_s: float) -> FlushReport:
        def ask(connections: Connections, link: Link) -> FlushReport:
            mine, others = self._daemon.unflushed(connections)
            complete, raw = _ask_flush(link, timeout_s, b"")
            nbytes = 8 * len(DURABILITY)
            if len(raw) < nbytes:
                raise DaemonAwayError("malformed counts")
            totals = np.frombuffer(raw[:nbytes], "<u8").tolist()
            counts = Counter(dict(zip(DURABILITY, totals, strict=True)))
            durable = counts.pop(Durability.DURABLE)
            counts[Durability.DAEMON] += others
            tiers = _parsed_tiers(raw[nbytes:])
            report = FlushReport(complete and not others, durable, +counts, (), tiers)
            self._daemon.told(connections, mine if report.ok else 0)
            return report

        return self._daemon.ask(ask, FlushReport(False))

    def _flush_keys(
        self, keys: Keys, part: range, timeout_s: float
    ) -> tuple[list[Durability], dict[str, TierReport]]:
        """The durability of each key of a batch, DAEMON if no daemon answers; and by tier."""

        def ask(_: Connections, link: Link) -> tuple[list[Durability], dict[str, TierReport]]:
            raw = _ask_flush(link, timeout_s, keys_of(keys, part))[1]
            codes = raw[: len(part)]
            if len(codes) != len(part) or max(codes, default=0) >= len(DURABILITY):
                raise DaemonAwayError("malformed answers")
            return [DURABILITY[code] for code in codes], _parsed_tiers(raw[len(part) :])

        none: dict[str, TierReport] = {}
        return self._daemon.ask(ask, ([Durability.DAEMON] * len(part), none))

    def _check_no_secret(self, tenant: str) -> None:
        """Raise unless the daemon says that the tenant has no secret: keys made without it would be
        the wrong ones.
        """
        try:
            with self._daemon.link() as (_, link):
                call_s = self._daemon.call_s
                has_one = link.number(FrameKind.HAS_SECRET, str(tenant).encode(), call_s)
        except DaemonAwayError as error:
            raise DaemonError(
                self._daemon.path,
                f"cannot find out if tenant {tenant!r} has a secret: {error}",
                hint='pass secret=…, or secret=b"" for a tenant without one',
            ) from error
        if has_one:
            raise ConfigError(
                f"tenants.{tenant}",
                "the tenant has a secret, which the daemon does not reveal",
                hint="pass secret=…, or tenants={…} to kvdepot.open",
            )


def _parsed_tiers(raw: bytes) -> dict[str, TierReport]:
    try:
        return frames.parse_tiers(raw)
    except WireError as error:
        raise DaemonAwayError("malformed answers") from error


def _ask_flush(link: Link, timeout_s: float, keys: bytes) -> tuple[bool, bytes]:
    body = frames.Seconds(timeout_s).body() + keys
    frame = link.call(FrameKind.FLUSH, body, timeout_s + CLOSE_TIMEOUT_S)
    head, rest = frames.split(frames.Flushed, expect(frame, FrameKind.FLUSHED).body)
    return bool(head.complete), rest


class Getter:
    """Serves `get` over one connection."""

    def __init__(self, connections: Connections, link: Link, timeout_s: float) -> None:
        self._connections = connections
        self._link = link
        self._deadline = time.monotonic() + timeout_s

    def fetch(self, blocks: Array) -> bytes:
        """Fill the buffers of blocks, rows of BLOCK_DTYPE. Returns an index into ANSWERS for each.
        After a DaemonAwayError all buffers are undefined.
        """
        answers = np.full(len(blocks), AWAY, np.uint8)
        for span, indices in _by_span(blocks):
            for part in batches(indices):
                chosen = indices[part.start : part.stop]
                answers[chosen] = self._fetch(span, blocks[chosen])
        return answers.tobytes()

    def _fetch(self, span: tuple[int, int], blocks: Array) -> Codes:
        answers, damaged = self._ask(span, blocks, again=False)
        if len(damaged):
            # The daemon verifies these too: it drops the damaged copy and looks for another.
            found, lost = self._ask(span, blocks[damaged], again=True)
            found[lost] = CORRUPT
            answers[damaged] = found
        return answers

    def _ask(self, span: tuple[int, int], blocks: Array, *, again: bool) -> tuple[Codes, Array]:
        """The answers, and which blocks are damaged. `again`: the daemon verifies them too."""
        left_s = max(0.0, self._deadline - time.monotonic())
        head = frames.Fetch(*span, again, left_s)
        serial = self._link.send(FrameKind.FETCH, head.body() + blocks["key"].tobytes())
        welcome, limit_s = self._connections.welcome, left_s + self._connections.call_s
        damaged = np.zeros(len(blocks), bool)
        while (frame := self._link.answer(serial, limit_s)).kind is FrameKind.ARRIVED:
            number, arrivals = arrivals_of(frame, len(blocks))
            verify = bool(welcome.verify) and not frame.flags & Flag.VERIFIED
            damaged[arrivals["index"]] |= ~self._take(arrivals, blocks, verify=verify)
            if frame.flags & Flag.LAST:
                answers = np.full(len(blocks), ABSENT, np.uint8)
                in_dram = arrivals["location"] < welcome.arena_bytes
                answers[arrivals["index"]] = np.where(in_dram, FROM_DRAM, FROM_CXL)
                break
            if frame.flags & Flag.LENT:
                self._link.follow_up(serial, FrameKind.TAKEN)
        else:
            number, answers = answers_of(frame, len(blocks))
        self._connections.check_intact()
        if number:
            self._link.send(FrameKind.RELEASE, frames.Number(number).body())
        return answers, np.flatnonzero(damaged)

    def _take(self, arrivals: Array, blocks: Array, *, verify: bool) -> Array:
        """Copy arrived blocks. Returns True for those that are intact and have the right key."""
        chosen = blocks[arrivals["index"]]
        slots = slots_in(self._connections, arrivals, chosen["payload_bytes"])
        return np.frombuffer(copy_out(chosen, slots, verify), bool)


def _by_span(blocks: Array) -> Iterator[tuple[tuple[int, int], Array]]:
    """Group blocks by the wanted range of bytes; (0, 0) stands for the whole payload."""
    starts, stops = blocks["start"], blocks["stop"]
    is_whole = stops - starts == blocks["payload_bytes"]
    if is_whole.any():
        yield (0, 0), np.flatnonzero(is_whole)
    parts = zip(starts[~is_whole].tolist(), stops[~is_whole].tolist(), strict=True)
    for start, stop in sorted(set(parts)):
        yield (start, stop), np.flatnonzero(~is_whole & (starts == start) & (stops == stop))
