"""Stand-ins for a tier: one in plain memory, and wrappers that fail, dawdle or count.

A wrapper is a tier around a tier; wrappers can be stacked. None of them needs pytest.
"""

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvdepot.codec.record import HEAD_BYTES, TABLE_OFFSET, parse_own
from kvdepot.core.clock import Clock, SystemClock
from kvdepot.core.tier import Found, Health, Load, Outcome, Pending, Usage
from kvdepot.native import COPY, address_of, checksum
from kvdepot.tiers.memory.copy_ops import transfers

GARBAGE: Final = 0xA5
"""What a failed load leaves behind, so that whoever looks at it is found out."""


class PlainTier(Protocol):
    """What the wrappers here wrap."""

    name: str

    def store(self, images: Sequence[memoryview]) -> list[int | None]: ...
    def load(
        self, loads: Sequence[Load], timeout_s: float
    ) -> tuple[list[Outcome], Pending | None]: ...
    def discard(self, locations: Sequence[int], payload_bytes: Sequence[int]) -> None: ...
    def scan(self) -> Iterator[Found]: ...
    def flush(self) -> bool: ...
    def usage(self) -> Usage: ...
    def health(self) -> Health: ...
    def close(self) -> None: ...


class MemoryTier:
    """Records as bytes in a dict: the plainest tier there is. Implements core.tier.Tier."""

    name = "memory"

    def __init__(self, capacity_bytes: int) -> None:
        self.records: dict[int, bytes] = {}
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._next = 0
        self._lock = threading.Lock()

    def store(self, images: Sequence[memoryview]) -> list[int | None]:
        return [self._keep(bytes(image)) for image in images]

    def load(self, loads: Sequence[Load], timeout_s: float) -> tuple[list[Outcome], Pending | None]:
        del timeout_s  # memory answers at once
        return [self._serve(load) for load in loads], None

    def discard(self, locations: Sequence[int], payload_bytes: Sequence[int]) -> None:
        del payload_bytes  # the records are here to be measured
        with self._lock:
            for location in locations:
                self._used_bytes -= len(self.records.pop(location))

    def scan(self) -> Iterator[Found]:
        return iter(())

    def flush(self) -> bool:
        return True

    def usage(self) -> Usage:
        return Usage(self._capacity_bytes, self._used_bytes, self._used_bytes)

    def health(self) -> Health:
        return Health(True)

    def close(self) -> None:
        with self._lock:
            self.records.clear()
            self._used_bytes = 0

    def _keep(self, record: bytes) -> int | None:
        with self._lock:
            if self._used_bytes + len(record) > self._capacity_bytes:
                return None
            self._used_bytes += len(record)
            self._next += 1
            self.records[self._next] = record
            return self._next

    def _serve(self, load: Load) -> Outcome:
        record = memoryview(self.records.get(load.location, b""))
        if not record:
            return Outcome.CORRUPT
        _, key, _, payload_bytes = parse_own(record)
        if key != load.key or payload_bytes != load.payload_bytes:
            return Outcome.CORRUPT
        start, stop = HEAD_BYTES + load.start, HEAD_BYTES + load.stop
        if not _intact(record, load):
            return Outcome.CORRUPT
        load.image[:HEAD_BYTES] = record[:HEAD_BYTES]
        load.image[start:stop] = record[start:stop]
        if load.copy_to:
            source = address_of(load.image)[0] + start
            transfers([(0, source, load.copy_to, stop - start, 0, 0, COPY)])
        return Outcome.OK


def _intact(record: memoryview, load: Load) -> bool:
    """Whether the chunks of a load's range match the checksums in the record's head."""
    for at in range(load.start, load.stop, load.chunk_bytes):
        entry = TABLE_OFFSET + 8 * (at // load.chunk_bytes)
        chunk = record[HEAD_BYTES + at : HEAD_BYTES + min(at + load.chunk_bytes, load.stop)]
        if checksum(chunk) != int.from_bytes(record[entry : entry + 8], "little"):
            return False
    return True


class WrappedTier:
    """A tier that hands everything on to `inner`. Base of the wrappers."""

    def __init__(self, inner: PlainTier) -> None:
        self.inner = inner
        self.name = inner.name

    def store(self, images: Sequence[memoryview]) -> list[int | None]:
        return self.inner.store(images)

    def load(self, loads: Sequence[Load], timeout_s: float) -> tuple[list[Outcome], Pending | None]:
        return self.inner.load(loads, timeout_s)

    def discard(self, locations: Sequence[int], payload_bytes: Sequence[int]) -> None:
        self.inner.discard(locations, payload_bytes)

    def scan(self) -> Iterator[Found]:
        return self.inner.scan()

    def flush(self) -> bool:
        return self.inner.flush()

    def usage(self) -> Usage:
        return self.inner.usage()

    def health(self) -> Health:
        return self.inner.health()

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True, slots=True)
class Rates:
    """How often calls fail, from 0 to 1, drawn from `seed`."""

    seed: int
    store: float = 0.0
    load: Mapping[Outcome, float] = field(default_factory=dict)


class FaultyTier(WrappedTier):
    """Fails when told to: the next calls by script, others at random by rates.

    A failed load leaves garbage in its image and at its `copy_to`. A late one does so when
    `release_late` is called, and is busy until then.
    """

    def __init__(self, inner: PlainTier, rates: Rates | None = None) -> None:
        super().__init__(inner)
        self._rates = rates or Rates(0)
        self._random = random.Random(self._rates.seed)
        self._stores = 0
        self._loads: deque[Outcome] = deque()
        self._late: list[HeldLoads] = []
        self._lock = threading.Lock()

    def fail_stores(self, count: int) -> None:
        """The next `count` images are not stored."""
        with self._lock:
            self._stores += count

    def fail_loads(self, outcome: Outcome, count: int = 1) -> None:
        """The next `count` blocks that are loaded end in `outcome`."""
        with self._lock:
            self._loads.extend([outcome] * count)

    def release_late(self) -> None:
        """Late loads end now; what they were given is overwritten one last time."""
        with self._lock:
            held, self._late = self._late, []
        for loads in held:
            loads.release()

    def store(self, images: Sequence[memoryview]) -> list[int | None]:
        with self._lock:
            bad = [self._draw_store() for _ in images]
        good = [image for image, fails in zip(images, bad, strict=True) if not fails]
        stored = iter(self.inner.store(good) if good else [])
        return [None if fails else next(stored) for fails in bad]

    def load(self, loads: Sequence[Load], timeout_s: float) -> tuple[list[Outcome], Pending | None]:
        with self._lock:
            outcomes = [self._draw_load() for _ in loads]
        good = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        pending = None
        if good:
            answers, pending = self.inner.load([loads[i] for i in good], timeout_s)
            for i, answer in zip(good, answers, strict=True):
                outcomes[i] = answer
        mine = sorted(set(range(len(loads))) - set(good))
        late = [loads[i] for i in mine if outcomes[i] is Outcome.LATE]
        for i in mine:
            if outcomes[i] is not Outcome.LATE:
                scribble(loads[i])
        if not late:
            return outcomes, pending
        held = HeldLoads(late, pending)
        with self._lock:
            self._late.append(held)
        return outcomes, held

    def close(self) -> None:
        self.release_late()
        super().close()

    def _draw_store(self) -> bool:
        if self._stores:
            self._stores -= 1
            return True
        return self._random.random() < self._rates.store

    def _draw_load(self) -> Outcome:
        if self._loads:
            return self._loads.popleft()
        drawn = self._random.random()
        for outcome, rate in self._rates.load.items():
            if drawn < rate:
                return outcome
            drawn -= rate
        return Outcome.OK


@dataclass(slots=True)
class HeldLoads:
    """Loads that do not end before `release`. Implements core.tier.Pending."""

    loads: list[Load]
    other: Pending | None = None
    _released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        if not self._released.is_set():
            for load in self.loads:
                scribble(load)
            self._released.set()

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        if not self._released.wait(timeout_s):
            return False
        return self.other is None or self.other.wait(max(0.0, deadline - time.monotonic()))


def scribble(load: Load) -> None:
    """Fill with garbage what a load that is not OK leaves undefined."""
    garbage = bytes([GARBAGE]) * len(load.image)
    load.image[:] = garbage
    if load.copy_to:
        source = address_of(garbage)[0]
        transfers([(0, source, load.copy_to, load.stop - load.start, 0, 0, COPY)])


class SlowTier(WrappedTier):
    """Takes `delay_s` longer for every store and load; late where the deadline is shorter."""

    def __init__(
        self,
        inner: PlainTier,
        delay_s: float,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self.delay_s = delay_s
        self._clock = clock or SystemClock()
        self._sleep = sleep

    def store(self, images: Sequence[memoryview]) -> list[int | None]:
        self._sleep(self.delay_s)
        return self.inner.store(images)

    def load(self, loads: Sequence[Load], timeout_s: float) -> tuple[list[Outcome], Pending | None]:
        if loads and self.delay_s > timeout_s:
            ends_at_s = self._clock.now() + self.delay_s
            self._sleep(timeout_s)
            return [Outcome.LATE] * len(loads), _Countdown(ends_at_s, self._clock, self._sleep)
        self._sleep(self.delay_s)
        return self.inner.load(loads, timeout_s - self.delay_s)


@dataclass(frozen=True, slots=True)
class _Countdown:
    """Pending until a time."""

    ends_at_s: float
    clock: Clock
    sleep: Callable[[float], None]

    def wait(self, timeout_s: float) -> bool:
        left_s = max(0.0, self.ends_at_s - self.clock.now())
        self.sleep(min(left_s, timeout_s))
        return left_s <= timeout_s


class CountingTier(WrappedTier):
    """Counts calls by name, blocks by verb and bytes by direction; and what became of loads."""

    def __init__(self, inner: PlainTier) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.outcomes: Counter[Outcome] = Counter()
        self._lock = threading.Lock()

    def store(self, images: Sequence[memoryview]) -> list[int | None]:
        locations = self.inner.store(images)
        kept = [image for image, at in zip(images, locations, strict=True) if at is not None]
        self._count("store", len(kept), sum(map(len, kept)))
        return locations

    def load(self, loads: Sequence[Load], timeout_s: float) -> tuple[list[Outcome], Pending | None]:
        outcomes, pending = self.inner.load(loads, timeout_s)
        answered = zip(loads, outcomes, strict=True)
        good = [load for load, outcome in answered if outcome is Outcome.OK]
        self._count("load", len(good), sum(load.stop - load.start for load in good))
        with self._lock:
            self.outcomes.update(outcomes)
        return outcomes, pending

    def discard(self, locations: Sequence[int], payload_bytes: Sequence[int]) -> None:
        self.inner.discard(locations, payload_bytes)
        self._count("discard", len(locations))

    def flush(self) -> bool:
        self._count("flush")
        return self.inner.flush()

    def close(self) -> None:
        self._count("close")
        self.inner.close()

    def _count(self, verb: str, blocks: int = 0, nbytes: int = 0) -> None:
        with self._lock:
            self.calls[verb] += 1
            self.blocks[verb] += blocks
            self.nbytes[verb] += nbytes
