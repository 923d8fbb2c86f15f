"""What the scheduler tells the depot: prefetch hints for queued requests, sessions, prefill speed.

A request that vLLM leaves in its queue has its blocks brought from hard drives and buckets to
memory meanwhile. A request may name its session and the session's state in `kv_transfer_params`;
the depot is told when the request is over.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvdepot.adapters.prefill_report import PrefillReporter
from kvdepot.adapters.vllm.metrics import RateLimitedWarnings
from kvdepot.adapters.vllm.requests import EngineRequest, Phase, TrackedRequest
from kvdepot.adapters.vllm.shared_depot import SharedDepot
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import PrefetchHint
from kvdepot.core.sessions import checked_name, state_of
from kvdepot.errors import KVDepotError

SESSION: Final = "kvdepot_session"
STATE: Final = "kvdepot_state"
_REQUESTS_A_STEP: Final = 4
"""Requests looked at between two steps: the next step must not wait for a long queue."""
_HINTED_MAX: Final = 32
"""Requests with hints under way; those behind them wait long enough to be hinted at later."""
_SALT_BYTES: Final = 8
_SUPERSEDED: Final = "kvdepot: superseded"
"""Windows and states that nothing goes on from are told of as a session that is closed."""
_SLOW_TIERS: Final = frozenset({"hdd", "object"})
"""Blocks in a faster tier load soon enough without a hint."""


class QueueHints:
    """Belongs to the scheduler's thread."""

    def __init__(self, depot: SharedDepot, warnings: RateLimitedWarnings, hint_s: float) -> None:
        self._depot = depot
        self._warnings = warnings
        self._hint_s = hint_s
        self.prefill = PrefillReporter(lambda: depot.store, warnings.warn)
        self._waiting: dict[str, TrackedRequest] = {}
        """New requests that have not begun, in the order in which they came."""
        self._hints: dict[str, list[PrefetchHint]] = {}
        self._unsent: dict[str, list[tuple[str, str, list[BlockKey]]]] = {}
        """Sessions of requests that are over, but whose last blocks are still being saved."""
        self._repeat: list[tuple[str, str, list[BlockKey]]] = []
        """Sessions to report once more: their last blocks may have been saved since."""

    def queued(self, tracked: TrackedRequest) -> None:
        """A new request: if the next step does not begin it, its blocks are hinted at."""
        if self._hint_s > 0 and not tracked.request.skip_reading_prefix_cache:
            self._waiting[tracked.request.request_id] = tracked

    def begun(self, request_id: str) -> None:
        """A request loads, computes or is gone: its hints end."""
        self._waiting.pop(request_id, None)
        for hint in self._hints.pop(request_id, ()):
            hint.cancel()

    def after_schedule(self) -> None:
        """A step was scheduled: give hints for requests that are still in the queue."""
        repeat, self._repeat = self._repeat, []
        for session in repeat:
            self._report_session(*session)
        names = list(self._waiting)[:_REQUESTS_A_STEP]
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
                self._hint(tracked)

    def finished(self, request: EngineRequest, tracked: TrackedRequest, *, awaited: bool) -> None:
        """A request is over; `awaited`: `saved` follows when its last blocks are saved."""
        self.begun(request.request_id)
        told = []
        if superseded := tracked.superseded():
            told.append((_SUPERSEDED, "closed", superseded))
        try:
            session = session_of(request)
        except KVDepotError as error:
            self._warnings.warn("a request's session is left out", error)
            session = None
        if session is not None:
            block_keys = tracked.block_keys
            block_keys.grow(request.all_token_ids, request.num_tokens // block_keys.block_tokens)
            keys = [key for shard in block_keys.keys(0, len(block_keys)) for key in shard]
            self._report_session(*session, keys)
            told.append((*session, keys))
        if told and awaited:
            self._unsent[request.request_id] = told
        else:
            self._repeat += told

    def saved(self, request_ids: Iterable[str]) -> None:
        """The last blocks of these requests are in the depot."""
        for request_id in request_ids:
            for session in self._unsent.pop(request_id, ()):
                self._report_session(*session)

    def close(self) -> None:
        for name in list(self._hints):
            self.begun(name)

    def _hint(self, tracked: TrackedRequest) -> None:
        request, block_keys = tracked.request, tracked.block_keys
        blocks = request.num_tokens // block_keys.block_tokens
        block_keys.grow(request.all_token_ids, blocks)
        store = self._depot.store
        try:
            hints = []
            for keys in block_keys.keys(0, blocks):
                tiers = store.match(keys).tiers
                if not _SLOW_TIERS.isdisjoint(tiers):
                    hints.append(store.hint(keys[: len(tiers)], self._hint_s))
        except KVDepotError as error:
            self._warnings.warn("the depot takes no hints", error)
            return
        under_way = [hint for hint in hints if not hint.wait(0.0)]
        if under_way:
            self._hints[request.request_id] = under_way

    def _report_session(self, name: str, state: str, keys: list[BlockKey]) -> None:
        if not keys:
            return
        try:
            self._depot.store.session(name, keys, state)
        except KVDepotError as error:
            self._warnings.warn("the depot cannot be told of sessions", error)


def session_of(request: Any) -> tuple[str, str] | None:
    """Name and state of a request's session, None if it has none; ConfigError if not valid.

    Requests with different salts must not share a session, so a salt is a part of the name.
    """
    params = getattr(request, "kv_transfer_params", None)
    if not isinstance(params, Mapping) or SESSION not in params:
        return None
    name, state = checked_name(params[SESSION]), str(params.get(STATE, "alive"))
    state_of(state)
    if request.cache_salt:
        salt = hashlib.blake2b(request.cache_salt.encode(), digest_size=_SALT_BYTES).hexdigest()
        name = checked_name(f"{salt} {name}")
    return name, state
