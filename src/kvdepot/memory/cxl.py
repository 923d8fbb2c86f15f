"""Slower memory: a DAX device or a NUMA node, such as CXL memory."""

import ctypes
import fcntl
import os
import platform
import stat
from pathlib import Path
from typing import Final

from kvdepot.core.units import format_bytes
from kvdepot.errors import ConfigError

_NODES: Final = Path("/sys/devices/system/node")
_MBIND: Final = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}
_MPOL_BIND: Final = 2
_MPOL_MF_STRICT: Final = 1
_WORD: Final = 8 * ctypes.sizeof(ctypes.c_ulong)


def open_device(setting: str, path: Path, nbytes: int) -> int:
    """Open and lock a device to be mapped. ConfigError if that fails or it is too small."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            setting,
            f"{path} cannot be opened: {error.strerror}",
            hint="daxctl list; run as root or in the device's group; containers: --device",
        ) from error
    try:
        _check(setting, path, fd, nbytes)
    except ConfigError:
        os.close(fd)
        raise
    return fd


def size_of(fd: int) -> int:
    """Bytes that can be mapped; 0 if it is neither a DAX device nor a file."""
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        return status.st_size
    if not stat.S_ISCHR(status.st_mode):
        return 0
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    try:
        return int((Path("/sys/dev/char") / number / "size").read_text())
    except (OSError, ValueError):
        return 0


def _check(setting: str, path: Path, fd: int, nbytes: int) -> None:
    found = size_of(fd)
    if not found:
        raise ConfigError(setting, f"{path} is neither a DAX device nor a non-empty file")
    if found < nbytes:
        raise ConfigError(
            setting,
            f"{path} has {format_bytes(found)}, less than the capacity of {format_bytes(nbytes)}",
            hint="lower the capacity, or use a larger device",
        )
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(setting, f"{path} is in use by another store") from error


def check_node(setting: str, node: int, nbytes: int) -> None:
    """Raise ConfigError unless the node exists and has this much memory."""
    known = _nodes()
    if node not in known:
        known_nodes = ", ".join(
            f"{number} ({format_bytes(size)})" for number, size in known.items()
        )
        raise ConfigError(
            setting,
            f"this machine has no NUMA node {node} with memory",
            hint=f"there are: {known_nodes or 'none'}; numactl -H",
        )
    if nbytes > known[node]:
        raise ConfigError(
            setting,
            f"NUMA node {node} has {format_bytes(known[node])}, "
            f"less than the capacity of {format_bytes(nbytes)}",
            hint="lower the capacity, or use another node",
        )


def bind(address: int, nbytes: int, node: int) -> None:
    """Bind memory that was not touched yet to one node. Raises OSError."""
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(f"memory cannot be bound to a node on {platform.machine()}")
    mask = (ctypes.c_ulong * (node // _WORD + 1))()
    mask[node // _WORD] = 1 << node % _WORD
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_MPOL_BIND),
        mask,
        ctypes.c_ulong(len(mask) * _WORD + 1),
        ctypes.c_uint(_MPOL_MF_STRICT),
    )
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, f"mbind to node {node}: {os.strerror(code)}")


def _nodes() -> dict[int, int]:
    found: dict[int, int] = {}
    for folder in _NODES.glob("node[0-9]*"):
        for line in (folder / "meminfo").read_text().splitlines():
            if "MemTotal:" in line:
                found[int(folder.name[4:])] = int(line.split()[3]) * 1024
    return {node: nbytes for node, nbytes in sorted(found.items()) if nbytes}
