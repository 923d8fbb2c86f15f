"""Memory for blocks, on huge pages where there are any, mappable by others where asked for."""

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from kvdepot.errors import ConfigError
from kvdepot.native import address_of

_HUGE: Final = 2 << 20
_STEP: Final = 64 << 20
_MADV_POPULATE_WRITE: Final = 23


class Memory:
    """`nbytes` of zeroed, page-aligned memory, registrable for DMA; valid until `close`.

    Shared memory has a descriptor (`fd`) that another process can map. Private memory gets
    transparent huge pages on most machines, shared memory only where the administrator allowed it;
    direct I/O into 4 KiB pages reaches about half the rate.
    """

    def __init__(
        self,
        nbytes: int,
        huge_pages: Literal["auto", "always", "never"] = "auto",
        *,
        shared: bool = False,
    ) -> None:
        self.nbytes = -(-nbytes // _HUGE) * _HUGE
        limit = memory_limit()
        if self.nbytes > limit:
            raise OSError(errno.ENOMEM, f"{nbytes} bytes asked for, this machine has {limit}")
        self.huge = False
        self.fd = -1
        if huge_pages != "never":
            self._try_hugetlb()
        if not self.huge and huge_pages == "always":
            raise ConfigError(
                "dram.huge_pages",
                f"no {self.nbytes >> 21} free huge pages of 2 MiB",
                hint=f'sysctl vm.nr_hugepages={self.nbytes >> 21}, or huge_pages = "auto"',
            )
        if not self.huge:
            self._map_plain(shared=shared)
            if huge_pages == "auto":
                self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(self._map)
        skip = -address_of(whole, writable=True)[0] % _HUGE if self.fd < 0 else 0
        self.view = whole[skip : skip + self.nbytes]
        self.address, _ = address_of(self.view, writable=True)
        self._stop = threading.Event()
        self._toucher: threading.Thread | None = None
        self._closed = False

    def prefault(self, then: Callable[[], object]) -> None:
        """Touch all pages in the background, because the first touch is slow; then call `then`."""

        def run() -> None:
            if self._touch():
                then()

        self._toucher = threading.Thread(target=run, name="kvdepot-prefault", daemon=True)
        self._toucher.start()

    def prefaulted(self, timeout_s: float | None = None) -> bool:
        """Wait for `prefault` to end."""
        if self._toucher is not None:
            self._toucher.join(timeout_s)
        return self._toucher is None or not self._toucher.is_alive()

    def lock(self) -> bool:
        """Keep the pages from being swapped. False: the memlock limit does not allow it."""
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.mlock(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes)) == 0)

    def stop(self) -> None:
        """End the prefaulting."""
        self._stop.set()
        if self._toucher is not None:
            self._toucher.join()

    def close(self) -> None:
        self.stop()
        if self._closed:
            return
        self._closed = True
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(BufferError):
            # A caller may still hold a view of a lease: the memory then goes with that view.
            self.view.release()
            self._map.close()

    def _try_hugetlb(self) -> None:
        with contextlib.suppress(OSError):
            self._map_fd(os.MFD_CLOEXEC | os.MFD_HUGETLB)
            self.huge = True

    def _map_plain(self, *, shared: bool) -> None:
        if shared:
            self._map_fd(os.MFD_CLOEXEC)
            return
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._map = mmap.mmap(-1, self.nbytes + _HUGE, flags=flags)
        except (OSError, OverflowError, ValueError) as error:
            raise OSError(errno.ENOMEM, f"cannot map {self.nbytes} bytes") from error

    def _map_fd(self, flags: int) -> None:
        fd = os.memfd_create("kvdepot-arena", flags)
        try:
            os.ftruncate(fd, self.nbytes)
            self._map = mmap.mmap(fd, self.nbytes)
        except (OSError, OverflowError, ValueError) as error:
            os.close(fd)
            raise OSError(errno.ENOMEM, f"cannot map {self.nbytes} bytes") from error
        self.fd = fd

    def _touch(self) -> bool:
        libc = ctypes.CDLL(None, use_errno=True)
        for offset in range(0, self.nbytes, _STEP):
            if self._stop.is_set():
                return False
            length = min(_STEP, self.nbytes - offset)
            address = ctypes.c_void_p(self.address + offset)
            if libc.madvise(address, ctypes.c_size_t(length), _MADV_POPULATE_WRITE) != 0:
                return False
        return True


def memory_limit() -> int:
    """Bytes of memory this process can have: the machine's, or its control group's if less."""
    total = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int((Path("/sys/fs/cgroup") / name).read_text()))
    return total


def trim_heap() -> None:
    """Give memory that was freed back to the system, where the C library can.

    Recovery of a large store frees several times what the index keeps.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
