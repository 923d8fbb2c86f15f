"""The statistics of one call, and the counters of all calls, as plain values."""

import dataclasses
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ServedRow:
    """One prompt of a call. Its tokens are the sum of the last three fields."""

    prompt_tokens: int
    fetched: dict[str, int] = field(default_factory=dict)
    """Tokens whose KV came from the depot, by tier. A token whose KV came from several tiers counts
    for the slowest."""
    unneeded_tokens: int = 0
    """Tokens outside every window: neither fetched nor computed."""
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
    """Time from the lookup's end until the model could start. On a GPU copies may continue."""
    misses: dict[str, int] = field(default_factory=dict)
    """Blocks that the lookup found and that could not be used, by reason."""
    passed: str = ""
    """The reason why the depot was not used; empty if it was."""

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON-able values."""
        return dataclasses.asdict(self)


@dataclass
class ModelCounters:
    """Counters of one DepotModel. They may be read at any time."""

    calls: int = 0
    prompt_tokens: int = 0
    fetched_tokens: Counter[str] = field(default_factory=Counter)
    """Fetched tokens by tier."""
    computed_tokens: int = 0
    passed: Counter[str] = field(default_factory=Counter)
    """Calls that were left to the model, by reason."""
    onboard_failed: Counter[str] = field(default_factory=Counter)
    """Blocks that the lookup found and that could not be used, by reason."""
    offload_stored: int = 0
    """Blocks that were put into the depot."""
    offload_skipped: int = 0
    """Jobs that were dropped because too many were waiting."""
    offload_throttled: int = 0
    """Blocks for which the depot had no room in time."""
    offload_failed: int = 0
    """Jobs that ended with an error; `DepotModel.last_error` is the last error."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

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

    def add(self, **more: int) -> None:
        """Add to the counters with these names."""
        with self._lock:
            for name, count in more.items():
                setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, Any]:
        """The counters as JSON-able values."""
        with self._lock:
            return {
                name: dict(value) if isinstance(value, Counter) else value
                for name, value in vars(self).items()
                if not name.startswith("_")
            }
