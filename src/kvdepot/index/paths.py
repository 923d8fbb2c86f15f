"""Sorts rows by prompt: every block directly after the one that it continues."""

from collections.abc import Iterable

from kvdepot.index.tree import PrefixTree


def path_order(tree: PrefixTree, rows: Iterable[int]) -> list[int]:
    """Sort rows path by path, heads first. Paths have the order of their first rows."""
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
    # Only forged keys form cycles, which have no head: they come last.
    left = chosen.keys() - set(ordered) if len(ordered) < len(chosen) else ()
    return ordered + [row for row in chosen if row in left]
