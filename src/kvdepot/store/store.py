"""The store of this process: the calls of core.depot.Depot."""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdepot.config.settings import NatsConfig
from kvdepot.core.block import MISS, TAG_BYTES, BlockKey, GetResult, PutResult
from kvdepot.core.clock import Clock
from kvdepot.core.depot import (
    CLOSE_TIMEOUT_S,
    CheckReport,
    Depot,
    FlushReport,
    Layout,
    Match,
    NamespaceHandle,
)
from kvdepot.core.first_token import FirstToken
from kvdepot.core.keys import TokenIds
from kvdepot.core.metadata import Tombstone
from kvdepot.core.namespace import Namespace
from kvdepot.core.order import SessionState
from kvdepot.core.units import format_bytes, format_count, parse_bytes
from kvdepot.errors import ConfigError, ExtraMissingError, KVDepotError
from kvdepot.format.record import record_bytes, token_ids
from kvdepot.index.pinned_rows import PinnedRows
from kvdepot.index.table import NONE, Keys
from kvdepot.store.audits import SYNC_S, AuditService
from kvdepot.store.check.online import check_store
from kvdepot.store.cluster_member import ClusterMember
from kvdepot.store.drives.maintenance import VolumeMaintenance
from kvdepot.store.mapped import MappedStore
from kvdepot.store.namespaces import (
    DescribedNamespaces,
    Namespaces,
    check_block_bytes,
    checked,
    make_namespace,
)
from kvdepot.store.read.disk_reads import BlockRead
from kvdepot.store.read.expected_time import expected_s
from kvdepot.store.read.lease import StoreLease
from kvdepot.store.read.prefetch import Hint, Prefetcher, checked_deadline
from kvdepot.store.read.reader import Reader
from kvdepot.store.read.timed_out import TimedOutIo
from kvdepot.store.read.token_ids import read_heads
from kvdepot.store.sessions.archive import SessionExporter
from kvdepot.store.sessions.pins import PinManager
from kvdepot.store.sessions.records import SessionRecords
from kvdepot.store.sessions.service import SessionService
from kvdepot.store.sessions.session_table import Sessions, by_tag, checked_name, state_of
from kvdepot.store.state.state import StoreState
from kvdepot.store.stats import describe, describe_drives_of
from kvdepot.store.trace_recorder import TraceRecorder
from kvdepot.store.write.memory_eviction import SlotAllocator
from kvdepot.store.write.put import Putter, StoreReservation
from kvdepot.store.write.write_back import Flusher
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
        slots = SlotAllocator(state, state.memory_tiers[0])
        self._namespaces = Namespaces()
        self._late = TimedOutIo(state)
        self._putter = Putter(state, slots)
        self._reader = Reader(state, slots, self._late)
        self._prefetcher = Prefetcher(state, self._reader)
        self._drives = VolumeMaintenance(state, configured.opener)
        self._flusher = Flusher(state)
        flush = self._flusher.flush
        known = self._sessions = Sessions(state.catalog, wall, promises)
        records = SessionRecords(state, known)
        self._keeper = PinManager(state, known, records, wall, flush, self._drives.renew)
        parts = (state, known, self._reader, self._putter, self.register_tag)
        archivist = self._archivist = SessionExporter(*parts)
        self._desk = SessionService(state, known, self._keeper, archivist, wall, flush, self._warm)
        self._keeper.start()
        self._audits = AuditService(state, wall, self.remove_tag)
        self._described = DescribedNamespaces(state.descriptions.all, state.config.tenants)
        self._site = self._join_site(state.config.nats) if state.config.nats else None
        self._announcer: Announcer | None = None
        try:
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
        self.register_tag(namespace.tag, namespace.layout.block_bytes, description)
        return self._namespaces.add(namespace)

    def register_tag(self, tag: bytes, block_bytes: int, description: bytes) -> None:
        """Check that blocks of a namespace fit, and record what its tag stands for."""
        check_block_bytes(block_bytes)
        self._check_fits(record_bytes(block_bytes))
        self._state.descriptions.register(tag, description)
        with self._state.lock:
            self._state.ledger.registered(tag, description)

    def put_many(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[Any],
        *,
        timeout_s: float | None = None,
        token_ids: TokenIds | None = None,
    ) -> list[PutResult]:
        keys, buffers = list(keys), list(buffers)  # a lazy sequence would free what we point to
        if timeout_s is None:
            timeout_s = self._state.config.writeback.put_timeout
        self._state.check_open()
        offers = self._namespaces.new_blocks(keys, buffers, token_ids)
        with self._state.using():
            answers = self._putter.store(offers, timeout_s)
            self._flusher.write_through(timeout_s)
            return answers

    def reserve(
        self,
        keys: Sequence[BlockKey],
        *,
        timeout_s: float | None = None,
        token_ids: TokenIds | None = None,
    ) -> StoreReservation:
        self._state.check_open()
        if timeout_s is None:
            timeout_s = self._state.config.writeback.put_timeout
        offers = self._namespaces.empty_blocks(keys, token_ids)
        with contextlib.ExitStack() as scope:
            scope.enter_context(self._state.using())
            outcomes = self._putter.reserve(offers, timeout_s)
            return StoreReservation(self._putter, offers, outcomes, scope.pop_all().close)

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
        reads = self._namespaces.reads(keys, intos, layers)
        if timeout_s is None:
            timeout_s = self._state.config.read_timeout
        with self._state.using():
            tags = self._state.quarantined
            served = [read for read in reads if read.key[:TAG_BYTES] not in tags]
            found = self._reader.fetch(served, timeout_s) if served else []
        if len(served) == len(reads):
            return found
        left = iter(found)
        return [MISS if read.key[:TAG_BYTES] in tags else next(left) for read in reads]

    def match(self, keys: Sequence[BlockKey]) -> Match:
        state = self._state
        state.check_open()
        checked(keys)
        with state.lock:
            rows = state.resident(keys)
            state.record_lookup(keys)
            found = Match(tuple(state.catalog.fastest(rows)))
            state.traffic.match.add(len(keys), len(rows))
            state.traffic.match.add_found(found.tiers)
            return found

    def lease(self, keys: Sequence[BlockKey]) -> StoreLease:
        state = self._state
        state.check_open()
        checked(keys)
        with state.lock:
            rows = state.resident(keys)
            state.record_lookup(keys)
            state.catalog.use(rows)
            state.lease(rows)
            state.traffic.lease.add(len(keys), len(rows))
        return StoreLease(state, self._reader, self._namespaces, list(keys[: len(rows)]), rows)

    def touch(self, keys: Sequence[BlockKey]) -> int:
        self._state.check_open()
        checked(keys)
        with self._state.lock:
            rows = self._state.catalog.resident(keys)
            self._state.catalog.use(rows)
        return len(rows)

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
        for key in keys or ():
            self._namespaces.of(key)
        with self._state.lock:
            for tag, words in parts.items():
                if words is not None:
                    self._state.ledger.session_told(tag, name, words)
            tell = self._sessions.tell
            return sum(tell(tag, name, words, session_state) for tag, words in parts.items())

    def hint(self, keys: Sequence[BlockKey] | str, deadline_s: float, *, tenant: str = "") -> Hint:
        self._state.check_open()
        deadline_s = checked_deadline(deadline_s)
        with self._state.lock:
            if isinstance(keys, str):
                tags = self._namespaces.tags_of(tenant)
                prompts, session_state = self._sessions.recall(tags, checked_name(keys))
            else:
                prompts, session_state = [list(checked(keys))], SessionState.NONE
            wanted, resident = self._not_in_memory(prompts)
        if resident < sum(map(len, prompts)):
            self._state.request_refresh()
        hint = self._prefetcher.start(
            self._namespaces.whole_reads(wanted), deadline_s, session_state
        )
        hint.resident = resident
        return hint

    def hint_described(self, keys: Sequence[BlockKey], deadline_s: float) -> Hint:
        """`hint` for keys of one namespace that is described here, registered or not."""
        state = self._state
        space = self._described.all().get(bytes(keys[0][:TAG_BYTES])) if keys else None
        if space is None or state.closing.is_set():
            return Hint([], 0.0)
        layout, size = space.layout, space.layout.block_bytes
        with state.lock:
            rows = state.resident(keys)
            reads = [
                BlockRead(key, 0, size, layout.chunk_bytes, 0, size)
                for key, row in zip(keys, rows, strict=False)
                if not state.catalog.in_memory(row) and state.catalog.nbytes[row] == size
            ]
        hint = self._prefetcher.start(reads, deadline_s)
        hint.resident = len(rows)
        return hint

    def keys_of_tokens(self, tokens: Sequence[int], model: str = "") -> list[list[BlockKey]]:
        """Of a prompt, in each namespace of a model, or of all, that is described here and whose
        secret the settings have.
        """
        spaces = [one for one in self._described.all().values() if model in ("", one.model)]
        found = [one.namespace.keys(tokens) for one in spaces if one.namespace is not None]
        return [keys for keys in found if keys]

    def keys_of_session(self, name: str, tenant: str = "") -> list[list[BlockKey]]:
        """Of a session's prompt, in each namespace of a tenant that has it."""
        tags = [tag for tag, one in self._described.all().items() if one.tenant == tenant]
        with self._state.lock:
            return self._sessions.recall(tags, name)[0]

    def _warm(self, tag: bytes, name: str, deadline_s: float) -> Hint:
        """`hint` for a session in one namespace, which need not be registered."""
        with self._state.lock:
            prompt = self._sessions.find(tag, name)
        keys = prompt.keys(tag) if prompt is not None else []
        return self.hint_described(keys, checked_deadline(deadline_s))

    def remove(self, keys: BlockKey | Sequence[BlockKey]) -> int:
        self._state.check_open()
        wanted = list(dict.fromkeys(checked([keys] if isinstance(keys, bytes) else keys)))
        catalog = self._state.catalog
        return self._remove(lambda: [row for row in catalog.rows(wanted) if row != NONE], wanted)

    def remove_tag(self, tag: bytes) -> int:
        self._state.check_open()
        catalog, word = self._state.catalog, np.frombuffer(tag, np.uint64)[0]

        def of_namespace() -> list[int]:
            known = np.flatnonzero(catalog.table.tags() == word).tolist()
            return [row for row in known if catalog.is_live(row)]

        removed = self._remove(of_namespace, [tag])
        self._state.descriptions.removed(tag)
        return removed

    def flush(
        self, timeout_s: float = CLOSE_TIMEOUT_S, *, keys: Sequence[BlockKey] | None = None
    ) -> FlushReport:
        self._state.check_open()
        began_s = self._state.clock.now()
        if keys is None:
            self._keeper.write_in_time(timeout_s)
        timeout_s = max(0.0, timeout_s - (self._state.clock.now() - began_s))
        return self._flusher.flush(timeout_s, None if keys is None else checked(list(keys)))

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
        with state.using():
            recorder = TraceRecorder(Path(path), state.config.block_tokens, state.clock)
            with state.lock:
                known = state.recorder = state.recorder or recorder
            if known is not recorder:
                recorder.close()
                recorder.path.unlink()
                raise ConfigError("record", f"{known.path} is being written already")

    def stop_recording(self) -> int:
        with self._state.lock:
            recorder, self._state.recorder = self._state.recorder, None
        return recorder.close() if recorder is not None else 0

    def check(self, *, deep: bool = True) -> CheckReport:
        with self._state.using():
            return check_store(self._state, deep=deep)

    def stats(self) -> dict[str, Any]:
        self._state.check_open()
        with self._state.lock:
            known = self._sessions.describe()
            known |= self._keeper.describe()
            known["transfer"] = asdict(self._archivist.transfer)
            found = {**describe(self._state), "sessions": known}
        found["audit"] = self._audits.describe()
        parts = {"site": self._site, "events": self._announcer}
        return found | {name: part.describe() for name, part in parts.items() if part is not None}

    @property
    def sessions(self) -> SessionService:
        return self._desk

    @property
    def audits(self) -> AuditService:
        return self._audits

    def report_first_token(self, first: FirstToken) -> None:
        """Kept until the store is closed."""
        self._state.check_open()
        first.check()
        with self._state.lock:
            self._state.traffic.answered(first, self._state.clock.now())

    def token_ids(self, keys: Sequence[BlockKey]) -> list[list[int]]:
        """Of each block the token ids that it was put with; empty where there are none, or it is
        not here. Reads a page of each block that is not in memory.
        """
        with self._state.using():
            found = read_heads(self._state, checked(list(keys)), token_ids, b"")
        return [np.frombuffer(ids, "<u4").tolist() for ids in found]

    def peek(self, keys: Sequence[BlockKey]) -> Match:
        """`match` that is not counted as a lookup: a router asks several stores for one request."""
        state = self._state
        state.check_open()
        with state.lock:
            rows = state.resident(checked(keys))
            return Match(tuple(state.catalog.fastest(rows)))

    def expected_s(self, nbytes: Mapping[str, int]) -> float | None:
        """How long so many bytes of each tier would take now; None where that is not known."""
        return expected_s(self._state, nbytes)

    def described_namespaces(self) -> list[Namespace]:
        """Those that are described here, and whose secret is known."""
        found = (one.namespace for one in self._described.all().values())
        return [space for space in found if space is not None]

    def namespaces_of_session(self, name: str) -> list[bytes]:
        """Tags of the namespaces that have a session of that name."""
        with self._state.lock:
            return self._sessions.tags_of(checked_name(name))

    def mapped(self) -> MappedStore:
        """This store for processes that map its memory; it must be shared (`dram.shared`)."""
        parts = (self._state, self._putter, self._reader, self._prefetcher, self._sessions)
        return MappedStore(*parts, self.register_tag)

    def inspect(self) -> "StoreInspector":
        """What tests and benchmarks may see and do beyond the public calls."""
        from kvdepot.store.inspect import StoreInspector

        parts = (self._putter, self._reader, self._prefetcher, self._late, self._drives)
        return StoreInspector(self._state, *parts)

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
            for condition in (state.work, state.room, state.written, state.arrived):
                condition.notify_all()
            stuck = not state.idle.wait_for(lambda: not state.calls, timeout_s)
        self.stop_recording()
        if self._announcer is not None:
            stuck = not self._announcer.close(timeout_s) or stuck
        stuck = not self._drives.join(timeout_s) or stuck
        stuck = not self._keeper.join(timeout_s) or stuck
        stuck = not self._prefetcher.close(timeout_s) or stuck
        if not stuck:
            self._reader.close()
        late = not self._late.wait(timeout_s)
        if stuck or late:
            # The kernel or a caller may still use the memory: leave it to the process's end.
            return replace(report, complete=False)
        for arena in state.all_arenas:
            arena.memory.stop()
        state.volumes.close()
        self._configured.close()
        for arena in state.all_arenas:
            arena.close()
        return report

    def _remove(self, find_rows: Callable[[], list[int]], names: Sequence[bytes]) -> int:
        """Take blocks out of the index; wait for those that are being written; record it."""
        state = self._state
        tiers = [lower for lower in state.lower_tiers if lower.writable]
        limit_s = max((lower.config.write_timeout for lower in tiers), default=0.0)
        with state.lock:
            rows = find_rows()
            state.mark_deleted(rows)
            state.counters.removed += len(rows)
            below = state.stamps.next()
            state.written.wait_for(
                lambda: not state.is_being_written(filter(state.catalog.is_deleted, rows)), limit_s
            )
            recorded = state.stamps.next()
        tombstones = [Tombstone(name, below, recorded) for name in names]
        if tombstones:
            self._drives.mover.record_tombstones(tombstones)
        return len(rows)

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

    def _not_in_memory(self, prompts: Sequence[Sequence[BlockKey]]) -> tuple[list[BlockKey], int]:
        """What of prompts could come to memory, the heads of all of them first; and how many of
        their leading blocks are in the store.
        """
        state = self._state
        assert state.held()
        parts, resident = [], 0
        for keys in prompts:
            rows = state.resident(keys)
            resident += len(rows)
            pairs = zip(keys, rows, strict=False)
            parts.append([key for key, row in pairs if not state.catalog.in_memory(row)])
        heads_first = itertools.zip_longest(*parts)
        return [key for some in heads_first for key in some if key is not None], resident

    def _join_site(self, config: NatsConfig) -> ClusterMember:
        """Tell the other stores of a site what this one publishes, and follow their hints."""
        return ClusterMember(config, self, self._state.volumes, self._state.clock)

    def _check_fits(self, nbytes: int) -> None:
        """Refuse blocks that no tier could ever hold."""
        state = self._state
        if not state.arena.chunks_for(nbytes):
            raise ConfigError(
                "dram.capacity", f"a block takes {format_bytes(nbytes)}, more than the tier has"
            )
        if not state.lower_tiers:
            return
        if not state.staging.chunks_for(nbytes):
            raise ConfigError(
                "writeback.staging", f"a block takes {format_bytes(nbytes)}, more than there is"
            )
        for lower in state.lower_tiers:
            rooms = [
                facts.record_bytes_max for _, facts in lower.volumes.all_facts() if not facts.lost
            ]
            room = min(rooms, default=nbytes)
            if nbytes > room:
                segment = f"{lower.name}.segment"
                raise ConfigError(
                    segment,
                    f"a block takes {format_bytes(nbytes)}, a segment of this store holds "
                    f"{format_bytes(room)}",
                    hint=f"make a new store with a larger {segment} or {lower.name}.capacity",
                )
