"""Page-locked host memory, which the copy engine of a CUDA device reads and writes directly.

A range is locked once per process, for all movers together. After the restart of a daemon a depot
has other memory; `FollowedMemory` finds it and locks it.
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
"""cudaHostRegisterPortable: the lock counts for every device."""
_LOOK_S: Final = 0.25
_REFUSED_PAUSE_S: Final = 5.0
_log: Final = RateLimitedLog("kvdepot.pagelock")
_mutex: Final = threading.Lock()
_users: Final[Counter[tuple[int, int]]] = Counter()
"""The users of each range (address, nbytes) that is locked; guarded by `_mutex`."""


class PageLockError(KVDepotError):
    """The driver refused to page-lock memory. The ranges of this call are unlocked again."""

    hint = "give the depot less memory, or raise the limit of locked memory (ulimit -l)"


class Driver(Protocol):
    """The calls of the CUDA runtime that lock memory, as in `torch.cuda.cudart()`. 0 is success."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int, /) -> Any: ...
    def cudaHostUnregister(self, address: int, /) -> Any: ...
    def cudaGetErrorString(self, error: Any, /) -> str: ...


class LockedMemory:
    """Ranges of memory, page-locked until `close`, as tensors.

    The memory cannot be unmapped before `close`: closing its mmap raises BufferError.
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
        """The bytes at `address`. BadBufferError unless one range has all of them."""
        at = bisect_right(self._ranges, address, key=itemgetter(0)) - 1
        if at >= 0:
            start, whole = self._ranges[at]
            if address + nbytes <= start + whole.numel():
                return whole[address - start : address - start + nbytes]
        raise BadBufferError("the payload lies outside the memory that the mover was opened with")

    def close(self) -> None:
        """Unlock the memory. No copy may be in progress. May be called again."""
        while self._ranges:
            address, whole = self._ranges.pop()
            nbytes = whole.numel()
            with _mutex:
                _users[address, nbytes] -= 1
                if not _users[address, nbytes]:
                    del _users[address, nbytes]
                    self._driver.cudaHostUnregister(address)

    def _add(self, view: memoryview) -> None:
        try:
            address, nbytes = native.address_of(view, writable=True)
        except (BufferError, ValueError) as error:
            raise BadBufferError(f"memory cannot be page-locked: {error}") from error
        if not nbytes:
            return
        with _mutex:
            if not _users[address, nbytes]:
                code = self._driver.cudaHostRegister(address, nbytes, _PORTABLE)
                if int(code):
                    reason = self._driver.cudaGetErrorString(code)
                    raise PageLockError(f"cannot page-lock {nbytes} bytes: {reason}")
            _users[address, nbytes] += 1
        # A second view keeps the memory mapped if the caller releases this one.
        self._ranges.append((address, torch.frombuffer(memoryview(view), dtype=torch.uint8)))


class FollowedMemory:
    """The memory that `memory()` returns, page-locked wherever it is, until `close`.

    `lock` locks ranges; `paused` is a scope without copies. A thread calls `memory()` every
    `look_s` seconds. If the memory has changed, the old memory is unlocked and then the new is
    locked, which takes seconds; `tensor` raises BadBufferError meanwhile.
    """

    def __init__(
        self,
        memory: Callable[[], Sequence[memoryview]],
        lock: Callable[[Sequence[memoryview]], LockedMemory],
        paused: Callable[[], AbstractContextManager[object]],
        look_s: float = _LOOK_S,
    ) -> None:
        self._memory = memory
        self._lock = lock
        self._paused = paused
        self._look_s = look_s
        views = memory()
        self._locked = lock(views)
        self._ranges = [native.address_of(view) for view in views]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvdepot-pagelock", daemon=True)
        self._thread.start()

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """See `LockedMemory.tensor`."""
        return self._locked.tensor(address, nbytes)

    def stop(self) -> None:
        """End the thread. Must not be called inside `paused`."""
        self._stop.set()
        self._thread.join()

    def close(self) -> None:
        """Unlock, after `stop`. No copy may be in progress. May be called again."""
        self._locked.close()

    def _run(self) -> None:
        pause_s = self._look_s
        while not self._stop.wait(pause_s):
            pause_s = self._look_s
            try:
                self._follow()
            except PageLockError as error:
                _log.warning("the depot is not used until its memory is page-locked: %s", error)
                pause_s = _REFUSED_PAUSE_S
            except (KVDepotError, ValueError, RuntimeError):
                continue  # the depot is closed, its memory has just gone, or the device failed

    def _follow(self) -> None:
        views = self._memory()
        ranges = [native.address_of(view) for view in views]
        if ranges == self._ranges:
            return
        nothing = self._lock([])
        with self._paused():
            gone, self._locked = self._locked, nothing
        self._ranges = []
        gone.close()
        self._locked = self._lock(views)
        self._ranges = ranges
