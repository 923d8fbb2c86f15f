"""The store of this process: the calls of core.depot.Depot."""

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvdepot.codec.notes import space_key
from kvdepot.codec.record import HEAD_BYTES, record_bytes
from kvdepot.core.block import BlockKey, Got, Put
from kvdepot.core.depot import (
    CLOSE_TIMEOUT_S,
    CheckReport,
    Depot,
    FlushReport,
    Layout,
    Match,
    NamespaceHandle,
    Sink,
)
from kvdepot.core.namespace import Namespace
from kvdepot.core.order import SessionState
from kvdepot.errors import ConfigError, StoreClosedError
from kvdepot.index.table import NONE, Keys
from kvdepot.store.check.online import check_stock
from kvdepot.store.drives.maintenance import Fleet
from kvdepot.store.namespaces import Spaces, check_block_bytes, checked, make_namespace
from kvdepot.store.read.late_reads import Drainer
from kvdepot.store.read.lease import StoreLease
from kvdepot.store.read.prefetch import Hint, Hinter, checked_deadline
from kvdepot.store.read.read_ahead import ReadAhead
from kvdepot.store.read.reader import Reader
from kvdepot.store.sessions import Sessions, by_tag, checked_name, state_of
from kvdepot.store.state.lower_tier import Level
from kvdepot.store.state.state import Stock
from kvdepot.store.stats import describe
from kvdepot.store.write.flush import Flusher
from kvdepot.store.write.memory_eviction import Room
from kvdepot.store.write.put import Putter
from kvdepot.store.write.reservation import StoreReservation
from kvdepot.tiers.log.notes import NOTE_BYTES_MAX

_TRIES: Final = 3


class Store(Depot):
    """A depot in this process. Made by `kvdepot.open`."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._spaces = Spaces()
        self._room = Room(stock, stock.pools[0])
        self._drainer = Drainer(stock)
        self._putter = Putter(stock, self._room)
        self._reader = Reader(stock, self._room, self._drainer)
        self._hinter = Hinter(stock, self._reader)
        read_ahead = ReadAhead(stock, self._hinter)
        if read_ahead.is_useful:
            self._reader.follow = read_ahead.saw
        self._sessions = Sessions(stock.catalog)
        self._fleet = Fleet(stock)
        self._flusher = Flusher(stock)
        self._leases = 0
        self._calls = 0
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
        self._check_open()
        config, fields = self._stock.config, {**fields, "tenant": tenant, "secret": secret}
        return self.register(
            make_namespace(model, layout, config.block_tokens, config.tenants, fields)
        )

    def register(self, namespace: Namespace) -> NamespaceHandle:
        self._check_open()
        description = json.dumps(namespace.description(), sort_keys=True).encode()
        self._admit(namespace.tag, namespace.layout.block_bytes, description)
        return self._spaces.add(namespace)

    def put_many(
        self, keys: Sequence[BlockKey], buffers: Sequence[Any], *, timeout_s: float | None = None
    ) -> list[Put]:
        self._check_open()
        keys, buffers = list(keys), list(buffers)  # a lazy sequence would free what we point to
        if timeout_s is None:
            timeout_s = self._stock.config.writeback.put_timeout
        offers = self._spaces.offers(keys, buffers)
        with self._using():
            answers = self._putter.store(offers, timeout_s)
            self._flusher.write_through(timeout_s)
            return answers

    def reserve(
        self, keys: Sequence[BlockKey], *, timeout_s: float | None = None
    ) -> StoreReservation:
        self._check_open()
        if timeout_s is None:
            timeout_s = self._stock.config.writeback.put_timeout
        offers = self._spaces.blanks(keys)
        with contextlib.ExitStack() as scope:
            scope.enter_context(self._using())
            outcomes = self._putter.reserve(offers, timeout_s)
            return StoreReservation(self._putter, offers, outcomes, scope.pop_all().close)

    @property
    def memory(self) -> tuple[memoryview, ...]:
        self._check_open()
        return tuple(arena.memory.view for arena in self._stock.arenas)

    def get_many(
        self,
        keys: Sequence[BlockKey],
        intos: Sequence[Any],
        *,
        layers: range | None = None,
        timeout_s: float | None = None,
    ) -> list[Got]:
        self._check_open()
        keys, intos = list(keys), list(intos)
        wants = self._spaces.wants(keys, intos, layers)
        with self._using():
            return self._reader.fetch(wants, self._read_timeout(timeout_s)) if wants else []

    def match(self, keys: Sequence[BlockKey]) -> Match:
        self._check_open()
        catalog = self._stock.catalog
        with self._stock.changed:
            rows = self._usable(catalog.resident(checked(keys)))
            self._stock.looked_up(keys)
            return Match(tuple(catalog.fastest(rows)))

    def lease(self, keys: Sequence[BlockKey]) -> StoreLease:
        self._check_open()
        catalog = self._stock.catalog
        with self._stock.changed:
            rows = self._usable(catalog.resident(checked(keys)))
            self._stock.looked_up(keys)
            catalog.use(rows)
            catalog.lease(rows)
            self._leases += len(rows)
        return StoreLease(list(keys[: len(rows)]), rows, self._release, self._view, self._deliver)

    def touch(self, keys: Sequence[BlockKey]) -> int:
        self._check_open()
        with self._stock.changed:
            rows = self._stock.catalog.resident(checked(keys))
            self._stock.catalog.use(rows)
        return len(rows)

    def session(
        self,
        name: str,
        keys: Sequence[BlockKey] | None = None,
        state: str = "alive",
        *,
        tenant: str = "",
    ) -> int:
        self._check_open()
        hint, name = state_of(state), checked_name(name)
        parts: Mapping[bytes, Keys | None]
        parts = by_tag(checked(keys)) if keys else dict.fromkeys(self._spaces.tags_of(tenant))
        for key in keys or ():
            self._spaces.of(key)
        with self._stock.changed:
            told = self._sessions.tell
            return sum(told(tag, name, words, hint) for tag, words in parts.items())

    def hint(self, keys: Sequence[BlockKey] | str, deadline_s: float, *, tenant: str = "") -> Hint:
        self._check_open()
        deadline_s = checked_deadline(deadline_s)
        with self._stock.changed:
            if isinstance(keys, str):
                tags = self._spaces.tags_of(tenant)
                chains, state = self._sessions.recall(tags, checked_name(keys))
            else:
                chains, state = [list(checked(keys))], SessionState.NONE
            away = self._away(chains)
        return self._hinter.take(self._spaces.looks(away), deadline_s, state)

    def remove(self, keys: BlockKey | Sequence[BlockKey]) -> int:
        self._check_open()
        wanted = checked([keys] if isinstance(keys, bytes) else list(keys))
        with self._stock.changed:
            rows = [row for row in self._stock.catalog.rows(wanted) if row != NONE]
            self._doom(rows)
        self._record(wanted, whole_namespace=False)
        return len(rows)

    def remove_tag(self, tag: bytes) -> int:
        self._check_open()
        catalog = self._stock.catalog
        word = np.frombuffer(tag, np.uint64)[0]
        with self._stock.changed:
            known = np.flatnonzero(catalog.table.tags() == word)
            rows = [row for row in known.tolist() if catalog.is_live(row)]
            self._doom(rows)
        self._record([space_key(tag)], whole_namespace=True)
        return len(rows)

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> FlushReport:
        self._check_open()
        return self._flusher.flush(timeout_s, self._fleet.writers)

    def set_write_mode(self, tier: str, mode: str) -> None:
        with self._using():
            self._fleet.set_mode(tier, mode)

    def add_drive(self, tier: str, path: str | os.PathLike[str]) -> None:
        with self._using():
            self._fleet.add(tier, Path(path))

    def drain_drive(self, tier: str, path: str | os.PathLike[str]) -> int:
        with self._using():
            return self._fleet.drain(tier, Path(path))

    def resize(self, tier: str, capacity: int | str) -> None:
        with self._using():
            self._fleet.resize(tier, capacity)

    def record(self, path: str | os.PathLike[str]) -> None:
        with self._using():
            self._stock.record(Path(path))

    def stop_recording(self) -> int:
        return self._stock.stop_recording()

    def check(self, *, deep: bool = True) -> CheckReport:
        with self._using():
            return check_stock(self._stock, deep=deep)

    def stats(self) -> dict[str, Any]:
        self._check_open()
        with self._stock.changed:
            found = describe(self._stock, leased=self._leases)
            return {**found, "sessions": self._sessions.describe()}

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> FlushReport:
        if self._closed:
            return FlushReport(True, 0, 0)
        report = self._flusher.flush(timeout_s, self._fleet.writers)
        stock = self._stock
        with stock.changed:
            self._closed = stock.closing = True
            stock.ended.set()
            for level in stock.levels:
                level.dirty.clear()
            stock.work.notify_all()
            stock.changed.notify_all()
            stuck = not stock.changed.wait_for(lambda: not self._calls, timeout_s)
        stock.stop_recording()
        stuck = not self._fleet.join(timeout_s) or stuck
        stuck = not self._hinter.close(timeout_s) or stuck
        if not stuck:
            self._reader.close()
        late = not self._drainer.wait(timeout_s)
        if stuck or late:
            # The kernel or a caller may still use the memory: leave it to the process's end.
            return FlushReport(False, report.waiting, report.given_up)
        for arena in stock.arenas:
            arena.memory.stop()
        for level in stock.levels:
            level.tier.close()
        for arena in stock.arenas:
            arena.close()
        return report

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """A call that works on the store's memory: close() waits for it."""
        with self._stock.changed:
            self._check_open()
            self._calls += 1
        try:
            yield
        finally:
            with self._stock.changed:
                self._calls -= 1
                if self._closed:
                    self._stock.changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed")

    def _check_fits(self, nbytes: int) -> None:
        """Refuse blocks that no tier could ever hold."""
        stock = self._stock
        if not stock.arena.chunks_for(nbytes):
            raise ConfigError(
                "dram.capacity", f"a block takes {nbytes} bytes, more than the tier has"
            )
        if not stock.levels:
            return
        if not stock.staging.chunks_for(nbytes):
            raise ConfigError(
                "writeback.staging", f"a block takes {nbytes} bytes, more than there is"
            )
        for level in stock.levels:
            room = min(drive.record_bytes_max for drive in level.tier.drives)
            if nbytes > room:
                segment = f"{level.name}.segment"
                raise ConfigError(
                    segment,
                    f"a block takes {nbytes} bytes, a segment of this store holds {room}",
                    hint=f"make a new store with a larger {segment} or {level.name}.capacity",
                )

    def _usable(self, rows: list[int]) -> list[int]:
        """Cut a run of rows where it needs a drive that is known to be down."""
        levels, catalog = self._stock.levels, self._stock.catalog
        if all(level.tier.is_up() for level in levels):
            return rows
        for index, row in enumerate(rows):
            if not catalog.in_memory(row) and not any(level.usable(row) for level in levels):
                return rows[:index]
        return rows

    def _admit(self, tag: bytes, block_bytes: int, description: bytes) -> None:
        """Check that blocks of a namespace fit, and write down what its tag stands for."""
        check_block_bytes(block_bytes)
        self._check_fits(record_bytes(block_bytes))
        for level in self._fleet.writers:
            level.tier.remember(tag, description)

    def _away(self, chains: Sequence[Sequence[BlockKey]]) -> list[BlockKey]:
        """What of prompts could come to memory, the heads of all of them first. Lock held."""
        catalog = self._stock.catalog
        parts = []
        for keys in chains:
            rows = self._usable(catalog.resident(keys))
            pairs = zip(keys, rows, strict=False)
            parts.append([key for key, row in pairs if not catalog.in_memory(row)])
        return [key for some in itertools.zip_longest(*parts) for key in some if key is not None]

    def _release(self, rows: list[int]) -> None:
        with self._stock.changed:
            self._leases -= len(rows)
            if not self._closed:
                self._stock.unlease(rows)

    def _view(self, row: int) -> memoryview | None:
        catalog = self._stock.catalog
        with self._stock.changed:
            self._check_open()
            pool = self._stock.pool_of(row)
            if pool is None:
                return None
            end = HEAD_BYTES + catalog.nbytes[row]
            return pool.image(row)[HEAD_BYTES:end].toreadonly()

    def _deliver(
        self, keys: list[BlockKey], sink: Sink, verify: bool | None, timeout_s: float | None
    ) -> list[Got]:
        wants = self._spaces.looks(keys)
        with self._using():
            limit_s = self._read_timeout(timeout_s)
            return self._reader.fetch(wants, limit_s, verify=verify, sink=sink) if wants else []

    def _read_timeout(self, timeout_s: float | None) -> float:
        return self._stock.config.read_timeout if timeout_s is None else timeout_s

    def _doom(self, rows: list[int]) -> None:
        """Take blocks out of the books; wait for those that are being written. Lock held."""
        stock = self._stock
        for row in rows:
            if stock.catalog.doom(row) and not stock.is_waiting(row):
                stock.drop_all(row)
        stock.counters.removed += len(rows)
        for level in stock.levels:
            self._await_writes(level, rows)

    def _await_writes(self, level: Level, rows: list[int]) -> None:
        """Wait until none of the rows is being written to a tier. Lock held."""
        busy = (level.tickets, level.moving, level.mirrors.writing if level.mirrors else ())
        self._stock.changed.wait_for(
            lambda: not any(row in part for part in busy for row in rows),
            level.config.write_timeout,
        )

    def _record(self, keys: Sequence[BlockKey], *, whole_namespace: bool) -> None:
        """Write removals down on every drive of every tier: older copies may lie on any."""
        if not keys:
            return
        for level, writers in self._fleet.writers.items():
            tier = level.tier
            removals = [tier.removal(key, whole_namespace=whole_namespace) for key in keys]
            failed = tier.erase(removals)
            for _ in range(_TRIES):
                for index in failed:
                    writers[index].make_room(NOTE_BYTES_MAX)
                failed = tier.erase(removals, failed) if failed else []
            if failed:
                with self._stock.changed:
                    self._stock.counters.removal_unrecorded += 1
