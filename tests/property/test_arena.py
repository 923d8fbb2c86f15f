"""The arena against a plain list of taken ranges, under random sizes."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvdepot.memory.arena import UNOWNED, Arena

CAPACITY = 4 << 20
PAGE = 4096
SIZES = st.sampled_from([1, PAGE, 5 * PAGE - 1, 17 * PAGE, 64 * PAGE, 300 * PAGE])


class ArenaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(CAPACITY, "never")
        self.taken: dict[int, tuple[int, int]] = {}
        """Location to size in whole pages and owner."""
        self.owners = 0

    @rule(nbytes=SIZES, times=st.integers(1, 40))
    def allocate(self, nbytes: int, times: int) -> None:
        size = -(-nbytes // PAGE) * PAGE
        for _ in range(times):
            self.owners += 1
            location = self.arena.allocate(nbytes, self.owners)
            if location is None:
                assert self.no_slot_is_free(size)
                return
            assert location % PAGE == 0
            assert 0 <= location <= CAPACITY - size
            for start, (length, _) in self.taken.items():
                assert location + size <= start or start + length <= location, "slots overlap"
            self.taken[location] = (size, self.owners)
            self.arena.image(location, nbytes)[:1] = bytes([self.owners % 251])

    def no_slot_is_free(self, size: int) -> bool:
        """Nothing of this class is free, and no run of free chunks could take one slot."""
        if any(slab.free for slab in self.arena.slabs() if slab.slot_bytes == size):
            return False
        chunk = 65536
        covered = {
            at for slab in self.arena.slabs() for at in range(slab.start, slab.start + slab.chunks)
        }
        needed, run = -(-size // chunk), 0
        for at in range(CAPACITY // chunk):
            run = 0 if at in covered else run + 1
            if run >= needed:
                return False
        return True

    @rule(which=st.integers(0, 10**6), times=st.integers(1, 60))
    def free(self, which: int, times: int) -> None:
        for step in range(times):
            if not self.taken:
                return
            location = sorted(self.taken)[(which + step) % len(self.taken)]
            _, owner = self.taken.pop(location)
            assert self.arena.image(location, 1)[0] == owner % 251, "somebody else's memory"
            self.arena.free(location)

    @rule(which=st.integers(0, 10**6))
    def hand_over(self, which: int) -> None:
        if self.taken:
            location = sorted(self.taken)[which % len(self.taken)]
            self.owners += 1
            self.arena.set_owner(location, self.owners)
            self.arena.image(location, 1)[0] = self.owners % 251
            self.taken[location] = (self.taken[location][0], self.owners)

    @invariant()
    def books_agree(self) -> None:
        assert self.arena.used_bytes == sum(size for size, _ in self.taken.values())
        slabs = self.arena.slabs()
        owners = [owner for slab in slabs for owner in slab.owners if owner != UNOWNED]
        assert sorted(owners) == sorted(owner for _, owner in self.taken.values())
        assert all(len(slab.free) < len(slab.owners) for slab in slabs), "an empty slab is kept"
        for slab in slabs:
            others = {other.slot_bytes for other in slabs} - {slab.slot_bytes}
            assert self.arena.has_others(slab.slot_bytes) == bool(others)
        found = self.arena.slabs_in(0, self.arena.chunk_count)
        assert {slab.start for slab in found} == {slab.start for slab in slabs}

    def teardown(self) -> None:
        for location in self.taken:
            self.arena.free(location)
        assert self.arena.used_bytes == 0
        assert self.arena.slabs() == []
        assert self.arena.allocate(CAPACITY, 1) == 0, "all of it is one piece again"
        self.arena.close()


def test_slots_never_overlap_and_the_books_are_right() -> None:
    run_state_machine_as_test(ArenaMachine)
