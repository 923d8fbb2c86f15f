"""Rows in the order of prompts: every block right behind the one it continues."""

from collections.abc import Iterable
from typing import Final

from kvdepot.index.table import NONE
from kvdepot.index.tree import PrefixTree

_STEPS_MAX: Final = 4096
"""Blocks looked at below one, to find the longest path through it."""


def path_order(tree: PrefixTree, rows: Iterable[int]) -> list[int]:
    """`rows`, one path after the other, heads first; paths in the order their first row has."""
    chosen = dict.fromkeys(rows)
    below: dict[int, list[int]] = {}
    heads = []
    for row in chosen:
        parent = tree.parent[row]
        if parent in chosen:
            below.setdefault(parent, []).append(row)
        else:
            heads.append(row)
    ordered: list[int] = []
    waiting = heads[::-1]
    while waiting:
        row = waiting.pop()
        ordered.append(row)
        waiting.extend(reversed(below.get(row, ())))
    # Only made-up keys go in circles, without a head; they come last.
    left = chosen.keys() - set(ordered) if len(ordered) < len(chosen) else ()
    return ordered + [row for row in chosen if row in left]


def path_blocks(tree: PrefixTree, rows: Iterable[int], enough: int) -> dict[int, int]:
    """For each row how many blocks the longest path through it has; counted up to `enough`."""
    depth: dict[int, int] = {}
    for row in rows:
        above: dict[int, None] = {}
        while row != NONE and row not in depth and row not in above:
            above[row] = None
            row = tree.parent[row]
        base = depth.get(row, 0)
        for number, one in enumerate(reversed(above), base + 1):
            depth[one] = number
    reach: dict[int, int] = {}
    for row in sorted(depth, key=depth.__getitem__, reverse=True):
        reach[row] = _reach(tree, row, depth[row], reach, enough)
    return {row: min(blocks, enough) for row, blocks in reach.items()}


def _reach(tree: PrefixTree, row: int, depth: int, known: dict[int, int], enough: int) -> int:
    """Blocks from the head to the farthest end below `row`, where some are `known`."""
    best, steps = depth, 0
    waiting = [(row, depth)]
    while waiting and best < enough and steps < _STEPS_MAX:
        at, blocks = waiting.pop()
        for child in tree.children(at):
            steps += 1
            best = max(best, known.get(child, blocks + 1))
            if child not in known:
                waiting.append((child, blocks + 1))
    return best
