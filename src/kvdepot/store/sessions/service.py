"""Serves what a depot's sessions are asked: listing, contracts, parking, archives."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from kvdepot.core.block import BlockKey
from kvdepot.core.clock import Clock
from kvdepot.core.depot import checked_deadline
from kvdepot.core.keys import Keys, as_words
from kvdepot.core.order import SessionState
from kvdepot.core.sessions import DepotSessions, RetentionReceipt, checked_name
from kvdepot.errors import ConfigError
from kvdepot.index.table import NONE
from kvdepot.store.access import Caller
from kvdepot.store.engine import Engine
from kvdepot.store.events import PrefillReported, SessionNamed
from kvdepot.store.observers.ledger import SavingsLedger
from kvdepot.store.read.prefetch import Hint
from kvdepot.store.sessions.archive import ByteSource, SessionExporter
from kvdepot.store.sessions.pins import PinManager
from kvdepot.store.sessions.session_table import PACKED_BYTES, SESSION_ORDERS, Prompt, Sessions
from kvdepot.store.sessions.shared_prefixes import PREFIX_ORDERS, SharedPrefix, shared_prefixes
from kvdepot.store.state.background_throttle import backoff_s

LISTED_MAX: Final = 10_000
_WRITTEN_S: Final = 30.0
_STEP_S_MAX: Final = 3600.0
PrefixList = list[tuple[SharedPrefix, Mapping[str, Any]]]
_QUICK_S: Final = 0.005


class SessionService(DepotSessions):
    """Of a store in this process."""

    def __init__(
        self,
        engine: Engine,
        caller: Caller,
        sessions: Sessions,
        keeper: PinManager,
        wall: Clock,
        ledger: SavingsLedger,
    ) -> None:
        """`caller` may use all namespaces."""
        self._engine = engine
        self._state = engine.state
        self._caller = caller
        self._sessions = sessions
        self._keeper = keeper
        self._archivist = SessionExporter(engine, sessions)
        self._wall = wall
        self._ledger = ledger
        self._prefixes: tuple[float, PrefixList] = (0.0, [])
        """Those that were found last, and until when they are good enough."""

    def update(
        self, tag: bytes, name: str, keys: Keys | None, state: SessionState, start: int = 0
    ) -> int:
        """Know the prompt and the state of a session in one namespace; a prompt may come in parts.
        Returns how many of its leading blocks are here.
        """
        with self._state.lock:
            if keys is not None:
                self._state.events.emit(SessionNamed(tag, name, keys))
            return self._sessions.tell(tag, name, keys, state, start)

    def hint(self, caller: Caller, tags: Sequence[bytes], name: str, deadline_s: float) -> Hint:
        """Bring a session's prompts in these namespaces to memory in the background."""
        prompts = self._prompts(name, tags)
        state = max((prompt.state for prompt in prompts.values()), default=SessionState.NONE)
        words = [prompt.words(tag) for tag, prompt in prompts.items()]
        return self._engine.prefetch(caller, words, deadline_s, state)

    def namespaces_of(self, name: str) -> list[bytes]:
        """Tags of the namespaces that have a session of that name."""
        with self._state.lock:
            return self._sessions.tags_of(checked_name(name))

    def keys_of(self, tags: Sequence[bytes], name: str) -> list[list[BlockKey]]:
        """A session's prompt in each of these namespaces that has it."""
        return [prompt.keys(tag) for tag, prompt in self._prompts(name, tags).items()]

    def describe(self) -> dict[str, Any]:
        """For `stats`."""
        with self._state.lock:
            found = self._sessions.describe() | self._keeper.describe()
        return {**found, "transfer": asdict(self._archivist.transfer)}

    def known(self, order: str = "recent", limit: int = 100) -> list[dict[str, Any]]:
        state = self._state
        state.check_open()
        if order not in SESSION_ORDERS:
            raise ConfigError("order", f"{order!r} is not one of {', '.join(SESSION_ORDERS)}")
        limit = max(0, min(limit, LISTED_MAX))
        with state.lock:
            known = self._sessions.known(order, limit)
        known.sort(key=SESSION_ORDERS[order])
        return [self._facts(tag, name, prompt) for tag, name, prompt in known[:limit]]

    def show(self, name: str, *, namespace: str = "") -> list[dict[str, Any]]:
        found = []
        for tag in self._tags(name, namespace):
            with self._state.lock:
                prompt = self._sessions.find(tag, name)
            if prompt is not None:
                facts = self._state.descriptions.facts(tag)
                model = {"model": facts.get("model", ""), "tenant": facts.get("tenant", "")}
                found.append({**self._facts(tag, name, prompt), **model})
        return found

    def shared_prefixes(self, order: str = "busy", limit: int = 100) -> list[dict[str, Any]]:
        state = self._state
        state.check_open()
        if order not in PREFIX_ORDERS:
            raise ConfigError("order", f"{order!r} is not one of {', '.join(PREFIX_ORDERS)}")
        found = sorted(self._all_prefixes(), key=lambda one: PREFIX_ORDERS[order](one[0]))
        return [self._prefix_facts(*one) for one in found[: max(0, min(limit, LISTED_MAX))]]

    def _all_prefixes(self) -> PrefixList:
        """Where they took long to find, those of before are good for a while: a page is looked at
        every second, and 10,000 sessions take 40 ms.
        """
        state, began_s = self._state, self._state.clock.now()
        until_s, found = self._prefixes
        if began_s < until_s:
            return found
        with state.lock:
            known = self._sessions.known("busy", LISTED_MAX)
        prompts: dict[bytes, list[Prompt]] = {}
        for tag, _, prompt in known:
            prompts.setdefault(tag, []).append(prompt)
        found = []
        for tag, some in prompts.items():
            facts = state.descriptions.facts(tag)
            if _is_whole(facts):
                found += [(one, facts) for one in shared_prefixes(tag, some)]
        spent_s = state.clock.now() - began_s
        self._prefixes = began_s + (backoff_s(spent_s) if spent_s > _QUICK_S else 0.0), found
        return found

    def _prefix_facts(self, one: SharedPrefix, facts: Mapping[str, Any]) -> dict[str, Any]:
        prompt = Prompt(one.packed, SessionState.NONE)
        with self._state.lock:
            tiers = self._sessions.tiers_of(one.tag, prompt)
            held = self._sessions.bytes_of(one.tag, prompt)
        return {
            "prefix": one.packed[-PACKED_BYTES:].hex()[16:32],
            "namespace": one.tag.hex(),
            "model": facts.get("model", ""),
            "tenant": facts.get("tenant", ""),
            "sessions": one.sessions,
            "blocks": len(one),
            "tokens": len(one) * int(facts["layout"]["block_tokens"]),
            "tiers": tiers,
            "bytes": held,
            "idle_s": round(max(0.0, self._wall.now() - one.told_s), 3),
        }

    def pin(
        self,
        name: str,
        *,
        until_s: float | None = None,
        for_s: float | None = None,
        through_turn: bool = False,
        namespace: str = "",
    ) -> RetentionReceipt:
        tags = self._tags(name, namespace)
        if until_s is not None and for_s is not None:
            raise ConfigError("pin", "give an end or a duration, not both")
        end_s = self._keeper.default_until_s(for_s) if until_s is None else until_s
        with self._state.using():
            return self._keeper.grant(name, tags, end_s, through_turn=through_turn)

    def unpin(self, name: str, *, namespace: str = "") -> int:
        ended = self._keeper.end(name, self._tags(name, namespace))
        self._keeper.write(_WRITTEN_S)
        return ended

    def park(self, name: str, *, namespace: str = "") -> dict[str, Any]:
        tags = self._tags(name, namespace)
        prompts = self._prompts(name, tags)
        keys = [key for tag, prompt in prompts.items() for key in prompt.keys(tag)]
        with self._state.using():
            report = self._engine.flush(self._caller, _WRITTEN_S, as_words(keys))
            freed = sum(self._leave_memory(tag, prompt) for tag, prompt in prompts.items())
        return {"session": name, "blocks": len(keys), "durable": report.durable, "freed": freed}

    def warm(self, name: str, deadline_s: float = 10.0, *, namespace: str = "") -> dict[str, Any]:
        tags = self._tags(name, namespace)
        hint = self.hint(self._caller, tags, name, checked_deadline(deadline_s))
        return {"session": name, "wanted": hint.wanted}

    def expire(self, name: str, *, namespace: str = "") -> dict[str, Any]:
        tags = self._tags(name, namespace)
        ended = self._keeper.end(name, tags)
        with self._state.lock:
            tell = self._sessions.tell
            blocks = sum(tell(tag, name, None, SessionState.CLOSED) for tag in tags)
        self._keeper.write(_WRITTEN_S)
        return {"session": name, "blocks": blocks, "contracts_ended": ended}

    def export(
        self, name: str, path: str | os.PathLike[str], *, namespace: str = ""
    ) -> dict[str, Any]:
        prompts = self._prompts(name, self._tags(name, namespace))
        return self._archivist.export(name, prompts, Path(path))

    def export_pieces(self, name: str, *, namespace: str = "") -> Iterator[bytes | memoryview]:
        """What `export` would write, piece by piece. ConfigError at once where a block is missing
        now, and at a block that is missing when its turn comes.
        """
        prompts = self._prompts(name, self._tags(name, namespace))
        with self._state.lock:
            here = sum(sum(self._sessions.tiers_of(*one).values()) for one in prompts.items())
        if here < sum(map(len, prompts.values())):
            hint = "kvdepot session show says where its blocks are"
            raise ConfigError("session", "not all of its blocks are in the store", hint=hint)
        return self._archivist.pieces(name, prompts)

    def import_file(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        self._state.check_open()
        return self._archivist.import_file(Path(path))

    def import_from(self, source: ByteSource) -> dict[str, Any]:
        """What `import_file` does, of an archive that comes from elsewhere."""
        self._state.check_open()
        return self._archivist.import_from(source, "archive")

    def ledger(self) -> dict[str, Any]:
        self._state.check_open()
        self._state.events.deliver()
        return self._ledger.page()

    def tell_prefill(self, namespace: str, token_s: float, pair_s: float = 0.0) -> bool:
        self._state.check_open()
        if not (0.0 < token_s < _STEP_S_MAX and 0.0 <= pair_s < _STEP_S_MAX):
            raise ConfigError("token_s", "seconds of prefill for a token are above 0")
        try:
            tag = bytes.fromhex(namespace)
        except ValueError as error:
            raise ConfigError("namespace", "is not a tag in hexadecimal") from error
        self._state.events.emit(PrefillReported(tag, token_s, pair_s))
        return self._engine.access.is_registered(tag)

    def _tags(self, name: str, namespace: str) -> list[bytes]:
        """Namespaces that have a session of that name, or ConfigError."""
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
        contract, now_s = prompt.contract, self._wall.now()
        with self._state.lock:
            tiers = self._sessions.tiers_of(tag, prompt)
            held = self._sessions.bytes_of(tag, prompt)
            missing = self._keeper.missing(tag, contract) if contract is not None else 0
        kept = contract and {
            "number": contract.number,
            "blocks": len(contract),
            "missing": missing,
            "granted_s": contract.granted_s,
            "until_s": contract.until_s,
            "through_turn": contract.through_turn,
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
            "idle_s": round(max(0.0, now_s - prompt.told_s), 3),
            "contract": kept,
        }

    def _leave_memory(self, tag: bytes, prompt: Prompt) -> int:
        """Free the memory of blocks that drives have and that nothing in memory continues."""
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


def _is_whole(facts: Mapping[str, Any]) -> bool:
    """A namespace that stands for a model's prompts: the first shard, of full attention."""
    layout = facts.get("layout", {})
    parts = layout.get("sliding_window"), layout.get("attention_chunk")
    whole = "block_tokens" in layout and layout.get("kind") != "state" and parts == (None, None)
    return whole and not facts.get("shard_rank", 0)
