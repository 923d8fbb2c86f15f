"""Page-locking: once for each range in a process, nothing left behind by a refusal, and a store's
memory is followed to where it is."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
from tests.support.page_locks import CardsDriver

from kvdepot.adapters.tensors.pagelock import FollowedMemory, LockedMemory, PageLockError
from kvdepot.errors import BadBufferError
from kvdepot.native import address_of


@pytest.fixture
def memory() -> Iterator[list[memoryview]]:
    maps = [mmap.mmap(-1, size) for size in (8192, 4096, 16384)]
    yield [memoryview(each) for each in maps]


def test_every_range_is_locked_until_close(memory: list[memoryview]) -> None:
    driver = CardsDriver()
    locked = LockedMemory(memory, driver)
    assert sorted(driver.locked) == sorted(address_of(view)[0] for view in memory)
    locked.close()
    locked.close()
    assert not driver.locked


def test_two_movers_share_a_range(memory: list[memoryview]) -> None:
    driver = CardsDriver()
    first, second = LockedMemory(memory, driver), LockedMemory(memory[:1], driver)
    assert len(driver.locked) == 3
    first.close()
    assert list(driver.locked) == [address_of(memory[0])[0]]
    second.close()
    assert not driver.locked


def test_a_refusal_leaves_nothing_locked(memory: list[memoryview]) -> None:
    driver = CardsDriver(most=8192)
    with pytest.raises(PageLockError, match="16384 bytes: refused with 2") as caught:
        LockedMemory(memory, driver)
    assert caught.value.hint
    assert not driver.locked
    driver.most = 1 << 20
    LockedMemory(memory, driver).close()


def test_views_are_found_in_their_range(memory: list[memoryview]) -> None:
    locked = LockedMemory([*memory, memoryview(bytearray())], CardsDriver())
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
        LockedMemory([memoryview(bytes(4096))], CardsDriver())


def test_memory_is_held_while_it_is_locked() -> None:
    area = mmap.mmap(-1, 4096)
    view = memoryview(area)
    locked = LockedMemory([view], CardsDriver())
    view.release()
    with pytest.raises(BufferError):
        area.close()
    locked.close()
    area.close()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_found(memory: FollowedMemory, address: int, nbytes: int) -> bool:
    try:
        return memory.tensor(address, nbytes).numel() == nbytes
    except BadBufferError:
        return False


def is_unmapped(area: mmap.mmap) -> bool:
    """Closes it, unless a view of it is held."""
    try:
        area.close()
    except BufferError:
        return False
    return True


def test_memory_that_moves_is_followed(memory: list[memoryview]) -> None:
    """The old is unlocked before the new is locked, and can be unmapped."""
    driver, area, now = CardsDriver(), mmap.mmap(-1, 16384), list[memoryview]()
    now.append(memoryview(area))
    followed = FollowedMemory(
        lambda: list(now), lambda views: LockedMemory(views, driver), nullcontext, look_s=0.005
    )
    old, _ = address_of(now[0])
    assert followed.tensor(old, 16384).numel() == 16384
    now.pop().release()
    wait_for(lambda: not driver.locked)
    wait_for(lambda: is_unmapped(area))  # its view is let go an instant after it is unlocked
    with pytest.raises(BadBufferError, match="outside"):
        followed.tensor(old, 1)
    for view in memory[1:]:
        now[:] = [view]
        wait_for(lambda: list(driver.locked.items()) == [address_of(now[0])])
        wait_for(lambda: is_found(followed, *address_of(now[0])))
    assert driver.most_locked == 16384
    followed.stop()
    followed.close()
    assert not driver.locked
