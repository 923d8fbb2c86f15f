"""Page-locked host memory: what a device's copy engine reads and writes by itself.

A range is locked once in a process, however many movers use it, and unlocked with the last of them.
A store's memory becomes other memory when its daemon is restarted: `FollowedMemory` looks for that.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any, Final, Protocol

import torch

from kvdepot import native
from kvdepot.core.log import RateLimitedLog
from kvdepot.errors import BadBufferError, KVDepotError

_PORTABLE: Final = 1
"""cudaHostRegisterPortable: locked for every device, not only the current one."""

LOOK_S: Final = 0.25
"""Between two looks at where a store's memory is."""
_REFUSED_PAUSE_S: Final = 5.0
_log: Final = RateLimitedLog("kvdepot.pagelock")
_mutex: Final = threading.Lock()
_users: Final[Counter[tuple[int, int]]] = Counter()
"""How many have each range (address, nbytes) locked; guarded by `_mutex`."""


class PageLockError(KVDepotError):
    """The driver refused to page-lock memory; what the same call had locked is unlocked again."""

    hint = "give the depot less memory, or raise the limit of locked memory (ulimit -l)"


class Driver(Protocol):
    """The part of the CUDA runtime that locks, as `torch.cuda.cudart()` has it. 0 is success."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int, /) -> Any: ...
    def cudaHostUnregister(self, address: int, /) -> Any: ...
    def cudaGetErrorString(self, error: Any, /) -> str: ...


class LockedMemory:
    """Ranges of memory, page-locked until `close`, and torch's view of them.

    They cannot be unmapped before: closing an mmap of them is a BufferError.
    """

    def __init__(self, memory: Sequence[memoryview], driver: Driver) -> None:
        self._driver = driver
        self._ranges: list[tuple[int, torch.Tensor]] = []
        try:
            for view in memory:
                self._add(view)
        except BaseException:
            self.close()
            raise
        self._ranges.sort(key=itemgetter(0))

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """The bytes at `address`; BadBufferError when they are not all in one of the ranges."""
        at = bisect_right(self._ranges, address, key=itemgetter(0)) - 1
        if at >= 0:
            start, whole = self._ranges[at]
            if address + nbytes <= start + whole.numel():
                return whole[address - start : address - start + nbytes]
        raise BadBufferError("the payload lies outside the memory that the mover was opened with")

    def close(self) -> None:
        """Unlock. No copy may be under way. May be called again."""
        while self._ranges:
            start, whole = self._ranges.pop()
            _unlock(self._driver, start, whole.numel())

    def _add(self, view: memoryview) -> None:
        try:
            address, nbytes = native.address_of(view, writable=True)
        except (BufferError, ValueError) as error:
            raise BadBufferError(f"memory cannot be page-locked: {error}") from error
        if nbytes:
            _lock(self._driver, address, nbytes)
            # A view of its own keeps the memory mapped, also when the caller releases this one.
            held = memoryview(view)
            self._ranges.append((address, torch.frombuffer(held, dtype=torch.uint8)))


class FollowedMemory:
    """The memory that `memory()` names, page-locked wherever it is, until `close`.

    `lock` locks ranges; `paused` is a scope in which no copy is under way. When the memory is gone
    it is unlocked at once, and only then is other memory locked, in a thread here, since that takes
    seconds: meanwhile `tensor` finds nothing.
    """

    def __init__(
        self,
        memory: Callable[[], Sequence[memoryview]],
        lock: Callable[[Sequence[memoryview]], LockedMemory],
        paused: Callable[[], AbstractContextManager[object]],
        look_s: float = LOOK_S,
    ) -> None:
        self._memory = memory
        self._lock = lock
        self._paused = paused
        self._look_s = look_s
        views = memory()
        self._locked = lock(views)
        self._ranges = _ranges(views)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvdepot-pagelock", daemon=True)
        self._thread.start()

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """See `LockedMemory.tensor`."""
        return self._locked.tensor(address, nbytes)

    def stop(self) -> None:
        """Follow no more. Not to be called inside `paused`."""
        self._stop.set()
        self._thread.join()

    def close(self) -> None:
        """Unlock, after `stop`. No copy may be under way. May be called again."""
        self._locked.close()

    def _run(self) -> None:
        pause_s = self._look_s
        while not self._stop.wait(pause_s):
            pause_s = self._look_s
            try:
                self._look()
            except PageLockError as error:
                _log.warning("what is loaded and saved goes without the depot: %s", error)
                pause_s = _REFUSED_PAUSE_S
            except (KVDepotError, ValueError, RuntimeError):
                continue  # the store is closed, the memory went meanwhile, or the device failed

    def _look(self) -> None:
        views = self._memory()
        ranges = _ranges(views)
        if ranges == self._ranges:
            return
        nothing = self._lock([])
        with self._paused():
            gone, self._locked = self._locked, nothing
        self._ranges = ()
        gone.close()
        self._locked = self._lock(views)
        self._ranges = ranges


def _ranges(views: Sequence[memoryview]) -> tuple[tuple[int, int], ...]:
    return tuple(native.address_of(view) for view in views)


def _lock(driver: Driver, address: int, nbytes: int) -> None:
    with _mutex:
        if not _users[address, nbytes]:
            code = driver.cudaHostRegister(address, nbytes, _PORTABLE)
            if int(code):
                reason = driver.cudaGetErrorString(code)
                raise PageLockError(f"cannot page-lock {nbytes} bytes: {reason}")
        _users[address, nbytes] += 1


def _unlock(driver: Driver, address: int, nbytes: int) -> None:
    with _mutex:
        _users[address, nbytes] -= 1
        if not _users[address, nbytes]:
            del _users[address, nbytes]
            driver.cudaHostUnregister(address)
