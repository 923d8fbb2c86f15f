"""The events of a store, for its observers: metrics, ledger, trace recorder.

The parts of the store emit events and know no observers. One thread delivers the events in batches,
in the order of emission and without the store's lock. If the order of two events matters, both are
emitted with that lock held.
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
"""Most events that wait for delivery. Further ones are dropped and counted."""
_WAKE_AT: Final = RING_MAX // 8
_PAUSE_S: Final = 0.1
"""Longest time between two deliveries."""
_log = logging.getLogger("kvdepot.store")


@dataclass(slots=True)
class LookedUp:
    """A caller looked up a prompt. `found` has the fastest tier (index in TIER_NAMES) of each block
    of the resident prefix.
    """

    at_s: float
    keys: Keys
    found: bytes
    is_lease: bool = False


@dataclass(slots=True)
class BlocksServed:
    """Blocks of one namespace were served."""

    tag: bytes
    tier: str
    blocks: int
    nbytes: int
    whole: float
    """Number of blocks; a part of a block counts as a fraction."""
    before: int
    """Number of blocks before the first one in the prompt."""
    last: int
    """Digest of the last block's key."""


@dataclass(slots=True)
class Counted:
    """An increment of one of `observers.activity.COUNTERS`."""

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
    """A namespace was registered."""

    tag: bytes
    description: bytes


@dataclass(slots=True)
class SessionNamed:
    """A session was named, with its prompt in one namespace."""

    tag: bytes
    name: str
    keys: Keys


@dataclass(slots=True)
class PrefillReported:
    """An engine has reported its prefill speed: seconds per token, and per attending pair."""

    tag: bytes
    token_s: float
    pair_s: float


@dataclass(slots=True)
class FirstTokenReported:
    """An engine has reported the time to a first token."""

    at_s: float
    first: FirstToken


@dataclass(slots=True)
class Lost:
    """Events were dropped, because too many waited."""

    count: int


Event = (
    LookedUp | BlocksServed | Counted | Took | Registered | SessionNamed | PrefillReported
    | FirstTokenReported | Lost
)  # fmt: skip


class Observer(Protocol):
    """Receives the events of a store."""

    def observe(self, events: Sequence[Event]) -> None:
        """Called with events in their order. An observer that raises is unsubscribed."""


class Events:
    """Queues and delivers the events of one store. Thread-safe."""

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
        """Deliver the events emitted so far, then no more. Blocks while observers work."""
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
        """Deliver all events emitted before this call. Blocks while observers work."""
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
                    _log.exception("unsubscribed %s after an exception", type(observer).__name__)

    def close(self) -> None:
        """Deliver the remaining events and end the thread. Blocks."""
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
