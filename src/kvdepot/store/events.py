"""Events of a store, for those that watch it: metrics, ledger, trace recorder.

The parts of the store emit events; none of them knows an observer. Events are delivered in the
order in which they were emitted, in batches, by one thread and without the store's lock. Where the
order of two events matters, both are emitted with that lock held.
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvdepot.core.first_token import FirstToken
from kvdepot.core.keys import Keys

RING_MAX: Final = 1 << 14
"""Events that wait to be delivered. Further ones are lost, and counted."""
_WAKE_AT: Final = RING_MAX // 8
_PAUSE_S: Final = 0.1
"""Events are delivered at least this often while there are any."""
_log = logging.getLogger("kvdepot.store")


@dataclass(slots=True)
class LookedUp:
    """A caller looked a prompt up. `found`: the fastest tier of each resident block of its prefix,
    as a place in TIER_NAMES; only how many there are matters to a lease.
    """

    at_s: float
    keys: Keys
    found: bytes
    is_lease: bool = False


@dataclass(slots=True)
class BlocksServed:
    """Blocks of one namespace were given to a caller."""

    tag: bytes
    tier: str
    blocks: int
    nbytes: int
    whole: float
    """The same in whole blocks: a part of a block counts as that part."""
    before: int
    """Blocks before the first one in its prompt."""
    last: int
    """Digest of the last block's key."""


@dataclass(slots=True)
class Counted:
    """Something happened that is only counted: see `observers.activity.COUNTERS`."""

    name: str
    count: int


@dataclass(slots=True)
class Took:
    """The duration of one stage of a call. `what` is the tier or the request."""

    stage: str
    what: str
    seconds: float


@dataclass(slots=True)
class Registered:
    """A namespace is used from now on."""

    tag: bytes
    description: bytes


@dataclass(slots=True)
class SessionNamed:
    """The prompt of a session in one namespace."""

    tag: bytes
    name: str
    keys: Keys


@dataclass(slots=True)
class PrefillReported:
    """An engine has measured its prefill: seconds for a token, and for a pair that attends."""

    tag: bytes
    token_s: float
    pair_s: float


@dataclass(slots=True)
class FirstTokenReported:
    """An engine has answered the first token of a request."""

    at_s: float
    first: FirstToken


@dataclass(slots=True)
class Lost:
    """Events were not delivered, because too many waited."""

    count: int


Event = (
    LookedUp | BlocksServed | Counted | Took | Registered | SessionNamed | PrefillReported
    | FirstTokenReported | Lost
)  # fmt: skip


class Observer(Protocol):
    """Watches a store."""

    def observe(self, events: Sequence[Event]) -> None:
        """Events in their order. An observer that raises gets no more."""


class Events:
    """The events of one store that wait to be delivered. Thread-safe."""

    def __init__(self) -> None:
        self._ring: deque[Event] = deque()
        self._lost = 0
        self._observers: list[Observer] = []
        self._delivering = threading.Lock()
        self._wake = threading.Event()
        self._full = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def subscribe(self, observer: Observer) -> None:
        """Deliver events to an observer from now on."""
        with self._delivering:
            self._observers.append(observer)

    def unsubscribe(self, observer: Observer) -> None:
        """Deliver what was emitted so far, then no more."""
        self.deliver()
        with self._delivering:
            if observer in self._observers:
                self._observers.remove(observer)

    def start(self) -> None:
        """Begin to deliver in the background."""
        self._thread = threading.Thread(target=self._run, name="kvdepot-observers", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        """Queue an event. Does not block."""
        ring = self._ring
        if len(ring) >= RING_MAX:
            self._lost += 1
            return
        ring.append(event)
        if not self._wake.is_set():
            self._wake.set()
        elif len(ring) == _WAKE_AT:
            self._full.set()

    def count(self, name: str, count: int = 1) -> None:
        """Emit `Counted`, unless the count is 0."""
        if count:
            self.emit(Counted(name, count))

    def took(self, stage: str, seconds: float, what: str = "") -> None:
        self.emit(Took(stage, what, seconds))

    def deliver(self) -> None:
        """Deliver what was emitted before this call. Blocks while observers work."""
        with self._delivering:
            ring, batch = self._ring, []
            for _ in range(len(ring)):
                batch.append(ring.popleft())
            if self._lost:
                lost, self._lost = self._lost, 0
                batch.append(Lost(lost))
                _log.warning("%d events were lost: counts are too low", lost)
            for observer in list(self._observers) if batch else ():
                try:
                    observer.observe(batch)
                except Exception:
                    self._observers.remove(observer)
                    _log.exception("%s is not told of events any more", type(observer).__name__)

    def close(self) -> None:
        """Deliver what is left and end the thread."""
        self._closed = True
        self._wake.set()
        self._full.set()
        if self._thread is not None:
            self._thread.join()
        self.deliver()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._full.wait(_PAUSE_S)  # so that many events come in one batch
            self._full.clear()
            self._wake.clear()
            self.deliver()
