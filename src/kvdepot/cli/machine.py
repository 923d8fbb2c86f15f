"""Facts about the machine and about paths, read from /proc and /sys.

`root` is `/`; tests give the folder of a made-up machine.
"""

import datetime
import errno
import os
import platform
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from kvdepot import native
from kvdepot.bench.raw import nameless
from kvdepot.core.units import format_bytes

HERE = Path("/")
SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True)
class Disk:
    name: str
    size_bytes: int
    rotational: bool
    """The disk's own report; virtual disks often report this wrongly."""
    model: str

    def __str__(self) -> str:
        kind = "says it is rotational" if self.rotational else "not rotational"
        return ", ".join(filter(None, (self.model, format_bytes(self.size_bytes), kind)))


@dataclass(frozen=True, slots=True)
class MachineFacts:
    kernel: str
    cpu: str
    cores: int
    memory_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int
    """The limit of the container; `memory_bytes` without one."""
    far_nodes: tuple[int, ...]
    """NUMA nodes without processors, which are memory behind CXL as a rule."""
    dax_devices: tuple[str, ...]
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PathFacts:
    """A directory or a raw block device. `problem` is empty if it can be used."""

    path: str
    problem: str
    is_device: bool = False
    filesystem: str = ""
    disk: Disk | None = None
    total_bytes: int = 0
    free_bytes: int = 0
    direct_io: bool = False


def read_machine(root: Path = HERE) -> MachineFacts:
    """All facts; what the kernel does not say is empty or 0."""
    memory = read_fields(root / "proc/meminfo")
    cpu = read_fields(root / "proc/cpuinfo")
    memory_bytes = kib(memory.get("MemTotal", "0"))
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    return MachineFacts(
        kernel=read_text(root / "proc/sys/kernel/osrelease"),
        cpu=cpu.get("model name", "unknown"),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes,
        memory_available_bytes=kib(memory.get("MemAvailable", "0")),
        memory_limit_bytes=min(memory_bytes, read_memory_limit(root)),
        far_nodes=tuple(int(node.name[4:]) for node in nodes if is_far(node)),
        dax_devices=tuple(sorted(str(path) for path in (root / "dev").glob("dax*"))),
        gpus=tuple(list_gpus(root)),
    )


def describe(where: PathFacts) -> dict[str, Any]:
    """The machine of a measurement, and the directory that it wrote to."""
    facts = read_machine()
    return {
        "cpu": facts.cpu,
        "cores": facts.cores,
        "memory_bytes": facts.memory_bytes,
        "gpus": facts.gpus,
        "load": os.getloadavg()[0],
        "kernel": facts.kernel,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "native": native.NAME,
        "uring": native.uring_available()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "path": where.path,
        "filesystem": where.filesystem,
        "direct_io": where.direct_io,
        "disk": where.disk.name if where.disk else "",
    }


def read_text(path: Path) -> str:
    """The stripped content; empty if the file cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_fields(path: Path) -> dict[str, str]:
    """`name : value` lines; the first of each name counts."""
    fields: dict[str, str] = {}
    for line in read_text(path).splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def kib(text: str) -> int:
    """`24684100 kB`, in bytes."""
    return int(text.split()[0]) << 10


def read_memory_limit(root: Path) -> int:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = read_text(root / "sys/fs/cgroup" / name)
        if text.isdigit():
            return int(text)
    return 1 << 63


def is_far(node: Path) -> bool:
    """True for a NUMA node with memory and without processors."""
    size = read_fields(node / "meminfo").get(f"Node {node.name[4:]} MemTotal", "0")
    return not read_text(node / "cpulist") and kib(size) > 0


def find_disk(device: str, root: Path = HERE) -> Disk | None:
    """The disk of a `major:minor`, or of the partition that it names."""
    entry = root / "sys/dev/block" / device
    if not entry.exists():
        return None
    entry = entry.resolve()
    entry = entry.parent if (entry / "partition").exists() else entry
    return Disk(
        name=entry.name,
        size_bytes=int(read_text(entry / "size") or 0) * SECTOR_BYTES,
        rotational=read_text(entry / "queue/rotational") == "1",
        model=read_text(entry / "device/model"),
    )


def find_mount(path: Path, root: Path = HERE) -> tuple[str, str]:
    """Filesystem and `major:minor` of a resolved path: of the deepest mount, and the last there."""
    mount, deepest = ("unknown", ""), ""
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code.group(1), 8)), fields[4])
        if path.is_relative_to(point) and len(point) >= len(deepest):
            mount, deepest = (after.split()[0], fields[2]), point
    return mount


def list_gpus(root: Path) -> Iterator[str]:
    """Names of NVIDIA GPUs, with the version of the driver."""
    driver = root / "proc/driver/nvidia"
    version = re.search(r"\d+\.\d+(\.\d+)?", read_text(driver / "version"))
    for card in sorted(driver.glob("gpus/*/information")):
        name = read_fields(card).get("Model", "unknown NVIDIA GPU")
        yield f"{name}, driver {version.group(0) if version else 'unknown'}"


def read_path(path: Path, root: Path = HERE) -> PathFacts:
    """Facts about a directory or block device. Leaves nothing behind; a device is only opened."""
    try:
        resolved = path.resolve(strict=True)
        status = resolved.stat()
    except OSError as error:
        return PathFacts(str(path), problem=error.strerror or str(error))
    if stat.S_ISBLK(status.st_mode):
        return read_device(path, resolved, root)
    if not stat.S_ISDIR(status.st_mode):
        return PathFacts(str(path), problem="neither a directory nor a block device")
    space = os.statvfs(resolved)
    filesystem, device = find_mount(resolved, root)
    problem, direct = "", False
    try:
        with nameless(resolved) as (_, direct):
            pass
    except OSError as error:
        problem = f"cannot write here: {error.strerror}"
    return PathFacts(
        path=str(path),
        problem=problem,
        filesystem=filesystem,
        disk=find_disk(device, root) if device else None,
        total_bytes=space.f_blocks * space.f_frsize,
        free_bytes=space.f_bavail * space.f_frsize,
        direct_io=direct,
    )


def read_device(path: Path, resolved: Path, root: Path) -> PathFacts:
    number, direct, size_bytes = resolved.stat().st_rdev, True, 0
    try:
        fd = os.open(resolved, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            return PathFacts(str(path), problem=f"cannot open it: {error.strerror}", is_device=True)
        direct = False
    else:
        size_bytes = os.lseek(fd, 0, os.SEEK_END)
        os.close(fd)
    return PathFacts(
        path=str(path),
        problem="",
        is_device=True,
        filesystem="raw device",
        disk=find_disk(f"{os.major(number)}:{os.minor(number)}", root),
        total_bytes=size_bytes,
        free_bytes=size_bytes,
        direct_io=direct,
    )
