"""The catalog's eviction order against a model of plain lists, scanned instead of counted.

The model knows a block's children by looking at all blocks, its place by a list a size class.
"""

import struct
from dataclasses import dataclass, field
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tests.support.catalogs import resident

from kvdepot.core.block import BlockKey
from kvdepot.index import catalog as catalog_module
from kvdepot.index import leaves as leaves_module
from kvdepot.index import tree as tree_module
from kvdepot.index.catalog import Catalog
from kvdepot.index.table import NONE

CHAIN, BLOCKS = 24, 40
GROUPS = (4096, 8192)
STEPS_MAX = 8
"""A head looks this far from the cold end for its place; otherwise it goes to the warm end."""

Numbers = st.integers(0, BLOCKS - 1)


def parent_of(number: int) -> int | None:
    """One long prompt, and branches off it, one of them off a branch."""
    if number < CHAIN:
        return number - 1 if number else None
    return (number - CHAIN) * 5 % CHAIN if number < BLOCKS - 1 else BLOCKS - 2


def key_of(number: int) -> BlockKey:
    """All digests agree in their low 40 bits."""
    parent = parent_of(number)
    link = (parent + 1) << 40 if parent is not None else 0
    return BlockKey(struct.pack("<QQQQ", 1, link, (number + 1) << 40, 0))


def prompt(number: int) -> list[int]:
    """The block and all before it, head first."""
    path = [number]
    while (parent := parent_of(path[-1])) is not None:
        path.append(parent)
    return path[::-1]


@dataclass(eq=False)
class Block:
    number: int
    row: int
    group: int = 0
    disk: bool = False
    stamp: int = 0
    hits: int = 0
    leases: int = 0
    dirty: int = 0
    doomed: bool = False


@dataclass
class Model:
    """What the catalog promises, in the plainest words."""

    known: dict[int, Block] = field(default_factory=dict)
    lines: dict[int, list[Block]] = field(default_factory=lambda: {group: [] for group in GROUPS})
    now: int = 0

    def parent(self, block: Block) -> Block | None:
        number = parent_of(block.number)
        return None if block.doomed or number is None else self.known.get(number)

    def has_children(self, block: Block) -> bool:
        return any(other.group and self.parent(other) is block for other in self.known.values())

    def is_held(self, block: Block) -> bool:
        return bool(block.leases or block.dirty)

    def victim(self, group: int) -> Block | None:
        """The first block in line. Held ones are taken out of the line when they come first."""
        line = self.lines[group]
        while line and self.is_held(line[0]):
            line.pop(0)
        return line[0] if line else None

    def in_line(self, block: Block) -> bool:
        return any(block in line for line in self.lines.values())

    def unline(self, block: Block) -> None:
        for line in self.lines.values():
            if block in line:
                line.remove(block)

    def settle(self, block: Block | None) -> None:
        if block is None or not block.group or self.in_line(block):
            return
        if self.is_held(block) or self.has_children(block):
            return
        line = self.lines[block.group]
        warmer = [n for n, other in enumerate(line) if other.stamp >= block.stamp]
        place = warmer[0] if warmer else len(line)
        line.insert(place if place < STEPS_MAX else len(line), block)

    def enter(self, block: Block, group: int) -> None:
        block.group = group
        parent = self.parent(block)
        if parent is not None:
            self.unline(parent)
        if not self.has_children(block):
            self.lines[group].append(block)

    def leave(self, block: Block) -> None:
        self.unline(block)
        block.group = 0
        parent = self.parent(block)
        if parent is not None:
            parent.stamp = max(parent.stamp, block.stamp)
            self.settle(parent)

    def use(self, blocks: list[Block]) -> None:
        self.now += len(blocks)
        for age, block in enumerate(blocks):
            block.stamp = self.now - age
            block.hits += 1
            if self.in_line(block):
                self.unline(block)
                self.lines[block.group].append(block)

    def mark_deleted(self, block: Block) -> None:
        parent = self.parent(block)
        block.doomed = True
        del self.known[block.number]
        self.settle(parent)


class CatalogMachine(RuleBasedStateMachine):
    """A catalog driven the way the store drives it, beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.catalog = Catalog()
        self.model = Model()
        self.leases: list[list[Block]] = []
        self.dirty: list[Block] = []

    def known(self, number: int) -> Block:
        block = self.model.known.get(number)
        if block is None:
            block = Block(number, self.catalog.ensure(key_of(number), 1 + number))
            self.model.known[number] = block
        return block

    def forget_if_gone(self, block: Block) -> None:
        self.catalog.forget_if_gone(block.row)
        if block.group or block.disk or block.leases or block.dirty or block.doomed:
            return
        parent = self.model.parent(block)
        del self.model.known[block.number]
        self.model.settle(parent)

    def leave(self, block: Block) -> None:
        self.catalog.leaves.leave(block.row)
        self.catalog.memory.drop(block.row)
        self.model.leave(block)

    def drop_all(self, block: Block) -> None:
        if block.group:
            self.leave(block)
        if block.disk:
            self.catalog.files[0].drop(block.row)
            block.disk = False
        self.forget_if_gone(block)

    @rule(number=Numbers, group=st.sampled_from(GROUPS), dirty=st.booleans())
    def arrive(self, number: int, group: int, dirty: bool) -> None:
        block = self.known(number)
        if block.group:
            return
        self.catalog.memory.reserve(block.row, number)
        self.catalog.memory.seal(block.row)
        self.catalog.leaves.enter(block.row, group)
        self.model.enter(block, group)
        if dirty:
            self.catalog.leaves.hold(block.row)
            block.dirty += 1
            self.dirty.append(block)

    @rule(group=st.sampled_from(GROUPS))
    def evict(self, group: int) -> None:
        block = self.model.victim(group)
        assert self.catalog.leaves.coldest(group) == (block.row if block else NONE)
        if block is not None:
            assert not self.model.has_children(block), "a head before its tail"
            assert not block.leases and not block.dirty, "a block in use"
            self.leave(block)
            self.forget_if_gone(block)

    @rule(number=Numbers)
    def write_down(self, number: int) -> None:
        block = self.known(number)
        if not block.disk:
            self.catalog.files[0].reserve(block.row, number)
            self.catalog.files[0].seal(block.row)
            block.disk = True

    @rule(number=Numbers)
    def drop_disk(self, number: int) -> None:
        block = self.model.known.get(number)
        if block is not None and block.disk and not block.leases:
            self.catalog.files[0].drop(block.row)
            block.disk = False
            self.forget_if_gone(block)

    @rule(number=Numbers)
    def use(self, number: int) -> None:
        keys = [key_of(n) for n in prompt(number)]
        rows = resident(self.catalog, keys)
        blocks = []
        for n in prompt(number):
            found = self.model.known.get(n)
            if found is None or not (found.group or found.disk):
                break
            blocks.append(found)
        assert rows == [block.row for block in blocks]
        self.catalog.use(rows)
        self.model.use(blocks)

    @rule(number=Numbers)
    def lease(self, number: int) -> None:
        rows = resident(self.catalog, [key_of(n) for n in prompt(number)])
        blocks = [self.model.known[n] for n in prompt(number)[: len(rows)]]
        self.catalog.lease(rows)
        for block in blocks:
            block.leases += 1
        self.leases.append(blocks)

    @rule(which=st.integers(0, 10))
    def unlease(self, which: int) -> None:
        if not self.leases:
            return
        blocks = self.leases.pop(which % len(self.leases))
        gone = self.catalog.unlease([block.row for block in blocks])
        for block in blocks:
            block.leases -= 1
            self.model.settle(block)
        free = [b for b in blocks if not b.leases and (b.doomed or not (b.group or b.disk))]
        assert gone == [block.row for block in free]
        for block in free:
            self.drop_all(block)

    @rule(which=st.integers(0, 40))
    def clean(self, which: int) -> None:
        if not self.dirty:
            return
        block = self.dirty.pop(which % len(self.dirty))
        self.catalog.leaves.release(block.row)
        block.dirty -= 1
        self.model.settle(block)
        if block.doomed and not block.leases:
            self.drop_all(block)

    @rule(number=Numbers)
    def remove(self, number: int) -> None:
        block = self.model.known.get(number)
        if block is None:
            return
        assert self.catalog.mark_deleted(block.row) == (not block.leases)
        self.model.mark_deleted(block)
        if not block.leases and not block.dirty:
            self.drop_all(block)

    @invariant()
    def the_next_victims_are_the_models(self) -> None:
        for group in GROUPS:
            block = self.model.victim(group)
            assert self.catalog.leaves.coldest(group) == (block.row if block else NONE)
        assert self.catalog.leased == sum(map(len, self.leases))
        assert self.catalog.memory.count == sum(1 for b in self.everybody() if b.group)
        assert self.catalog.files[0].count == sum(1 for b in self.everybody() if b.disk)

    def everybody(self) -> set[Block]:
        ghosts = {block for blocks in self.leases for block in blocks} | set(self.dirty)
        return set(self.model.known.values()) | ghosts

    def teardown(self) -> None:
        """Let everything go, in line order: nothing may be left anywhere."""
        while self.leases:
            self.unlease(0)
        while self.dirty:
            self.clean(0)
        while any(self.model.lines.values()):
            for group in GROUPS:
                self.evict(group)
        assert not any(block.group for block in self.everybody()), "a block nobody can evict"
        for block in list(self.model.known.values()):
            self.drop_all(block)
        assert self.catalog.table.live == 0
        assert not self.catalog.tree._orphans


def test_the_catalog_evicts_what_the_model_says() -> None:
    run_state_machine_as_test(CatalogMachine)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["use", "lease", "unlease", "mark_deleted", "evict"]),
            st.lists(Numbers, unique=True, max_size=BLOCKS),
        ),
        max_size=12,
    )
)
def test_short_and_long_batches_are_treated_alike(steps: list[tuple[str, list[int]]]) -> None:
    """The loops for few rows and the array code for many are one algorithm."""
    loops, arrays = play(steps, few=10**9), play(steps, few=1)
    assert loops == arrays


def play(steps: list[tuple[str, list[int]]], few: int) -> list[object]:
    """Everything that can be seen while the steps are done with batches from `few` on as arrays."""
    seen: list[object] = []
    with (
        patch.object(tree_module, "FEW", few),
        patch.object(leaves_module, "FEW", few),
        patch.object(catalog_module, "FEW", few),
    ):
        catalog = Catalog()
        rows = []
        for number in range(BLOCKS):
            rows.append(catalog.ensure(key_of(number), 1))
            catalog.memory.reserve(rows[-1], number)
            catalog.memory.seal(rows[-1])
            catalog.leaves.enter(rows[-1], GROUPS[0])
        leased: list[list[int]] = []
        for verb, numbers in steps:
            found = [row for row in catalog.rows([key_of(n) for n in numbers]) if row != NONE]
            seen.append(found)
            if verb == "use":
                catalog.use(found)
            elif verb == "lease":
                catalog.lease(found)
                leased.append(found)
            elif verb == "unlease" and leased:
                seen.append(catalog.unlease(leased.pop()))
            elif verb == "mark_deleted":
                seen.append([catalog.mark_deleted(row) for row in found[:3]])
            elif (victim := catalog.leaves.coldest(GROUPS[0])) != NONE and verb == "evict":
                catalog.leaves.leave(victim)
                seen.append((victim, catalog.memory.drop(victim)))
            seen.append([(catalog.tree.stamp[row], catalog.tree.hits[row]) for row in rows])
            seen.append([(catalog.leases(row), catalog.leaves.held(row)) for row in rows])
            seen.append(catalog.leaves.coldest(GROUPS[0]))
    return seen
