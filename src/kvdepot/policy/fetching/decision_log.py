"""How well decisions were predicted. Pure."""

from collections import deque
from dataclasses import dataclass
from math import isfinite
from typing import Final

import numpy as np

from kvdepot.policy.fetching.fetch_or_recompute import Decision, Reason

KEPT: Final = 256
"""Decisions of each reason that the figures are about."""


@dataclass(frozen=True, slots=True)
class PredictionError:
    """Errors relative to what was measured.

    `bias`: by how much of their time decisions took longer than predicted; below zero, shorter.
    """

    count: int
    bias: float
    p50: float
    p95: float


class DecisionLog:
    """Predicted and actual times to the first token, of the latest decisions of each reason."""

    def __init__(self) -> None:
        self._pairs = {reason: deque[tuple[float, float]](maxlen=KEPT) for reason in Reason}
        self.counts = dict.fromkeys(Reason, 0)

    def record(self, decision: Decision, actual_s: float) -> None:
        """Count a decision; where it predicted nothing, there is no error to keep."""
        self.counts[decision.reason] += 1
        if isfinite(decision.predicted_s) and actual_s > 0.0:
            self._pairs[decision.reason].append((decision.predicted_s, actual_s))

    def error(self, reason: Reason | None = None) -> PredictionError | None:
        """Of one reason or of all; None if there is nothing to tell."""
        reasons = Reason if reason is None else [reason]
        pairs = np.array([pair for each in reasons for pair in self._pairs[each]])
        if not len(pairs):
            return None
        predicted, actual = pairs.T
        p50, p95 = np.quantile(np.abs(predicted - actual) / actual, [0.5, 0.95])
        bias = float((actual - predicted).sum() / actual.sum())
        return PredictionError(len(pairs), bias, float(p50), float(p95))
