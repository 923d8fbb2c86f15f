"""Measures drives that were never measured, while nothing else uses them, and records the result.

Each piece takes a few milliseconds: a read or write that arrives meanwhile waits for that at most,
and the piece does not count.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvdepot.core.clock import Clock
from kvdepot.format.record import PAGE
from kvdepot.io.speed import Profile
from kvdepot.io.survey import SURVEY_BYTES_MIN, SurveyLimits, VolumeBenchmark
from kvdepot.volumes.log.drive import Drive, Segment

ProfileMode = Literal["auto", "always", "never"]
WORTH_BYTES: Final = 1 << 30
"""A smaller drive is measured only where the setting is "always"."""
_SETTLE_S: Final = 1.0
"""After opening, before anything is measured; not where the setting is "always"."""
_QUIET_S: Final = 0.25
"""When to look again while the tier is in use."""
_BOUT_S: Final = 0.1
"""Longest time of one call of `work`."""
_READ_ONLY_BYTES_MIN: Final = 16 << 20
_NEVER_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class MeasuredDrive:
    """The drive that is being measured, and the segment it has lent for that, if it could."""

    drive: Drive
    survey: VolumeBenchmark
    lent: Segment | None
    use: int
    """Of the segment's descriptor (Descriptors), until it is given back."""


class Measuring:
    """Of all drives of a tier. For one thread."""

    def __init__(
        self,
        drives: Callable[[], Sequence[Drive]],
        mode: ProfileMode,
        limits: SurveyLimits,
        clock: Clock,
        *,
        writable: bool,
    ) -> None:
        self._drives = drives
        self._mode = mode
        self._limits = limits
        self._clock = clock
        self._writable = writable
        self._opened_s = clock.now()
        self._known: set[Drive] = set()
        self._waiting: deque[Drive] = deque()
        self._current: MeasuredDrive | None = None

    @property
    def idle(self) -> bool:
        return self._current is None and not self._waiting

    def work(self, is_quiet: Callable[[], bool]) -> float:
        """Measure a little if nothing uses the drives. Returns in how many seconds to go on."""
        self._find_new()
        now = self._clock.now
        until_s = now() + _BOUT_S
        settled = self._mode == "always" or now() >= self._opened_s + _SETTLE_S
        while settled and not self.idle and now() < until_s and is_quiet():
            if self._current is None and not self._begin():
                return _QUIET_S
            self._step(is_quiet)
        if self.idle:
            return _NEVER_S
        return 0.0 if settled and is_quiet() else _QUIET_S

    def stop(self) -> None:
        """Give back what a drive has lent."""
        current = self._current
        if current is None:
            return
        if current.lent is not None:
            current.drive.take_back(current.lent, current.survey.written_bytes)
        current.drive.files.descriptors.end(current.use)
        self._current = None

    def _find_new(self) -> None:
        """Give drives the profile that their log has; queue those that are to be measured."""
        there = self._drives()
        self._known.intersection_update(there)
        for drive in there:
            if drive in self._known or drive.lost:
                continue
            self._known.add(drive)
            profile = drive.profile
            if profile is not None and profile.emulated != drive.is_emulated:
                profile = None
            if profile is not None and profile.is_measured:
                drive.gauge.profile = profile
            if self._is_worth(drive):
                self._waiting.append(drive)
            elif drive.is_emulated and profile is None and self._writable:
                drive.keep_profile(Profile.unmeasured(emulated=True))

    def _is_worth(self, drive: Drive) -> bool:
        settings = drive.settings
        if self._mode == "never" or not self._writable:
            return False
        if settings.segment_bytes < SURVEY_BYTES_MIN + 2 * PAGE:
            return False
        if self._mode == "always":
            return True
        large = drive.slots_max * settings.segment_bytes >= WORTH_BYTES
        return large and drive.medium.direct and drive.gauge.profile is None

    def _begin(self) -> bool:
        """Go to the next drive. False: there is none that can be measured now."""
        there = self._drives()
        for _ in range(len(self._waiting)):
            drive = self._waiting[0]
            gone = drive.lost or drive.draining or drive not in there
            if not gone and drive.breaker.closed and not drive.wear.spent:
                self._current = self._open(drive)
            if gone or self._current is not None:
                self._waiting.popleft()
            else:
                self._waiting.rotate(-1)
            if self._current is not None:
                return True
        return False

    def _open(self, drive: Drive) -> MeasuredDrive | None:
        descriptors = drive.files.descriptors
        use = descriptors.begin()
        lent = drive.lend()
        segment = lent or max(drive.sealed(), key=lambda one: one.tail, default=None)
        least = _READ_ONLY_BYTES_MIN if lent is None else SURVEY_BYTES_MIN
        if segment is not None:
            end = segment.tail if lent is None else drive.settings.segment_bytes - PAGE
            if end - PAGE >= least:
                fd, base = segment.extent
                place = (fd, base + PAGE, end - PAGE)
                survey = VolumeBenchmark(drive.files, place, self._limits, writes=lent is not None)
                return MeasuredDrive(drive, survey, lent, use)
        descriptors.end(use)
        return None

    def _step(self, is_quiet: Callable[[], bool]) -> None:
        current = self._current
        assert current is not None
        drive, survey = current.drive, current.survey
        if drive.lost or drive.draining or not drive.breaker.closed:
            self.stop()
            return
        try:
            survey.step()
        except OSError as error:
            drive.breaker.failed(str(error.strerror))
            self.stop()
            return
        if not is_quiet():
            survey.discard()
        elif survey.done:
            self.stop()
            profile = survey.profile(direct_io=drive.medium.direct, emulated=drive.is_emulated)
            drive.gauge.profile = profile
            drive.keep_profile(profile)
