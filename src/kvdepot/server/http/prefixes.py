"""Which prefix of a prompt a store has, for routers that ask before they place a request."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvdepot.core.depot import Match
from kvdepot.core.namespace import Namespace
from kvdepot.store.store import Store


@dataclass(frozen=True, slots=True)
class PrefixQuestion:
    """The tokens of a prompt, and which namespaces are meant."""

    token_ids: Sequence[int]
    model: str | None = None
    tenant: str = ""
    namespace: str | None = None

    def means(self, space: Namespace) -> bool:
        """Of the shards of a model the first one answers for all."""
        if self.namespace is not None:
            return space.tag.hex() == self.namespace
        same = self.model is None or space.model == self.model
        return same and space.tenant == self.tenant and space.shard_rank == 0


class PrefixQueries:
    """Answers. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def answer(self, question: PrefixQuestion) -> dict[str, Any]:
        """The longest prefix held, and that of each namespace that is meant, the longest first."""
        spaces = [space for space in self._store.described_namespaces() if question.means(space)]
        rows = [self._row(space, question.token_ids) for space in spaces]
        rows.sort(key=lambda row: -int(row["tokens"]))
        return {"tokens": rows[0]["tokens"] if rows else 0, "namespaces": rows}

    def _row(self, space: Namespace, token_ids: Sequence[int]) -> dict[str, Any]:
        size, nbytes = space.block_tokens, space.layout.block_bytes
        found: Match = self._store.peek(space.keys(token_ids))
        blocks = Counter(found.tiers)
        seconds = self._store.expected_s({tier: nbytes * count for tier, count in blocks.items()})
        return {
            "namespace": space.tag.hex(),
            "model": space.model,
            "adapter": space.adapter,
            "block_tokens": size,
            "tokens": size * len(found),
            "memory_tokens": size * found.blocks_in_memory,
            "tiers": {tier: size * count for tier, count in blocks.items()},
            "bytes": nbytes * len(found),
            "expected_s": None if seconds is None else round(seconds, 6),
        }
