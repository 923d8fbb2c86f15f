"""The ledger counts the tokens that were served to engines, and the prefill time that they saved.

The ledger multiplies the tokens of served blocks by the prefill speed that the engine reported for
the namespace or, without a report, by `ledger.prefill_tokens_per_s`. It adds the result to the
tenant at once, and to a session when a prompt of the session is named with these blocks.

All counts begin at zero when the store is opened. Prometheus keeps their history.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvdepot.config.settings import LedgerConfig
from kvdepot.core.keys import Keys
from kvdepot.store.events import BlocksServed, Event, PrefillReported, Registered, SessionNamed

TENANTS_MAX: Final = 64
OTHERS: Final = "(others)"
"""The account of all tenants after the first TENANTS_MAX."""
SESSIONS_MAX: Final = 1 << 12
"""Most sessions. The ledger drops the one that was named longest ago."""
SESSIONS_LISTED: Final = 100
_UNCLAIMED_MAX: Final = 256
"""Limit of the namespaces with calls that belong to no session yet, and of the calls in each."""
_SPACES_MAX: Final = 1 << 16


@dataclass(slots=True)
class Account:
    """Tokens served to one tenant or session."""

    tokens: dict[str, float] = field(default_factory=dict)
    """Tokens by the tier that they came from."""
    gpu_s: float = 0.0
    """Seconds of prefill that the engine did not need to compute."""
    untimed_tokens: float = 0.0
    """Tokens served while no prefill speed was known. They add nothing to `gpu_s`."""

    def add(self, other: "Account") -> None:
        for tier, tokens in other.tokens.items():
            self.tokens[tier] = self.tokens.get(tier, 0.0) + tokens
        self.gpu_s += other.gpu_s
        self.untimed_tokens += other.untimed_tokens

    def as_dict(self, prices: LedgerConfig) -> dict[str, Any]:
        return {
            "tokens": sum(self.tokens.values()),
            "tiers": dict(self.tokens),
            "untimed_tokens": self.untimed_tokens,
            "gpu_s": self.gpu_s,
            "saved": self.gpu_s / 3600.0 * prices.gpu_price_per_hour,
        }


@dataclass(frozen=True, slots=True)
class _Space:
    """The ledger's facts of a namespace."""

    tenant: str
    block_tokens: int
    shards: int
    """A block of one shard stands for this fraction of the tokens."""


class SavingsLedger:
    """The counts of one store."""

    def __init__(self, prices: LedgerConfig) -> None:
        self._prices = prices
        self._spaces: dict[bytes, _Space] = {}
        self._prefill: dict[bytes, PrefillReported] = {}
        self._total = Account()
        self._tenants: dict[str, Account] = {}
        self._sessions: OrderedDict[tuple[bytes, str], Account] = OrderedDict()
        """Accounts of sessions by tag and name, in the order in which they were named."""
        self._unclaimed: OrderedDict[bytes, OrderedDict[int, Account]] = OrderedDict()
        """Accounts of calls that belong to no session yet, by tag and digest of the last block."""

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, BlocksServed):
                self._served(event)
            elif isinstance(event, Registered):
                self._registered(event.tag, event.description)
            elif isinstance(event, SessionNamed):
                self._session_named(event.tag, event.name, event.keys)
            elif isinstance(event, PrefillReported):
                self._prefill[event.tag] = event

    def _registered(self, tag: bytes, description: bytes) -> None:
        """Count the blocks of a namespace from now on. Windows and states are not counted: they
        are for the same tokens as the blocks of full attention.
        """
        space = _described(description)
        if space is not None and (tag in self._spaces or len(self._spaces) < _SPACES_MAX):
            self._spaces[tag] = space

    def _served(self, event: BlocksServed) -> None:
        """Count served blocks of one prompt and tier."""
        tag, blocks = event.tag, event.whole
        space = self._spaces.get(tag)
        if space is None:
            return
        tokens = blocks * space.block_tokens / space.shards
        saved = Account({event.tier: tokens})
        prefill = self._prefill.get(tag)
        if prefill is not None:
            context = (event.before + blocks / 2) * space.block_tokens
            saved.gpu_s = tokens * (prefill.token_s + prefill.pair_s * context)
        elif self._prices.prefill_tokens_per_s:
            saved.gpu_s = tokens / self._prices.prefill_tokens_per_s
        else:
            saved.untimed_tokens = tokens
        self._total.add(saved)
        self._tenant(space.tenant).add(saved)
        calls = self._unclaimed.setdefault(tag, OrderedDict())
        calls.setdefault(event.last, Account()).add(saved)
        _drop_first(calls, _UNCLAIMED_MAX)
        _drop_first(self._unclaimed, _UNCLAIMED_MAX)

    def _session_named(self, tag: bytes, name: str, words: Keys) -> None:
        """Add calls that ended with a block of this prompt to the account of its session."""
        calls = self._unclaimed.get(tag)
        if not calls:
            return
        digests = np.fromiter(calls, np.uint64, len(calls))
        claimed = digests[np.isin(digests, words[:, 2])].tolist()
        if claimed:
            account = self._sessions.setdefault((tag, name), Account())
            self._sessions.move_to_end((tag, name))
            _drop_first(self._sessions, SESSIONS_MAX)
            for digest in claimed:
                account.add(calls.pop(digest))

    def describe(self) -> dict[str, Any]:
        """The counts for `stats`. `gpu_s` is None while no prefill speed is known."""
        known = self._prefill or self._prices.prefill_tokens_per_s
        total = self._total.as_dict(self._prices)
        return {
            **total,
            "gpu_s": total["gpu_s"] if known else None,
            "tenants": {name: one.as_dict(self._prices) for name, one in self._tenants.items()},
            "assumed": self._prices.assumed(),
        }

    def page(self) -> dict[str, Any]:
        """The counts as time and money, with the speeds and prices used. docs/ledger.md"""
        best = sorted(self._sessions.items(), key=lambda one: -one[1].gpu_s)[:SESSIONS_LISTED]
        return {
            "tenants": [
                {"tenant": name, **self._tenants[name].as_dict(self._prices)}
                for name in sorted(self._tenants)
            ],
            "sessions": [
                {"name": name, "namespace": tag.hex(), **account.as_dict(self._prices)}
                for (tag, name), account in best
            ],
            "total": self._total.as_dict(self._prices),
            "assumed": {
                **self._prices.assumed(),
                "gpu_price_per_hour": self._prices.gpu_price_per_hour,
                "measured": {tag.hex(): _speed(one) for tag, one in self._prefill.items()},
            },
        }

    def _tenant(self, name: str) -> Account:
        if name not in self._tenants and len(self._tenants) >= TENANTS_MAX:
            name = OTHERS
        return self._tenants.setdefault(name, Account())


def _speed(prefill: PrefillReported) -> dict[str, float | None]:
    """`crossover_tokens` is the context at which attention takes as long as all the rest."""
    crossover = prefill.token_s / prefill.pair_s if prefill.pair_s else None
    return {"tokens_per_s": 1.0 / prefill.token_s, "crossover_tokens": crossover}


def _drop_first(many: OrderedDict[Any, Any], limit: int) -> None:
    if len(many) > limit:
        many.popitem(last=False)


def _described(description: bytes) -> _Space | None:
    """Parse a description of a namespace; None if its blocks are not counted."""
    try:
        said: Mapping[str, Any] = json.loads(description)
        layout, shards = said["layout"], max(1, int(said["shard_size"]))
        parts = layout.get("sliding_window"), layout.get("attention_chunk")
        if layout.get("kind") == "state" or parts != (None, None):
            return None
        return _Space(str(said["tenant"]), int(layout["block_tokens"]), shards)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
