"""Load or compute: how many of the pages that a depot has are worth loading for a request.

SGLang shows a linker neither its steps nor its queue. The speed of computing is learnt from
requests of which nothing is loaded: from their last lookup, after which they begin, until their
first pages are offloaded. Other work meanwhile makes computing look slower, so that more is loaded.
The speed of a tier is learnt from loads that waited for it. Does not depend on SGLang.
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
from kvdepot.policy.fetching.fetch_or_recompute import PromptLengths, TierRun
from kvdepot.policy.fetching.speed_models import (
    TierProfile,
    Transfer,
    attention_work,
    starting_profile,
)

_ENTRIES_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class AwaitedLoad:
    """Pages of a request that are loaded from one tier below memory since `at`."""

    tier: str
    pages: int
    at: float


class LoadDecider:
    """Decides for one linker. Thread-safe.

    `drives`: speeds of tiers that the depot has measured.
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
            chunk_tokens,
            {tier: starting_profile(tier, drives.get(tier), None) for tier in TIER_NAMES},
        )
        self._begun: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Request and time of its last lookup, by the first page that the request lacks. The
        request is empty if several lack that page, because their times are not known."""
        self._awaited: OrderedDict[str, AwaitedLoad] = OrderedDict()

    def pages_worth(self, rid: str, tiers: Sequence[str], lacking: int) -> tuple[int, Probe | None]:
        """Returns how many of the pages in these tiers to load, and pages to read as a measurement.

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
        """A request lacks its pages from this one on, and may begin to compute them now."""
        with self._lock:
            other = self._begun.pop(first_page, (rid, 0.0))[0]
            self._begun[first_page] = (rid if other == rid else "", self._clock())
            _trim(self._begun)

    def load_ended(self, rid: str, first_page: str, *, there: bool, waited: bool) -> None:
        """The pages of a request are in memory (`there`), or it computes them now.

        `waited`: some were missing when the load began, so the tier has been busy with them since
        the decision.
        """
        with self._lock:
            self._begun.pop(first_page, None)
            awaited = self._awaited.pop(rid, None)
            if awaited is not None and waited:
                self._observe(awaited.tier, awaited.pages, self._clock() - awaited.at)
        if not there:
            self.looked_up(rid, first_page)

    def computed(self, pages: Sequence[str]) -> None:
        """SGLang has these pages now. None was loaded if a request lacked the first of them."""
        with self._lock:
            rid, at = self._begun.pop(pages[0], ("", 0.0)) if pages else ("", 0.0)
            if rid:
                tokens = len(pages) * self._page_tokens
                seconds = self._clock() - at
                self.advisor.prefill.observe(tokens, attention_work(tokens, 0), seconds)

    def probed(self, probe: Probe, seconds: float) -> None:
        """The pages of a probe were read within this time."""
        with self._lock:
            self._observe(probe.tier, probe.blocks, seconds)

    def _observe(self, tier: str, pages: int, seconds: float) -> None:
        self.advisor.tiers[tier].observe(Transfer(pages, pages * self._page_bytes, seconds))


def _trim(entries: OrderedDict[str, Any]) -> None:
    while len(entries) > _ENTRIES_MAX:
        entries.popitem(last=False)
