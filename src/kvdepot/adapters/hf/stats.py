"""What a call got from the depot, and what all calls did, as plain values."""

import dataclasses
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ServedRow:
    """One prompt of a call. Its tokens are the sum of the last three."""

    prompt_tokens: int
    fetched: dict[str, int] = field(default_factory=dict)
    """Tokens whose KV came from the depot, by tier. Where the groups of a model come from several
    tiers the slowest counts."""
    unneeded_tokens: int = 0
    """Tokens that are out of every window: neither fetched nor computed."""
    computed_tokens: int = 0

    @property
    def fetched_tokens(self) -> int:
        return sum(self.fetched.values())


@dataclass(slots=True)
class CallStats:
    """One call of the model."""

    rows: list[ServedRow] = field(default_factory=list)
    lookup_s: float = 0.0
    onboard_s: float = 0.0
    """From the lookup's end until the model could start; on a GPU copies may go on after that."""
    misses: dict[str, int] = field(default_factory=dict)
    """Blocks that the lookup found but that could not be used, by reason."""
    passed: str = ""
    """Why the call was left to the model alone; empty when the depot was used."""

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-able values."""
        return dataclasses.asdict(self)


class ModelCounters:
    """What one DepotModel did so far. Safe to read at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls = 0
        self.prompt_tokens = 0
        self.fetched_tokens: Counter[str] = Counter()
        self.computed_tokens = 0
        self.passed: Counter[str] = Counter()
        """Calls left to the model alone, by reason."""
        self.onboard_failed: Counter[str] = Counter()
        """Blocks that the lookup found but that could not be used, by reason."""
        self.offload_stored = 0
        """Blocks put into the depot."""
        self.offload_skipped = 0
        """Jobs dropped because too many were waiting."""
        self.offload_throttled = 0
        """Blocks for which the depot had no room in time."""
        self.offload_failed = 0
        """Jobs that ended with an error; `DepotModel.last_error` is the last one."""

    def add_call(self, call: CallStats) -> None:
        with self._lock:
            self.calls += 1
            if call.passed:
                self.passed[call.passed] += 1
            for row in call.rows:
                self.prompt_tokens += row.prompt_tokens
                self.computed_tokens += row.computed_tokens
                self.fetched_tokens.update(row.fetched)
            self.onboard_failed.update(call.misses)

    def add_offload(
        self, *, stored: int = 0, throttled: int = 0, skipped: int = 0, failed: int = 0
    ) -> None:
        """Add blocks stored and throttled, and jobs skipped and failed."""
        with self._lock:
            self.offload_stored += stored
            self.offload_throttled += throttled
            self.offload_skipped += skipped
            self.offload_failed += failed

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-able values."""
        with self._lock:
            return {
                name: dict(value) if isinstance(value, Counter) else value
                for name, value in vars(self).items()
                if not name.startswith("_")
            }
