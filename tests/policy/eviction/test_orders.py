"""Every eviction order over the production index, against a slow model of who may leave."""

import random
import struct

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvdepot.core.block import BlockKey
from kvdepot.core.sessions import SessionState
from kvdepot.errors import ConfigError
from kvdepot.index.catalog import Catalog
from kvdepot.index.table import NONE
from kvdepot.policy.eviction import ORDERS, order_named
from kvdepot.policy.eviction.prefill_value import PrefillValue
from kvdepot.policy.eviction.reuse_density import AGES, LearntTrust, ReuseDensity
from kvdepot.sim.tiers import BlockIndex, SimulatedTier
from kvdepot.sim.workload import NO_PARENT, Workload

BLOCKS = 60
GROUPS = (1, 2)
Numbers = st.integers(0, BLOCKS - 1)


def parent_of(number: int) -> int | None:
    """A tree with long branches and a root that many continue."""
    return None if number == 0 else number - 1 if number % 6 else 0


def key_of(number: int) -> BlockKey:
    parent = parent_of(number)
    link = 0 if parent is None else (parent + 1) * 0x9E3779B97F4A7C15 % 2**64
    return BlockKey(
        struct.pack("<QQQQ", 1, link, (number + 1) * 0x9E3779B97F4A7C15 % 2**64, number)
    )


def path_to(number: int) -> list[int]:
    path = [number]
    while (parent := parent_of(path[-1])) is not None:
        path.append(parent)
    return path[::-1]


class OrderMachine(RuleBasedStateMachine):
    """Blocks enter, are used, held, hinted and evicted; the model scans everything."""

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.catalog = Catalog(order=order_named(self.name))
        self.row: dict[int, int] = {}
        self.group: dict[int, int] = {}
        self.held: dict[int, int] = {}

    def eligible(self, group: int) -> set[int]:
        parents = {parent_of(number) for number in self.group}
        return {
            number
            for number, mine in self.group.items()
            if mine == group and number not in parents and not self.held.get(number)
        }

    @rule(number=Numbers, group=st.sampled_from(GROUPS))
    def bring_in(self, number: int, group: int) -> None:
        """A prompt as the store serves it: what is there is used, what is not is made."""
        path = path_to(number)
        self.catalog.use([self.row[n] for n in path if n in self.group])
        for one in path:
            if one not in self.group:
                row = self.row[one] = self.catalog.ensure(key_of(one), 1)
                self.catalog.memory.reserve(row, one)
                self.catalog.memory.seal(row)
                self.catalog.leaves.enter(row, group)
                self.group[one] = group
        self.catalog.use([self.row[n] for n in path], hit=False)

    @rule(number=Numbers)
    def use(self, number: int) -> None:
        self.catalog.use([self.row[n] for n in path_to(number) if n in self.group])

    @rule(number=Numbers)
    def hold(self, number: int) -> None:
        if number in self.group:
            self.catalog.leaves.hold(self.row[number])
            self.held[number] = self.held.get(number, 0) + 1

    @rule(number=Numbers)
    def release(self, number: int) -> None:
        if self.held.get(number):
            self.catalog.leaves.release(self.row[number])
            self.held[number] -= 1

    @rule(number=Numbers, state=st.sampled_from(list(SessionState)))
    def change_session(self, number: int, state: SessionState) -> None:
        rows = [self.row[n] for n in path_to(number) if n in self.group]
        self.catalog.leaves.session_changed(rows, state)

    @rule(group=st.sampled_from(GROUPS), times=st.integers(1, 20))
    def evict(self, group: int, times: int) -> None:
        for _ in range(times):
            victim = self.catalog.leaves.coldest(group)
            candidates = self.eligible(group)
            if victim == NONE:
                assert not candidates, "somebody could have left"
                return
            number = next(n for n in self.group if self.row[n] == victim)
            assert number in candidates
            self.catalog.leaves.leave(victim)
            self.catalog.memory.drop(victim)
            self.catalog.forget_if_gone(victim)
            del self.group[number], self.row[number]

    @invariant()
    def somebody_can_leave_if_the_model_says_so(self) -> None:
        assert self.catalog.memory.count == len(self.group)
        for group in GROUPS:
            found = self.catalog.leaves.coldest(group) != NONE
            assert found == bool(self.eligible(group))


@pytest.mark.parametrize("name", ORDERS)
def test_victims_are_eligible_leaves(name: str) -> None:
    class Machine(OrderMachine):
        pass

    Machine.name = name
    run_state_machine_as_test(Machine)


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="mru"):
        order_named("mru")


class Memory:
    """A catalog of single blocks, filled and drained by name."""

    def __init__(self, policy: str) -> None:
        self.catalog = Catalog(order=order_named(policy))
        self.names: dict[int, str] = {}

    def enter(self, *names: str) -> None:
        for name in names:
            number = int.from_bytes(name.encode(), "little") + 1
            digest = number * 0x9E3779B97F4A7C15 % 2**64
            row = self.catalog.ensure(BlockKey(struct.pack("<QQQQ", 1, 0, digest, 0)), 1)
            self.names[row] = name
            self.catalog.memory.reserve(row, 0)
            self.catalog.memory.seal(row)
            self.catalog.leaves.enter(row, 1)
            self.catalog.use([row], hit=False)

    def row(self, name: str) -> int:
        return next(row for row, other in self.names.items() if other == name)

    def use(self, *names: str) -> None:
        for name in names:
            self.catalog.use([self.row(name)])

    def evict(self) -> str | None:
        row = self.catalog.leaves.coldest(1)
        if row == NONE:
            return None
        self.catalog.leaves.leave(row)
        self.catalog.memory.drop(row)
        self.catalog.forget_if_gone(row)
        return self.names.pop(row)

    def drain(self) -> list[str]:
        gone = []
        while (name := self.evict()) is not None:
            gone.append(name)
        return gone


@pytest.mark.parametrize(
    ("policy", "gone"),
    [("lru", "bdca"), ("fifo", "abcd"), ("lfu", "bdca"), ("s3fifo", "bdac"), ("default", "bdca")],
)
def test_each_order_has_its_own(policy: str, gone: str) -> None:
    """a was used three times and last, c once, b and d never. S3-FIFO keeps those that were used
    in the order in which they came."""
    memory = Memory(policy)
    memory.enter(*"abcd")
    memory.use(*"aca a".replace(" ", ""))
    assert "".join(memory.drain()) == gone


def test_lfu_prefers_frequency_to_recency() -> None:
    memory = Memory("lfu")
    memory.enter(*"ab")
    memory.use(*"aab")
    assert memory.drain() == ["b", "a"]


def test_s3fifo_keeps_what_came_back_after_it_left() -> None:
    memory = Memory("s3fifo")
    memory.enter(*"abcdefghij")
    assert memory.evict() == "a"
    memory.enter("a")
    assert [memory.evict() for _ in range(9)] == list("bcdefghij"), "a is in the long line"


def test_a_closed_session_leaves_first_and_a_pending_one_late() -> None:
    memory = Memory("default")
    memory.enter(*"abcd")
    memory.catalog.leaves.session_changed([memory.row("a")], SessionState.PENDING)
    memory.catalog.leaves.session_changed([memory.row("d")], SessionState.CLOSED)
    assert memory.drain() == ["d", "b", "c", "a"]


def test_a_hint_ends_with_the_next_use() -> None:
    memory = Memory("default")
    memory.enter(*"abc")
    memory.catalog.leaves.session_changed([memory.row("c")], SessionState.CLOSED)
    memory.use("c")
    assert memory.drain() == ["a", "b", "c"]


def test_a_pending_session_that_never_returns_leaves_in_the_end() -> None:
    memory = Memory("default")
    memory.enter("p")
    memory.catalog.leaves.session_changed([memory.row("p")], SessionState.PENDING)
    gone = []
    for number in range(400):
        memory.enter(f"n{number}")
        if number >= 8:
            gone.append(memory.evict())
    assert "p" in gone


def test_what_was_seen_at_the_ends_of_lines_is_never_out_of_date() -> None:
    """The default order remembers them between uses; looking anew must find the same victim."""
    draw = random.Random(11)
    workload = Workload(16)
    chains = [workload.new_blocks(NO_PARENT, 6) for _ in range(40)]
    index, order = BlockIndex.of(workload), ReuseDensity()
    tier = SimulatedTier("dram", 60, index, order)
    for _ in range(600):
        rows = chains[min(int(draw.expovariate(0.1)), 39)]
        found = int(tier.has(rows).sum())
        for some in (rows[:found], rows):
            if len(some):
                index.tree.use(some.tolist(), hit=some is not rows)
                tier.leaves.used(some.tolist(), hit=some is not rows)
        tier.insert(rows)
        while tier.count > 50:
            remembered = order.victim(1)
            order._search.moment = -1
            assert order.victim(1) == remembered
            tier.shrink(tier.count - 1)
    assert tier.evicted > 500


def test_a_few_blocks_are_counted_as_many_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop for a few rows and numpy for many leave the same counts behind."""
    states = []
    for few in (0, 1000):
        monkeypatch.setattr("kvdepot.policy.eviction.reuse_density._FEW", few)
        draw = random.Random(5)
        workload = Workload(16)
        chains = [workload.new_blocks(NO_PARENT, 1 + number % 9) for number in range(50)]
        index, order = BlockIndex.of(workload), ReuseDensity()
        tier = SimulatedTier("dram", 80, index, order)
        for _ in range(2000):
            rows = chains[min(int(draw.expovariate(0.1)), 49)]
            found = rows[: int(tier.has(rows).sum())].tolist()
            if found:
                index.tree.use(found)
                tier.leaves.used(found)
            tier.insert(rows)
        columns = (order._since, order._kind, order._turns, order._uses)
        states.append(
            [column.array.tolist() for column in columns]
            + [order._rates._reuses.tolist(), order._trust.share, order._trust.hits, tier.evicted]
        )
    assert states[0] == states[1]
    assert states[0][-1] > 500


def test_a_long_prompt_in_a_new_tier_is_no_trouble() -> None:
    """Trust is learned in powers of e; hundreds of hits at once must not leave its bounds."""
    memory = Memory("default")
    names = [f"n{number}" for number in range(900)]
    memory.enter(*names)
    memory.catalog.use(list(memory.names))
    assert memory.evict() is not None


def test_recency_is_not_overruled_where_the_counts_are_not_trusted() -> None:
    """However many reuses come too late: LRU may do no better, but the counts have done worse."""
    trust = LearntTrust()
    trust.late, trust.hits = 1e6, 1.0
    trust.learn(-(10**6))
    assert trust.share < 0.1


def test_value_keeps_what_takes_long_to_compute() -> None:
    """Two tails of one kind: the one with more context is worth more."""
    order = order_named("value", 4096)
    parents = [NO_PARENT, *range(20), NO_PARENT]
    index = BlockIndex.of(Workload(block_tokens=4096, parents=parents))
    tier = SimulatedTier("dram", len(parents), index, order)
    for prompt in (list(range(21)), [21]):
        tier.insert(np.array(prompt))
    queues = [order.queue(row) for row in (0, 20, 21)]
    assert queues[0] == queues[2] < queues[1], "depth has queues of its own"
    assert isinstance(order, PrefillValue)
    order._rates.density = [[1.0] * len(AGES) for _ in order._rates.density]
    since = [index.tree.now - 1] * len(parents)
    order._search.moment = index.tree.now
    deep, shallow = (
        order._search._look(queue, row, row, since)[3]
        for queue, row in zip(queues[1:], (20, 21), strict=True)
    )
    assert deep > shallow


def test_value_counts_what_is_worth_more_as_younger() -> None:
    """Where recency decides, it is weighed too: a deep tail that is a little older stays."""
    deep = 20
    parents = [NO_PARENT, *range(deep), *[NO_PARENT] * 40]
    first = {}
    for name in ("default", "value"):
        index = BlockIndex.of(Workload(block_tokens=4096, parents=parents))
        tier = SimulatedTier("dram", len(parents), index, order_named(name, 4096))
        for prompt in (list(range(deep + 1)), *([row] for row in range(deep + 1, len(parents)))):
            tier.insert(np.array(prompt))
            index.tree.use(prompt, hit=False)
            tier.leaves.used(prompt, hit=False)
        gone: list[int] = []
        tier.shrink(len(parents) - 1, gone)
        first[name] = gone
    assert first == {"default": [deep], "value": [deep + 1]}
