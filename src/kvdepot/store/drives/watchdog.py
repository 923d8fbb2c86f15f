"""Looks after drives that nobody can use: one that was pulled, left alone, or is not measured yet.

Without it a drive would come back only when somebody happens to write to it or to ask for what it
has, and nobody asks for what `match` does not promise.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Final

from kvdepot.store.drives.restore import Restorer
from kvdepot.store.state.lower_tier import Level
from kvdepot.store.state.state import Stock
from kvdepot.store.write.write_back import Writer

_LOOK_S: Final = 1.0
_LOOK_S_MIN: Final = 0.02
_QUIET_S: Final = 0.25
"""Nobody has read for so long."""


class Prober:
    """The background thread of all drives of a store."""

    def __init__(self, stock: Stock, writers: Mapping[Level, Sequence[Writer]]) -> None:
        self._stock = stock
        self._writers = writers
        self._measure_in_s = 0.0
        self.thread = threading.Thread(target=self._run, name="kvdepot-prober", daemon=True)

    def _run(self) -> None:
        try:
            while not self._stock.ended.wait(self._pause_s()):
                for level in self._stock.levels:
                    for index in range(len(level.tier.drives)):
                        self.look(level, index)
                pauses = [level.tier.measure(self._is_quiet) for level in self._stock.levels]
                self._measure_in_s = min(pauses)
        finally:
            for level in self._stock.levels:
                level.tier.stop_measuring()

    def _is_quiet(self) -> bool:
        """Whether nobody reads, and nothing waits to be written."""
        since_s = self._stock.clock.now() - _QUIET_S
        return not self._stock.closing and not any(
            level.tickets or level.moving or level.pace.busy_since(since_s)
            for level in self._stock.levels
        )

    def look(self, level: Level, index: int) -> None:
        """Bring one drive back if it is away and can be."""
        drive = level.tier.drives[index]
        if drive.draining or self._stock.closing:
            return
        level.tier.probe(index)
        if drive.lost:
            self._restore(level, index)

    def _restore(self, level: Level, index: int) -> None:
        writers = self._writers.get(level, ())
        if index < len(writers):
            writers[index].restore()
        elif not level.tier.writable:
            Restorer(self._stock, level, index).restore()

    def _pause_s(self) -> float:
        """Until the next drive may be tried again, or measured on."""
        away = [
            drive.breaker.health().retry_in_s
            for level in self._stock.levels
            for drive in level.tier.drives
            if not drive.draining and not drive.breaker.closed
        ]
        return max(_LOOK_S_MIN, min([_LOOK_S, self._measure_in_s, *away]))
