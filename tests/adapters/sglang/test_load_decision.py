"""A linker loads pages that arrive sooner than they are computed; it learns the speeds."""

from dataclasses import dataclass, field

import pytest

from kvdepot.adapters.sglang.load_decision import LoadDecider
from kvdepot.policy.fetching.advisor import Probe
from kvdepot.policy.fetching.speed_models import TierProfile
from kvdepot.testing.clocks import ManualClock

PAGE_TOKENS, PAGE_BYTES, PAGES = 64, 4 << 20, 256
"""16,384 tokens of 1 GiB."""
COMPUTED_S = 0.41
"""By one H200."""


@dataclass
class Asked:
    """An SGLang that takes so long to compute, and drives that take so long for 1 GiB."""

    drive_s: float
    computed_s: float = COMPUTED_S
    clock: ManualClock = field(default_factory=lambda: ManualClock(100.0))
    requests: int = 0
    probes: list[Probe] = field(default_factory=list)

    def __post_init__(self) -> None:
        drives = {"ssd": TierProfile(1e-4, 3e9)}
        self.decider = LoadDecider(PAGE_TOKENS, PAGE_BYTES, 1 << 20, drives, self.clock.now)

    def ask(self, tier: str = "ssd") -> int:
        """A request whose pages are all in one tier. Returns the number of pages loaded."""
        self.requests += 1
        rid, first = f"request {self.requests}", f"page of {self.requests}"
        count, probe = self.decider.pages_worth(rid, [tier] * PAGES, PAGES)
        self.decider.looked_up(rid, first)
        if probe is not None:
            self.probes.append(probe)
            self.decider.probed(probe, self.drive_s * probe.blocks / PAGES)
        if count:
            if tier == "ssd":
                self.clock.advance(self.drive_s * count / PAGES)
            self.decider.load_ended(rid, first, there=True, waited=tier == "ssd")
        self.clock.advance(self.computed_s * (PAGES - count) / PAGES)
        self.decider.computed([first, *map(str, range(PAGES - 1))])
        return count

    def ask_new(self) -> None:
        """A request with no page in the depot."""
        self.requests += 1
        rid, first = f"request {self.requests}", f"page of {self.requests}"
        self.decider.looked_up(rid, first)
        self.clock.advance(self.computed_s)
        self.decider.computed([first, *map(str, range(PAGES - 1))])


def test_all_is_loaded_before_speeds_are_known() -> None:
    assert Asked(drive_s=10.0).ask() == PAGES


def test_a_drive_that_is_slower_than_computing_is_not_used() -> None:
    sglang = Asked(drive_s=0.6)
    sglang.ask_new()
    loaded = [sglang.ask() for _ in range(12)]
    assert loaded[-4:] == [0] * 4
    assert sglang.ask("dram") == PAGES


def test_a_drive_that_is_faster_than_computing_is_loaded_from() -> None:
    sglang = Asked(drive_s=0.3)
    sglang.ask_new()
    assert [sglang.ask() for _ in range(12)] == [PAGES] * 12


def test_an_unused_drive_is_measured_and_used_again() -> None:
    sglang = Asked(drive_s=2.0)
    sglang.ask_new()
    assert [sglang.ask() for _ in range(12)][-1] == 0
    assert sglang.probes
    sglang.drive_s = 0.15
    assert PAGES in [sglang.ask() for _ in range(40)]


def test_a_slower_gpu_loads_from_the_same_drive() -> None:
    sglang = Asked(drive_s=0.6, computed_s=2.0)
    sglang.ask_new()
    assert [sglang.ask() for _ in range(12)] == [PAGES] * 12


@pytest.fixture
def decider() -> LoadDecider:
    return LoadDecider(PAGE_TOKENS, PAGE_BYTES, 8192)


def test_requests_that_lack_the_same_pages_teach_nothing(decider: LoadDecider) -> None:
    decider.looked_up("one", "page")
    decider.looked_up("other", "page")
    decider.computed(["page"])
    assert decider.advisor.prefill.pace() is None


def test_loaded_pages_do_not_count_as_computed(decider: LoadDecider) -> None:
    decider.pages_worth("one", ["dram"], 2)
    decider.looked_up("one", "page")
    decider.load_ended("one", "page", there=True, waited=False)
    decider.computed(["page", "next"])
    decider.computed([])
    assert decider.advisor.prefill.pace() is None


def test_a_load_that_failed_is_computed_from_then_on() -> None:
    clock = ManualClock(100.0)
    decider = LoadDecider(PAGE_TOKENS, PAGE_BYTES, 8192, clock=clock.now)
    decider.looked_up("one", "page")
    clock.advance(5.0)
    decider.load_ended("one", "page", there=False, waited=True)
    clock.advance(0.5)
    decider.computed(["page"])
    pace = decider.advisor.prefill.pace()
    assert pace is not None
    step_s = pace.step_s + PAGE_TOKENS * (pace.token_s + pace.pair_s * PAGE_TOKENS / 2)
    assert step_s == pytest.approx(0.5, rel=0.1)


def test_pages_that_lay_ready_say_nothing_of_their_tier() -> None:
    sglang = Asked(drive_s=0.3)
    before = sglang.decider.advisor.tiers["ssd"].bandwidth_bytes_s
    sglang.decider.pages_worth("one", ["ssd"] * PAGES, PAGES)
    sglang.clock.advance(60.0)  # in SGLang's queue
    sglang.decider.load_ended("one", "page", there=True, waited=False)
    assert sglang.decider.advisor.tiers["ssd"].bandwidth_bytes_s == before
