"""What an engine's adapter asks and tells: decisions from models that learn from their outcome.

No clock, no thread: times come in as facts. The simulator runs the same code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final

from kvdepot.policy.fetching.decision_log import DecisionLog
from kvdepot.policy.fetching.fetch_or_recompute import Decision, decide
from kvdepot.policy.fetching.prefill_model import CROSSOVER_TOKENS, PrefillModel, PrefillPace
from kvdepot.policy.fetching.tier_model import TierModel, TierProfile
from kvdepot.policy.fetching.timetable import Engine, Prompt, Queue, Run

PROBE_EVERY: Final = 2
"""A tier that was passed over this often in a row is asked for a little, to see how it is now."""
PROBE_BYTES: Final = (4 << 20, 16 << 20)
"""How little: by turns this much, or one block and three. Two sizes tell latency from bandwidth."""
PROBE_BLOCKS: Final = (1, 3)
IDLE: Final = Queue()


@dataclass(frozen=True, slots=True)
class Probe:
    """Blocks to fetch in the background while they are recomputed; nobody waits for them.

    They are as good as any: kept in a faster tier, they shorten the next fetch.
    """

    tier: str
    start: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Advice:
    decision: Decision
    probe: Probe | None


class Advisor:
    """The models of one engine and its tiers.

    `profiles`: None for a tier nobody has measured; `prefill`: what was learnt before, if anything.
    """

    def __init__(
        self,
        engine: Engine,
        profiles: Mapping[str, TierProfile | None],
        crossover_tokens: float = CROSSOVER_TOKENS,
        prefill: PrefillPace | None = None,
    ) -> None:
        self.engine = engine
        self.prefill = PrefillModel(crossover_tokens, prefill)
        self.tiers = {tier: TierModel(profile) for tier, profile in profiles.items()}
        self.log = DecisionLog()
        self._passed_over = dict.fromkeys(self.tiers, 0)
        self._probes = dict.fromkeys(self.tiers, 0)

    def advise(
        self,
        prompt: Prompt,
        runs: Sequence[Run],
        outstanding_bytes: Mapping[str, int],
        queue: Queue = IDLE,
    ) -> Advice:
        """Decide, and say whether a tier that was passed over should be looked at again.

        `outstanding_bytes`: by tier, asked and not there yet; a tier left out has none. Asking
        twice is not the same as asking once: it counts as passing over a tier twice.
        """
        paces = {
            tier: model.pace(outstanding_bytes.get(tier, 0)) for tier, model in self.tiers.items()
        }
        decision = decide(prompt, runs, self.prefill.pace(), paces, queue, self.engine)
        return Advice(decision, self._probe(decision, runs, outstanding_bytes))

    def profiles(self) -> dict[str, TierProfile]:
        """What has been learnt of the tiers."""
        return {
            tier: TierProfile(model.latency_s, model.bandwidth_bytes_s)
            for tier, model in self.tiers.items()
            if model.known and isfinite(model.bandwidth_bytes_s)
        }

    def _probe(
        self, decision: Decision, runs: Sequence[Run], outstanding_bytes: Mapping[str, int]
    ) -> Probe | None:
        """Of the first tier that stopped us, if it is idle and its turn has come."""
        used = {run.tier for run, blocks in zip(runs, decision.by_run, strict=True) if blocks}
        for tier in used:
            self._passed_over[tier] = 0
        start = 0
        for run in runs:
            if run.blocks and run.tier not in used:
                due = self._due(run.tier, outstanding_bytes.get(run.tier, 0))
                return self._probe_of(run, start) if due else None
            start += run.blocks
        return None

    def _due(self, tier: str, outstanding_bytes: int) -> bool:
        self._passed_over[tier] += 1
        if outstanding_bytes:
            return False
        if self._passed_over[tier] < PROBE_EVERY and not self.tiers[tier].doubting:
            return False
        self._passed_over[tier] = 0
        return True

    def _probe_of(self, run: Run, start: int) -> Probe:
        turn = self._probes[run.tier] % len(PROBE_BYTES)
        self._probes[run.tier] += 1
        fit = PROBE_BYTES[turn] * run.blocks // max(run.size_bytes, 1)
        return Probe(run.tier, start, min(max(fit, PROBE_BLOCKS[turn]), run.blocks))
