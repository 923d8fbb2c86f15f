"""Waiting in front of one server, with Poisson arrivals and any service time. Pure."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nobody waits with chance 1 - busy; the others exponentially long, `mean_s` over all."""

    busy: float
    mean_s: float

    @property
    def rate(self) -> float:
        """Of the exponential part."""
        return self.busy / self.mean_s if self.mean_s > 0 else np.inf


NO_WAIT = Wait(0.0, 0.0)


def wait_for(rate: float, mean_s: float, square_s: float) -> Wait | None:
    """The M/G/1 queue: arrivals a second, mean and mean square of the service time.

    The mean is exact (Pollaczek-Khinchine), the exponential tail is the usual approximation. None
    where more comes than can be served.
    """
    busy = rate * mean_s
    if busy >= 1.0:
        return None
    return Wait(busy, rate * square_s / (2.0 * (1.0 - busy))) if busy > 0 else NO_WAIT


def waits_longer(first: Wait, second: Wait, times: Times) -> Times:
    """The chance that both waits together take longer than each of `times`."""
    times_s = np.maximum(times, 0.0)
    one, two = _tail(first, times_s), _tail(second, times_s)
    both = _both(first.rate, second.rate, times_s)
    chance = (
        first.busy * (1.0 - second.busy) * one
        + second.busy * (1.0 - first.busy) * two
        + first.busy * second.busy * both
    )
    return np.where(times < 0.0, 1.0, chance)


def _tail(wait: Wait, times_s: Times) -> Times:
    if not np.isfinite(wait.rate):
        return np.zeros_like(times_s)
    return np.exp(-wait.rate * times_s)


def _both(first: float, second: float, times_s: Times) -> Times:
    """The tail of the sum of two exponential times with these rates."""
    if not np.isfinite(first):
        return np.zeros_like(times_s) if not np.isfinite(second) else np.exp(-second * times_s)
    if not np.isfinite(second):
        return np.exp(-first * times_s)
    if abs(first - second) < 1e-6 * first:
        return (1.0 + first * times_s) * np.exp(-first * times_s)
    slow = second * np.exp(-first * times_s) - first * np.exp(-second * times_s)
    return slow / (second - first)
