"""What the scheduler knows before the depot does: who waits for its turn, and whose session it is.

A request that vLLM leaves in its queue has its blocks brought from hard drives to memory meanwhile,
so that its load finds them there. A request may name its session and say what becomes of it, in
`kv_transfer_params`; when it is over the depot is told.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvdepot.adapters.vllm.complaints import Complaints
from kvdepot.adapters.vllm.depot import Depot
from kvdepot.adapters.vllm.requests import EngineRequest, Phase, Tracked
from kvdepot.core.block import BlockKey
from kvdepot.errors import KVDepotError
from kvdepot.store.sessions import checked_name, state_of

SESSION: Final = "kvdepot_session"
STATE: Final = "kvdepot_state"
_A_STEP: Final = 4
"""Requests looked at between two steps: the next step must not wait for a long queue."""
_AT_ONCE: Final = 32
"""Requests with hints under way; what comes behind them waits long enough to be hinted at later."""
_SALT_BYTES: Final = 8
_SLOW: Final = "hdd"
"""What lies in a faster tier is there soon enough when it is loaded."""


class UnderWay(Protocol):
    """A hint that was taken."""

    def cancel(self) -> None: ...

    def wait(self, timeout_s: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class Note:
    """What a request says of its session."""

    name: str
    state: str


class Foresight:
    """Belongs to the scheduler's thread."""

    def __init__(self, depot: Depot, complaints: Complaints, hint_s: float) -> None:
        self._depot = depot
        self._complaints = complaints
        self._hint_s = hint_s
        self._waiting: dict[str, Tracked] = {}
        """New requests that have not begun, in the order in which they came."""
        self._hints: dict[str, list[UnderWay]] = {}
        self._untold: dict[str, tuple[Note, list[BlockKey]]] = {}
        """Sessions of requests that are over, but whose last blocks are still being saved."""
        self._again: list[tuple[Note, list[BlockKey]]] = []
        """Sessions to be told of once more: their last blocks may have come since."""

    def queued(self, tracked: Tracked) -> None:
        """A new request: if the next step does not begin it, its blocks are hinted at."""
        if self._hint_s > 0 and not tracked.request.skip_reading_prefix_cache:
            self._waiting[tracked.request.request_id] = tracked

    def begun(self, request_id: str) -> None:
        """A request loads, computes or is gone: it reads for itself what has not come."""
        self._waiting.pop(request_id, None)
        for hint in self._hints.pop(request_id, ()):
            hint.cancel()

    def look_ahead(self) -> None:
        """A step was scheduled: bring what those need who are still in the queue."""
        again, self._again = self._again, []
        for note, keys in again:
            self._tell(note, keys)
        names = list(self._waiting)[:_A_STEP]
        if not names or len(self._hints) >= _AT_ONCE:
            self._forget_ended()
            return
        for name in names:
            tracked = self._waiting.pop(name)
            if tracked.phase is Phase.QUEUED:
                self._hint(tracked)

    def finished(self, request: EngineRequest, tracked: Tracked, *, awaited: bool) -> None:
        """A request is over; `awaited`: it will be `sent` when its last blocks are saved."""
        self.begun(request.request_id)
        try:
            note = note_of(request)
        except KVDepotError as error:
            self._complaints.say("a request's session is left out", error)
            return
        if note is None:
            return
        tracked.chain.grow(request.all_token_ids, request.num_tokens // tracked.chain.block_tokens)
        keys = [key for shard in tracked.chain.keys(0, len(tracked.chain)) for key in shard]
        self._tell(note, keys)
        if awaited:
            self._untold[request.request_id] = note, keys
        else:
            self._again.append((note, keys))

    def sent(self, request_ids: Iterable[str]) -> None:
        """What these requests have saved is in the depot."""
        for request_id in request_ids:
            if request_id in self._untold:
                self._tell(*self._untold.pop(request_id))

    def close(self) -> None:
        for name in list(self._hints):
            self.begun(name)

    def _hint(self, tracked: Tracked) -> None:
        request, chain = tracked.request, tracked.chain
        blocks = request.num_tokens // chain.block_tokens
        chain.grow(request.all_token_ids, blocks)
        store = self._depot.store
        try:
            hints: list[UnderWay] = [
                store.hint(keys, self._hint_s)
                for keys in chain.keys(0, blocks)
                if _SLOW in store.match(keys).tiers
            ]
        except KVDepotError as error:
            self._complaints.say("the depot takes no hints", error)
            return
        under_way = [hint for hint in hints if not hint.wait(0.0)]
        if under_way:
            self._hints[request.request_id] = under_way

    def _forget_ended(self) -> None:
        ended = [name for name, some in self._hints.items() if all(one.wait(0.0) for one in some)]
        for name in ended:
            del self._hints[name]

    def _tell(self, note: Note, keys: list[BlockKey]) -> None:
        if not keys:
            return
        try:
            self._depot.store.session(note.name, keys, note.state)
        except KVDepotError as error:
            self._complaints.say("the depot cannot be told of sessions", error)


def note_of(request: Any) -> Note | None:
    """What a request says of its session, None if nothing; ConfigError if it makes no sense.

    Requests with different salts must not meet, so a salt is a part of the name.
    """
    params = getattr(request, "kv_transfer_params", None)
    if not isinstance(params, Mapping) or SESSION not in params:
        return None
    name, state = checked_name(params[SESSION]), str(params.get(STATE, "alive"))
    state_of(state)
    if request.cache_salt:
        salt = hashlib.blake2b(request.cache_salt.encode(), digest_size=_SALT_BYTES).hexdigest()
        name = checked_name(f"{salt} {name}")
    return Note(name, state)
