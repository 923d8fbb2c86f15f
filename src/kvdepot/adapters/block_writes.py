"""Storing blocks that an engine has computed, some at a time."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from kvdepot.core.block import BlockKey, PutResult
from kvdepot.core.depot import NamespaceHandle
from kvdepot.depot import Depot

_WAVE_BYTES: Final = 64 << 20
Fill = Callable[[Sequence[int], Sequence[memoryview]], None]
"""Copies the blocks with these indices into these views."""


def store_blocks(
    depot: Depot,
    space: NamespaceHandle,
    keys: Sequence[BlockKey],
    fill: Fill,
    *,
    token_ids: Any = None,
    timeout_s: float | None = None,
) -> list[PutResult]:
    """Store the blocks of `keys`, head first. `fill` is called for those that the depot lacks.

    Returns one answer per key. After a wave of which the depot takes nothing all others are
    THROTTLED. `token_ids`, if given, are those of all blocks. May wait for the disk as
    `Depot.reserve` does.
    """
    size, wave = space.layout.block_tokens, max(1, _WAVE_BYTES // space.block_bytes)
    results: list[PutResult] = []
    while len(results) < len(keys):
        first, part = len(results), keys[len(results) : len(results) + wave]
        ids = None
        if token_ids is not None:
            ids = token_ids[first * size : (first + len(part)) * size]
        with depot.reserve(part, token_ids=ids, timeout_s=timeout_s) as slots:
            views = {
                index: view
                for index, put in enumerate(slots.outcomes)
                if put is PutResult.STORED and (view := slots.view(index)) is not None
            }
            if views:
                fill([first + index for index in views], list(views.values()))
                slots.seal(views)
            taken = [put for put in slots.outcomes if put is not PutResult.THROTTLED]
        if not taken:
            break
        results += taken
    return results + [PutResult.THROTTLED] * (len(keys) - len(results))
