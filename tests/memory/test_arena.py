"""Slots in shared memory, and room for a second size class."""

import os
from collections.abc import Iterator
from itertools import pairwise

import pytest
from tests.support.store_contract import touch

import kvdepot
from kvdepot.format.record import PAGE, record_bytes
from kvdepot.memory.arena import CHUNK, Arena, slab_chunks
from kvdepot.memory.memory import Memory

CAPACITY = 8 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(CAPACITY, "never")
    yield arena
    arena.close()


def fill(arena: Arena, nbytes: int) -> list[int]:
    """Slots until there is none."""
    slots: list[int] = []
    while (slot := arena.allocate(nbytes, len(slots))) is not None:
        slots.append(slot)
    return slots


class TestSlots:
    @pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 20480, CHUNK, CHUNK + PAGE, 3 << 20])
    def test_one_class_fills_the_arena_with_aligned_slots_and_little_waste(
        self, arena: Arena, nbytes: int
    ) -> None:
        slots = sorted(fill(arena, nbytes))
        size = -(-nbytes // PAGE) * PAGE
        assert all(slot % PAGE == 0 for slot in slots)
        assert all(after - before >= size for before, after in pairwise(slots))
        assert slots[-1] + size <= CAPACITY
        assert arena.used_bytes == size * len(slots)
        lost = CAPACITY - arena.used_bytes
        assert lost < size or lost <= CAPACITY * 0.05

    def test_the_image_of_a_slot_is_its_memory_and_no_more(self, arena: Arena) -> None:
        first, second = arena.allocate(PAGE, 1), arena.allocate(PAGE, 2)
        assert first is not None and second is not None
        image = arena.image(first, PAGE)
        assert len(image) == PAGE
        image[:] = b"\x5a" * PAGE
        assert bytes(arena.image(first, PAGE)) == b"\x5a" * PAGE
        assert bytes(arena.image(second, PAGE)) == bytes(PAGE)

    @pytest.mark.parametrize("nbytes", [CAPACITY + 1, 1 << 40])
    def test_what_is_larger_than_the_arena_never_fits(self, arena: Arena, nbytes: int) -> None:
        assert arena.chunks_for(nbytes) == 0
        assert arena.allocate(nbytes, 1) is None

    def test_an_arena_below_one_chunk_holds_nothing(self) -> None:
        tiny = Arena(CHUNK - 1, "never")
        assert tiny.allocate(1, 0) is None
        assert tiny.chunks_for(1) == 0
        tiny.close()

    def test_an_arena_below_the_usual_slab_still_works(self) -> None:
        small = Arena(2 * CHUNK, "never")
        assert len(fill(small, 20480)) == 6, "three in each chunk"
        small.close()


@pytest.mark.parametrize("pages", range(2, 600, 7))
def test_a_slab_wastes_at_most_two_percent_when_memory_is_plenty(pages: int) -> None:
    slot_bytes = pages * PAGE
    chunks = slab_chunks(slot_bytes, 1 << 20)
    assert chunks * CHUNK >= slot_bytes
    assert (chunks * CHUNK) % slot_bytes <= 0.02 * chunks * CHUNK


class TestMemory:
    def test_private_memory_is_aligned_for_huge_pages(self) -> None:
        memory = Memory(3 << 20, "auto")
        assert memory.address % (2 << 20) == 0
        assert len(memory.view) == memory.nbytes == 4 << 20
        memory.close()

    @pytest.mark.parametrize("shared", [False, True])
    def test_no_descriptor_stays_behind(self, shared: bool) -> None:
        before = len(os.listdir("/proc/self/fd"))
        Memory(1 << 20, "never", shared=shared).close()
        assert len(os.listdir("/proc/self/fd")) == before

    def test_shared_memory_is_mapped_by_another(self) -> None:
        memory = Memory(3 << 20, "auto", shared=True)
        memory.prefault(bool)
        assert memory.prefaulted()
        memory.view[12345:12350] = b"hello"
        before = len(os.listdir("/proc/self/fd"))
        other = Memory.mapped((os.dup(memory.fd), memory.nbytes))
        assert bytes(other.view[12345:12350]) == b"hello"
        assert memory.address % (2 << 20) == other.address % (2 << 20) == 0
        assert memory.address != other.address
        view = other.view[12345:12350]
        memory.close()
        other.close()
        assert bytes(view) == b"hello", "a view outlives both"
        assert len(os.listdir("/proc/self/fd")) == before - 1

    @pytest.mark.parametrize("nbytes", [4 << 20, 1 << 20])
    def test_what_is_not_there_is_not_mapped(self, nbytes: int) -> None:
        memory = Memory(2 << 20, "never", shared=True)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="to map"):
            Memory.mapped((os.dup(memory.fd), nbytes))
        assert len(os.listdir("/proc/self/fd")) == before
        memory.close()


class TestRoom:
    """Blocks of two sizes in one memory: neither is shut out, neither thrashes in a corner."""

    SMALL, LARGE = 16384, 262144

    def hits_of_newcomers(self, store: kvdepot.Store, blocks: int) -> int:
        """How many of the last `blocks` large blocks are in memory after small ones filled it."""
        small = store.namespace(model="s", layout=kvdepot.KVLayout.opaque(self.SMALL, 16))
        large = store.namespace(model="l", layout=kvdepot.KVLayout.opaque(self.LARGE, 16))
        for start in range(0, 2 * CAPACITY, self.SMALL):
            assert store.put_many([small.keys([start] * 16)[0]], [bytes(self.SMALL)])[0]
        keys = [large.keys([number] * 16)[0] for number in range(20 * blocks)]
        for key in keys:
            assert store.put_many([key], [bytes(self.LARGE)])[0]
        return sum(len(store.match([key])) for key in keys[-blocks:])

    def test_a_second_class_takes_over_when_the_first_is_no_longer_used(self) -> None:
        """24 large blocks are 6.1 of 8 MiB: with small ones idle they have a place.

        Stretches are emptied one at a time and slabs do not tile the memory, so not quite all.
        """
        with kvdepot.open(dram=memory_only()) as store:
            assert self.hits_of_newcomers(store, 24) >= 20
            assert store.admin.check()

    def test_a_class_in_use_keeps_its_place(self) -> None:
        """Small blocks that are used all the time are not pushed out by large ones used once."""
        with kvdepot.open(dram=memory_only()) as store:
            small = store.namespace(model="s", layout=kvdepot.KVLayout.opaque(self.SMALL, 16))
            large = store.namespace(model="l", layout=kvdepot.KVLayout.opaque(self.LARGE, 16))
            busy = [small.keys([number] * 16)[0] for number in range(100)]
            for key in busy:
                assert store.put_many([key], [bytes(self.SMALL)])[0]
            for number in range(300):
                assert store.put_many([large.keys([number] * 16)[0]], [bytes(self.LARGE)])[0]
                touch(store, busy)
            assert sum(len(store.match([key])) for key in busy) == len(busy)

    def test_leased_blocks_do_not_make_way_for_another_class(self) -> None:
        with kvdepot.open(dram=memory_only()) as store:
            small = store.namespace(model="s", layout=kvdepot.KVLayout.opaque(self.SMALL, 16))
            large = store.namespace(model="l", layout=kvdepot.KVLayout.opaque(self.LARGE, 16))
            keys = small.keys(range(16 * (CAPACITY // record_bytes(self.SMALL))))
            assert all(store.put_many(keys, [bytes(self.SMALL)] * len(keys)))
            keys = keys[: len(store.match(keys))]
            with store.lease(keys) as lease:
                assert len(lease) * record_bytes(self.SMALL) >= 0.98 * CAPACITY
                answer = store.put_many(
                    [large.keys(range(16))[0]], [bytes(self.LARGE)], timeout_s=0.0
                )[0]
                assert answer is kvdepot.PutResult.THROTTLED
                assert len(store.match(keys)) == len(keys)
            assert store.put_many([large.keys(range(16))[0]], [bytes(self.LARGE)], timeout_s=0.0)[0]

    def test_a_long_prompt_of_one_class_is_judged_in_time_that_grows_with_its_length(self) -> None:
        """Looking for a stretch to empty must not walk every block's whole tail."""
        with kvdepot.open(dram=memory_only()) as store:
            small = store.namespace(model="s", layout=kvdepot.KVLayout.opaque(PAGE, 16))
            large = store.namespace(model="l", layout=kvdepot.KVLayout.opaque(self.LARGE, 16))
            keys = small.keys(range(16 * CAPACITY // (2 * PAGE)))
            assert all(store.put_many(keys, [bytes(PAGE)] * len(keys)))
            steps = StepCounter(store)
            assert store.put_many([large.keys(range(16))[0]], [bytes(self.LARGE)])[0]
            assert steps.count <= 20 * len(keys)


class StepCounter:
    """Counts the links that are followed in a store's prefix tree."""

    def __init__(self, store: kvdepot.Store) -> None:
        self.count = 0
        tree = store.inspect().catalog.tree
        children = tree.children

        def counted(row: int) -> Iterator[int]:
            self.count += 1
            return children(row)

        tree.children = counted  # type: ignore[method-assign]


def memory_only() -> dict[str, object]:
    return {"capacity": CAPACITY, "prefault": False, "huge_pages": "never"}


def test_failed_allocations_leave_no_descriptor_behind() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises((OSError, ValueError)):
        Memory(1 << 62, "never")
    assert sorted(os.listdir("/proc/self/fd")) == before
