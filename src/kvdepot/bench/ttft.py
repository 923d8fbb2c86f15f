"""`bench ttft`: the time to first token of a long prompt, computed and from each tier.

Four ways run in turn: computed by the model alone; computed with a depot that has no block of the
prompt, which adds the lookup and the offload; from memory; and from the disk of a store that was
just opened. The first token must be the same in all of them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvdepot.bench.raw import MIB
from kvdepot.bench.rounds import Result, Timings, compare, spread
from kvdepot.errors import ConfigError, StateError
from kvdepot.store.open import open_store
from kvdepot.store.store import Store

if TYPE_CHECKING:
    from kvdepot.adapters.hf.first_token import TimedAnswer, TimedModel

TTFT_SSD: Final = 1 / 20
"""The promised time to first token of a long prompt from disk, relative to computing it."""
TTFT_MISS: Final = 1.03
"""The same for a prompt without any block in the depot."""
PREFIX_TOKENS: Final = 4000
QUICK_PREFIX_TOKENS: Final = 1000
QUESTION_TOKENS: Final = 16
BLOCK_TOKENS: Final = 32
"""A prefix is fetched in whole blocks; with small blocks little is left to compute."""
_WAIT_S: Final = 120.0
_ROOM: Final = 1.25


def measure(
    directory: Path, cache: Path, folder: Path | None, prefix_tokens: int, rounds: int
) -> list[Result]:
    """`cache` is the folder of SmolLM2, `folder` a model to use instead."""
    from kvdepot.adapters.hf import smollm2
    from kvdepot.adapters.hf.first_token import TimedModel

    model = TimedModel.load(folder or smollm2.prepare(cache))
    if model.context_tokens < prefix_tokens + QUESTION_TOKENS + 1:
        reason = f"{prefix_tokens} is more than the model's {model.context_tokens}"
        raise ConfigError("prefix", reason, hint="give a smaller --prefix")
    arms = Arms(model, directory, prefix_tokens)
    try:
        with_depot = {"miss": arms.miss, "dram": arms.dram, "ssd": arms.ssd}
        speeds = compare({"computed": arms.computed}, with_depot, rounds)
    finally:
        arms.close()
    return figures(speeds, prefix_tokens, arms.whole_call_s)


@dataclass(slots=True)
class Arms:
    """The four ways. Each returns the seconds to the first token, without preparations."""

    model: "TimedModel"
    directory: Path
    prefix_tokens: int
    prompt: list[int] = field(default_factory=list)
    whole_call_s: dict[str, list[float]] = field(default_factory=dict)
    """Seconds until the call returned, with the offload, by way."""
    _stores: dict[str, Store] = field(default_factory=dict)
    _first: list[int] = field(default_factory=list)
    _misses: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(20261115)
        count = self.prefix_tokens + QUESTION_TOKENS
        self.prompt = rng.integers(0, self.model.vocabulary, count).tolist()

    def computed(self) -> float:
        self.model.detach()
        return self._timed("computed")

    def miss(self) -> float:
        """A new tenant each time, so that nothing is found."""
        self._misses += 1
        store = self._store("miss")
        self._attach(store, tenant=f"bench-{self._misses}")
        seconds = self._timed("miss")
        self._settle(store)
        return seconds

    def dram(self) -> float:
        store = self._filled("dram")
        self._attach(store)
        seconds = self._timed("dram", "dram")
        self._settle(store)
        return seconds

    def ssd(self) -> float:
        """A store that was closed and opened again has no blocks in memory."""
        self._filled("ssd").close()
        del self._stores["ssd"]
        self._attach(self._store("ssd"))
        return self._timed("ssd", "ssd")

    def close(self) -> None:
        self.model.detach()
        for store in self._stores.values():
            store.close()
        self._stores.clear()

    def _timed(self, name: str, tier: str = "") -> float:
        answer = self.model.answer(self.prompt, 1)
        self._check(answer, tier)
        self.whole_call_s.setdefault(name, []).append(answer.seconds)
        return answer.ttft_s

    def _check(self, answer: "TimedAnswer", tier: str) -> None:
        expected = self.prefix_tokens // BLOCK_TOKENS * BLOCK_TOKENS if tier else 0
        if answer.fetched.get(tier, 0) < expected or sum(answer.fetched.values()) > len(
            self.prompt
        ):
            raise StateError(f"{expected} tokens should come from {tier}, got {answer.fetched}")
        if not tier and answer.fetched:
            raise StateError(f"nothing should be fetched, got {answer.fetched}")
        self._first = self._first or answer.ids
        if answer.ids != self._first:
            raise StateError(f"the first token is {answer.ids} instead of {self._first}")

    def _attach(self, store: Store, **settings: Any) -> None:
        self.model.attach(store, block_tokens=BLOCK_TOKENS, **settings)

    def _filled(self, name: str) -> Store:
        """A store with the prompt in memory and on disk."""
        known = name in self._stores
        store = self._store(name)
        if not known:
            self._attach(store)
            self.model.answer(self.prompt, 1)
            self._settle(store)
        return store

    def _settle(self, store: Store) -> None:
        """Wait until the work in the background ends."""
        self.model.flush()
        if not store.flush(_WAIT_S):
            raise StateError("flush did not write all blocks")

    def _store(self, name: str) -> Store:
        if name not in self._stores:
            need = int(_ROOM * (len(self.prompt) + BLOCK_TOKENS) * self.model.token_bytes)
            memory = max(32 * MIB, 2 * need)
            disk = {"path": self.directory / name, "capacity": max(256 * MIB, 4 * need)}
            self._stores[name] = open_store(dram=memory, ssd=disk)
        return self._stores[name]


def figures(
    speeds: dict[str, Timings], prefix_tokens: int, whole_call_s: dict[str, list[float]]
) -> list[Result]:
    computed = next(iter(speeds.values())).limit_seconds
    results: list[Result] = [spread(f"TTFT of {prefix_tokens} tokens, computed", computed, "s")]
    names = {"miss": "computed, nothing in the depot", "dram": "from dram", "ssd": "from ssd"}
    judged = prefix_tokens >= PREFIX_TOKENS  # a short prompt has little to save
    bars = {"miss": TTFT_MISS, "ssd": TTFT_SSD} if judged else {}
    for key, name in names.items():
        results.append(spread(f"TTFT, {name}", speeds[key].seconds, "s"))
    for key, name in names.items():
        shares = [1 / ratio for ratio in speeds[key].ratios()]
        results.append(spread(f"TTFT {name} / computed", shares, "×", bars.get(key)))
    # The first call of each was to warm up.
    pairs = zip(whole_call_s["miss"][1:], whole_call_s["computed"][1:], strict=True)
    shares = [miss_s / computed_s for miss_s, computed_s in pairs]
    results.append(spread("whole call, nothing in the depot / computed", shares, "×"))
    return results
