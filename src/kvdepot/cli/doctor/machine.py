"""Facts about the machine, read from /proc and /sys, and the measured speed of a path.

Everything here only looks; `doctor` judges. `root` stands for `/`, so that tests can lay out a
machine of their own.
"""

import datetime
import errno
import mmap
import os
import platform
import re
import secrets
import stat
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from kvdepot import native

HERE = Path("/")
SECTOR_BYTES = 512
DIRECT_BYTES = 4096
SPEED_BYTES = 256 << 20
SPEED_CHUNK_BYTES = 4 << 20
SPEED_THREADS = 4
SPEED_LIMIT_S = 10.0
PROGRESS_INTERVAL_S = 0.1
FEATURES_OF_INTEREST = ("avx2", "avx512f", "amx_bf16", "sha_ni", "pclmulqdq", "asimd", "crc32")
NOT_DISKS = re.compile(r"^(loop|ram|zram|sr|fd|nbd|dm-|md)\d*")
NVIDIA_SMI_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Disk:
    name: str
    size_bytes: int
    rotational: bool
    model: str


@dataclass(frozen=True, slots=True)
class Mount:
    point: str
    filesystem: str
    device: str
    """`major:minor`, as in /sys/dev/block."""


@dataclass(frozen=True, slots=True)
class HugePages:
    total: int
    free: int
    size_bytes: int
    transparent: str
    """`always`, `madvise`, `never`, or empty where the kernel has none."""
    shmem: str


@dataclass(frozen=True, slots=True)
class GpuCard:
    name: str
    driver: str


@dataclass(frozen=True, slots=True)
class MachineFacts:
    kernel: str
    cpu: str
    cores: int
    features: tuple[str, ...]
    memory_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int
    """What the container may use; `memory_bytes` where it is not limited."""
    numa_nodes: int
    far_nodes: tuple[int, ...]
    """Those without processors: memory behind CXL, as a rule."""
    huge_pages: HugePages
    disks: tuple[Disk, ...]
    dax_devices: tuple[str, ...]
    gpus: tuple[GpuCard, ...]


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What a directory or a raw block device can do. `problem` is empty when it can be used."""

    path: str
    problem: str
    is_device: bool = False
    filesystem: str = ""
    disk: Disk | None = None
    total_bytes: int = 0
    free_bytes: int = 0
    direct_refusal: str = ""
    """Why O_DIRECT does not work here; empty when it does."""


@dataclass(frozen=True, slots=True)
class PathSpeed:
    direct: bool
    read_bytes_per_s: float
    write_bytes_per_s: float | None
    """None for a raw device, which is only read."""


def read_machine(root: Path = HERE, *, nvidia_smi: str | None = None) -> MachineFacts:
    """Read everything once. What the kernel does not tell is empty or 0."""
    memory = read_fields(root / "proc/meminfo")
    cpu = read_fields(root / "proc/cpuinfo")
    memory_bytes = kib(memory.get("MemTotal", "0"))
    flags = cpu.get("flags", cpu.get("Features", "")).split()
    return MachineFacts(
        kernel=read_text(root / "proc/sys/kernel/osrelease"),
        cpu=cpu.get("model name", "unknown"),
        cores=len(os.sched_getaffinity(0)),
        features=tuple(name for name in FEATURES_OF_INTEREST if name in flags),
        memory_bytes=memory_bytes,
        memory_available_bytes=kib(memory.get("MemAvailable", "0")),
        memory_limit_bytes=min(memory_bytes, read_memory_limit(root)),
        numa_nodes=max(1, len(list((root / "sys/devices/system/node").glob("node[0-9]*")))),
        far_nodes=tuple(list_far_nodes(root)),
        huge_pages=read_huge_pages(root, memory),
        disks=tuple(list_disks(root)),
        dax_devices=tuple(sorted(str(path) for path in (root / "dev").glob("dax*"))),
        gpus=tuple(list_gpus(root, nvidia_smi)),
    )


def describe(where: PathFacts) -> dict[str, Any]:
    """What a measurement says of the machine it ran on, and of the directory it wrote to."""
    found = read_machine()
    return {
        "cpu": found.cpu,
        "cores": found.cores,
        "memory_bytes": found.memory_bytes,
        "gpus": [gpu.name for gpu in found.gpus],
        "load": os.getloadavg()[0],
        "kernel": found.kernel,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "native": native.NAME,
        "uring": native.uring_available()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "path": where.path,
        "filesystem": where.filesystem,
        "direct_io": not where.direct_refusal,
        "disk": where.disk.name if where.disk else "",
    }


def list_far_nodes(root: Path) -> list[int]:
    """NUMA nodes that have memory and no processors."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    return sorted(
        int(folder.name.removeprefix("node"))
        for folder in folders
        if not read_text(folder / "cpulist")
        and kib(read_fields(folder / "meminfo").get(f"Node {folder.name[4:]} MemTotal", "0"))
    )


def read_text(path: Path) -> str:
    """The stripped content, or empty where there is no such file or it may not be read."""
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


def read_huge_pages(root: Path, memory: dict[str, str]) -> HugePages:
    transparent = root / "sys/kernel/mm/transparent_hugepage"
    return HugePages(
        total=int(memory.get("HugePages_Total", "0")),
        free=int(memory.get("HugePages_Free", "0")),
        size_bytes=kib(memory.get("Hugepagesize", "0")),
        transparent=selected(read_text(transparent / "enabled")),
        shmem=selected(read_text(transparent / "shmem_enabled")),
    )


def selected(choices: str) -> str:
    """The chosen one of `always [madvise] never`."""
    found = re.search(r"\[(\w+)\]", choices)
    return found.group(1) if found else ""


def list_disks(root: Path = HERE) -> Iterator[Disk]:
    """Real disks, without loop devices, memory disks and what is built on top of disks."""
    for entry in sorted((root / "sys/block").glob("*")):
        disk = read_disk(entry)
        if disk.size_bytes and not NOT_DISKS.match(disk.name):
            yield disk


def read_disk(entry: Path) -> Disk:
    return Disk(
        name=entry.name,
        size_bytes=int(read_text(entry / "size") or 0) * SECTOR_BYTES,
        rotational=read_text(entry / "queue/rotational") == "1",
        model=read_text(entry / "device/model"),
    )


def find_disk(device: str, root: Path = HERE) -> Disk | None:
    """The disk behind a `major:minor`, or behind the partition it names."""
    entry = root / "sys/dev/block" / device
    if not entry.exists():
        return None
    entry = entry.resolve()
    return read_disk(entry.parent if (entry / "partition").exists() else entry)


def find_mount(path: Path, root: Path = HERE) -> Mount | None:
    """The mount a resolved path lies on: the deepest point, and the last one mounted there."""
    best: Mount | None = None
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code.group(1), 8)), fields[4])
        if path.is_relative_to(point) and (best is None or len(point) >= len(best.point)):
            best = Mount(point=point, filesystem=after.split()[0], device=fields[2])
    return best


def list_gpus(root: Path, nvidia_smi: str | None) -> Iterator[GpuCard]:
    driver = root / "proc/driver/nvidia"
    version = re.search(r"\d+\.\d+(\.\d+)?", read_text(driver / "version"))
    cards = sorted(driver.glob("gpus/*/information"))
    for card in cards:
        name = read_fields(card).get("Model", "unknown NVIDIA GPU")
        yield GpuCard(name=name, driver=version.group(0) if version else "")
    if not cards and nvidia_smi is not None:
        yield from ask_nvidia_smi(nvidia_smi)


def ask_nvidia_smi(nvidia_smi: str) -> Iterator[GpuCard]:
    command = [nvidia_smi, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return  # installed but without a working driver: there is no GPU to use
    for line in answer.stdout.splitlines():
        name, _, driver = line.rpartition(",")
        yield GpuCard(name=name.strip(), driver=driver.strip())


def read_path(path: Path, root: Path = HERE) -> PathFacts:
    """Look at a directory or block device. Leaves nothing behind and never writes to a device."""
    try:
        resolved = path.resolve(strict=True)
        mode = resolved.stat().st_mode
    except OSError as error:
        return PathFacts(str(path), problem=error.strerror or str(error))
    if stat.S_ISBLK(mode):
        return read_device(path, resolved, root)
    if not stat.S_ISDIR(mode):
        return PathFacts(str(path), problem="neither a directory nor a block device")
    space = os.statvfs(resolved)
    mount = find_mount(resolved, root)
    problem, refusal = "", ""
    try:
        with scratch_file(resolved) as (_, refusal):
            pass
    except OSError as error:
        problem = f"cannot write here: {error.strerror}"
    return PathFacts(
        path=str(path),
        problem=problem,
        filesystem=mount.filesystem if mount else "unknown",
        disk=find_disk(mount.device, root) if mount else None,
        total_bytes=space.f_blocks * space.f_frsize,
        free_bytes=space.f_bavail * space.f_frsize,
        direct_refusal=refusal,
    )


def read_device(path: Path, resolved: Path, root: Path) -> PathFacts:
    device = resolved.stat().st_rdev
    refusal, size_bytes = "", 0
    try:
        fd = os.open(resolved, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            return PathFacts(str(path), problem=f"cannot open it: {error.strerror}", is_device=True)
        refusal = "the device refuses it"
    else:
        size_bytes = os.lseek(fd, 0, os.SEEK_END)
        os.close(fd)
    return PathFacts(
        path=str(path),
        problem="",
        is_device=True,
        filesystem="raw device",
        disk=find_disk(f"{os.major(device)}:{os.minor(device)}", root),
        total_bytes=size_bytes,
        free_bytes=size_bytes,
        direct_refusal=refusal,
    )


@contextmanager
def scratch_file(directory: Path) -> Iterator[tuple[int, str]]:
    """A nameless file in `directory`, open with O_DIRECT if it works there, and why it does not.

    The name is gone before the body runs, so even a killed process leaves no file.
    """
    fd, refusal = create_unlinked(directory, os.O_DIRECT), ""
    if fd is not None:
        try:
            with aligned_buffer(DIRECT_BYTES) as buffer:
                os.pwritev(fd, [buffer], 0)
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EINVAL:
                raise
            fd = None
    if fd is None:
        refusal = "the filesystem refuses it"
        fd = create_unlinked(directory, 0)
        assert fd is not None
    try:
        yield fd, refusal
    finally:
        os.close(fd)


def create_unlinked(directory: Path, flags: int) -> int | None:
    """A new file that has no name any more, or None if the filesystem refuses the flags."""
    path = directory / f".kvdepot-doctor-{secrets.token_hex(8)}"
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        if flags and error.errno == errno.EINVAL:
            return None
        raise
    finally:
        path.unlink(missing_ok=True)  # a refused O_DIRECT can leave the file created


@contextmanager
def aligned_buffer(size_bytes: int) -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, size_bytes) as buffer:
        buffer.write(secrets.token_bytes(size_bytes))  # touched, and not compressible
        yield buffer


def measure_speed(
    facts: PathFacts,
    *,
    size_bytes: int = SPEED_BYTES,
    advance: Callable[[int], None] = lambda amount: None,
) -> PathSpeed:
    """Write and read back `size_bytes` (a device is only read), each for ten seconds at most.

    `advance` is called with the bytes moved since the last call, from this thread. Raises OSError
    when the disk fails. The scratch file is gone afterwards in any case.
    """
    path = Path(facts.path).resolve()
    offsets = list(range(0, max(size_bytes, SPEED_CHUNK_BYTES), SPEED_CHUNK_BYTES))
    if facts.is_device:
        fitting = [at for at in offsets if at + SPEED_CHUNK_BYTES <= facts.total_bytes]
        fd = os.open(
            path, os.O_RDONLY | os.O_CLOEXEC | (0 if facts.direct_refusal else os.O_DIRECT)
        )
        try:
            _, read_speed = timed(os.preadv, fd, fitting, advance)
        finally:
            os.close(fd)
        return PathSpeed(not facts.direct_refusal, read_speed, None)
    with scratch_file(path) as (fd, refusal):
        written, write_speed = timed(os.pwritev, fd, offsets, advance)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        _, read_speed = timed(os.preadv, fd, written, advance)
    return PathSpeed(not refusal, read_speed, write_speed)


Mover = Callable[[int, list[mmap.mmap], int], int]


def timed(
    move: Mover, fd: int, offsets: list[int], advance: Callable[[int], None]
) -> tuple[list[int], float]:
    """Move one chunk at each offset, several at once; which were moved, and bytes per second.

    The time includes making written bytes durable.
    """
    todo, done = deque(offsets), deque[int]()

    def work(buffer: mmap.mmap) -> None:
        while todo and time.perf_counter() - started_s < SPEED_LIMIT_S:
            try:
                offset = todo.popleft()
            except IndexError:
                return  # another thread took the last one
            if move(fd, [buffer], offset) != SPEED_CHUNK_BYTES:
                raise OSError(errno.EIO, "the disk moved less than it was asked to")
            done.append(offset)

    with ExitStack() as scope:
        buffers = [
            scope.enter_context(aligned_buffer(SPEED_CHUNK_BYTES)) for _ in range(SPEED_THREADS)
        ]
        pool = scope.enter_context(
            ThreadPoolExecutor(SPEED_THREADS, thread_name_prefix="kvdepot-doctor")
        )
        started_s = time.perf_counter()
        workers = [pool.submit(work, buffer) for buffer in buffers]
        told = 0
        while wait(workers, timeout=PROGRESS_INTERVAL_S).not_done:
            advance((len(done) - told) * SPEED_CHUNK_BYTES)
            told = len(done)
        for worker in workers:
            worker.result()
        os.fdatasync(fd)
        elapsed_s = time.perf_counter() - started_s
    return sorted(done), len(done) * SPEED_CHUNK_BYTES / elapsed_s
