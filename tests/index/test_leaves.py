"""The line in which blocks leave memory: what is held, and chains that leave together.

The order in which blocks leave: tests/property/test_lru.py.
"""

import struct

import pytest
from tests.support.catalogs import chain, in_memory

from kvdepot.core.block import BlockKey
from kvdepot.index.catalog import Catalog
from kvdepot.index.table import NONE
from kvdepot.policy.eviction.fifo_lfu_s3fifo import S3Fifo

SMALL = 8192


class Memory:
    """A catalog whose blocks enter and leave memory the way the store does it."""

    def __init__(self) -> None:
        self.catalog = Catalog()
        self.names: dict[int, str] = {}
        self.row: dict[str, int] = {}
        self.digests: dict[str, int] = {}

    def know(self, name: str, parent: str | None = None) -> int:
        """Make a row, in no tier yet."""
        digest = self.digests.setdefault(name, len(self.digests) + 1)
        link = self.digests.setdefault(parent, len(self.digests) + 1) if parent else 0
        row = self.catalog.ensure(BlockKey(struct.pack("<QQQQ", 1, link, digest, 0)), 100)
        self.row[name], self.names[row] = row, name
        return row

    def enter(self, name: str, parent: str | None = None) -> None:
        row = self.know(name, parent)
        self.catalog.memory.reserve(row, 0)
        self.catalog.memory.seal(row)
        self.catalog.leaves.enter(row, SMALL)
        self.catalog.use([row], hit=False)

    def leave(self, name: str) -> None:
        row = self.row[name]
        self.catalog.leaves.leave(row)
        self.catalog.memory.drop(row)
        self.catalog.forget_if_gone(row)

    def coldest(self) -> str | None:
        row = self.catalog.leaves.coldest(SMALL)
        return None if row == NONE else self.names[row]

    def drain(self) -> list[str]:
        """Everything that can leave, in order."""
        gone = []
        while (name := self.coldest()) is not None:
            self.leave(name)
            gone.append(name)
        return gone

    def use(self, *names: str) -> None:
        self.catalog.use([self.row[name] for name in names])


@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_held_block_is_out_of_line_until_the_last_release(times: int) -> None:
    memory = Memory()
    memory.enter("a")
    memory.enter("b")
    leaves, row = memory.catalog.leaves, memory.row["a"]
    for _ in range(times):
        leaves.hold(row)
    for _ in range(times):
        assert leaves.held(row)
        assert memory.coldest() == "b"
        leaves.release(row)
    assert not leaves.held(row)
    assert memory.coldest() == "a"


class TestChains:
    """Blocks that leave together leave what is left as if they had left one by one."""

    @staticmethod
    def filled() -> Memory:
        memory = Memory()
        memory.enter("root")
        for prompt in "ab":
            for number in range(6):
                parent = f"{prompt}{number - 1}" if number else "root"
                memory.enter(f"{prompt}{number}", parent)
        memory.use("root", *(f"a{number}" for number in range(6)))
        memory.use("root", *(f"b{number}" for number in range(6)))
        return memory

    def test_as_one_by_one(self) -> None:
        one_by_one, together = self.filled(), self.filled()
        expected = one_by_one.drain()
        gone = []
        leaves, memory = together.catalog.leaves, together.catalog.memory
        while (row := leaves.coldest(SMALL)) != NONE:
            rows = leaves.chain(row, 4)
            assert len(rows) <= 4
            leaves.leave_chain(rows)
            gone += [together.names[one] for one in rows]
            for one in rows:
                memory.drop(one)
        assert gone == expected

    def test_it_ends_where_another_prompt_begins(self) -> None:
        memory = self.filled()
        row = memory.catalog.leaves.coldest(SMALL)
        names = [memory.names[one] for one in memory.catalog.leaves.chain(row, 100)]
        assert names == [f"a{number}" for number in range(5, -1, -1)]

    def test_what_is_in_use_stays(self) -> None:
        memory = self.filled()
        memory.catalog.lease([memory.row["a3"]])
        row = memory.catalog.leaves.coldest(SMALL)
        names = [memory.names[one] for one in memory.catalog.leaves.chain(row, 100)]
        assert names == ["a5", "a4"]

    def test_an_order_may_want_them_one_by_one(self) -> None:
        catalog = Catalog(order=S3Fifo())
        rows = [in_memory(catalog, one) for one in chain(4)]
        assert catalog.leaves.chain(rows[-1], 4) == [rows[-1]]
