"""Stand-ins for a tier: one in plain memory, and wrappers that fail, are slow or count.

A wrapper is a tier around a tier; wrappers can be stacked. None of them needs pytest.
"""

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvdepot.core.block import TAG_BYTES, BlockKey
from kvdepot.core.clock import Clock, SystemClock
from kvdepot.core.metadata import Metadata, MetaEntry
from kvdepot.core.tier import (
    NO_CONTENTS,
    Contents,
    DriveFacts,
    Health,
    Load,
    Loaded,
    MetaWritten,
    Outcome,
    Pending,
    Purpose,
    SegmentInfo,
    Tier,
    Usage,
    pack_location,
    segment_of,
)
from kvdepot.format.copy_ops import transfers
from kvdepot.format.record import Head, parse_head, place
from kvdepot.native import COPY, address_of
from kvdepot.volumes.records import deliver, describe_drive, is_intact

GARBAGE: Final = 0xA5
"""What a failed load leaves behind, so that a test notices when it is used."""


@dataclass(slots=True)
class MemoryMedium:
    """What a MemoryTier keeps. Given to another one, it stands for a restart."""

    records: dict[int, bytes] = field(default_factory=dict)
    """By segment: each has one record."""
    metadata: Metadata = field(default_factory=Metadata)


class MemoryTier:
    """Records as bytes in a dict, one a segment. Implements core.tier.Tier."""

    writable = True

    def __init__(
        self, capacity_bytes: int, medium: MemoryMedium | None = None, name: str = "memory"
    ) -> None:
        self.name = name
        self.medium = medium or MemoryMedium()
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._live: dict[int, int] = {}
        """Segments whose block is in use, with the bytes of its record."""
        self._unentered: set[int] = set()
        self._segment = max(self.medium.records, default=0)
        self._contents = self._recover()

    def append(
        self,
        drive: int,
        images: Sequence[memoryview],
        purpose: Purpose = Purpose.BLOCK,
    ) -> list[int | None]:
        del drive, purpose  # there is one drive, and nothing is kept back
        return [self._append(image) for image in images]

    def _append(self, image: memoryview) -> int | None:
        with self._lock:
            if self._held_bytes() + len(image) > self._capacity_bytes:
                return None
            self._segment += 1
            place(image, self._segment)
            self.medium.records[self._segment] = bytes(image)
            self._unentered.add(self._segment)
            return pack_location(0, self._segment, 0)

    def load(self, loads: Sequence[Load], timeout_s: float) -> Loaded:
        del timeout_s  # memory answers at once
        records = [self.medium.records.get(segment_of(load.location), b"") for load in loads]
        return [deliver(*pair) for pair in zip(records, loads, strict=True)], None

    def read_records(
        self, keys: Sequence[BlockKey], locations: Sequence[int], images: Sequence[memoryview]
    ) -> list[bool]:
        results = []
        for key, location, image in zip(keys, locations, images, strict=True):
            record = self.medium.records.get(segment_of(location), b"")
            results.append(len(record) == len(image) and is_intact(record, key))
            if results[-1]:
                image[:] = record
        return results

    def count(self, location: int, payload_bytes: int) -> None:
        del payload_bytes  # the record is here to be measured
        with self._lock:
            segment = segment_of(location)
            self._unentered.discard(segment)
            self._live[segment] = len(self.medium.records[segment])

    def discard(self, locations: Sequence[int], payload_bytes: Sequence[int]) -> None:
        del payload_bytes
        with self._lock:
            for location in locations:
                self._live.pop(segment_of(location), None)

    def put_meta(self, entries: Sequence[MetaEntry], sync_s: float | None = None) -> MetaWritten:
        del sync_s  # what is in the medium outlives the tier
        with self._lock:
            for entry in entries:
                self.medium.metadata.add(entry)
        return MetaWritten(1, 1)

    def metadata(self) -> Metadata:
        known = self.medium.metadata
        with self._lock:
            return Metadata(dict(known.entries), dict(known.tombstones))

    def has_room(self, drive: int, nbytes: int) -> bool:
        del drive
        with self._lock:
            return self._held_bytes() + nbytes <= self._capacity_bytes

    def segments(self, drive: int, *, reclaimable: bool = True) -> list[SegmentInfo]:
        del drive
        with self._lock:
            hidden = self._unentered if reclaimable else set()
            entered = sorted(self.medium.records.keys() - hidden)
            sizes = [(segment, self._live.get(segment, 0)) for segment in entered]
            return [SegmentInfo(segment, segment, size, int(size > 0)) for segment, size in sizes]

    def has_unentered(self, drive: int) -> bool:
        del drive
        return bool(self._unentered)

    def release(self, drive: int, slot: int) -> bool:
        del drive
        with self._lock:
            self._live.pop(slot, None)
            self.medium.records.pop(slot, None)
        return True

    def take_contents(self) -> Contents:
        contents, self._contents = self._contents, NO_CONTENTS
        return contents

    def drive_count(self) -> int:
        return 1

    def drive(self, drive: int) -> DriveFacts:
        del drive
        with self._lock:
            largest = max(map(len, self.medium.records.values()), default=1 << 20)
            spare = (self._capacity_bytes - self._held_bytes()) // largest
        return DriveFacts(
            label=self.name,
            up=True,
            takes_blocks=True,
            segment_bytes=largest,
            segments_max=max(1, self._capacity_bytes // largest),
            spare_segments=spare,
            record_bytes_max=self._capacity_bytes,
        )

    def is_up(self, drive: int | None = None) -> bool:
        del drive
        return True

    def write_budget(self) -> None:
        return None

    def flush(self, timeout_s: float = 10.0) -> bool:
        del timeout_s
        return True

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._capacity_bytes, sum(self._live.values()), self._held_bytes())

    def health(self) -> Health:
        return Health(True)

    def describe_drives(self) -> list[dict[str, Any]]:
        return [describe_drive(self.drive(0), self.usage(), self.health())]

    def close(self) -> None:
        pass

    def _held_bytes(self) -> int:
        return sum(map(len, self.medium.records.values()))

    def _is_removed(self, head: Head) -> bool:
        stones = self.medium.metadata.tombstones
        found = (stones.get(head.key), stones.get(head.key[:TAG_BYTES]))
        return any(stone is not None and head.stamp < stone.below for stone in found)

    def _recover(self) -> Contents:
        """Take in the newest record of each key that was not removed; drop all others."""
        newest: dict[BlockKey, tuple[int, Head]] = {}
        for segment, record in sorted(self.medium.records.items()):
            head = parse_head(memoryview(record))
            if head is None or self._is_removed(head):
                continue
            if head.key not in newest or newest[head.key][1].stamp <= head.stamp:
                newest[head.key] = (segment, head)
        found = sorted(newest.values(), key=lambda pair: pair[1].stamp)
        for segment in self.medium.records.keys() - {segment for segment, _ in found}:
            del self.medium.records[segment]
        self._live = {segment: len(self.medium.records[segment]) for segment, _ in found}
        keys = b"".join(head.key for _, head in found)
        return Contents(
            np.frombuffer(keys, np.uint64).reshape(-1, 4),
            np.array([pack_location(0, segment, 0) for segment, _ in found], np.int64),
            np.array([head.payload_bytes for _, head in found], np.int64),
            np.array([head.stamp for _, head in found], np.int64),
        )


class WrappedTier:
    """A tier that hands everything on to `inner`. Base of the wrappers."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.writable = inner.writable
        self.read_records = inner.read_records
        self.count = inner.count
        self.put_meta = inner.put_meta
        self.metadata = inner.metadata
        self.has_room = inner.has_room
        self.segments = inner.segments
        self.has_unentered = inner.has_unentered
        self.release = inner.release
        self.take_contents = inner.take_contents
        self.drive_count = inner.drive_count
        self.drive = inner.drive
        self.is_up = inner.is_up
        self.write_budget = inner.write_budget
        self.usage = inner.usage
        self.health = inner.health
        self.describe_drives = inner.describe_drives

    def append(
        self, drive: int, images: Sequence[memoryview], *more: Any, **named: Any
    ) -> list[int | None]:
        return self.inner.append(drive, images, *more, **named)

    def load(self, loads: Sequence[Load], timeout_s: float) -> Loaded:
        return self.inner.load(loads, timeout_s)

    def discard(self, locations: Sequence[int], payload_bytes: Sequence[int]) -> None:
        self.inner.discard(locations, payload_bytes)

    def flush(self, timeout_s: float = 10.0) -> bool:
        return self.inner.flush(timeout_s)

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True, slots=True)
class Rates:
    """How often calls fail, from 0 to 1, drawn from `seed`."""

    seed: int
    append: float = 0.0
    load: Mapping[Outcome, float] = field(default_factory=dict)


class FaultyTier(WrappedTier):
    """Fails when told to: the next calls by script, others at random by rates.

    A failed load leaves garbage in its image and at its `copy_to`. A late one does so when
    `release_late` is called, and is busy until then.
    """

    def __init__(self, inner: Tier, rates: Rates | None = None) -> None:
        super().__init__(inner)
        self._rates = rates or Rates(0)
        self._random = random.Random(self._rates.seed)
        self._appends = 0
        self._loads: deque[Outcome] = deque()
        self._late: list[HeldLoads] = []
        self._lock = threading.Lock()

    def fail_appends(self, count: int) -> None:
        """The next `count` images are not written."""
        with self._lock:
            self._appends += count

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

    def append(
        self,
        drive: int,
        images: Sequence[memoryview],
        purpose: Purpose = Purpose.BLOCK,
    ) -> list[int | None]:
        with self._lock:
            bad = [self._draw_append() for _ in images]
        good = [index for index, fails in enumerate(bad) if not fails]
        some = [images[index] for index in good]
        places = iter(self.inner.append(drive, some, purpose) if good else [])
        return [None if fails else next(places) for fails in bad]

    def load(self, loads: Sequence[Load], timeout_s: float) -> Loaded:
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

    def _draw_append(self) -> bool:
        if self._appends:
            self._appends -= 1
            return True
        return self._random.random() < self._rates.append

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
    """Takes `delay_s` longer for every append and load; late where the deadline is shorter."""

    def __init__(
        self,
        inner: Tier,
        delay_s: float,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self.delay_s = delay_s
        self._clock = clock or SystemClock()
        self._sleep = sleep

    def append(
        self, drive: int, images: Sequence[memoryview], *more: Any, **named: Any
    ) -> list[int | None]:
        self._sleep(self.delay_s)
        return self.inner.append(drive, images, *more, **named)

    def load(self, loads: Sequence[Load], timeout_s: float) -> Loaded:
        if loads and self.delay_s > timeout_s:
            ends_at_s = self._clock.now() + self.delay_s
            self._sleep(timeout_s)
            return [Outcome.LATE] * len(loads), _Countdown(ends_at_s, self._clock, self._sleep)
        self._sleep(self.delay_s)
        return self.inner.load(loads, timeout_s - self.delay_s)


@dataclass(frozen=True, slots=True)
class _Countdown:
    ends_at_s: float
    clock: Clock
    sleep: Callable[[float], None]

    def wait(self, timeout_s: float) -> bool:
        left_s = max(0.0, self.ends_at_s - self.clock.now())
        self.sleep(min(left_s, timeout_s))
        return left_s <= timeout_s


class CountingTier(WrappedTier):
    """Counts calls by name, blocks by verb and bytes by direction; and what became of loads."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.outcomes: Counter[Outcome] = Counter()
        self._lock = threading.Lock()

    def append(
        self, drive: int, images: Sequence[memoryview], *more: Any, **named: Any
    ) -> list[int | None]:
        locations = self.inner.append(drive, images, *more, **named)
        kept = [image for image, at in zip(images, locations, strict=True) if at is not None]
        self._count("append", len(kept), sum(map(len, kept)))
        return locations

    def load(self, loads: Sequence[Load], timeout_s: float) -> Loaded:
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

    def flush(self, timeout_s: float = 10.0) -> bool:
        self._count("flush")
        return self.inner.flush(timeout_s)

    def close(self) -> None:
        self._count("close")
        self.inner.close()

    def _count(self, verb: str, blocks: int = 0, nbytes: int = 0) -> None:
        with self._lock:
            self.calls[verb] += 1
            self.blocks[verb] += blocks
            self.nbytes[verb] += nbytes
