"""Sessions of a store in this process: names, pins, prefetch, eviction to disk, archives."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from kvdepot.core.block import BlockKey
from kvdepot.core.clock import Clock
from kvdepot.core.depot import checked_deadline
from kvdepot.core.keys import Keys, as_words
from kvdepot.core.sessions import (
    KEEP_S,
    DepotSessions,
    Facts,
    PinReceipt,
    SessionState,
    by_tag,
    checked_name,
    state_of,
)
from kvdepot.depot import Namespaces, checked
from kvdepot.errors import ConfigError
from kvdepot.index.pinned_rows import PinnedRows
from kvdepot.index.table import NONE
from kvdepot.store.engine import Caller, Engine
from kvdepot.store.events import SessionNamed
from kvdepot.store.read.prefetch import Hint
from kvdepot.store.sessions.archive import ByteSource, SessionExporter
from kvdepot.store.sessions.pins import PinManager
from kvdepot.store.sessions.records import SessionRecords
from kvdepot.store.sessions.session_table import SESSION_ORDERS, Prompt, Sessions

Prompts = list[list[BlockKey]]
LISTED_MAX: Final = 10_000
_WRITTEN_S: Final = 30.0


class SessionService(DepotSessions):
    """See core.sessions.DepotSessions."""

    caller: Caller
    """A caller that may use all namespaces."""

    def __init__(
        self, engine: Engine, namespaces: Namespaces, pinned: PinnedRows, wall: Clock
    ) -> None:
        """`namespaces` are those registered by this process."""
        self._engine = engine
        self._state = engine.state
        self._namespaces = namespaces
        self._sessions = Sessions(engine.state.catalog, wall, pinned)
        records = SessionRecords(engine.state, self._sessions)
        self.pins = PinManager(
            engine.state,
            self._sessions,
            records,
            wall,
            lambda timeout_s, keys: engine.flush(self.caller, timeout_s, keys),
        )
        self._exporter = SessionExporter(engine, self._sessions)
        self._wall = wall

    def name(
        self,
        name: str,
        keys: Sequence[BlockKey] | None = None,
        state: str = "alive",
        *,
        tenant: str = "",
    ) -> int:
        self._state.check_open()
        session_state, name = state_of(state), checked_name(name)
        self._namespaces.check(checked(keys or ()))
        parts: Mapping[bytes, Keys | None]
        parts = by_tag(keys) if keys else dict.fromkeys(self._namespaces.tags_of(tenant))
        return sum(self.update(tag, name, words, session_state) for tag, words in parts.items())

    def update(
        self, tag: bytes, name: str, keys: Keys | None, state: SessionState, start: int = 0
    ) -> int:
        """Set the prompt and the state of a session in one namespace. A prompt may be given in
        parts. Returns how many of its leading blocks are stored.
        """
        with self._state.lock:
            if keys is not None:
                self._state.events.emit(SessionNamed(tag, name, keys))
            return self._sessions.tell(tag, name, keys, state, start)

    def hint(self, caller: Caller, tags: Sequence[bytes], name: str, deadline_s: float) -> Hint:
        """Read a session's prompts in these namespaces into memory in the background."""
        prompts = self._prompts(name, tags)
        state = max((prompt.state for prompt in prompts.values()), default=SessionState.NONE)
        words = [prompt.words(tag) for tag, prompt in prompts.items()]
        return self._engine.prefetch(caller, words, deadline_s, state)

    def namespaces_of(self, name: str) -> Sequence[bytes]:
        """Tags of the namespaces that have a session of that name."""
        with self._state.lock:
            return self._sessions.tags_of(checked_name(name))

    def keys_of(self, tags: Sequence[bytes], name: str) -> Prompts:
        """The keys of a session's prompt in each of these namespaces that has it."""
        return [prompt.keys(tag) for tag, prompt in self._prompts(name, tags).items()]

    def describe(self) -> dict[str, Any]:
        """The counts for `stats`."""
        with self._state.lock:
            found = self._sessions.describe() | self.pins.describe()
        return {**found, "transfer": asdict(self._exporter.transfer)}

    def list(self, order: str = "recent", limit: int = 100) -> Facts:
        state = self._state
        state.check_open()
        if order not in SESSION_ORDERS:
            raise ConfigError("order", f"{order!r} is not one of {', '.join(SESSION_ORDERS)}")
        limit = max(0, min(limit, LISTED_MAX))
        with state.lock:
            known = self._sessions.known(order, limit)
        known.sort(key=SESSION_ORDERS[order])
        return [self._facts(tag, name, prompt) for tag, name, prompt in known[:limit]]

    def show(self, name: str, *, namespace: str = "") -> Facts:
        found = []
        for tag in self._tags(name, namespace):
            with self._state.lock:
                prompt = self._sessions.find(tag, name)
            if prompt is not None:
                facts = self._state.descriptions.facts(tag)
                model = {"model": facts.get("model", ""), "tenant": facts.get("tenant", "")}
                found.append({**self._facts(tag, name, prompt), **model})
        return found

    def pin(
        self,
        name: str,
        *,
        until_s: float | None = None,
        for_s: float | None = None,
        namespace: str = "",
    ) -> PinReceipt:
        return self.pin_for(os.getuid(), name, until_s=until_s, for_s=for_s, namespace=namespace)

    def pin_for(
        self,
        uid: int,
        name: str,
        *,
        until_s: float | None = None,
        for_s: float | None = None,
        namespace: str = "",
    ) -> PinReceipt:
        """`pin` for a user of the machine: it counts with the pins of this user."""
        tags = self._tags(name, namespace)
        if until_s is not None and for_s is not None:
            raise ConfigError("pin", "give an end or a duration, not both")
        if until_s is None:
            until_s = self._wall.now() + (KEEP_S if for_s is None else for_s)
        with self._state.using:
            return self.pins.grant(name, tags, until_s, f"user {uid}")

    def unpin(self, name: str, *, namespace: str = "") -> int:
        ended = self.pins.end(name, self._tags(name, namespace))
        self.pins.write(_WRITTEN_S)
        return ended

    def evict_to_disk(self, name: str, *, namespace: str = "") -> dict[str, Any]:
        tags = self._tags(name, namespace)
        prompts = self._prompts(name, tags)
        keys = [key for tag, prompt in prompts.items() for key in prompt.keys(tag)]
        with self._state.using:
            report = self._engine.flush(self.caller, _WRITTEN_S, as_words(keys))
            freed = sum(self._leave_memory(tag, prompt) for tag, prompt in prompts.items())
        return {"session": name, "blocks": len(keys), "durable": report.durable, "freed": freed}

    def prefetch(self, name: str, deadline_s: float = 10.0, *, namespace: str = "") -> Hint:
        self._state.check_open()
        tags = [tag for tag in self.namespaces_of(name) if namespace in ("", tag.hex())]
        return self.hint(self.caller, tags, name, checked_deadline(deadline_s))

    def export(
        self, name: str, path: str | os.PathLike[str], *, namespace: str = ""
    ) -> dict[str, Any]:
        prompts = self._prompts(name, self._tags(name, namespace))
        return self._exporter.export(name, prompts, Path(path))

    def export_pieces(self, name: str, *, namespace: str = "") -> Iterator[bytes | memoryview]:
        """Yield the pieces that `export` writes. Raises ConfigError at once if a block is missing,
        and later if one was evicted meanwhile.
        """
        prompts = self._prompts(name, self._tags(name, namespace))
        with self._state.lock:
            here = sum(sum(self._sessions.tiers_of(*one).values()) for one in prompts.items())
        if here < sum(map(len, prompts.values())):
            hint = "kvdepot session show says where its blocks are"
            raise ConfigError("session", "not all of its blocks are in the store", hint=hint)
        return self._exporter.pieces(name, prompts)

    def import_file(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        self._state.check_open()
        return self._exporter.import_file(Path(path))

    def import_from(self, source: ByteSource) -> dict[str, Any]:
        """Import an archive from a source that is not a file."""
        self._state.check_open()
        return self._exporter.import_from(source, "archive")

    def _tags(self, name: str, namespace: str) -> Sequence[bytes]:
        """Tags of the namespaces that have the session. ConfigError if there is none."""
        self._state.check_open()
        tags = self.namespaces_of(name)
        if namespace:
            tags = [tag for tag in tags if tag.hex() == namespace]
        if not tags:
            where = f" in namespace {namespace}" if namespace else ""
            raise ConfigError(
                "session", f"{name!r} is not known{where}", hint="kvdepot session list"
            )
        return tags

    def _prompts(self, name: str, tags: Sequence[bytes]) -> Mapping[bytes, Prompt]:
        with self._state.lock:
            found = {tag: self._sessions.find(tag, name) for tag in tags}
        return {tag: prompt for tag, prompt in found.items() if prompt is not None}

    def _facts(self, tag: bytes, name: str, prompt: Prompt) -> dict[str, Any]:
        pin, now_s = prompt.pin, self._wall.now()
        with self._state.lock:
            tiers = self._sessions.tiers_of(tag, prompt)
            held = self._sessions.bytes_of(tag, prompt)
            missing = self.pins.blocks.missing(tag, pin) if pin is not None else 0
        kept = pin and {
            "number": pin.number,
            "blocks": len(pin),
            "missing": missing,
            "granted_s": pin.granted_s,
            "until_s": pin.until_s,
            "owner": pin.owner,
        }
        return {
            "name": name,
            "namespace": tag.hex(),
            "tenant": self._state.descriptions.tenant(tag),
            "state": prompt.state.name.lower(),
            "turns": prompt.turns,
            "blocks": len(prompt),
            "tiers": tiers,
            "bytes": held,
            "idle_s": round(max(0.0, now_s - prompt.named_s), 3),
            "pin": kept,
        }

    def _leave_memory(self, tag: bytes, prompt: Prompt) -> int:
        """Free the memory of blocks that drives have and that have no descendants in memory."""
        state, freed = self._state, 0
        with state.lock:
            rows = state.catalog.table.find_many(prompt.words(tag)).tolist()
            for row in reversed(rows):
                if row == NONE or not state.catalog.is_live(row):
                    continue
                below = any(lower.usable(row) for lower in state.lower_tiers)
                for memory in state.memory_tiers:
                    idle = not state.catalog.leases(row) and not state.writes.is_dirty(row)
                    if below and idle and memory.copies.ready(row):
                        if not memory.leaves.may_leave(row) or memory.leaves.held(row):
                            return freed
                        memory.drop(row)
                        state.events.count(f"evicted_{memory.name}")
                        freed += 1
            state.lock.room.notify_all()
        return freed
