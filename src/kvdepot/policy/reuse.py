"""When a block will be asked for again, from when blocks like it were. Pure; time is an argument.

Gaps between uses are counted in octaves, for all sessions together and for each session by
itself; a session that has shown its rhythm is believed more than the crowd. What has been idle for
long can only come back after that long: gaps that have passed without a return are out.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import frexp, inf
from typing import Final

_OCTAVES: Final = 32
_GAP_MIN_S: Final = 2.0**-4
_FADE: Final = 0.999
"""What a count of the crowd is worth one observation later."""
_CROWD_WEIGHT: Final = 2.0
"""As many gaps of a session count as much as the whole crowd."""


def octave(gap_s: float) -> int:
    """The octave of a gap: 0 up to a sixteenth of a second, then one for each doubling."""
    return min(_OCTAVES - 1, max(0, frexp(gap_s / _GAP_MIN_S)[1]))


def middle_s(number: int) -> float:
    """A gap that stands for its octave."""
    return _GAP_MIN_S * float(2.0 ** (number - 0.5))


@dataclass(slots=True)
class _Rhythm:
    """The gaps of one session."""

    last_s: float
    gaps: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Expectation:
    """When something comes back, and how likely it does at all."""

    chance: float
    interval_s: float
    """The mean time until then, if it comes back; infinite where that has never been seen."""


class ReuseEstimator:
    """Expected reuse of sessions. Remembers at most `sessions_max` of them, the latest."""

    def __init__(self, sessions_max: int = 1 << 16) -> None:
        self._sessions_max = sessions_max
        self._sessions: OrderedDict[Hashable, _Rhythm] = OrderedDict()
        self._returns = [0.0] * _OCTAVES
        self._starts = 0.0

    def used(self, session: Hashable, now_s: float) -> None:
        """A session asked for its blocks, for the first time or again."""
        self._starts = self._starts * _FADE + 1.0
        rhythm = self._sessions.get(session)
        if rhythm is None:
            self._sessions[session] = _Rhythm(now_s)
            if len(self._sessions) > self._sessions_max:
                self._sessions.popitem(last=False)
            return
        self._sessions.move_to_end(session)
        number = octave(max(0.0, now_s - rhythm.last_s))
        rhythm.gaps[number] = rhythm.gaps.get(number, 0.0) + 1.0
        rhythm.last_s = max(rhythm.last_s, now_s)
        self._returns = [count * _FADE for count in self._returns]
        self._returns[number] += 1.0

    def closed(self, session: Hashable) -> None:
        """The session will not come back."""
        self._sessions.pop(session, None)

    def expect(self, session: Hashable, now_s: float, horizon_s: float = inf) -> Expectation:
        """When the session comes back, counted from now, and how likely within `horizon_s`."""
        rhythm = self._sessions.get(session)
        idle_s = 0.0 if rhythm is None else max(0.0, now_s - rhythm.last_s)
        weights, silent = self._weights(rhythm)
        waits = [
            (weight, middle_s(number) - idle_s)
            for number, weight in enumerate(weights)
            if weight and middle_s(number) > idle_s
        ]
        at_risk = sum(weight for weight, _ in waits) + silent
        within = [(weight, wait_s) for weight, wait_s in waits if wait_s <= horizon_s]
        returning = sum(weight for weight, _ in within)
        if not returning:
            return Expectation(0.0, inf)
        mean_s = sum(weight * wait_s for weight, wait_s in within) / returning
        return Expectation(returning / at_risk, mean_s)

    def _weights(self, rhythm: _Rhythm | None) -> tuple[Sequence[float], float]:
        """Weights of gaps by octave, and the weight of never coming back."""
        total = max(self._starts, 1.0)
        scale = _CROWD_WEIGHT / total
        weights = [count * scale for count in self._returns]
        silent = max(0.0, total - sum(self._returns)) * scale
        if rhythm is not None:
            for number, count in rhythm.gaps.items():
                weights[number] += count
        return weights, silent
