"""Page-locking: once for each range in a process, and nothing left behind by a refusal."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest

from kvdepot.adapters.tensors.pagelock import LockedMemory, PageLockError
from kvdepot.errors import BadBufferError
from kvdepot.native import address_of

REFUSED = 2


class Cards:
    """A driver that keeps a list, and refuses ranges longer than `most` bytes."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.most = most
        self.locked: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if nbytes > self.most or address in self.locked:
            return REFUSED
        self.locked.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.locked.remove(address)
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return f"refused with {error}"


@pytest.fixture
def memory() -> Iterator[list[memoryview]]:
    maps = [mmap.mmap(-1, size) for size in (8192, 4096, 16384)]
    yield [memoryview(each) for each in maps]


def test_every_range_is_locked_until_close(memory: list[memoryview]) -> None:
    driver = Cards()
    locked = LockedMemory(memory, driver)
    assert sorted(driver.locked) == sorted(address_of(view)[0] for view in memory)
    locked.close()
    locked.close()
    assert driver.locked == []


def test_two_movers_share_a_range(memory: list[memoryview]) -> None:
    driver = Cards()
    first, second = LockedMemory(memory, driver), LockedMemory(memory[:1], driver)
    assert len(driver.locked) == 3
    first.close()
    assert driver.locked == [address_of(memory[0])[0]]
    second.close()
    assert driver.locked == []


def test_a_refusal_leaves_nothing_locked(memory: list[memoryview]) -> None:
    driver = Cards(most=8192)
    with pytest.raises(PageLockError, match="16384 bytes: refused with 2") as caught:
        LockedMemory(memory, driver)
    assert caught.value.hint
    assert driver.locked == []
    driver.most = 1 << 20
    LockedMemory(memory, driver).close()


def test_views_are_found_in_their_range(memory: list[memoryview]) -> None:
    locked = LockedMemory([*memory, memoryview(bytearray())], Cards())
    memory[2][100:104] = b"here"
    address = address_of(memory[2])[0]
    assert bytes(locked.tensor(address + 100, 4).numpy()) == b"here"
    locked.tensor(address + 100, 4).fill_(7)
    assert bytes(memory[2][99:105]) == b"\0\7\7\7\7\0"
    assert locked.tensor(address, 16384).numel() == 16384
    for wrong, nbytes in ((address - 1, 4), (address + 16381, 4), (0, 4), (1 << 47, 4)):
        inside = any(
            start <= wrong and wrong + nbytes <= start + length
            for start, length in map(address_of, memory)
        )
        if not inside:
            with pytest.raises(BadBufferError, match="outside"):
                locked.tensor(wrong, nbytes)
    locked.close()
    with pytest.raises(BadBufferError, match="outside"):
        locked.tensor(address, 4)


def test_read_only_memory_is_refused() -> None:
    with pytest.raises(BadBufferError, match="read-only"):
        LockedMemory([memoryview(bytes(4096))], Cards())


def test_memory_is_held_while_it_is_locked() -> None:
    area = mmap.mmap(-1, 4096)
    view = memoryview(area)
    locked = LockedMemory([view], Cards())
    view.release()
    with pytest.raises(BufferError):
        area.close()
    locked.close()
    area.close()
