"""A store with 2 MiB of memory and 8 MiB of disk, and prompts for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvdepot
from kvdepot.core.depot import NamespaceHandle
from kvdepot.testing.images import payload_for

TOKENS = 16
BLOCK = 16384
RECORD = BLOCK + 4096
DRAM = 2 << 20
DISK = 8 << 20
IN_DRAM = DRAM // RECORD - 2
"""Blocks that fit in memory; the last slab may not be filled to the end."""
LAYOUT = kvdepot.KVLayout.opaque(BLOCK, TOKENS)


def settings(path: Path | list[Path], **ssd: Any) -> dict[str, Any]:
    return {
        "dram": {"capacity": DRAM, "prefault": False, "huge_pages": "never"},
        "ssd": {"path": path, "capacity": DISK, "segment": "1MiB", **ssd},
        "writeback": {"staging": "2MiB"},
    }


def space_of(store: kvdepot.Store, model: str = "m") -> NamespaceHandle:
    return store.namespace(model=model, layout=LAYOUT)


def prompt(space: NamespaceHandle, number: int, blocks: int) -> list[kvdepot.BlockKey]:
    """Keys of a prompt that shares nothing with those of other numbers."""
    return space.keys([number, *range(1, TOKENS * blocks)])


def put(store: kvdepot.Store, keys: Sequence[kvdepot.BlockKey]) -> list[kvdepot.PutResult]:
    """Each key with the one payload that belongs to it."""
    return store.put_many(keys, [payload_for(key, BLOCK) for key in keys], timeout_s=20.0)


def tiers(store: kvdepot.Store, keys: Sequence[kvdepot.BlockKey]) -> list[str | None]:
    """Where each block came from, None for a miss; no hit has a wrong byte."""
    targets = [bytearray(BLOCK) for _ in keys]
    answers = store.get_many(keys, targets)
    for key, target, answer in zip(keys, targets, answers, strict=True):
        assert not answer or bytes(target) == payload_for(key, BLOCK)
    return [answer.tier for answer in answers]


def flood(store: kvdepot.Store, space: NamespaceHandle, blocks: int, first: int = 1000) -> None:
    """Put prompts of ten blocks that nobody asks for again."""
    for number in range(first, first + blocks // 10):
        assert all(put(store, prompt(space, number, 10)))


def files_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("segment-*"))
