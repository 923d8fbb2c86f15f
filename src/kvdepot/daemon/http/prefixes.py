"""Finds the stored prefixes of a prompt, for routers that choose a node for a request."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvdepot.core.depot import Match
from kvdepot.core.namespace import Namespace
from kvdepot.daemon.http.bodies import PrefixQuestion
from kvdepot.store.store import Store


def longest_prefixes(store: Store, question: PrefixQuestion) -> dict[str, Any]:
    """The longest stored prefix in tokens, and that of each matching namespace, longest first."""
    spaces = [space for space in store.routing.namespaces() if _is_meant(question, space)]
    rows = [_row(store, space, question.token_ids) for space in spaces]
    rows.sort(key=lambda row: -int(row["tokens"]))
    return {"tokens": rows[0]["tokens"] if rows else 0, "namespaces": rows}


def _is_meant(question: PrefixQuestion, space: Namespace) -> bool:
    """True if a namespace matches the question. The first shard of a model stands for all."""
    if question.namespace is not None:
        return space.tag.hex() == question.namespace
    same = question.model is None or space.model == question.model
    return same and space.tenant == (question.tenant or "") and space.shard_rank == 0


def _row(store: Store, space: Namespace, token_ids: Sequence[int]) -> dict[str, Any]:
    size, nbytes = space.block_tokens, space.layout.block_bytes
    found: Match = store.routing.match(space.keys(token_ids))
    blocks = Counter(found.tiers)
    seconds = store.routing.expected_s({tier: nbytes * count for tier, count in blocks.items()})
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
