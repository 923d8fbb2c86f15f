"""What a store answers to match and flush."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """The longest resident prefix of a chain of keys. `len(match)` is its length in blocks."""

    tiers: tuple[str, ...]
    """For each matched block the fastest tier that has it."""

    def __len__(self) -> int:
        return len(self.tiers)


@dataclass(frozen=True, slots=True)
class FlushReport:
    """Answer to `Store.flush`. True when everything put before is on disk."""

    ok: bool
    waiting: int
    """Blocks still waiting to be written when time ran out."""
    given_up: int
    """Blocks that could not be written since the last flush; they are in memory only, or gone."""

    def __bool__(self) -> bool:
        return self.ok
