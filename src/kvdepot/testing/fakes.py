"""Stand-ins for a volume: one in plain memory, and wrappers that fail, are slow or count.

A wrapper is a volume around a volume; wrappers can be stacked. None of them needs pytest.
"""

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.core.clock import Clock, StampClock, SystemClock, WallClock
from kvdepot.core.volume import (
    NO_PLACE,
    Array,
    Ints,
    Outcome,
    Outcomes,
    PendingRead,
    Priority,
    Purpose,
    Volume,
    VolumeContext,
)
from kvdepot.format.record import record_bytes, record_sizes
from kvdepot.native.memory import view_at
from kvdepot.volumes.named import NamedVolume

GARBAGE: Final = 0xA5
"""What a failed read leaves behind, so that a test notices when it is used."""


CONTEXT: Final = VolumeContext(SystemClock(), WallClock(), StampClock(WallClock()))
"""Opens a volume without a store, for writing."""


class MemoryMedium(dict[str, bytes]):
    """Values in a dict. Given to another MemoryVolume, it stands for a restart. Implements
    volumes.named.NamedValues.
    """

    def names(self) -> list[str]:
        return list(self)

    def write(self, name: str, value: bytes) -> None:
        self[name] = value

    def read(self, name: str, nbytes: int) -> bytes:
        return self.get(name, b"")[:nbytes]

    def delete(self, name: str) -> None:
        self.pop(name, None)


class MemoryVolume(NamedVolume):
    """A volume in plain memory."""

    def __init__(
        self,
        capacity_bytes: int,
        medium: MemoryMedium | None = None,
        label: str = "memory",
        context: VolumeContext = CONTEXT,
    ) -> None:
        self.medium = MemoryMedium() if medium is None else medium
        super().__init__(self.medium, context, label, capacity_bytes)


class WrappedVolume:
    """A volume that hands everything on to `inner`. Base of the wrappers."""

    def __init__(self, inner: Volume) -> None:
        self.inner = inner
        self.facts = inner.facts
        self.segments = inner.segments
        self.release = inner.release
        self.put_meta = inner.put_meta
        self.contents = inner.contents
        self.set_limits = inner.set_limits
        self.maintain = inner.maintain

    def append(self, records: Array, purpose: Purpose = Purpose.BLOCK) -> Ints:
        return self.inner.append(records, purpose)

    def read(self, reads: Array, priority: Priority, timeout_s: float) -> PendingRead:
        return self.inner.read(reads, priority, timeout_s)

    def discard(self, places: Ints, payload_bytes: Ints) -> None:
        self.inner.discard(places, payload_bytes)

    def sync(self, timeout_s: float) -> bool:
        return self.inner.sync(timeout_s)

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True, slots=True)
class Rates:
    """How often calls fail, from 0 to 1, drawn from `seed`."""

    seed: int
    append: float = 0.0
    read: Mapping[Outcome, float] = field(default_factory=dict)


class FaultyVolume(WrappedVolume):
    """Fails when told to: the next calls by script, others at random by rates.

    A failed read leaves garbage in its image and at its target. A late one does so when
    `release_late` is called, and is busy until then.
    """

    def __init__(self, inner: Volume, rates: Rates | None = None) -> None:
        super().__init__(inner)
        self._rates = rates or Rates(0)
        self._random = random.Random(self._rates.seed)
        self._appends = 0
        self._reads: deque[Outcome] = deque()
        self._late: list[FaultyRead] = []
        self._lock = threading.Lock()

    def fail_appends(self, count: int) -> None:
        """The next `count` records are not written."""
        with self._lock:
            self._appends += count

    def fail_reads(self, outcome: Outcome, count: int = 1) -> None:
        """The next `count` blocks that are read end in `outcome`."""
        with self._lock:
            self._reads.extend([outcome] * count)

    def release_late(self) -> None:
        """Late reads end now; what they were given is overwritten one last time."""
        with self._lock:
            late, self._late = self._late, []
        for reads in late:
            reads.release()

    def append(self, records: Array, purpose: Purpose = Purpose.BLOCK) -> Ints:
        places = np.full(len(records), NO_PLACE, np.int64)
        with self._lock:
            good = np.array([not self._draw_append() for _ in records], bool)
        if good.any():
            places[good] = self.inner.append(records[good], purpose)
        return places

    def read(self, reads: Array, priority: Priority, timeout_s: float) -> PendingRead:
        with self._lock:
            outcomes = np.array([self._draw_read() for _ in reads], np.uint8)
        good = outcomes == Outcome.OK
        inner = self.inner.read(reads[good], priority, timeout_s)
        faulty = FaultyRead(inner, reads, outcomes)
        if (outcomes == Outcome.LATE).any():
            with self._lock:
                self._late.append(faulty)
        return faulty

    def close(self) -> None:
        self.release_late()
        super().close()

    def _draw_append(self) -> bool:
        if self._appends:
            self._appends -= 1
            return True
        return self._random.random() < self._rates.append

    def _draw_read(self) -> Outcome:
        if self._reads:
            return self._reads.popleft()
        drawn = self._random.random()
        for outcome, rate in self._rates.read.items():
            if drawn < rate:
                return outcome
            drawn -= rate
        return Outcome.OK


class FaultyRead:
    """Reads of which some fail, or do not end before `release`."""

    def __init__(self, inner: PendingRead, reads: Array, outcomes: Outcomes) -> None:
        self._inner = inner
        self._reads = reads
        self._outcomes = outcomes
        self._good = outcomes == Outcome.OK
        self._free = threading.Event()
        if not (outcomes == Outcome.LATE).any():
            self._free.set()

    def release(self) -> None:
        """Late reads end."""
        scribble(self._reads[self._outcomes == Outcome.LATE])
        self._free.set()

    def when_done(self, call: Callable[[], None]) -> None:
        self._inner.when_done(call)

    def result(self) -> Outcomes:
        scribble(self._reads[~self._good & (self._outcomes != Outcome.LATE)])
        outcomes = self._outcomes.copy()
        outcomes[self._good] = self._inner.result()
        return outcomes

    def cancel(self) -> bool:
        return False

    def released(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        if not self._free.wait(timeout_s):
            return False
        return self._inner.released(max(0.0, deadline - time.monotonic()))


def scribble(reads: Array) -> None:
    """Fill with garbage what reads that are not OK leave undefined."""
    for read in reads:
        size = int(read["payload_bytes"])
        view_at(int(read["image"]), record_bytes(size))[:] = GARBAGE
        if read["target"]:
            view_at(int(read["target"]), int(read["stop"] - read["start"]))[:] = GARBAGE


class SlowVolume(WrappedVolume):
    """Takes `delay_s` longer for every append and read; late where the deadline is shorter."""

    def __init__(
        self,
        inner: Volume,
        delay_s: float,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self.delay_s = delay_s
        self._clock = clock or SystemClock()
        self._sleep = sleep

    def append(self, records: Array, purpose: Purpose = Purpose.BLOCK) -> Ints:
        self._sleep(self.delay_s)
        return self.inner.append(records, purpose)

    def read(self, reads: Array, priority: Priority, timeout_s: float) -> PendingRead:
        if len(reads) and self.delay_s > timeout_s:
            ends_at_s = self._clock.now() + self.delay_s
            self._sleep(timeout_s)
            return _Countdown(len(reads), ends_at_s, self._clock, self._sleep)
        self._sleep(self.delay_s)
        return self.inner.read(reads, priority, timeout_s - self.delay_s)


@dataclass(frozen=True, slots=True)
class _Countdown:
    """Reads that end at a moment, too late."""

    count: int
    ends_at_s: float
    clock: Clock
    sleep: Callable[[float], None]

    def when_done(self, call: Callable[[], None]) -> None:
        call()

    def result(self) -> Outcomes:
        return np.full(self.count, Outcome.LATE, np.uint8)

    def cancel(self) -> bool:
        return False

    def released(self, timeout_s: float) -> bool:
        left_s = max(0.0, self.ends_at_s - self.clock.now())
        self.sleep(min(left_s, timeout_s))
        return left_s <= timeout_s


class CountingVolume(WrappedVolume):
    """Counts calls by name, blocks by verb and bytes by direction; and what became of reads."""

    def __init__(self, inner: Volume) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.outcomes: Counter[Outcome] = Counter()
        self._lock = threading.Lock()

    def append(self, records: Array, purpose: Purpose = Purpose.BLOCK) -> Ints:
        places = self.inner.append(records, purpose)
        kept = records[places != NO_PLACE]
        self.count("append", len(kept), int(record_sizes(kept["payload_bytes"]).sum()))
        return places

    def read(self, reads: Array, priority: Priority, timeout_s: float) -> PendingRead:
        return _CountedRead(self, self.inner.read(reads, priority, timeout_s), reads)

    def discard(self, places: Ints, payload_bytes: Ints) -> None:
        self.inner.discard(places, payload_bytes)
        self.count("discard", len(places))

    def sync(self, timeout_s: float) -> bool:
        self.count("sync")
        return self.inner.sync(timeout_s)

    def close(self) -> None:
        self.count("close")
        self.inner.close()

    def count(self, verb: str, blocks: int = 0, nbytes: int = 0) -> None:
        with self._lock:
            self.calls[verb] += 1
            self.blocks[verb] += blocks
            self.nbytes[verb] += nbytes

    def ended(self, outcomes: Outcomes) -> None:
        with self._lock:
            self.outcomes.update(map(Outcome, outcomes.tolist()))


class _CountedRead:
    def __init__(self, volume: CountingVolume, inner: PendingRead, reads: Array) -> None:
        self._volume = volume
        self._inner = inner
        self._reads = reads
        self.when_done = inner.when_done
        self.cancel = inner.cancel
        self.released = inner.released

    def result(self) -> Outcomes:
        outcomes = self._inner.result()
        good = self._reads[outcomes == Outcome.OK]
        self._volume.count("read", len(good), int((good["stop"] - good["start"]).sum()))
        self._volume.ended(outcomes)
        return outcomes
