"""What happened in the demo, as plain values, and what follows from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, Literal

TIERS: Final = ("dram", "ssd")

Pass = Literal["without", "with", "returned", "damaged"]
"""No depot; with one; back after a kill; back after a kill and a flipped bit."""


@dataclass(frozen=True, slots=True)
class Request:
    """One question as one serving process answered it."""

    number: Pass
    started_s: float
    """Since the demo began."""

    prompt_tokens: int
    ids: list[int]
    text: str
    ttft_s: float
    seconds: float
    fetched: dict[str, int] = field(default_factory=dict)
    computed_tokens: int = 0
    misses: dict[str, int] = field(default_factory=dict)

    @property
    def fetched_tokens(self) -> int:
        return sum(self.fetched.values())

    @property
    def tier(self) -> str:
        """The tier that most of the fetched tokens came from; empty when most were computed."""
        if self.fetched_tokens <= self.computed_tokens:
            return ""
        return max(self.fetched, key=lambda tier: self.fetched[tier])


@dataclass(frozen=True, slots=True)
class Turn:
    """One question of one user, answered without the depot and with it."""

    number: int
    user: str
    question: str
    without: Request
    with_depot: Request

    @property
    def identical(self) -> bool:
        return self.without.ids == self.with_depot.ids

    @property
    def ratio(self) -> float:
        """TTFT with the depot, of that without."""
        return self.with_depot.ttft_s / self.without.ttft_s

    @property
    def speedup(self) -> float:
        return self.without.ttft_s / self.with_depot.ttft_s

    @property
    def after_restart(self) -> bool:
        return self.with_depot.number != "with"


@dataclass(frozen=True, slots=True)
class Start:
    """A serving process began. `kill_s` is when the one before it was killed, if it was."""

    started_s: float
    ready_s: float
    serves: Pass
    kill_s: float | None = None


@dataclass(frozen=True, slots=True)
class Damage:
    """The byte that was changed on disk."""

    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class Setting:
    """What the demo ran with."""

    model: str
    device: str
    users: int
    turns: int
    new_tokens: int
    shared_tokens: int
    token_bytes: int
    block_tokens: int
    dram_bytes: int
    path: str


@dataclass(slots=True)
class Result:
    """The whole demo."""

    setting: Setting
    turns: list[Turn]
    starts: list[Start]
    damage: Damage
    seconds: float
    machine: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    report: str = ""

    @property
    def identical(self) -> bool:
        return all(turn.identical for turn in self.turns)

    @property
    def returned(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.with_depot.number == "returned"]

    @property
    def damaged(self) -> Turn:
        return next(turn for turn in self.turns if turn.with_depot.number == "damaged")

    @property
    def recomputed_tokens(self) -> int:
        """What the damage cost: the same question had been answered without it just before."""
        return (
            self.damaged.with_depot.computed_tokens - self.returned[-1].with_depot.computed_tokens
        )

    def document(self) -> dict[str, Any]:
        """As one JSON document."""
        return {
            "identical": self.identical,
            "turns": [turn_document(turn) for turn in self.turns],
            "ttft_ratio_by_tier": ratio_by_tier(self.turns),
            "after_restart": self._after_restart(),
            "damage": {
                "file": self.damage.file,
                "offset": self.damage.offset,
                "misses": self.damaged.with_depot.misses,
                "recomputed_tokens": self.recomputed_tokens,
                "identical": self.damaged.identical,
            },
            "report": self.report,
            "setting": self.setting,
            "machine": self.machine,
            "command": self.command,
            "seconds": round(self.seconds, 1),
        }

    def _after_restart(self) -> dict[str, Any]:
        restarts = [start for start in self.starts if start.kill_s is not None]
        return {
            "kills": len(restarts),
            "restart_s": median(start.ready_s - start.started_s for start in restarts),
            "turns": len(self.returned),
            "identical": all(turn.identical for turn in self.returned),
            "fetched": fetched_by_tier(self.returned),
            "computed_tokens": sum(turn.with_depot.computed_tokens for turn in self.returned),
            "ttft_ratio": median(turn.ratio for turn in self.returned),
        }


def ratio_by_tier(turns: Sequence[Turn]) -> dict[str, float | None]:
    """Median of TTFT with / without over the turns that mostly came from a tier; None: no such.

    The turn after the damage is left out: it had to compute what an undamaged one fetches.
    """
    sound = [turn for turn in turns if turn.with_depot.number != "damaged"]
    ratios: dict[str, float | None] = {}
    for tier in TIERS:
        found = [turn.ratio for turn in sound if turn.with_depot.tier == tier]
        ratios[tier] = median(found) if found else None
    return ratios


def fetched_by_tier(turns: Sequence[Turn]) -> dict[str, int]:
    return {tier: sum(turn.with_depot.fetched.get(tier, 0) for turn in turns) for tier in TIERS}


def turn_document(turn: Turn) -> dict[str, Any]:
    served = turn.with_depot
    return {
        "turn": turn.number,
        "user": turn.user,
        "pass": served.number,
        "after_restart": turn.after_restart,
        "question": turn.question,
        "answer": served.text,
        "identical": turn.identical,
        "prompt_tokens": served.prompt_tokens,
        "fetched": {tier: served.fetched.get(tier, 0) for tier in TIERS},
        "computed_tokens": served.computed_tokens,
        "misses": served.misses,
        "ttft_without_s": round(turn.without.ttft_s, 4),
        "ttft_with_s": round(served.ttft_s, 4),
        "speedup": round(turn.speedup, 2),
    }
