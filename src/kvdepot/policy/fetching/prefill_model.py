"""How long the engine takes to prefill, learnt from its own steps. Pure."""

from dataclasses import dataclass
from typing import Final

from kvdepot.policy.fetching.linear_fit import Estimate, LinearFit, Memory

MEMORY: Final = Memory(fade=0.16, fade_any=0.004, confirm=3, constant_stays=False)
"""Steps of each size are remembered for long: many small ones say nothing about large ones."""
STEP_TOKENS: Final = 16.0
"""Before anything is known: a step costs as much as this many tokens, whatever is in it."""
CROSSOVER_TOKENS: Final = 16384.0
"""Before anything is known: the context at which attention costs as much as all the rest."""


def attention_work(new_tokens: float, context_tokens: float) -> float:
    """Pairs of tokens that attend: each new token to the context and to the new ones before it."""
    return new_tokens * (context_tokens + new_tokens / 2.0)


@dataclass(frozen=True, slots=True)
class PrefillPace:
    """seconds of a step = step_s + token_s · new tokens + pair_s · attention work."""

    step_s: float
    token_s: float
    pair_s: float

    def __post_init__(self) -> None:
        if min(self.step_s, self.token_s, self.pair_s) < 0.0:
            raise ValueError(f"a prefill pace is not negative: {self}")


class PrefillModel:
    """Prefill speed as a function of context, following the engine as it changes.

    `crossover_tokens`: the context at which attention costs as much as the rest of the model, where
    the model's shape is known; it only matters until steps with different contexts were seen.
    `known`: what was learnt before, by an engine like this.
    """

    def __init__(
        self, crossover_tokens: float = CROSSOVER_TOKENS, known: PrefillPace | None = None
    ) -> None:
        shape = (STEP_TOKENS, 1.0, 1.0 / crossover_tokens)
        if known is not None:
            shape = (known.step_s, known.token_s, known.pair_s)
        self._fit = LinearFit(shape, MEMORY, to_scale=known is not None)
        self._known = known is not None

    @property
    def steps(self) -> int:
        """How many steps were observed."""
        return self._fit.samples

    @property
    def spread_share(self) -> float:
        return self._fit.spread_share

    def observe(self, new_tokens: int, attention: float, seconds: float) -> None:
        """One engine step: its new tokens (decoding requests have one each) and the sum of
        `attention_work` over its requests. Steps without prefill need not be told."""
        if new_tokens > 0:
            work = max(attention, attention_work(1, 0) * new_tokens)
            self._fit.observe((1.0, float(new_tokens), work), seconds)

    def pace(self) -> PrefillPace | None:
        """None before the first step, unless something was known."""
        return PrefillPace(*self._fit.costs) if self._known or self._fit.samples else None

    def estimate(self, new_tokens: int, context_tokens: int) -> Estimate | None:
        """One step of one request; None before the first step."""
        if not self._fit.samples:
            return None
        work = attention_work(new_tokens, context_tokens)
        return self._fit.estimate((1.0, float(new_tokens), work))
