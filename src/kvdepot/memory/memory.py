"""Memory for blocks, on huge pages if possible. Other processes can map shared memory."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

from kvdepot.core.units import format_bytes
from kvdepot.errors import ConfigError
from kvdepot.memory import cxl
from kvdepot.native import address_of

HugePages = Literal["auto", "always", "never"]
HUGE_BYTES: Final = 2 << 20
_PAGE: Final = 4096
_STEP: Final = 64 << 20
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""A process with the descriptor can write to the memory, but cannot change its size."""
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value


class Memory:
    """`nbytes` of zeroed, page-aligned memory, registrable for DMA; valid until `close`.

    Shared memory has a descriptor (`fd`) that another process can map with `mapped`. Private memory
    gets transparent huge pages on most machines by itself, shared memory while it is prefaulted;
    direct I/O into 4 KiB pages reaches about half the rate. Core dumps leave it out.
    """

    huge = False
    fd = -1
    _collapse = False
    _closed = False
    _toucher: threading.Thread | None = None
    _parts: tuple[tuple[int, int], ...] = ()
    """Mapped descriptors, and bytes of each."""

    def __init__(
        self,
        nbytes: int,
        huge_pages: HugePages = "auto",
        *,
        shared: bool = False,
    ) -> None:
        self.nbytes = -(-nbytes // HUGE_BYTES) * HUGE_BYTES
        self._collapse = shared and huge_pages != "never"
        limit = memory_limit()
        if self.nbytes > limit:
            raise OSError(
                errno.ENOMEM,
                f"{format_bytes(nbytes)} requested, this machine has {format_bytes(limit)}",
            )
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
        self._start()

    @classmethod
    def mapped(cls, *parts: tuple[int, int]) -> "Memory":
        """Map descriptors of another process or a device, as (descriptor, bytes), one after the
        other.

        Owns the descriptors until `close`, and with them locks on devices. Raises OSError if a part
        cannot be mapped.
        """
        memory = cls.__new__(cls)
        memory.nbytes = sum(nbytes for _, nbytes in parts)
        for fd, nbytes in parts:
            if cxl.size_of(fd) < nbytes or nbytes % HUGE_BYTES:
                _close_all(parts)
                raise OSError(errno.EINVAL, f"there are no {nbytes} bytes to map")
        memory._map_parts(parts)
        memory._start()
        return memory

    @classmethod
    def on_node(cls, nbytes: int, node: int, *, shared: bool = False) -> "Memory":
        """Memory of one NUMA node, on transparent huge pages if possible. Raises OSError."""
        memory = cls.__new__(cls)
        memory.nbytes = -(-nbytes // HUGE_BYTES) * HUGE_BYTES
        memory._collapse = shared
        memory._map_plain(shared=shared)
        memory._map.madvise(mmap.MADV_HUGEPAGE)
        memory._start()
        try:
            cxl.bind(memory.address, memory.nbytes, node)
        except OSError:
            memory.close()
            raise
        return memory

    def _start(self) -> None:
        self._map.madvise(mmap.MADV_DONTDUMP)
        whole = memoryview(self._map)
        skip = -address_of(whole, writable=True)[0] % HUGE_BYTES
        self.view = whole[skip : skip + self.nbytes]
        self.address, _ = address_of(self.view, writable=True)
        self._stop = threading.Event()

    def prefault(self, then: Callable[[], object]) -> None:
        """Touch all pages in the background, because the first touch is slow. Then call `then`."""

        def run() -> None:
            if self._touch():
                then()

        self._toucher = threading.Thread(target=run, name="kvdepot-prefault", daemon=True)
        self._toucher.start()

    def prefaulted(self, timeout_s: float | None = None) -> bool:
        """Wait for `prefault` to end. False if it has not ended after `timeout_s`."""
        if self._toucher is not None:
            self._toucher.join(timeout_s)
        return self._toucher is None or not self._toucher.is_alive()

    def lock(self) -> bool:
        """Keep the pages from being swapped. False: the memlock limit does not allow it."""
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.mlock(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes)) == 0)

    def stop(self) -> None:
        self._stop.set()
        if self._toucher is not None:
            self._toucher.join()

    def close(self) -> None:
        self.stop()
        if self._closed:
            return
        self._closed = True
        _close_all(self._parts or [(self.fd, 0)])
        self.fd = -1
        view, area = self.view, self._map
        # A caller may still hold a view of a lease. The memory is unmapped with that view.
        self.view = memoryview(b"")
        del self._map
        with contextlib.suppress(BufferError):
            view.release()
            area.close()

    def _try_hugetlb(self) -> None:
        """Use reserved huge pages, which are aligned, if there are enough."""
        with contextlib.suppress(OSError):
            fd = self._new_fd(os.MFD_HUGETLB)
            try:
                self._map = mmap.mmap(fd, self.nbytes)
            except OSError:
                os.close(fd)
                raise
            self.fd, self.huge = fd, True

    def _map_plain(self, *, shared: bool) -> None:
        try:
            if shared:
                self._map_parts([(self._new_fd(), self.nbytes)])
            else:
                self._reserve()
        except (OSError, OverflowError, ValueError) as error:
            raise OSError(errno.ENOMEM, f"cannot map {self.nbytes} bytes") from error

    def _new_fd(self, more_flags: int = 0) -> int:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | more_flags
        fd = os.memfd_create("kvdepot-arena", flags)
        try:
            os.ftruncate(fd, self.nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _reserve(self, more_flags: int = 0) -> None:
        """Reserve more addresses than needed, so that the memory can start on a huge page."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | more_flags
        self._map = mmap.mmap(-1, self.nbytes + HUGE_BYTES, flags=flags)

    def _map_parts(self, parts: Sequence[tuple[int, int]]) -> None:
        """Map descriptors over addresses of `_map`, which unmaps them. Owns the descriptors, even
        if it fails.
        """
        try:
            self._reserve(_MAP_NORESERVE)
        except (OSError, OverflowError, ValueError):
            _close_all(parts)
            raise
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        start = address_of(memoryview(self._map), writable=True)[0]
        start += -start % HUGE_BYTES
        for fd, nbytes in parts:
            at = libc.mmap(
                ctypes.c_void_p(start),
                ctypes.c_size_t(nbytes),
                mmap.PROT_READ | mmap.PROT_WRITE,
                mmap.MAP_SHARED | _MAP_FIXED,
                fd,
                ctypes.c_long(0),
            )
            if at == _FAILED:
                _close_all(parts)
                raise OSError(ctypes.get_errno(), "mmap")
            start += nbytes
        self._parts = tuple(parts)
        self.fd = parts[0][0]

    def _touch(self) -> bool:
        for offset in range(0, self.nbytes, _STEP):
            if self._stop.is_set():
                return False
            length = min(_STEP, self.nbytes - offset)
            if self._collapse:
                self._make_huge(offset, length)
            if not populate(self.address + offset, length):
                return False
        return True

    def _make_huge(self, offset: int, length: int) -> None:
        """Touch one page of each huge page, then collapse them: shared memory gets no huge pages at
        the first touch. If that fails, pages stay small.
        """
        for at in range(offset, offset + length, HUGE_BYTES):
            populate(self.address + at, _PAGE)
        _advise(self.address + offset, length, _MADV_COLLAPSE)


def populate(address: int, nbytes: int) -> bool:
    """Fault in whole pages and keep their content. False: the kernel refuses."""
    start = -(-address // _PAGE) * _PAGE
    length = (address + nbytes) // _PAGE * _PAGE - start
    return length <= 0 or _advise(start, length, _MADV_POPULATE_WRITE)


def _advise(address: int, length: int, advice: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    at, size = ctypes.c_void_p(address), ctypes.c_size_t(length)
    return bool(libc.madvise(at, size, advice) == 0)


def _close_all(parts: Sequence[tuple[int, int]]) -> None:
    for fd, _ in parts:
        if fd >= 0:
            os.close(fd)


def memory_limit() -> int:
    """The memory of the machine in bytes, or the limit of the control group."""
    total = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int((Path("/sys/fs/cgroup") / name).read_text()))
    return total


def trim_heap() -> None:
    """Return freed memory to the system, if the C library can. The recovery of a large store frees
    several times the size of the index.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
