"""Measures a new volume while it is not in use, and stores the result.

Each step takes a few milliseconds. A read or write that arrives meanwhile waits for the step, whose
result is then ignored.
"""

from collections.abc import Callable
from typing import Final

from kvdepot.core.clock import Clock
from kvdepot.core.metadata import MetaKind
from kvdepot.format.record import PAGE
from kvdepot.io.speed import BENCHMARK_BYTES_MIN, FLASH, HEAD, Profile, VolumeBenchmark
from kvdepot.volumes.log.reader import LogReader
from kvdepot.volumes.log.segments import Segment, SegmentSet
from kvdepot.volumes.log.wear import Wear

WORTH_BYTES: Final = 1 << 30
"""A smaller volume is measured only if the setting is "always"."""
_SETTLE_S: Final = 1.0
"""Pause between opening and measuring, unless the setting is "always"."""
_QUIET_S: Final = 0.25
"""Pause before the next try while the volume is in use."""
_WORK_S: Final = 0.1
"""Longest time of one call of `work`."""
_READ_ONLY_BYTES_MIN: Final = 16 << 20
NEVER_S: Final = 3600.0


class Measuring:
    """Measures one volume. Used by one thread."""

    def __init__(self, segments: SegmentSet, reader: LogReader, wear: Wear, clock: Clock) -> None:
        self._segments = segments
        self._reader = reader
        self._wear = wear
        self._clock = clock
        self._settled_s = clock.now() + _SETTLE_S
        self._benchmark: VolumeBenchmark | None = None
        self._borrowed: Segment | None = None
        self._use = 0
        """The use of the segment's descriptor (io.files.Descriptors), while it is measured."""
        settings, meter = segments.settings, reader.meter
        entry = segments.metadata.own(MetaKind.PROFILE)
        known = Profile.parse(entry.value) if entry is not None and entry.value else None
        if known is not None and known.emulated != self.is_emulated:
            known = None
        if known is not None and known.is_measured:
            meter.profile = known
        always = settings.profile == "always"
        large = segments.slots_max * settings.segment_bytes >= WORTH_BYTES
        is_worth = always or (large and segments.medium.direct and meter.profile is None)
        has_room = settings.segment_bytes >= BENCHMARK_BYTES_MIN + 2 * PAGE
        may = settings.writable and settings.profile != "never"
        self.is_over = not (may and has_room and is_worth)
        if always:
            self._settled_s = clock.now()
        if self.is_over and self.is_emulated and known is None and settings.writable:
            self._keep(Profile.unmeasured(emulated=True))

    @property
    def is_emulated(self) -> bool:
        return self._segments.files.is_emulated(self._segments.medium.label)

    def work(self, is_quiet: Callable[[], bool]) -> float:
        """Measure a little if nothing uses the volume. Returns the seconds until the next call."""
        now = self._clock.now
        until_s, settled = now() + _WORK_S, now() >= self._settled_s
        while settled and not self.is_over and now() < until_s and is_quiet():
            if self._benchmark is None and not self._begin():
                return _QUIET_S
            self._step(is_quiet)
        if self.is_over:
            return NEVER_S
        return 0.0 if settled and is_quiet() else _QUIET_S

    def stop(self) -> None:
        """End a measurement and return the borrowed segment."""
        benchmark, self._benchmark = self._benchmark, None
        if benchmark is None:
            return
        borrowed, self._borrowed = self._borrowed, None
        if borrowed is not None:
            self._wear.take(benchmark.written_bytes)
            self._segments.return_segment(borrowed)
        self._segments.files.descriptors.end(self._use)

    def _begin(self) -> bool:
        """Borrow or choose a segment to measure in. False: there is none now."""
        segments = self._segments
        if not segments.health.works or self._wear.spent:
            return False
        self._use = segments.files.descriptors.begin()
        self._borrowed = segment = segments.borrow_free_segment()
        end, least = segments.settings.segment_bytes - PAGE, BENCHMARK_BYTES_MIN
        if segment is None:
            sealed = [one for one in list(segments.by_slot.values()) if one.sealed]
            segment = max(sealed, key=lambda one: one.tail, default=None)
            end, least = segment.tail if segment else 0, _READ_ONLY_BYTES_MIN
        if segment is None or end - PAGE < least:
            segments.files.descriptors.end(self._use)
            return False
        fd, base = segment.extent
        limits = FLASH if self._reader.elevator is None else HEAD
        self._benchmark = VolumeBenchmark(
            segments.files, (fd, base + PAGE, end - PAGE), limits, writes=bool(self._borrowed)
        )
        return True

    def _step(self, is_quiet: Callable[[], bool]) -> None:
        benchmark, health = self._benchmark, self._segments.health
        assert benchmark is not None
        if not health.works:
            self.stop()
            return
        try:
            benchmark.step()
        except OSError as error:
            health.breaker.failed(str(error.strerror))
            self.stop()
            self.is_over = True
            return
        if not is_quiet():
            benchmark.discard()
        elif benchmark.done:
            self.stop()
            direct_io = self._segments.medium.direct
            profile = benchmark.profile(direct_io=direct_io, emulated=self.is_emulated)
            self._reader.meter.profile = profile
            self._keep(profile)
            self.is_over = True

    def _keep(self, profile: Profile) -> None:
        try:
            self._segments.metadata.put_own(MetaKind.PROFILE, profile.pack())
        except OSError as error:
            self._segments.health.write_failed(error)
