"""KV events in the format of vLLM, which routers read.

An event is a map. Its hashes are the second words of our digests. Routers accept any u64, if the
hashes of parents and removals agree.
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
    """A block that is new on a medium."""

    digest: int
    parent: int
    """Hash of the block before it; 0 for the first block of a prompt."""
    tokens: bytes
    """Its token ids, little-endian u32."""
    space: AnnouncedSpace


def stored(blocks: Sequence[StoredBlock], medium: str) -> list[Event]:
    """Events for new blocks; consecutive blocks of a prompt are one event."""
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
    """Read a namespace's description; None if it is not published.

    Only the first shard of a model is published: all have the same tokens.
    """
    layout = facts.get("layout")
    tokens = layout.get("block_tokens") if isinstance(layout, dict) else None
    if not isinstance(tokens, int) or tokens <= 0 or facts.get("shard_rank", 0) != 0:
        return None
    return AnnouncedSpace(str(facts.get("model", "")), str(facts.get("adapter", "")), tokens)
