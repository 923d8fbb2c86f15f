"""Reports of the scheduler to the depot: prefetch hints, sessions, and the prefill speed.

Blocks of a request that waits in vLLM's queue are brought from hard drives and buckets to memory
meanwhile. A request may name its session and the session's state in `kv_transfer_params`; the depot
gets them when the request has ended.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvdepot.adapters.prefill_report import PrefillReporter
from kvdepot.adapters.vllm.metrics import warn
from kvdepot.adapters.vllm.requests import EngineRequest, Phase, TrackedRequest
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import PrefetchHint
from kvdepot.core.sessions import checked_name, state_of
from kvdepot.depot import Depot
from kvdepot.errors import KVDepotError

SESSION: Final = "kvdepot_session"
STATE: Final = "kvdepot_state"
_REQUESTS_PER_STEP: Final = 4
"""Requests that get hints between two steps: the next step must not wait for a long queue."""
_HINTED_MAX: Final = 32
"""Requests with active hints. Requests behind them wait long enough to get hints later."""
_SALT_BYTES: Final = 8
_SUPERSEDED: Final = "kvdepot: superseded"
"""The name of a closed session for windows and states that no request will continue from."""
_SLOW_TIERS: Final = frozenset({"hdd", "object"})
"""Blocks in a faster tier load soon enough without a hint."""
SessionUpdate = tuple[str, str, list[BlockKey]]
"""The name of a session, its state, and the blocks of its prompt."""


class QueueHints:
    """Belongs to the scheduler's thread."""

    def __init__(self, store: Depot, hint_s: float) -> None:
        self._store = store
        self._hint_s = hint_s
        self.prefill = PrefillReporter(store, warn)
        self._waiting: dict[str, TrackedRequest] = {}
        """New requests that have not begun, in the order in which they came."""
        self._hints: dict[str, list[PrefetchHint]] = {}
        self._unsent: dict[str, list[SessionUpdate]] = {}
        """Sessions of finished requests whose last blocks are still being saved."""
        self._repeat: list[SessionUpdate] = []
        """Sessions to report once more: their last blocks may have been saved since."""

    def queued(self, tracked: TrackedRequest) -> None:
        """A new request: if the next step does not begin it, its blocks are hinted at."""
        if self._hint_s > 0 and not tracked.request.skip_reading_prefix_cache:
            self._waiting[tracked.request.request_id] = tracked

    def begun(self, request_id: str) -> None:
        """A request loads, computes or has ended: its hints end."""
        self._waiting.pop(request_id, None)
        for hint in self._hints.pop(request_id, ()):
            hint.cancel()

    def after_schedule(self) -> None:
        """A step was scheduled: give hints for requests that are still in the queue."""
        repeat, self._repeat = self._repeat, []
        self._report(repeat)
        names = list(self._waiting)[:_REQUESTS_PER_STEP]
        if not names or len(self._hints) >= _HINTED_MAX:
            self._hints = {
                name: hints
                for name, hints in self._hints.items()
                if not all(hint.wait(0.0) for hint in hints)
            }
            return
        for name in names:
            tracked = self._waiting.pop(name)
            if tracked.phase is Phase.QUEUED:
                hints = self._hint(tracked)
                self._hints |= {name: hints} if hints else {}

    def finished(self, request: EngineRequest, tracked: TrackedRequest, *, is_saving: bool) -> None:
        """A request has ended. `is_saving`: `saved` follows when its last blocks are saved."""
        self.begun(request.request_id)
        updates: list[SessionUpdate] = []
        if superseded := tracked.saves.superseded():
            updates.append((_SUPERSEDED, "closed", superseded))
        try:
            session = session_of(request)
        except KVDepotError as error:
            warn("a request's session is ignored", error)
            session = None
        if session is not None:
            name, state = session
            keys = [key for shard in self._prompt_keys(tracked) for key in shard]
            updates.append((name, state, keys))
            self._report(updates[-1:])
        if updates and is_saving:
            self._unsent[request.request_id] = updates
        else:
            self._repeat += updates

    def saved(self, request_ids: Iterable[str]) -> None:
        """The last blocks of these requests are in the depot."""
        for request_id in request_ids:
            self._report(self._unsent.pop(request_id, ()))

    def close(self) -> None:
        for name in list(self._hints):
            self.begun(name)

    def _prompt_keys(self, tracked: TrackedRequest) -> tuple[tuple[BlockKey, ...], ...]:
        """The keys of all whole blocks of the first group, by shard."""
        keys, tokens = tracked.keys, tracked.request.num_tokens
        keys.grow(tokens // keys.groups.grain)
        return keys.of(0, 0, tokens // keys.block_tokens(0))

    def _hint(self, tracked: TrackedRequest) -> list[PrefetchHint]:
        """The active hints for a request."""
        hints = []
        try:
            for keys in self._prompt_keys(tracked):
                tiers = self._store.match(keys).tiers
                if not _SLOW_TIERS.isdisjoint(tiers):
                    hints.append(self._store.prefetch(keys[: len(tiers)], self._hint_s))
        except KVDepotError as error:
            warn("the depot accepts no hints", error)
        return [hint for hint in hints if not hint.wait(0.0)]

    def _report(self, updates: Iterable[SessionUpdate]) -> None:
        for name, state, keys in updates:
            if keys:
                try:
                    self._store.sessions.name(name, keys, state)
                except KVDepotError as error:
                    warn("a session could not be reported to the depot", error)


def session_of(request: Any) -> tuple[str, str] | None:
    """The name and the state of a request's session. None if it has none; ConfigError if they are
    not valid. Requests with different salts must not share a session, so a salt is a part of the
    name."""
    params = getattr(request, "kv_transfer_params", None)
    if not isinstance(params, Mapping) or SESSION not in params:
        return None
    name, state = checked_name(params[SESSION]), str(params.get(STATE, "alive"))
    state_of(state)
    if request.cache_salt:
        salt = hashlib.blake2b(request.cache_salt.encode(), digest_size=_SALT_BYTES).hexdigest()
        name = checked_name(f"{salt} {name}")
    return name, state
