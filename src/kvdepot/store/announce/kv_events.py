"""KV events as vLLM publishes them and routers read them: what a batch of changes says.

An event is a map. Hashes are the second words of our digests: any u64 will do, if parents and
removals agree.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnnouncedSpace:
    """The facts of a namespace that routers receive."""

    model: str
    adapter: str
    block_tokens: int


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block that has come to a medium."""

    digest: int
    parent: int
    """0: it begins a prompt."""
    tokens: bytes
    """Its token ids, little-endian u32."""
    space: AnnouncedSpace


def stored(blocks: Sequence[StoredBlock], medium: str) -> list[Event]:
    """Events for blocks that have come; those that continue each other make one."""
    events: list[Event] = []
    last: StoredBlock | None = None
    for block in blocks:
        ids = np.frombuffer(block.tokens, "<u4").tolist()
        joins = last is not None and block.parent == last.digest and block.space == last.space
        if joins:
            events[-1]["block_hashes"].append(block.digest)
            events[-1]["token_ids"] += ids
        else:
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": [block.digest],
                    "parent_block_hash": block.parent or None,
                    "token_ids": ids,
                    "block_size": block.space.block_tokens,
                    "lora_id": None,
                    "medium": medium,
                    "lora_name": block.space.adapter or None,
                }
            )
        last = block
    return events


def removed(digests: Iterable[int], medium: str) -> Event:
    return {"type": "BlockRemoved", "block_hashes": list(digests), "medium": medium}


def cleared() -> Event:
    return {"type": "AllBlocksCleared"}


def space_of(facts: Mapping[str, Any]) -> AnnouncedSpace | None:
    """Read a namespace's description; None if it is of no use to routers.

    One shard of each model is published: all hold the same tokens.
    """
    layout = facts.get("layout")
    tokens = layout.get("block_tokens") if isinstance(layout, dict) else None
    if not isinstance(tokens, int) or tokens <= 0 or facts.get("shard_rank", 0) != 0:
        return None
    return AnnouncedSpace(str(facts.get("model", "")), str(facts.get("adapter", "")), tokens)
