"""The store of this process: an engine, its services, and the interface of a depot."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvdepot.core.clock import Clock
from kvdepot.core.depot import CLOSE_TIMEOUT_S, FlushReport, NamespaceHandle
from kvdepot.core.keys import Keys
from kvdepot.core.requests import BlockSize, Offer
from kvdepot.core.units import format_bytes, format_count
from kvdepot.depot import Depot, DepotCalls, DepotDefaults, Namespaces
from kvdepot.errors import ExtraMissingError, KVDepotError
from kvdepot.index.pinned_rows import PinnedRows
from kvdepot.store.admin import StoreAdmin
from kvdepot.store.audits import AuditService
from kvdepot.store.cluster_member import ClusterMember
from kvdepot.store.drives.maintenance import VolumeMaintenance
from kvdepot.store.engine import Caller, Engine
from kvdepot.store.handles import StoreLease, StoreReservation
from kvdepot.store.routing import RoutingCalls
from kvdepot.store.sessions.service import SessionService
from kvdepot.store.state.state import StoreState
from kvdepot.store.stats import describe

if TYPE_CHECKING:
    from kvdepot.store.announce.announcer import Announcer
    from kvdepot.store.inspect import StoreInspector


def _announcer(state: StoreState) -> "Announcer | None":
    """The publisher of the store's blocks, if configured."""
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

    sessions: SessionService
    volumes: VolumeMaintenance
    audits: AuditService
    admin: StoreAdmin

    def __init__(
        self,
        state: StoreState,
        volumes: VolumeMaintenance,
        pinned: PinnedRows,
        wall: Clock,
        release: Callable[[], None],
    ) -> None:
        """`wall` is the clock for the time of day. `release` closes the parts of the store."""
        self._state = state
        self._release = release
        self._process = os.getpid()
        self._site: ClusterMember | None = None
        self._announcer: Announcer | None = None
        engine = self.engine = Engine(state, volumes.mover)
        caller = Caller("this process")
        super().__init__(
            DepotCalls(
                register=partial(_register, engine, caller),
                match=partial(engine.match, caller),
                lease=partial(_lease, engine, caller),
                read=partial(engine.read, caller),
                put=partial(engine.put, caller),
                reserve=partial(_reserve, engine, caller),
                prefetch=lambda keys, deadline_s: engine.prefetch(caller, [keys], deadline_s),
                remove=lambda keys, tag: engine.remove(caller, keys, tag=tag),
                flush=partial(self.flush_for, caller),
            ),
            DepotDefaults(
                state.config.block_tokens,
                state.config.writeback.put_timeout,
                state.config.read_timeout,
                state.config.tenants,
            ),
        )
        self.admin = StoreAdmin(engine)
        self.sessions = SessionService(engine, self._namespaces, pinned, wall)
        self.routing = RoutingCalls(engine, state.config.tenants, self.sessions.keys_of)
        self.sessions.caller = self.routing.caller
        self.audits = AuditService(engine, self.routing.caller, wall)
        self.volumes = volumes
        volumes.pins = self.sessions.pins
        self.sessions.pins.start()
        try:
            if state.config.nats is not None:
                self._site = ClusterMember(
                    state.config.nats, self.routing, state.volumes, state.clock
                )
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
        sizes = ", ".join(f"{name} {format_bytes(room)}" for name, room in rooms.items())
        return f"<kvdepot.Store, {sizes}: {format_count(state.catalog.table.live, 'block')}>"

    @property
    def memory(self) -> tuple[memoryview, ...]:
        self._state.check_open()
        return tuple(arena.memory.view for arena in self._state.all_arenas)

    def stats(self) -> dict[str, Any]:
        state = self._state
        state.check_open()
        counted = self.admin.describe()
        with state.lock:
            found = describe(state) | counted
        found["sessions"] = self.sessions.describe()
        found["audit"] = self.audits.describe()
        parts = {"site": self._site, "events": self._announcer}
        return found | {name: part.describe() for name, part in parts.items() if part is not None}

    def inspect(self) -> "StoreInspector":
        """Access to internals for tests and benchmarks."""
        from kvdepot.store.inspect import StoreInspector

        return StoreInspector(self.engine, self.volumes)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> FlushReport:
        state = self._state
        # In a forked child: threads and store belong to the parent.
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
            stuck = not state.lock.idle.wait_for(lambda: not state.using.active, timeout_s)
        self.admin.stop_recording()
        if self._announcer is not None:
            stuck = not self._announcer.close(timeout_s) or stuck
        for part in (self.volumes, self.sessions.pins, self.engine):
            stuck = not part.join(timeout_s) or stuck
        state.events.close()
        if stuck:
            # The kernel or a caller may still use the memory: keep it until the process ends.
            return replace(report, complete=False)
        for arena in state.all_arenas:
            arena.memory.stop()
        state.volumes.close()
        self._release()
        for arena in state.all_arenas:
            arena.close()
        return report

    def flush_for(self, caller: Caller, timeout_s: float, keys: Keys | None) -> FlushReport:
        """`flush` for a caller: reports the blocks evicted unwritten since its last one."""
        began_s = self._state.clock.now()
        if keys is None:
            self.sessions.pins.write_in_time(timeout_s)
        left_s = max(0.0, timeout_s - (self._state.clock.now() - began_s))
        return self.engine.flush(caller, left_s, keys)


def _register(engine: Engine, caller: Caller, space: NamespaceHandle) -> None:
    size = BlockSize(space.block_bytes, space.chunk_bytes)
    engine.register(caller, space.tag, size, space.namespace.describe())


def _lease(engine: Engine, caller: Caller, keys: Keys, namespaces: Namespaces) -> StoreLease:
    return StoreLease(engine, caller, namespaces, engine.lease(caller, keys))


def _reserve(engine: Engine, caller: Caller, offer: Offer, timeout_s: float) -> StoreReservation:
    call = engine.state.using
    call.__enter__()
    try:
        slots, outcomes = engine.reserve(caller, offer, timeout_s)
    except BaseException:
        call.__exit__()
        raise
    return StoreReservation(engine, caller, slots, outcomes, call.__exit__)
