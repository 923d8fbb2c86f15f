"""How much of a prompt the depot holds: the most tokens for which no group lacks a block."""

from collections.abc import Sequence

from kvdepot.adapters.hf.groups import Group
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import Depot
from kvdepot.core.keys import TokenIds

Chains = list[list[BlockKey]]
"""For each group the keys of a prompt's full blocks."""


def chains_of(groups: Sequence[Group], tokens: TokenIds) -> Chains:
    """The keys of a prompt."""
    return [group.keys(tokens) for group in groups]


def longest(store: Depot, groups: Sequence[Group], chains: Chains, limit: int) -> int:
    """The most leading tokens, `limit` at most, after which a model could go on from the depot.

    Ends inside a block where the limit does; the block is held then. Answered from memory.
    """
    tokens = min(limit, len(chains[0]) * groups[0].block_tokens)
    while tokens > 0:
        reach = min(
            _reach(store, group, keys, tokens) for group, keys in zip(groups, chains, strict=True)
        )
        if reach == tokens:
            return tokens
        tokens = reach
    return 0


def _reach(store: Depot, group: Group, keys: Sequence[BlockKey], tokens: int) -> int:
    """`tokens` if the group holds all it needs for that, else the start of a missing block."""
    needed = group.needed(tokens)
    found = len(store.match(keys[needed.start : needed.stop]))
    return tokens if found == len(needed) else (needed.start + found) * group.block_tokens
