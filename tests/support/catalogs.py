"""Keys and rows of a catalog."""

import struct
from collections.abc import Sequence
from itertools import takewhile

from kvdepot.core.block import BlockKey
from kvdepot.index.catalog import Catalog
from kvdepot.index.table import NONE


def key(number: int, parent: int | None = None) -> BlockKey:
    link = parent + 1 if parent is not None else 0
    return BlockKey(struct.pack("<QQQQ", 1, link, number + 1, 0))


def chain(count: int) -> list[BlockKey]:
    return [key(n, n - 1 if n else None) for n in range(count)]


def in_memory(catalog: Catalog, one: BlockKey, nbytes: int = 100) -> int:
    row = catalog.ensure(one, nbytes)
    catalog.memory.reserve(row, 7)
    catalog.memory.seal(row)
    catalog.leaves.enter(row, 4096)
    return row


def resident(catalog: Catalog, keys: Sequence[BlockKey]) -> list[int]:
    """Rows of the longest leading run of keys that are ready in some tier."""
    return list(
        takewhile(lambda row: row != NONE and catalog.residency.view[row], catalog.rows(keys))
    )
