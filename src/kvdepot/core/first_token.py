"""Reports of engines on first tokens: the decision, the expected and the measured time."""

from dataclasses import dataclass
from enum import Enum
from math import isfinite, isnan

from kvdepot.errors import ConfigError


class Reason(Enum):
    """The reason of a decision to fetch or to recompute. On the wire: an index in this class."""

    NOTHING_MATCHED = "nothing matched"
    FETCH = "fetching all is faster"
    RECOMPUTE = "recomputing all is faster"
    CUT = "the tail does not pay"
    SPLIT = "one part is recomputed while another is fetched"
    """No engine can do this. It keeps the numbers of the others."""

    RELIEVE = "a tier relieves the engine, which serves other requests"
    EXPLORE = "a tier is not known yet"
    PREFILL_UNKNOWN = "the speed of prefill is not known yet"


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A prompt with blocks in the depot. Times are measured from the decision."""

    prompt_tokens: int
    fetched_tokens: int
    """Tokens of the prompt that were fetched."""
    seconds: float
    """Measured time to the first token."""
    predicted_s: float
    """Predicted time to the first token; inf: unknown."""
    recompute_s: float
    """Predicted time to compute the whole prompt; inf: unknown."""
    reason: Reason

    def check(self) -> None:
        """Raise ConfigError if a number is invalid."""
        times = (self.seconds, self.predicted_s, self.recompute_s)
        if not isfinite(self.seconds) or any(isnan(one) or one < 0 for one in times):
            raise ConfigError("first token", f"invalid times: {times}")
        if not 0 <= self.fetched_tokens <= self.prompt_tokens:
            raise ConfigError(
                "first token", f"{self.fetched_tokens} of {self.prompt_tokens} tokens fetched"
            )
