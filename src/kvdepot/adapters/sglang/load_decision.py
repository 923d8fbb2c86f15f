"""Load or compute: how many of the pages that a depot has are worth loading for a request.

SGLang tells a linker neither its steps nor its queue. How fast it computes is learnt from requests
of which nothing is loaded: from their last lookup, after which they begin, until the first pages
are there to be offloaded. What else is done meanwhile makes computing look slower, so that more is
loaded. How fast a tier is, is learnt from loads that had to wait for it. Knows nothing of SGLang.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from kvdepot.core.depot import MEMORY_TIERS
from kvdepot.core.volume import TIER_NAMES
from kvdepot.policy.fetching.advisor import Advisor, Probe
from kvdepot.policy.fetching.fetch_or_recompute import EngineFeatures, PromptLengths, TierRun
from kvdepot.policy.fetching.speed_models import (
    TierProfile,
    Transfer,
    attention_work,
    starting_profile,
)

_REMEMBERED: Final = 1024


@dataclass(frozen=True, slots=True)
class AwaitedLoad:
    """Pages of a request that are to come from one tier below memory, and since when."""

    tier: str
    pages: int
    at: float


class LoadDecider:
    """Decides for one linker. Thread-safe.

    `drives`: what the depot has measured of its tiers.
    """

    def __init__(
        self,
        page_tokens: int,
        page_bytes: int,
        chunk_tokens: int,
        drives: Mapping[str, TierProfile] = {},
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._page_tokens = page_tokens
        self._page_bytes = page_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self.advisor = Advisor(
            EngineFeatures(chunk_tokens=chunk_tokens),
            {tier: starting_profile(tier, drives.get(tier), None) for tier in TIER_NAMES},
        )
        self._begun: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """By the first page of what a request lacks: the request, and its last lookup. Without a
        name: there are several, and what they take is not told apart."""
        self._awaited: OrderedDict[str, AwaitedLoad] = OrderedDict()

    def pages_worth(self, rid: str, tiers: Sequence[str], lacking: int) -> tuple[int, Probe | None]:
        """How many of the pages in these tiers to load, and what to read only to measure a tier.

        `lacking`: the pages of the request that SGLang does not have.
        """
        counts = [(tier, sum(1 for _ in group)) for tier, group in groupby(tiers)]
        runs = [TierRun(tier, pages, pages * self._page_bytes) for tier, pages in counts]
        prompt = PromptLengths(lacking * self._page_tokens + 1, self._page_tokens)
        with self._lock:
            advice = self.advisor.advise(prompt, runs, {})
            pages = advice.decision.cut_blocks
            below = Counter(tier for tier in tiers[:pages] if tier not in MEMORY_TIERS)
            if len(below) == 1:
                ((tier, count),) = below.items()
                self._awaited[rid] = AwaitedLoad(tier, count, self._clock())
                _trim(self._awaited)
        return pages, advice.probe

    def looked_up(self, rid: str, first_page: str) -> None:
        """A request lacks its pages from this one on. It may begin to compute them now."""
        with self._lock:
            other = self._begun.pop(first_page, (rid, 0.0))[0]
            self._begun[first_page] = (rid if other == rid else "", self._clock())
            _trim(self._begun)

    def load_ended(self, rid: str, first_page: str, *, there: bool, waited: bool) -> None:
        """The pages of a request are in memory; or they are not, and it computes them now.

        `waited`: some were not there when it was their turn, so that the tier was busy with them
        since they were decided on.
        """
        with self._lock:
            self._begun.pop(first_page, None)
            awaited = self._awaited.pop(rid, None)
            if awaited is not None and waited:
                self._observe(awaited.tier, awaited.pages, self._clock() - awaited.at)
        if not there:
            self.looked_up(rid, first_page)

    def computed(self, pages: Sequence[str]) -> None:
        """SGLang has these pages now, and nothing of them was loaded if the first is one that a
        request lacked."""
        with self._lock:
            rid, at = self._begun.pop(pages[0], ("", 0.0)) if pages else ("", 0.0)
            if rid:
                tokens = len(pages) * self._page_tokens
                seconds = self._clock() - at
                self.advisor.prefill.observe(tokens, attention_work(tokens, 0), seconds)

    def probed(self, probe: Probe, seconds: float) -> None:
        """Pages were read to measure a tier."""
        with self._lock:
            self._observe(probe.tier, probe.blocks, seconds)

    def _observe(self, tier: str, pages: int, seconds: float) -> None:
        self.advisor.tiers[tier].observe(Transfer(pages, pages * self._page_bytes, seconds))


def _trim(remembered: OrderedDict[str, Any]) -> None:
    while len(remembered) > _REMEMBERED:
        remembered.popitem(last=False)
