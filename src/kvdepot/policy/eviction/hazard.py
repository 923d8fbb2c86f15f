"""How likely blocks of each kind are asked for again, by how long they have been idle.

Counted, not assumed: reuses of a kind at an age, over the time that blocks of this kind spent at
this age, in the tier or as ghosts. What matters for eviction is the density: how many reuses a
place brings per unit of time if the block stays as long as that pays best.
"""

from bisect import bisect_right
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_STEPS_PER_OCTAVE: Final = 2
_OCTAVES: Final = 34
_AGE_MIN: Final = 16
_DECAY: Final = 0.99
"""What a count is worth one period later."""
_PRIOR: Final = 0.05
"""A kind is taken for average until this share of the tier has been watched for one period."""

AGES: Final[list[int]] = [
    (_AGE_MIN * (_STEPS_PER_OCTAVE + step) << octave) // _STEPS_PER_OCTAVE if octave + step else 0
    for octave in range(_OCTAVES)
    for step in range(_STEPS_PER_OCTAVE)
]
"""Where each age bucket starts, in block uses."""
_AGES: Final = np.array(AGES, dtype=np.int64)
_WIDTHS: Final = np.diff(np.append(_AGES, 2 * _AGES[-1])).astype(np.float64)


def bucket(age: int) -> int:
    return bisect_right(AGES, age) - 1


def buckets(ages: Ints) -> Ints:
    found: Ints = np.searchsorted(_AGES, ages, side="right") - 1
    return found


class Hazard:
    """Reuses and exposure by kind and age."""

    def __init__(self, kinds: int) -> None:
        self._shape = (kinds, len(AGES))
        self._reuses: Floats = np.zeros(self._shape)
        self._exposure: Floats = np.zeros(self._shape)
        self._cells = self._reuses.reshape(-1)
        self._cell = self._cells.data
        self.density: list[list[float]] = np.zeros(self._shape).tolist()

    def reused(self, kind: int, age: int) -> None:
        self._cell[kind * len(AGES) + bucket(age)] += 1

    def reused_many(self, kinds: Ints, ages: Ints) -> None:
        np.add.at(self._cells, kinds * len(AGES) + buckets(ages), 1.0)

    def exposed(self, kinds: Ints, ages: Ints, each: float) -> None:
        """Blocks of these kinds and ages were there; each stands for `each` blocks times uses."""
        self._exposure += each * self._count(kinds, ages)

    def refresh(self, now: int, prior: float, boost: Floats) -> None:
        """Bring `density` up to date, each kind's times its boost, and let the past fade.

        `prior` is how many blocks times uses make a period.
        """
        seen = bucket(now) + 1
        rates = self._rates(seen, prior * _PRIOR)
        known = _densities(rates, _WIDTHS[:seen]) * boost[:, None]
        self.density = np.pad(known, ((0, 0), (0, len(AGES) - seen)), mode="edge").tolist()
        self._reuses *= _DECAY
        self._exposure *= _DECAY

    def _rates(self, seen: int, prior: float) -> Floats:
        reuses, exposure = self._reuses[:, :seen], self._exposure[:, :seen]
        total = exposure.sum(axis=0)
        average = np.divide(reuses.sum(axis=0), total, out=np.zeros(seen), where=total > 0)
        rates: Floats = (reuses + prior * average) / (exposure + prior + 1e-9)
        return rates

    def _count(self, kinds: Ints, ages: Ints) -> Floats:
        cells = kinds * self._shape[1] + buckets(ages)
        counts: Floats = np.bincount(cells, minlength=self._reuses.size).astype(np.float64)
        return counts.reshape(self._shape)


def _densities(rates: Floats, widths: Floats) -> Floats:
    """For each kind and age the best of: chance of a reuse until then, over the time spent.

    `rates` are constant within a bucket; a block that is reused stops taking time.
    """
    spent = rates * widths
    before = np.cumsum(spent, axis=1) - spent
    survival = np.exp(-np.maximum(before[:, None, :] - before[:, :, None], 0.0))
    within = np.where(spent > 1e-12, -np.expm1(-spent) / np.maximum(rates, 1e-300), widths)
    later = np.triu(np.ones((len(widths), len(widths))))
    time = np.cumsum(later * survival * within[:, None, :], axis=2)
    chance = later * (1.0 - survival * np.exp(-spent)[:, None, :])
    best: Floats = (chance / np.maximum(time, 1e-300)).max(axis=2)
    return best
