"""Memory that others map: sealed, kept out of core dumps, gone with its last user."""

import os

import pytest
from tests.support.mappings import arenas, flags_at

from kvdepot.memory.memory import HUGE_BYTES, Memory


@pytest.mark.parametrize("shared", [False, True])
def test_memory_is_not_in_core_dumps(shared: bool) -> None:
    memory = Memory(2 * HUGE_BYTES, "never", shared=shared)
    other = Memory.mapped((os.dup(memory.fd), memory.nbytes)) if shared else memory
    try:
        for one in (memory, other):
            for address in (one.address, one.address + one.nbytes - 1):
                assert "dd" in flags_at(address)
    finally:
        memory.close()
        other.close()


def test_memory_cannot_be_taken_from_under_its_users() -> None:
    memory = Memory(2 * HUGE_BYTES, "never", shared=True)
    again = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDWR)
    try:
        for fd in (memory.fd, again):
            for nbytes in (0, HUGE_BYTES, 3 * HUGE_BYTES):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, nbytes)
        assert os.fstat(memory.fd).st_size == memory.nbytes
    finally:
        os.close(again)
        memory.close()


def test_closed_memory_goes_with_the_last_view_of_it() -> None:
    before = arenas()
    memory = Memory(HUGE_BYTES, "never", shared=True)
    memory.view[:5] = b"bytes"
    view = memory.view[:5]
    assert len(arenas() - before) == 1
    memory.close()
    assert bytes(view) == b"bytes"
    view.release()
    assert arenas() == before
