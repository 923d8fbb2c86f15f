"""Measures a volume that was never measured, while nothing else uses it, and keeps the result.

Each piece takes a few milliseconds: a read or write that arrives meanwhile waits for that at most,
and the piece does not count.
"""

from collections.abc import Callable
from typing import Final

from kvdepot.core.clock import Clock
from kvdepot.format.record import PAGE
from kvdepot.io.speed import Profile
from kvdepot.io.survey import FLASH, HEAD, SURVEY_BYTES_MIN, VolumeBenchmark
from kvdepot.volumes.log.reader import LogReader
from kvdepot.volumes.log.segments import Segment, SegmentSet
from kvdepot.volumes.log.wear import Wear

WORTH_BYTES: Final = 1 << 30
"""A smaller volume is measured only if the setting is "always"."""
_SETTLE_S: Final = 1.0
"""Pause between opening and measuring, unless the setting is "always"."""
_QUIET_S: Final = 0.25
"""When to look again while the volume is in use."""
_STEP_S: Final = 0.1
"""Longest time of one call of `work`."""
_READ_ONLY_BYTES_MIN: Final = 16 << 20
NEVER_S: Final = 3600.0


class Measuring:
    """Measures one volume. For one thread."""

    def __init__(
        self,
        segments: SegmentSet,
        reader: LogReader,
        wear: Wear,
        clock: Clock,
        known: Profile | None,
        keep: Callable[[Profile], object],
    ) -> None:
        """`known` is the profile that the volume has; `keep` records a new one."""
        self._segments = segments
        self._reader = reader
        self._wear = wear
        self._clock = clock
        self._keep = keep
        self._opened_s = clock.now()
        self._benchmark: VolumeBenchmark | None = None
        self._borrowed: Segment | None = None
        self._use = 0
        """Of the segment's descriptor (io.files.Descriptors), while it is measured."""
        if known is not None and known.emulated != self.is_emulated:
            known = None
        if known is not None and known.is_measured:
            reader.meter.profile = known
        self.is_over = not self._is_worth()
        if self.is_over and self.is_emulated and known is None and segments.settings.writable:
            keep(Profile.unmeasured(emulated=True))

    @property
    def is_emulated(self) -> bool:
        return self._segments.files.is_emulated(self._segments.medium.label)

    def work(self, is_quiet: Callable[[], bool]) -> float:
        """Measure a little if nothing uses the volume. Returns the seconds until the next call."""
        now = self._clock.now
        until_s = now() + _STEP_S
        always = self._segments.settings.profile == "always"
        settled = always or now() >= self._opened_s + _SETTLE_S
        while settled and not self.is_over and now() < until_s and is_quiet():
            if self._benchmark is None and not self._begin():
                return _QUIET_S
            self._step(is_quiet)
        if self.is_over:
            return NEVER_S
        return 0.0 if settled and is_quiet() else _QUIET_S

    def stop(self) -> None:
        """Give back the segment that was borrowed."""
        benchmark, self._benchmark = self._benchmark, None
        if benchmark is None:
            return
        borrowed, self._borrowed = self._borrowed, None
        if borrowed is not None:
            self._wear.written_bytes += benchmark.written_bytes
            self._wear.take(benchmark.written_bytes)
            self._segments.return_segment(borrowed)
        self._segments.files.descriptors.end(self._use)

    def _is_worth(self) -> bool:
        settings, segments = self._segments.settings, self._segments
        if settings.profile == "never" or not settings.writable:
            return False
        if settings.segment_bytes < SURVEY_BYTES_MIN + 2 * PAGE:
            return False
        if settings.profile == "always":
            return True
        large = segments.slots_max * settings.segment_bytes >= WORTH_BYTES
        return large and segments.medium.direct and self._reader.meter.profile is None

    def _begin(self) -> bool:
        """Open a segment to measure in. False: there is none now."""
        segments, health = self._segments, self._segments.health
        if not health.works or self._wear.spent:
            return False
        self._use = segments.files.descriptors.begin()
        borrowed = segments.borrow_free_segment()
        sealed = [segment for segment in list(segments.by_slot.values()) if segment.sealed]
        segment = borrowed or max(sealed, key=lambda one: one.tail, default=None)
        least = _READ_ONLY_BYTES_MIN if borrowed is None else SURVEY_BYTES_MIN
        if segment is not None:
            end = segment.tail if borrowed is None else segments.settings.segment_bytes - PAGE
            if end - PAGE >= least:
                fd, base = segment.extent
                limits = FLASH if self._reader.elevator is None else HEAD
                self._benchmark = VolumeBenchmark(
                    segments.files, (fd, base + PAGE, end - PAGE), limits, writes=bool(borrowed)
                )
                self._borrowed = borrowed
                return True
        segments.files.descriptors.end(self._use)
        return False

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
