"""The store of this process: the calls of core.depot.Depot."""

import contextlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdepot.core.block import ANSWERS, BlockKey, GetResult, PutResult
from kvdepot.core.clock import Clock
from kvdepot.core.depot import (
    CLOSE_TIMEOUT_S,
    CheckReport,
    Depot,
    FlushReport,
    Layout,
    Match,
    NamespaceHandle,
    checked_deadline,
)
from kvdepot.core.first_token import FirstToken
from kvdepot.core.keys import Keys, TokenIds, as_words
from kvdepot.core.namespace import Namespace
from kvdepot.core.requests import BLOCK_DTYPE, BlockSize
from kvdepot.core.sessions import by_tag, checked_name, state_of
from kvdepot.core.units import format_bytes, format_count, parse_bytes
from kvdepot.errors import ConfigError, ExtraMissingError, KVDepotError
from kvdepot.format.record import token_ids
from kvdepot.format.requests import Namespaces, checked, make_namespace
from kvdepot.index.pinned_rows import PinnedRows
from kvdepot.store.access import Caller, DescribedCaller
from kvdepot.store.audits import SYNC_S, AuditService
from kvdepot.store.check.online import check_store
from kvdepot.store.cluster_member import ClusterMember
from kvdepot.store.described import DescribedNamespaces
from kvdepot.store.drives.maintenance import VolumeMaintenance
from kvdepot.store.engine import Engine
from kvdepot.store.events import FirstTokenReported
from kvdepot.store.handles import StoreLease, StoreReservation
from kvdepot.store.observers.activity import Activity
from kvdepot.store.observers.ledger import SavingsLedger
from kvdepot.store.observers.trace_recorder import TraceRecorder
from kvdepot.store.read.expected_time import expected_s
from kvdepot.store.read.prefetch import Hint
from kvdepot.store.read.token_ids import read_heads
from kvdepot.store.sessions.pins import PinManager
from kvdepot.store.sessions.records import SessionRecords
from kvdepot.store.sessions.service import SessionService
from kvdepot.store.sessions.session_table import Sessions
from kvdepot.store.state.state import StoreState
from kvdepot.store.stats import describe, describe_drives_of
from kvdepot.volumes.registry import ConfiguredVolumes

if TYPE_CHECKING:
    from kvdepot.store.announce.announcer import Announcer
    from kvdepot.store.inspect import StoreInspector


def _announcer(state: StoreState) -> "Announcer | None":
    """What tells routers of the store's blocks, if it is to."""
    if state.config.events is None:
        return None
    try:
        from kvdepot.store.announce.announcer import Announcer
    except ImportError as error:
        raise ExtraMissingError("events", str(error.name)) from error
    announcer = Announcer(state, state.config.events)
    announcer.start()
    return announcer


class Store(Depot):
    """A depot in this process. Made by `kvdepot.open`."""

    def __init__(
        self, state: StoreState, configured: ConfiguredVolumes, promises: PinnedRows, wall: Clock
    ) -> None:
        """`wall` is the time of day."""
        self._state = state
        self._configured = configured
        self._process = os.getpid()
        self._caller = Caller("this process")
        self._namespaces = Namespaces()
        self._described = DescribedNamespaces(state.descriptions.all, state.config.tenants)
        self._drives = VolumeMaintenance(state, configured.opener)
        engine = self.engine = Engine(state, self._drives.mover)
        self.site_caller = DescribedCaller("other nodes", described=self._described.size_of)
        """Who acts for other nodes and for people: it may use all namespaces."""
        self._activity, self._ledger = Activity(), SavingsLedger(state.config.ledger)
        self._recorder: TraceRecorder | None = None
        self._recording = threading.Lock()
        for observer in (self._activity, self._ledger):
            state.events.subscribe(observer)
        state.events.start()
        known = Sessions(state.catalog, wall, promises)
        flush = partial(engine.flush, self._caller)
        records = SessionRecords(state, known)
        self._keeper = PinManager(state, known, records, wall, flush, self._drives.renew)
        self._sessions = SessionService(
            engine, self.site_caller, known, self._keeper, wall, self._ledger
        )
        self._keeper.start()
        self._audits = AuditService(engine, self.site_caller, wall)
        self._site: ClusterMember | None = None
        self._announcer: Announcer | None = None
        try:
            if state.config.nats is not None:
                self._site = ClusterMember(state.config.nats, self, state.volumes, state.clock)
            self._announcer = _announcer(state)
        except KVDepotError:
            self.close()
            raise

    def __repr__(self) -> str:
        state = self._state
        if state.closing.is_set():
            return "<kvdepot.Store, closed>"
        config = state.config
        rooms = {"dram": config.dram.capacity} | (
            {"cxl": config.cxl.capacity} if config.cxl else {}
        )
        rooms |= {lower.name: lower.volumes.capacity_bytes for lower in state.lower_tiers}
        told = ", ".join(f"{name} {format_bytes(room)}" for name, room in rooms.items())
        return f"<kvdepot.Store, {told}: {format_count(state.catalog.table.live, 'block')}>"

    def namespace(
        self,
        *,
        model: str,
        layout: Layout,
        tenant: str = "",
        secret: bytes | None = None,
        **fields: Any,
    ) -> NamespaceHandle:
        self._state.check_open()
        config, fields = self._state.config, {**fields, "tenant": tenant, "secret": secret}
        return self.register(
            make_namespace(model, layout, config.block_tokens, config.tenants, fields)
        )

    def register(self, namespace: Namespace) -> NamespaceHandle:
        self._state.check_open()
        description = json.dumps(namespace.description(), sort_keys=True).encode()
        layout = namespace.layout
        size = BlockSize(layout.block_bytes, layout.chunk_bytes)
        self.engine.register(self._caller, namespace.tag, size, description)
        return self._namespaces.add(namespace)

    def put_many(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[Any],
        *,
        timeout_s: float | None = None,
        token_ids: TokenIds | None = None,
    ) -> list[PutResult]:
        keys, buffers = list(keys), list(buffers)  # a lazy sequence would free what we point to
        self._state.check_open()
        offer = self._namespaces.offer(keys, buffers, token_ids)
        if timeout_s is None:
            timeout_s = self._state.config.writeback.put_timeout
        return self.engine.put(self._caller, offer, timeout_s)

    def reserve(
        self,
        keys: Sequence[BlockKey],
        *,
        timeout_s: float | None = None,
        token_ids: TokenIds | None = None,
    ) -> StoreReservation:
        self._state.check_open()
        offer = self._namespaces.offer(keys, None, token_ids)
        if timeout_s is None:
            timeout_s = self._state.config.writeback.put_timeout
        with contextlib.ExitStack() as scope:
            scope.enter_context(self._state.using())
            slots, outcomes = self.engine.reserve(self._caller, offer, timeout_s)
            done = scope.pop_all().close
            return StoreReservation(self.engine, self._caller, slots, outcomes, done)

    @property
    def memory(self) -> tuple[memoryview, ...]:
        self._state.check_open()
        return tuple(arena.memory.view for arena in self._state.all_arenas)

    def get_many(
        self,
        keys: Sequence[BlockKey],
        intos: Sequence[Any],
        *,
        layers: range | None = None,
        timeout_s: float | None = None,
    ) -> list[GetResult]:
        keys, intos = list(keys), list(intos)
        self._state.check_open()
        blocks = self._namespaces.targets(keys, intos, layers)
        if timeout_s is None:
            timeout_s = self._state.config.read_timeout
        codes = self.engine.read(self._caller, blocks, timeout_s)
        return [ANSWERS[code] for code in codes]

    def match(self, keys: Sequence[BlockKey]) -> Match:
        self._state.check_open()
        return Match.of(self.engine.match(self._caller, as_words(checked(keys))))

    def peek(self, keys: Sequence[BlockKey]) -> Match:
        """`match` that is not counted as a lookup: a router asks several stores for one request."""
        self._state.check_open()
        return Match.of(self.engine.match(self._caller, as_words(checked(keys)), counts=False))

    def lease(self, keys: Sequence[BlockKey]) -> StoreLease:
        self._state.check_open()
        lease = self.engine.lease(self._caller, as_words(checked(keys)))
        held = list(keys[: len(lease.rows)])
        return StoreLease(self.engine, self._caller, self._namespaces, held, lease)

    def touch(self, keys: Sequence[BlockKey]) -> int:
        self._state.check_open()
        return self.engine.touch(self._caller, as_words(checked(keys)))

    def session(
        self,
        name: str,
        keys: Sequence[BlockKey] | None = None,
        state: str = "alive",
        *,
        tenant: str = "",
    ) -> int:
        self._state.check_open()
        session_state, name = state_of(state), checked_name(name)
        parts: Mapping[bytes, Keys | None]
        parts = by_tag(checked(keys)) if keys else dict.fromkeys(self._namespaces.tags_of(tenant))
        self._namespaces.check(keys or ())
        update = self._sessions.update
        return sum(update(tag, name, words, session_state) for tag, words in parts.items())

    def hint(self, keys: Sequence[BlockKey] | str, deadline_s: float, *, tenant: str = "") -> Hint:
        self._state.check_open()
        deadline_s = checked_deadline(deadline_s)
        if isinstance(keys, str):
            tags = self._namespaces.tags_of(tenant)
            return self._sessions.hint(self._caller, tags, checked_name(keys), deadline_s)
        self._namespaces.check(checked(keys))
        return self.engine.prefetch(self._caller, [as_words(keys)], deadline_s)

    def hint_described(self, keys: Sequence[BlockKey], deadline_s: float) -> Hint:
        """`hint` for keys of namespaces that are described here, registered or not."""
        if self._state.closing.is_set():
            return Hint(np.zeros(0, BLOCK_DTYPE), 0.0)
        return self.engine.prefetch(self.site_caller, [as_words(keys)], deadline_s)

    def keys_of_tokens(self, tokens: Sequence[int], model: str = "") -> list[list[BlockKey]]:
        """The keys of a prompt in each namespace of a model, or of all, that is described here and
        whose secret the settings have.
        """
        spaces = [one for one in self._described.all().values() if model in ("", one.model)]
        found = [one.namespace.keys(tokens) for one in spaces if one.namespace is not None]
        return [keys for keys in found if keys]

    def keys_of_session(self, name: str, tenant: str = "") -> list[list[BlockKey]]:
        """The keys of a session's prompt in each namespace of a tenant that has it."""
        tags = [tag for tag, one in self._described.all().items() if one.tenant == tenant]
        return self._sessions.keys_of(tags, name)

    def remove(self, keys: BlockKey | Sequence[BlockKey]) -> int:
        self._state.check_open()
        wanted = checked([keys] if isinstance(keys, bytes) else keys)
        return self.engine.remove(self._caller, as_words(wanted))

    def remove_tag(self, tag: bytes) -> int:
        self._state.check_open()
        return self.engine.remove(self._caller, tag=tag)

    def flush(
        self, timeout_s: float = CLOSE_TIMEOUT_S, *, keys: Sequence[BlockKey] | None = None
    ) -> FlushReport:
        self._state.check_open()
        began_s = self._state.clock.now()
        if keys is None:
            self._keeper.write_in_time(timeout_s)
        timeout_s = max(0.0, timeout_s - (self._state.clock.now() - began_s))
        words = None if keys is None else as_words(checked(list(keys)))
        return self.engine.flush(self._caller, timeout_s, words)

    def set_write_mode(self, tier: str, mode: str) -> None:
        with self._state.using():
            self._drives.set_mode(tier, mode)

    def add_drive(self, tier: str, path: str | os.PathLike[str]) -> None:
        with self._state.using():
            self._drives.add(tier, Path(path))

    def drain_drive(self, tier: str, path: str | os.PathLike[str]) -> int:
        with self._state.using():
            self._check_promises(tier, without=Path(path))
            self._keeper.write(sync_s=SYNC_S)
            return self._drives.drain(tier, Path(path))

    def resize(self, tier: str, capacity: int | str) -> None:
        with self._state.using():
            self._check_promises(tier, capacity=capacity)
            self._drives.resize(tier, capacity)

    def record(self, path: str | os.PathLike[str]) -> None:
        state = self._state
        with state.using(), self._recording:
            if self._recorder is not None:
                raise ConfigError("record", f"{self._recorder.path} is being written already")
            self._recorder = TraceRecorder(Path(path), state.config.block_tokens, state.clock)
            state.events.subscribe(self._recorder)

    def stop_recording(self) -> int:
        with self._recording:
            recorder, self._recorder = self._recorder, None
        if recorder is None:
            return 0
        self._state.events.unsubscribe(recorder)
        return recorder.close()

    def check(self, *, deep: bool = True) -> CheckReport:
        with self._state.using():
            return check_store(self._state, deep=deep)

    def stats(self) -> dict[str, Any]:
        self._state.check_open()
        state = self._state
        state.events.deliver()
        with state.lock:
            found = describe(state)
        found |= self._activity.describe(state.clock.now())
        found["ledger"] = self._ledger.describe()
        recorder = self._recorder
        found["recording"] = recorder and {
            "path": str(recorder.path),
            "requests": recorder.requests,
        }
        found["sessions"] = self._sessions.describe()
        found["audit"] = self._audits.describe()
        parts = {"site": self._site, "events": self._announcer}
        return found | {name: part.describe() for name, part in parts.items() if part is not None}

    @property
    def sessions(self) -> SessionService:
        return self._sessions

    @property
    def audits(self) -> AuditService:
        return self._audits

    def report_first_token(self, first: FirstToken) -> None:
        """Kept until the store is closed."""
        self._state.check_open()
        first.check()
        self._state.events.emit(FirstTokenReported(self._state.clock.now(), first))

    def token_ids(self, keys: Sequence[BlockKey]) -> list[list[int]]:
        """Of each block the token ids that it was put with; empty where there are none, or it is
        not here. Reads a page of each block that is not in memory.
        """
        with self._state.using():
            found = read_heads(self._state, checked(list(keys)), token_ids, b"")
        return [np.frombuffer(ids, "<u4").tolist() for ids in found]

    def expected_s(self, nbytes: Mapping[str, int]) -> float | None:
        """How long so many bytes of each tier would take now; None where that is not known."""
        return expected_s(self._state, nbytes)

    def described_namespaces(self) -> list[Namespace]:
        """Those that are described here, and whose secret is known."""
        found = (one.namespace for one in self._described.all().values())
        return [space for space in found if space is not None]

    def inspect(self) -> "StoreInspector":
        """What tests and benchmarks may see and do beyond the public calls."""
        from kvdepot.store.inspect import StoreInspector

        return StoreInspector(self.engine, self._drives)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> FlushReport:
        state = self._state
        # A forked child has neither the threads nor the store: both are its parent's.
        if state.closing.is_set() or os.getpid() != self._process:
            return FlushReport(True)
        report = self.flush(timeout_s)
        if self._site is not None:
            self._site.close()
        with state.lock:
            state.closing.set()
            for lower in state.lower_tiers:
                lower.queue.dirty.clear()
            state.lock.wake_all()
            stuck = not state.lock.idle.wait_for(lambda: not state.calls, timeout_s)
        self.stop_recording()
        if self._announcer is not None:
            stuck = not self._announcer.close(timeout_s) or stuck
        stuck = not self._drives.join(timeout_s) or stuck
        stuck = not self._keeper.join(timeout_s) or stuck
        stuck = not self.engine.close(timeout_s) or stuck
        state.events.close()
        if stuck:
            # The kernel or a caller may still use the memory: leave it to the process's end.
            return replace(report, complete=False)
        for arena in state.all_arenas:
            arena.memory.stop()
        state.volumes.close()
        self._configured.close()
        for arena in state.all_arenas:
            arena.close()
        return report

    def _check_promises(
        self, tier: str, *, without: Path | None = None, capacity: int | str | None = None
    ) -> None:
        """ConfigError where what is under contract would not fit a tier with less room."""
        drives = describe_drives_of(self._state, tier)
        down = [Path(one["path"]).resolve() for one in drives if not one.get("healthy", True)]
        if without is not None and without.resolve() in down and self._keeper.has_missing():
            raise ConfigError(
                f"{tier}.path",
                f"{without} is away, and blocks under contract are missing: it may have them",
                hint="bring it back, or end those contracts with kvdepot session unpin",
            )
        with self._state.lock:
            promised = self._keeper.promised_bytes(tier)
        paths = {Path(one["path"]).resolve(): one["capacity_bytes"] for one in drives}
        room = sum(paths.values()) - (paths.get(without.resolve(), 0) if without else 0)
        with contextlib.suppress(ValueError):
            room = room if capacity is None else parse_bytes(capacity)
        if promised and 2 * promised > room:
            raise ConfigError(
                f"{tier}.capacity",
                f"{format_bytes(promised)} are under contract, and would take more than half of "
                f"{format_bytes(room)}",
                hint="kvdepot session unpin ends contracts, kvdepot session list names them",
            )
