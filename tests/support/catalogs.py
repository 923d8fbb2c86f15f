"""Keys and rows of a catalog."""

import struct

from kvdepot.core.block import BlockKey
from kvdepot.index.catalog import Catalog


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
