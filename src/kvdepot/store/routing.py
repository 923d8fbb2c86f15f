"""Requests of routers, other nodes and people. They may use all namespaces that are described on
the drives, even if no program has registered them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from kvdepot.config.settings import TenantConfig
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import Match
from kvdepot.core.keys import as_words
from kvdepot.core.namespace import Namespace
from kvdepot.depot import checked
from kvdepot.format.record import token_ids
from kvdepot.store.described import DescribedNamespaces
from kvdepot.store.engine import Caller, Engine
from kvdepot.store.read.prefetch import Hint
from kvdepot.store.read.token_ids import read_heads
from kvdepot.store.state.lower_tier import LowerTier

MEMORY_BYTES_PER_S: Final = 10e9
"""Assumed speed of memory, which is not measured."""
KeysOfSession = Callable[[Sequence[bytes], str], list[list[BlockKey]]]
"""Returns the keys of a session's prompt in each of these namespaces (tags) that has it."""


class RoutingCalls:
    """Matches, prefetches and facts for prompts of all namespaces described here."""

    def __init__(
        self, engine: Engine, tenants: Mapping[str, TenantConfig], keys_of_session: KeysOfSession
    ) -> None:
        self._engine = engine
        self._described = DescribedNamespaces(engine.state.descriptions.all, tenants)
        self._keys_of_session = keys_of_session
        self.caller = Caller("other nodes", described=self._described.size_of)

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """Match without counting a lookup, because a router asks several stores for one request."""
        words = as_words(checked(keys))
        return Match.of(self._engine.match(self.caller, words, counts=False))

    def prefetch(self, keys: Sequence[BlockKey], deadline_s: float) -> Hint:
        """Read a prompt into memory in the background. Does nothing if the store is closing."""
        return self._engine.prefetch(self.caller, [as_words(keys)], deadline_s)

    def keys_of_tokens(self, tokens: Sequence[int], model: str = "") -> list[list[BlockKey]]:
        """The keys of a prompt in each namespace of a model, or of all, whose secret is known."""
        found = [one.keys(tokens) for one in self.namespaces() if model in ("", one.model)]
        return [keys for keys in found if keys]

    def keys_of_session(self, name: str, tenant: str = "") -> list[list[BlockKey]]:
        """The keys of a session's prompt in each namespace of a tenant that has it."""
        tags = [tag for tag, one in self._described.all().items() if one.tenant == tenant]
        return self._keys_of_session(tags, name)

    def namespaces(self) -> list[Namespace]:
        """The namespaces whose secret is known."""
        found = (one.namespace for one in self._described.all().values())
        return [space for space in found if space is not None]

    def token_ids(self, keys: Sequence[BlockKey]) -> list[list[int]]:
        """The token ids that were put with each block; empty if there are none, or the block is
        missing. Blocks: reads a page of each block that is not in memory.
        """
        with self._engine.state.using:
            found = read_heads(self._engine.state, checked(list(keys)), token_ids, b"")
        return [np.frombuffer(ids, "<u4").tolist() for ids in found]

    def expected_s(self, nbytes: Mapping[str, int]) -> float | None:
        """Expected seconds to read `nbytes` from each tier in parallel, after the reads that are
        queued; None if the speed of a tier is unknown.
        """
        lower = {one.name: one for one in self._engine.state.lower_tiers}
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
