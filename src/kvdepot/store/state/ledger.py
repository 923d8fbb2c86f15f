"""The ledger: what sessions and tenants have saved, and what keeping their blocks costs.

Saved: blocks that were given back, in the seconds that the engine would have needed to compute
them, by the prefill speed that it reports for their namespace (`told_prefill`) or, before that, by
`ledger.prefill_tokens_per_s`. What a call gives back goes to the tenant at once, and to the session
whose prompt is told of next with the last of these blocks.

Held: bytes times seconds on each tier, from a look at the index every minute. A block counts for
the session that was told of last with it, so that no byte is counted twice.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvdepot.core.config import LedgerConfig
from kvdepot.core.tier import TIER_NAMES
from kvdepot.index.catalog import Catalog
from kvdepot.index.table import Keys, Rows

TENANTS_MAX: Final = 64
OTHERS: Final = "(others)"
"""All tenants beyond the first TENANTS_MAX."""
SAMPLE_S: Final = 60.0
MONTH_S: Final = 730.0 * 3600.0
_OPEN_MAX: Final = 256
"""Namespaces with calls whose session is not known yet, and such calls of each."""
_SPACES_MAX: Final = 1 << 16
_PART: Final = 1 << 16
"""Rows that are looked at in one go."""
_UNOWNED: Final = 0
_NUMBER_MAX: Final = 1e30
_TIERS: Final = len(TIER_NAMES)


@dataclass(slots=True)
class Account:
    """Of one session or tenant. `byte_s` is by place in TIER_NAMES."""

    tokens: float = 0.0
    """Given back."""
    gpu_s: float = 0.0
    """Prefill that was not needed for those whose speed was known."""
    untimed_tokens: float = 0.0
    """Of `tokens`, given back before any speed was known."""
    byte_s: list[float] = field(default_factory=lambda: [0.0] * _TIERS)

    def add(self, other: "Account") -> None:
        """What was saved; not what is held."""
        self.tokens += other.tokens
        self.gpu_s += other.gpu_s
        self.untimed_tokens += other.untimed_tokens

    def as_dict(self, prices: LedgerConfig) -> dict[str, Any]:
        """With money, by these prices."""
        held = {name: each / 3600.0 for name, each in zip(TIER_NAMES, self.byte_s, strict=True)}
        cost = sum(
            prices.price_per_tb_month(name) * each / 1e12 / MONTH_S
            for name, each in zip(TIER_NAMES, self.byte_s, strict=True)
        )
        return {
            "tokens": self.tokens,
            "untimed_tokens": self.untimed_tokens,
            "gpu_s": self.gpu_s,
            "saved": self.gpu_s / 3600.0 * prices.gpu_price_per_hour,
            "byte_hours": {name: hours for name, hours in held.items() if hours},
            "cost": cost,
        }

    def packed(self) -> list[Any]:
        """For a page."""
        held = {
            name: round(each, 3) for name, each in zip(TIER_NAMES, self.byte_s, strict=True) if each
        }
        return [round(self.tokens, 3), round(self.gpu_s, 6), round(self.untimed_tokens, 3), held]

    @classmethod
    def unpacked(cls, said: Any) -> "Account":
        """As it was packed; an empty one where that makes no sense."""
        try:
            tokens, gpu_s, untimed, held = said
            byte_s = [float(held.get(name, 0.0)) for name in TIER_NAMES]
            found = cls(float(tokens), float(gpu_s), float(untimed), byte_s)
        except (TypeError, ValueError, AttributeError, OverflowError):
            return cls()
        numbers = (found.tokens, found.gpu_s, found.untimed_tokens, *byte_s)
        return found if all(0.0 <= one < _NUMBER_MAX for one in numbers) else cls()


@dataclass(frozen=True, slots=True)
class SpaceFacts:
    """What the ledger knows of a namespace."""

    tenant: str
    tokens: float
    """That a block stands for: those of all shards of a model together are its tokens."""
    block_tokens: int
    counts: bool
    """Not a window or a state: those come beside the blocks of full attention."""


@dataclass(frozen=True, slots=True)
class ToldPrefill:
    """Seconds of prefill for each token, and for each pair of tokens that attend."""

    token_s: float
    pair_s: float = 0.0

    @property
    def crossover(self) -> float | None:
        """The context at which attention takes as long as all the rest; None: it takes no time."""
        return self.token_s / self.pair_s if self.pair_s else None


class SavingsLedger:
    """Of one store. Savings are guarded by the store's lock; what is held by `_sampling`."""

    def __init__(self, catalog: Catalog, prices: LedgerConfig, now_s: float) -> None:
        self._catalog = catalog
        self.prices = prices
        self._owner = catalog.table.column(np.uint32, _UNOWNED)
        """The number of the session that was told of last with each row."""
        self._accounts: dict[int, Account] = {}
        self._last_number = _UNOWNED
        self._spaces: dict[bytes, SpaceFacts] = {}
        self._paces: dict[bytes, ToldPrefill] = {}
        self._open: OrderedDict[bytes, OrderedDict[int, Account]] = OrderedDict()
        """By tag and digest of the last block of a call, what it saved."""
        self.tenants: dict[str, Account] = {}
        """Since the store was made."""
        self.since_start = Account()
        self._sampled_s = now_s
        self._sampling = threading.Lock()
        self.tenant_of: Callable[[bytes], str] = lambda _: ""
        """Of namespaces that no program has registered."""

    def registered(self, tag: bytes, description: bytes) -> None:
        """A namespace is known."""
        if tag in self._spaces or len(self._spaces) < _SPACES_MAX:
            self._spaces[tag] = _facts(description)

    def told_prefill(self, tag: bytes, pace: ToldPrefill) -> bool:
        """An engine has measured its prefill. False: the namespace is not known."""
        if tag not in self._spaces:
            return False
        self._paces[tag] = pace
        return True

    def number_of(self, account: Account) -> int:
        """A session is known from now on, until `forget`. Returns its number."""
        self._last_number = self._last_number % 0xFFFFFFFF + 1
        self._accounts[self._last_number] = account
        return self._last_number

    def forget(self, number: int) -> None:
        self._accounts.pop(number, None)

    def own(self, rows: Rows | list[int], number: int) -> None:
        """These blocks count for a session from now on."""
        self._owner.array[rows] = number

    def served(self, tag: bytes, first: int, last: int, blocks: float) -> None:
        """So many blocks of one prompt were given back, from row `first` to row `last`. A part of
        a block's bytes is a part of a block. Takes as long for many blocks as for one.
        """
        space = self._spaces.get(tag)
        if space is None or not space.counts:
            return
        tokens = blocks * space.tokens
        saved = Account(tokens)
        pace = self._paces.get(tag)
        if pace is not None:
            context = (self._catalog.tree.depth(first) - 1) * space.block_tokens
            pairs = context + blocks * space.block_tokens / 2
            saved.gpu_s = tokens * (pace.token_s + pace.pair_s * pairs)
        elif self.prices.prefill_tokens_per_s:
            saved.gpu_s = tokens / self.prices.prefill_tokens_per_s
        else:
            saved.untimed_tokens = tokens
        self.since_start.add(saved)
        self._tenant(space.tenant).add(saved)
        waiting = self._open.setdefault(tag, OrderedDict())
        known = waiting.setdefault(self._catalog.table.digest(last), Account())
        known.add(saved)
        for many in (waiting, self._open):
            if len(many) > _OPEN_MAX:
                many.popitem(last=False)

    def settle(self, tag: bytes, words: Keys, account: Account) -> None:
        """A session was told of with this prompt: what its blocks have saved is its own."""
        waiting = self._open.get(tag)
        if not waiting:
            return
        digests = np.fromiter(waiting, np.uint64, len(waiting))
        for digest in digests[np.isin(digests, words[:, 2])].tolist():
            account.add(waiting.pop(digest))
        if not waiting:
            del self._open[tag]

    def sample(self, now_s: float) -> None:
        """Count what is held since the last look. Takes no lock of the store."""
        with self._sampling:
            passed_s, self._sampled_s = now_s - self._sampled_s, now_s
            if passed_s <= 0.0:
                return
            catalog = self._catalog
            count = min(map(len, (catalog.residency.array, self._owner.array)))
            for start in range(0, count, _PART):
                self._count_held(slice(start, min(count, start + _PART)), passed_s)

    def is_due(self, now_s: float) -> bool:
        return now_s - self._sampled_s >= SAMPLE_S

    def speed_known(self) -> bool:
        return bool(self._paces or self.prices.prefill_tokens_per_s or self.since_start.gpu_s)

    def assumptions(self) -> dict[str, Any]:
        """What savings and costs are computed with; `measured` has namespaces by their tags."""
        prices = {tier: self.prices.price_per_tb_month(tier) for tier in TIER_NAMES}
        measured = {
            tag.hex(): {"tokens_per_s": 1.0 / pace.token_s, "crossover_tokens": pace.crossover}
            for tag, pace in list(self._paces.items())
        }
        return {
            **self.prices.assumed(),
            "gpu_price_per_hour": self.prices.gpu_price_per_hour,
            "price_per_tb_month": prices,
            "measured": measured,
        }

    def describe(self) -> dict[str, Any]:
        """For `stats`."""
        return {
            "tokens": self.since_start.tokens,
            "untimed_tokens": self.since_start.untimed_tokens,
            "gpu_s": self.since_start.gpu_s if self.speed_known() else None,
            "tenants": {name: one.as_dict(self.prices) for name, one in list(self.tenants.items())},
            "assumed": self.prices.assumed(),
        }

    def restore(self, said: Any) -> None:
        """Tenants as a page has them, but for those that are known."""
        for name, packed in said.items() if isinstance(said, dict) else ():
            if isinstance(name, str) and len(self.tenants) <= TENANTS_MAX:
                self.tenants.setdefault(name, Account.unpacked(packed))

    def packed(self) -> dict[str, list[Any]]:
        """Tenants, for a page."""
        return {name: account.packed() for name, account in list(self.tenants.items())}

    def _count_held(self, part: slice, passed_s: float) -> None:
        """Of some rows: the index as it is while it changes."""
        catalog = self._catalog
        here = np.flatnonzero(catalog.residency.array[part]) + part.start
        where = catalog.residency.array[here]
        weights = catalog.nbytes.array[here] * passed_s
        sessions, session = np.unique(self._owner.array[here], return_inverse=True)
        tags, tag = np.unique(catalog.table.tags()[here], return_inverse=True)
        accounts = [self._accounts.get(number) for number in sessions.tolist()]
        tenants = [self._tenant(self._tenant_of(one.tobytes())) for one in tags]
        for copies in catalog.tiers:
            place, held = TIER_NAMES.index(copies.tier), weights * (where & copies.bit != 0)
            for which, whose in ((session, accounts), (tag, tenants)):
                totals = np.bincount(which, held, len(whose)).tolist()
                for account, total in zip(whose, totals, strict=True):
                    if account is not None:
                        account.byte_s[place] += total

    def _tenant_of(self, tag: bytes) -> str:
        space = self._spaces.get(tag)
        if space is None:
            space = SpaceFacts(self.tenant_of(tag), 0.0, 0, counts=False)
            if len(self._spaces) < _SPACES_MAX:
                self._spaces.setdefault(tag, space)
        return space.tenant

    def _tenant(self, name: str) -> Account:
        known = self.tenants.get(name)
        if known is None:
            name = name if len(self.tenants) < TENANTS_MAX else OTHERS
            known = self.tenants.setdefault(name, Account())
        return known


def _facts(description: bytes) -> SpaceFacts:
    """Of a namespace's description; nothing is counted for one that makes no sense."""
    try:
        said = json.loads(description)
        layout, shards = said["layout"], max(1, int(said["shard_size"]))
        block_tokens = int(layout["block_tokens"])
        parts = layout.get("sliding_window"), layout.get("attention_chunk")
        whole = layout.get("kind") != "state" and parts == (None, None)
        return SpaceFacts(str(said["tenant"]), block_tokens / shards, block_tokens, counts=whole)
    except (ValueError, TypeError, KeyError, OverflowError):
        return SpaceFacts("", 0.0, 0, counts=False)
