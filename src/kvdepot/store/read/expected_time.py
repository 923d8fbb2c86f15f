"""How long blocks take to come to the caller, as far as the drives' speeds are known."""

from collections.abc import Mapping
from typing import Final

from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.state.state import StoreState

MEMORY_BYTES_PER_S: Final = 10e9
"""Assumed: memory is not measured."""


def expected_s(state: StoreState, nbytes: Mapping[str, int]) -> float | None:
    """Seconds for so many bytes of each tier, behind the reads that wait already; None where a
    tier's speed is not known. The tiers are read at the same time.
    """
    lower = {one.name: one for one in state.lower_tiers}
    times = [
        _tier_s(lower[tier], size) if tier in lower else size / MEMORY_BYTES_PER_S
        for tier, size in nbytes.items()
    ]
    known = [seconds for seconds in times if seconds is not None]
    return max(known, default=0.0) if len(known) == len(times) else None


def _tier_s(lower: LowerTier, nbytes: int) -> float | None:
    up = [facts for _, facts in lower.volumes.all_facts() if facts.up]
    speed = sum(facts.read_bytes_per_s for facts in up)
    queued = sum(facts.queued_bytes for facts in up)
    return (nbytes + queued) / speed if speed else None
