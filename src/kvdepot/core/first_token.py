"""Reports of engines on first tokens: the decision, the expected and the measured time."""

from dataclasses import dataclass
from enum import Enum
from math import isfinite, isnan

from kvdepot.errors import ConfigError


class Reason(Enum):
    """Why a decision to fetch or to recompute is what it is. On the wire: its place in here."""

    NOTHING_MATCHED = "nothing matched"
    FETCH = "fetching all is faster"
    RECOMPUTE = "recomputing all is faster"
    CUT = "the tail does not pay"
    SPLIT = "one part is recomputed while another is fetched"
    RELIEVE = "a tier works beside the engine, for the sake of other requests"
    EXPLORE = "a tier is not known yet"
    PREFILL_UNKNOWN = "the speed of prefill is not known yet"


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One prompt of which the depot had something. Times count from the decision."""

    prompt_tokens: int
    fetched_tokens: int
    """Tokens among them that were to be fetched."""
    seconds: float
    """To the first token, as measured."""
    predicted_s: float
    """The same as predicted; inf: unknown."""
    recompute_s: float
    """Predicted for computing the whole prompt; inf: unknown."""
    reason: Reason

    def check(self) -> None:
        """ConfigError for numbers that cannot be."""
        times = (self.seconds, self.predicted_s, self.recompute_s)
        if not isfinite(self.seconds) or any(isnan(one) or one < 0 for one in times):
            raise ConfigError("first token", f"takes {self.seconds}, {times[1:]} expected")
        if not 0 <= self.fetched_tokens <= self.prompt_tokens:
            raise ConfigError(
                "first token", f"{self.fetched_tokens} of {self.prompt_tokens} tokens fetched"
            )
