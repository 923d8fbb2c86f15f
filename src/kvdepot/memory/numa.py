"""Memory of one NUMA node: CXL memory without processors is a node like any other."""

import ctypes
import os
import platform
from pathlib import Path
from typing import Final

from kvdepot.core.units import format_bytes
from kvdepot.errors import ConfigError

_NODES: Final = Path("/sys/devices/system/node")
_MBIND: Final = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}
_MPOL_BIND: Final = 2
_MPOL_MF_STRICT: Final = 1
_WORD: Final = 8 * ctypes.sizeof(ctypes.c_ulong)


def check_node(setting: str, node: int, nbytes: int) -> None:
    """ConfigError unless the node is there and has this much memory in all."""
    known = _nodes()
    if node not in known:
        there = ", ".join(f"{number} ({format_bytes(size)})" for number, size in known.items())
        raise ConfigError(
            setting,
            f"this machine has no NUMA node {node} with memory",
            hint=f"there are: {there or 'none'}; numactl -H",
        )
    if nbytes > known[node]:
        raise ConfigError(
            setting,
            f"NUMA node {node} has {format_bytes(known[node])}, "
            f"less than the capacity of {format_bytes(nbytes)}",
            hint="give less capacity, or another node",
        )


def bind(address: int, nbytes: int, node: int) -> None:
    """Take the pages of untouched memory from one node only. OSError where that cannot be."""
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
