"""The line in which blocks leave memory: tails before heads, the coldest first, nobody in use."""

import struct

import pytest
from tests.support.catalogs import chain, in_memory

from kvdepot.core.block import BlockKey
from kvdepot.index.catalog import Catalog
from kvdepot.index.table import NONE
from kvdepot.policy.eviction.fifo_lfu_s3fifo import S3Fifo

SMALL, LARGE = 8192, 65536


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

    def enter(self, name: str, parent: str | None = None, group: int = SMALL) -> None:
        row = self.know(name, parent)
        self.catalog.memory.reserve(row, 0)
        self.catalog.memory.seal(row)
        self.catalog.leaves.enter(row, group)
        self.catalog.use([row], hit=False)

    def leave(self, name: str) -> None:
        row = self.row[name]
        self.catalog.leaves.leave(row)
        self.catalog.memory.drop(row)
        self.catalog.forget_if_gone(row)

    def coldest(self, group: int = SMALL) -> str | None:
        row = self.catalog.leaves.coldest(group)
        return None if row == NONE else self.names[row]

    def drain(self, group: int = SMALL) -> list[str]:
        """Everything that can leave, in order."""
        gone = []
        while (name := self.coldest(group)) is not None:
            self.leave(name)
            gone.append(name)
        return gone

    def use(self, *names: str) -> None:
        self.catalog.use([self.row[name] for name in names])


@pytest.fixture
def memory() -> Memory:
    return Memory()


def test_unrelated_blocks_leave_in_the_order_of_their_last_use(memory: Memory) -> None:
    for name in "abcd":
        memory.enter(name)
    memory.use("b")
    memory.use("a")
    assert memory.drain() == ["c", "d", "b", "a"]


def test_an_empty_line_has_no_victim(memory: Memory) -> None:
    assert memory.coldest() is None


def test_a_prompt_leaves_from_its_tail(memory: Memory) -> None:
    memory.enter("head")
    memory.enter("middle", "head")
    memory.enter("tail", "middle")
    assert memory.drain() == ["tail", "middle", "head"]


def test_a_head_stays_for_its_warm_branch(memory: Memory) -> None:
    memory.enter("head")
    memory.enter("cold", "head")
    memory.enter("warm", "head")
    memory.enter("other")
    memory.use("head", "warm")
    assert memory.drain() == ["cold", "other", "warm", "head"]


def test_a_head_is_as_recent_as_what_continued_it(memory: Memory) -> None:
    """The head itself was used long ago, but its tail after everything else."""
    memory.enter("head")
    memory.enter("tail", "head")
    for name in "ab":
        memory.enter(name)
    memory.use("tail")
    memory.leave("tail")
    assert memory.drain() == ["a", "b", "head"]


def test_a_cold_head_takes_its_place_in_front(memory: Memory) -> None:
    memory.enter("head")
    memory.enter("tail", "head")
    for name in "ab":
        memory.enter(name)
    assert memory.drain() == ["tail", "head", "a", "b"]


def test_a_tail_that_comes_before_its_head_still_protects_it(memory: Memory) -> None:
    memory.enter("tail", "head")
    memory.enter("head")
    memory.use("tail")
    assert memory.drain() == ["tail", "head"]


def test_a_child_outside_the_tier_protects_nobody(memory: Memory) -> None:
    memory.enter("head")
    memory.know("on disk only", "head")
    assert memory.coldest() == "head"


def test_a_parent_in_no_tier_still_counts_its_children(memory: Memory) -> None:
    """The parent is known (from disk) before it comes to memory; its child is there already."""
    memory.know("parent")
    memory.enter("child", "parent")
    memory.enter("parent")
    assert memory.drain() == ["child", "parent"]


@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_held_block_is_out_of_line_until_the_last_release(memory: Memory, times: int) -> None:
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


def test_a_block_held_before_it_enters_stays_out_of_line(memory: Memory) -> None:
    row = memory.know("a")
    memory.catalog.leaves.hold(row)
    memory.enter("a")
    assert memory.coldest() is None
    memory.catalog.leaves.release(row)
    assert memory.coldest() == "a"


def test_a_held_tail_keeps_its_whole_prompt(memory: Memory) -> None:
    memory.enter("head")
    memory.enter("tail", "head")
    memory.catalog.leaves.hold(memory.row["tail"])
    assert memory.drain() == []
    memory.catalog.leaves.release(memory.row["tail"])
    assert memory.drain() == ["tail", "head"]


def test_each_size_class_has_a_line_of_its_own(memory: Memory) -> None:
    memory.enter("small", group=SMALL)
    memory.enter("large", group=LARGE)
    assert memory.coldest(SMALL) == "small"
    assert memory.coldest(LARGE) == "large"
    memory.leave("small")
    assert memory.coldest(SMALL) is None
    assert memory.coldest(LARGE) == "large"


def test_a_child_of_another_size_protects_its_parent_too(memory: Memory) -> None:
    memory.enter("head", group=SMALL)
    memory.enter("tail", "head", group=LARGE)
    assert memory.coldest(SMALL) is None
    memory.leave("tail")
    assert memory.coldest(SMALL) == "head"


def test_a_removed_parent_does_not_haunt_its_children(memory: Memory) -> None:
    """The child's departure must not touch the counters of whoever has the parent's row now."""
    memory.enter("parent")
    memory.enter("child", "parent")
    row = memory.row["parent"]
    assert memory.catalog.mark_deleted(row)
    memory.leave("parent")
    memory.enter("heir")
    assert memory.row["heir"] == row, "the row is used again"
    memory.leave("child")
    assert memory.drain() == ["heir"]


def test_a_removed_child_frees_its_parent(memory: Memory) -> None:
    memory.enter("parent")
    memory.enter("child", "parent")
    assert memory.coldest() == "child"
    memory.catalog.mark_deleted(memory.row["child"])
    memory.leave("child")
    assert memory.drain() == ["parent"]


@pytest.mark.parametrize(("older", "place"), [(0, 0), (3, 3), (7, 7), (8, 12), (12, 12)])
def test_a_head_finds_its_place_near_the_cold_end_or_goes_to_the_warm_one(
    memory: Memory, older: int, place: int
) -> None:
    """Eight steps are taken at most, so that eviction costs the same for any number of blocks."""
    others = [f"other {number}" for number in range(12)]
    for name in others[:older]:
        memory.enter(name)
    memory.enter("head")
    memory.enter("tail", "head")
    for name in others[older:]:
        memory.enter(name)
    memory.leave("tail")
    assert memory.drain().index("head") == place


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
