"""Measures drives that were never measured, while nobody needs them, and keeps what came out.

A piece of a few milliseconds at a time: whoever comes meanwhile waits for that at most, and the
piece does not count.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from kvdepot.codec.record import PAGE
from kvdepot.store.state.lower_tier import Level
from kvdepot.store.state.state import Stock
from kvdepot.tiers.device.profile import Profile
from kvdepot.tiers.device.survey import FLASH, HEAD, SURVEY_BYTES_MIN, Survey
from kvdepot.tiers.log.drive import Drive
from kvdepot.tiers.log.segments import Segment

WORTH_BYTES: Final = 1 << 30
"""A path with less is not measured unless that is asked for."""
_SETTLE_S: Final = 1.0
"""After opening, before anything is measured."""
_QUIET_S: Final = 0.25
"""Nobody has read for so long."""
_BOUT_S: Final = 0.1
"""Measured on before the other drives are looked at."""
_READ_ONLY_BYTES_MIN: Final = 16 << 20
_NEVER_S: Final = 3600.0


@dataclass(slots=True)
class Site:
    """A drive that is being measured, and the segment it has lent for that, if it could."""

    level: Level
    index: int
    drive: Drive
    survey: Survey
    lent: Segment | None


class Surveyor:
    """Of all drives of a store. For one thread."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._opened_s = stock.clock.now()
        self._met: set[Drive] = set()
        self._waiting: deque[tuple[Level, int, Drive]] = deque()
        self._site: Site | None = None

    def pause_s(self) -> float:
        """How soon `work` may have something to do."""
        if self._site is None and not self._waiting:
            return _NEVER_S
        return 0.0 if self._is_quiet(self._stock.clock.now()) else _QUIET_S

    def work(self) -> None:
        """Meet new drives, and measure a little if nobody needs the drives now."""
        self._meet()
        clock, stock = self._stock.clock, self._stock
        until_s = clock.now() + _BOUT_S
        while not stock.closing and clock.now() < until_s and self._is_quiet(clock.now()):
            if self._site is None and not self._begin():
                return
            self._step()

    def stop(self) -> None:
        """Give back what a drive has lent."""
        site, self._site = self._site, None
        if site is not None and site.lent is not None:
            site.drive.take_back(site.lent, site.survey.written_bytes)

    def _meet(self) -> None:
        """Tell drives what is known of them; those of which nothing is known wait."""
        for level in self._stock.levels:
            for index, drive in enumerate(level.tier.drives):
                if drive in self._met or drive.lost:
                    continue
                self._met.add(drive)
                notebook = level.tier.notebooks[index]
                known = notebook.profile
                if known is not None and known.emulated != drive.files.emulated:
                    known = None
                if known is not None and known.is_measured:
                    drive.gauge.profile = known
                if self._is_worth(level, drive):
                    self._waiting.append((level, index, drive))
                elif drive.files.emulated and known is None and level.tier.writable:
                    notebook.keep_profile(Profile.unmeasured(emulated=True))

    def _is_worth(self, level: Level, drive: Drive) -> bool:
        config, settings = level.config, drive.settings
        if config.profile == "never" or not level.tier.writable:
            return False
        if settings.segment_bytes < SURVEY_BYTES_MIN + 2 * PAGE:
            return False
        if config.profile == "always":
            return True
        large = settings.slots_max * settings.segment_bytes >= WORTH_BYTES
        return large and drive.medium.direct and drive.gauge.profile is None

    def _is_quiet(self, now_s: float) -> bool:
        """Whether nobody reads, and nothing waits to be written."""
        levels = self._stock.levels
        asked = any(level.config.profile == "always" for level in levels)
        if not asked and now_s < self._opened_s + _SETTLE_S:
            return False
        return not any(
            level.tickets or level.moving or level.pace.busy_since(now_s - _QUIET_S)
            for level in levels
        )

    def _begin(self) -> bool:
        """Go to the next drive. False: there is none that can be measured now."""
        for _ in range(len(self._waiting)):
            level, index, drive = self._waiting.popleft()
            if drive.lost or drive.draining or level.tier.drives[index] is not drive:
                continue
            able = drive.breaker.closed and not drive.wear.spent
            self._site = self._open(level, index, drive) if able else None
            if self._site is not None:
                return True
            self._waiting.append((level, index, drive))
        return False

    def _open(self, level: Level, index: int, drive: Drive) -> Site | None:
        lent = drive.lend()
        segment = lent or max(drive.sealed(), key=lambda one: one.tail, default=None)
        if segment is None:
            return None
        end = segment.tail if lent is None else drive.settings.segment_bytes - PAGE
        if end - PAGE < (_READ_ONLY_BYTES_MIN if lent is None else SURVEY_BYTES_MIN):
            return None
        fd, base = drive.medium.extent(segment.slot)
        place = (fd, base + PAGE, end - PAGE)
        terms = HEAD if level.run_bytes else FLASH
        survey = Survey(drive.files, place, terms, writes=lent is not None)
        return Site(level, index, drive, survey, lent)

    def _step(self) -> None:
        site = self._site
        assert site is not None
        if site.drive.lost or site.drive.draining or not site.drive.breaker.closed:
            self.stop()
            return
        started_s = self._stock.clock.now()
        try:
            site.survey.step()
        except OSError as error:
            site.drive.breaker.failed(str(error.strerror))
            self.stop()
            return
        if any(level.tickets or level.pace.busy_since(started_s) for level in self._stock.levels):
            site.survey.discard()
        elif site.survey.done:
            self._finish(site)

    def _finish(self, site: Site) -> None:
        self.stop()
        drive = site.drive
        profile = site.survey.profile(direct_io=drive.medium.direct, emulated=drive.files.emulated)
        drive.gauge.profile = profile
        site.level.tier.notebooks[site.index].keep_profile(profile)
