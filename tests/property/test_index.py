"""The key table and the catalog against plain dicts and lists, under random operations."""

import struct

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvdepot.core.block import BlockKey
from kvdepot.core.keys import as_words
from kvdepot.index.table import NONE, KeyTable

# Low bits that fall on the edges of tables of 2048 to 2^40 slots; high ones tell keys apart.
EDGES = st.sampled_from([0, 1, 2, 2046, 2047, (1 << 40) - 1])
WORDS = st.tuples(
    st.integers(1, 2),
    st.sampled_from([0, 1 << 41 | 2047]),
    st.builds(lambda high, low: high << 41 | low, st.integers(1, 6), EDGES),
    st.integers(0, 1),
)


def pack(words: tuple[int, int, int, int]) -> BlockKey:
    return BlockKey(struct.pack("<QQQQ", *words))


class TableMachine(RuleBasedStateMachine):
    """KeyTable beside a dict."""

    @initialize()
    def start(self) -> None:
        self.table = KeyTable()
        self.mark = self.table.column(np.int64, NONE)
        self.model: dict[BlockKey, int] = {}
        self.hidden: list[int] = []
        self.rows: set[int] = set()
        self.fresh = 0

    def taken(self, row: int) -> None:
        assert row not in self.rows
        self.rows.add(row)
        assert self.mark[row] == NONE, "a new row starts with the fill value"
        self.mark[row] = row

    @rule(words=WORDS)
    def add(self, words: tuple[int, int, int, int]) -> None:
        key = pack(words)
        if key not in self.model:
            row = self.table.add(key)
            self.taken(row)
            self.model[key] = row

    @rule(count=st.sampled_from([0, 1, 7, 7, 7, 400]), slot=EDGES)
    def add_many(self, count: int, slot: int) -> None:
        keys = []
        for _ in range(count):
            self.fresh += 1
            crowded = count < 10
            low = slot if crowded else self.fresh * 0x9E3779B97F4A7C15 % (1 << 40)
            keys.append(pack((3, 0, (1000 + self.fresh) << 41 | low, 0)))
        for key, row in zip(keys, self.table.add_many(as_words(keys)).tolist(), strict=True):
            self.taken(row)
            self.model[key] = row

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def hide(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model)[:60]))
        row = self.model.pop(key)
        self.table.hide(row)
        self.hidden.append(row)

    @precondition(lambda self: self.hidden)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        row = self.hidden.pop(data.draw(st.integers(0, len(self.hidden) - 1)))
        self.table.free(row)
        self.rows.remove(row)

    @rule(wanted=st.lists(WORDS, max_size=40))
    def find_many(self, wanted: list[tuple[int, int, int, int]]) -> None:
        keys = [pack(words) for words in wanted]
        expected = [self.model.get(key, NONE) for key in keys]
        assert [self.table.find(key) for key in keys] == expected
        words = np.array(wanted, dtype=np.uint64).reshape(-1, 4)
        assert self.table.find_many(words).tolist() == expected

    @rule(wanted=st.lists(WORDS, max_size=40))
    def find_names(self, wanted: list[tuple[int, int, int, int]]) -> None:
        names: dict[tuple[int, int], set[int]] = {}
        for key, row in self.model.items():
            tag, _, high, _ = struct.unpack("<QQQQ", key)
            names.setdefault((tag, high), set()).add(row)
        words = np.array(wanted, dtype=np.uint64).reshape(-1, 4)
        at_once = self.table.find_names(words[:, 0], words[:, 2]).tolist()
        for (tag, _, high, _), many in zip(wanted, at_once, strict=True):
            allowed = names.get((tag, high), {NONE})
            assert many in allowed
            assert self.table.find_name(tag, high) in allowed

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "table"):
            assert self.table.live == len(self.model) + len(self.hidden)

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        for key, row in self.model.items():
            assert self.table.find(key) == row
            assert self.table.key(row) == key
            assert self.mark[row] == row, "growth moved a value"


def test_the_table_is_a_dict_of_keys() -> None:
    run_state_machine_as_test(TableMachine)
