"""`kvdepot doctor`: checks what this machine offers a store, and says what to improve.

Each function checks one thing. A check is ok, info (nothing to do), warn (works, but is slower,
smaller or more open to other users than it should be) or bad (a store cannot work).
"""

import argparse
import importlib
import os
import platform
import resource
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy

from kvdepot import native
from kvdepot.cli import drive_speed, output
from kvdepot.cli.command import Answer, Command
from kvdepot.cli.machine import (
    HERE,
    MachineFacts,
    PathFacts,
    kib,
    read_fields,
    read_machine,
    read_path,
    read_text,
)
from kvdepot.config import settings as config
from kvdepot.core.private import check_folder_status, runtime_folder
from kvdepot.core.units import format_bytes
from kvdepot.errors import UnsafePathError

MEMLOCK_MIN_BYTES: Final = 1 << 30
OPEN_FILES_MIN: Final = 4096
FREE_MIN_BYTES: Final = 1 << 30
SHARED_MEMORY_MIN_BYTES: Final = 1 << 30
NUMPY_MIN: Final = (1, 26)
SPEED_SLOW_BYTES_PER_S: Final = 500e6
FILES_SHOWN: Final = 3
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
Status = Literal["ok", "info", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class Check:
    subject: str
    status: Status
    found: str
    advice: str = ""


Checks = Iterator[Check]


def judged(subject: str, good: bool, found: str, advice: str, worst: Status = "warn") -> Check:
    """Ok, or `worst` with advice."""
    return Check(subject, "ok", found) if good else Check(subject, worst, found, advice)


def run(args: argparse.Namespace) -> Answer:
    settings = config.load(args.config, env=args.env) if args.config else None
    if args.measure and settings is not None:
        drive_speed.measure_store(settings)
    stores = [path for tier in settings.file_tiers for path in tier.path] if settings else []
    home = Path(args.env.get("HOME") or Path.cwd())
    paths = args.path or stores or list(dict.fromkeys([Path.cwd(), home]))
    facts = read_machine()
    checks = [
        *software_checks(),
        *(check for checks in MACHINE_CHECKS for check in checks(facts)),
        *limit_checks(
            resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            *resource.getrlimit(resource.RLIMIT_NOFILE),
        ),
        *shared_memory_checks(Path("/dev/shm")),
        *path_checks(paths, measure=None if args.quick else speed_check),
        *privacy_checks(args.env, paths, stores),
    ]
    counts = {status: sum(check.status == status for check in checks) for status in ("bad", "warn")}
    return Answer(
        {"ok": not counts["bad"], "checks": checks, "machine": facts},
        lines(checks),
        notes=[f"{counts['bad']} bad, {counts['warn']} to improve"],
        status=1 if counts["bad"] else 0,
    )


def lines(checks: Sequence[Check]) -> Iterator[str]:
    """A line for each check, and its advice below it."""
    width = max(len(check.subject) for check in checks)
    for check in checks:
        status = output.marked(f"{check.status:<4}")
        yield f"{status}  {check.subject:<{width}}  {check.found}"
        if check.advice:
            yield f"{'':<4}  {'':<{width}}  -> {check.advice}"


def software_checks() -> Checks:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    enough = tuple(int(part) for part in numpy.__version__.split(".")[:2]) >= NUMPY_MIN
    yield judged("numpy", enough, numpy.__version__, "pip install 'numpy>=1.26'", worst="bad")
    try:
        importlib.import_module("kvdepot.native._native")
        missing = ""
    except ImportError as error:
        missing = str(error)
    yield from native_checks(missing, *native.uring_available())


def native_checks(missing: str, uring: bool, refusal: str) -> Checks:
    """`missing` and `refusal` say why the extension and io_uring cannot be used."""
    found = f"the C extension is missing, slow Python code is in use ({missing})"
    yield judged(
        "native",
        not missing,
        found if missing else "the C extension is in use",
        "apt-get install gcc python3-dev, then install kvdepot again (here: ./dev setup)",
    )
    if missing and not uring:
        yield Check("io_uring", "info", "not used: it needs the C extension")
        return
    yield judged(
        "io_uring",
        uring,
        "available" if uring else f"not available: {refusal}; threads do the I/O",
        "allow io_uring in the container's seccomp profile, "
        "and set sysctl kernel.io_uring_disabled=0",
    )


def memory_checks(facts: MachineFacts) -> Checks:
    yield Check("cpu", "info", f"{facts.cpu}, {facts.cores} cores usable")
    available = format_bytes(facts.memory_available_bytes)
    found = f"{format_bytes(facts.memory_bytes)}, {available} available"
    if facts.memory_limit_bytes < facts.memory_bytes:
        found += f"; this container may use {format_bytes(facts.memory_limit_bytes)}"
    yield Check("memory", "info", found)


def huge_page_checks(facts: MachineFacts, root: Path = HERE) -> Checks:
    memory = read_fields(root / "proc/meminfo")
    free = int(memory.get("HugePages_Free", "0"))
    size = format_bytes(kib(memory.get("Hugepagesize", "0")))
    folder = root / "sys/kernel/mm/transparent_hugepage"
    # The kernel marks the current choice: always [madvise] never.
    transparent, shared = (
        read_text(folder / name).partition("[")[2].partition("]")[0] or "unknown"
        for name in ("enabled", "shmem_enabled")
    )
    found = (
        f"{free} of {memory.get('HugePages_Total', '0')} free, {size} each; "
        f"transparent: {transparent}, for shared memory: {shared}"
    )
    advice = (
        "sysctl vm.nr_hugepages=N, or as root "
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    )
    if free or shared in ("always", "advise", "within_size", "force"):
        yield Check("huge pages", "ok", found)
    elif transparent in ("always", "madvise"):
        yield Check("huge pages", "ok", found, f"only for dram.shared = true: {advice}")
    else:
        yield Check("huge pages", "warn", found, f"disk reads take twice as long: {advice}")


def slower_memory_checks(facts: MachineFacts) -> Checks:
    """Memory for a cxl tier."""
    nodes = [f"NUMA node {node} (no processors)" for node in facts.far_nodes]
    if not nodes and not facts.dax_devices:
        found = "no /dev/dax* and no NUMA node without processors; DRAM would be used"
        yield Check("cxl", "info", found)
        return
    ways = [f"cxl.node = {node}" for node in facts.far_nodes]
    ways += [f'cxl.path = "{device}"' for device in facts.dax_devices]
    yield Check("cxl", "ok", ", ".join([*nodes, *facts.dax_devices]), " or ".join(ways))


def gpu_checks(facts: MachineFacts) -> Checks:
    for gpu in facts.gpus:
        yield Check("gpu", "ok", gpu)
    if not facts.gpus:
        advice = "for a GPU machine: install the NVIDIA driver, and give the container the GPU"
        yield Check("gpu", "info", "none found; the store needs none", advice)


MACHINE_CHECKS: Final[Sequence[Callable[[MachineFacts], Checks]]] = (
    memory_checks,
    huge_page_checks,
    slower_memory_checks,
    gpu_checks,
)


def limit_checks(memlock: int, files: int, files_hard: int) -> Checks:
    """Limits of this process, as `getrlimit` has them."""
    unlimited = resource.RLIM_INFINITY
    found = "unlimited" if memlock == unlimited else format_bytes(memlock)
    enough = memlock == unlimited or memlock >= MEMLOCK_MIN_BYTES
    yield judged(
        "memlock",
        enough,
        found if enough else f"only {found} may be locked in memory",
        "ulimit -l unlimited (containers: --ulimit memlock=-1), at least the DRAM tier's size",
    )
    hard = "unlimited" if files_hard == unlimited else str(files_hard)
    enough = files == unlimited or files >= OPEN_FILES_MIN
    found = "unlimited" if files == unlimited else str(files)
    yield judged(
        "open files",
        enough,
        found if enough else f"at most {found}",
        f"ulimit -n {OPEN_FILES_MIN} or more (hard limit here: {hard})",
    )


def shared_memory_checks(path: Path) -> Checks:
    try:
        free_bytes = shutil.disk_usage(path).free
    except OSError as error:
        advice = "mount -t tmpfs tmpfs /dev/shm; without it memory cannot be shared"
        yield Check(str(path), "warn", error.strerror or str(error), advice)
        return
    advice = "containers: --shm-size, at least the DRAM tier's size"
    enough = free_bytes >= SHARED_MEMORY_MIN_BYTES
    yield judged(str(path), enough, f"{format_bytes(free_bytes)} free", advice)


def path_checks(paths: Sequence[Path], *, measure: Callable[[PathFacts], Check] | None) -> Checks:
    """The checks of each path; a filesystem of several paths is measured once."""
    measured: dict[object, str] = {}
    for path in paths:
        facts = read_path(path)
        yield from place_checks(facts)
        if facts.problem:
            continue
        if (known := drive_speed.kept_profile(path)) is not None:
            yield Check(f"{path} store", "info", drive_speed.profile_text(known))
        if measure is None:
            continue
        device = path.stat().st_rdev if facts.is_device else path.stat().st_dev
        if device in measured:
            found = f"on the same filesystem as {measured[device]}"
            yield Check(f"{path} speed", "info", found)
        else:
            measured[device] = str(path)
            yield measure(facts)


def place_checks(facts: PathFacts) -> Checks:
    if facts.problem:
        advice = "create it, mount its disk, or give a directory you may write to"
        if facts.is_device:
            advice = "run as root or in the device's group; containers: --device"
        yield Check(facts.path, "bad", facts.problem, advice)
        return
    where = f"{facts.filesystem}, {format_bytes(facts.free_bytes)} of "
    where += f"{format_bytes(facts.total_bytes)} free"
    if facts.disk is not None:
        where += f", on {facts.disk.name} ({facts.disk})"
    enough = facts.free_bytes >= FREE_MIN_BYTES
    yield judged(facts.path, enough, where, "make room, or choose a larger disk")
    yield judged(
        f"{facts.path} O_DIRECT",
        facts.direct_io,
        "works" if facts.direct_io else "refused",
        "put the store on ext4, xfs or a raw device; else the page cache holds blocks twice",
    )


def speed_check(facts: PathFacts, nbytes: int = drive_speed.MEASURED_BYTES) -> Check:
    """Measures the speed, unless that would take more than a quarter of the free space."""
    subject = f"{facts.path} speed"
    if facts.free_bytes < 4 * nbytes and not facts.is_device:
        return Check(subject, "info", "not measured: the free space is too small")
    try:
        with output.Progress(f"measuring {facts.path}"):
            profile = drive_speed.measure_path(facts, nbytes)
    except OSError as error:
        advice = "see the kernel log (dmesg) and the disk's health (smartctl)"
        return Check(subject, "bad", f"the disk failed: {error.strerror or error}", advice)
    advice = "suits a cold tier; a GPU often computes faster than this disk reads"
    fast = profile.read_bytes_per_s >= SPEED_SLOW_BYTES_PER_S
    return judged(subject, fast, drive_speed.profile_text(profile), advice)


def privacy_checks(
    env: Mapping[str, str], paths: Sequence[Path], stores: Sequence[Path], root: Path = HERE
) -> Checks:
    """Exposure to other users of this machine; `stores` are folders of a store."""
    yield swap_check(root)
    yield core_dump_check(root, resource.getrlimit(resource.RLIMIT_CORE)[0])
    yield from runtime_checks(env)
    for path in dict.fromkeys([*stores, *paths]):
        if path.is_dir() or path.is_symlink():
            yield from folder_checks(path, is_store=path in stores)


def swap_check(root: Path) -> Check:
    rows = [line.split() for line in read_text(root / "proc/swaps").splitlines()[1:]]
    areas = [f"{row[0]} ({format_bytes(int(row[2]) * 1024)})" for row in rows if len(row) > 2]
    return judged(
        "swap",
        not areas,
        f"on: {', '.join(areas)}; blocks in memory may be written there" if areas else "off",
        "swapoff -a, swap on an encrypted device, or enough memlock for the engine to lock memory",
    )


def core_dump_check(root: Path, limit_bytes: int) -> Check:
    """Core dumps: a handler behind a pipe gets them regardless of the limit."""
    pattern = read_text(root / "proc/sys/kernel/core_pattern")
    to_handler = pattern.startswith("|")
    if not to_handler and (limit_bytes == 0 or not pattern):
        return Check("core dumps", "ok", f"off (pattern {pattern or 'none'})")
    limit = "unlimited" if limit_bytes == resource.RLIM_INFINITY else format_bytes(limit_bytes)
    where = f"to {pattern[1:].split()[0]}" if to_handler else f"as {pattern}, up to {limit}"
    return Check(
        "core dumps",
        "warn",
        f"on, {where}; without memory tiers, with an engine's own tensors and prompts",
        "ulimit -c 0 (systemd: LimitCORE=0), and sysctl kernel.core_pattern=core",
    )


def runtime_checks(env: Mapping[str, str]) -> Checks:
    """The default folder of sockets, and who may connect to the sockets in it."""
    given = env.get("XDG_RUNTIME_DIR", "")
    try:
        folder = runtime_folder(env)
    except UnsafePathError as error:
        yield Check("runtime folder", "warn", str(error), error.hint)
        return
    used = not given or folder.is_relative_to(given)
    refused = f"XDG_RUNTIME_DIR={given} is not a private folder of this user; {folder} is used"
    advice = f"chmod 700 {given}, or unset it"
    yield judged("runtime folder", used, str(folder) if used else refused, advice)
    if not folder.is_dir():
        return
    yield from folder_checks(folder, is_store=False)
    for path in sorted(folder.glob("*.sock")):
        status = path.lstat()
        mode = stat.S_IMODE(status.st_mode)
        found = f"mode {mode:04o}, of user {status.st_uid}"
        if status.st_uid != os.geteuid():
            advice = "remove this socket of another user, or use another path"
            yield Check(str(path), "warn", found, advice)
        else:
            public = bool(mode & stat.S_IRWXO)
            found += ": all users may connect" if public else ""
            yield judged(str(path), not public, found, f"chmod o= {path}")


def folder_checks(path: Path, *, is_store: bool) -> Checks:
    """The folder itself, the folders above it, and the files of a store in it."""
    subject = f"{path} access"
    holds_store = is_store or (path / "superblock").exists()
    status = path.lstat()
    mode = stat.S_IMODE(status.st_mode)
    try:
        check_folder_status(path, status)
    except UnsafePathError as error:
        reason = str(error).removeprefix(f"{path}: ")
        yield Check(subject, "bad" if is_store else "warn", reason, error.hint)
    else:
        private = not (holds_store and mode & _OTHERS)
        found = f"mode {mode:04o}" + ("" if private else ": other users may see its content")
        yield judged(subject, private, found, f"chmod 700 {path}")
    yield from parent_checks(path.absolute())
    if holds_store and os.access(path, os.R_OK | os.X_OK):
        yield from file_checks(path)


def parent_checks(path: Path) -> Checks:
    """Folders above in which another user may rename things."""
    for parent in path.parents:
        status = parent.lstat()
        if status.st_uid not in (0, os.geteuid()):
            reason = f"{parent} belongs to user {status.st_uid}, who may replace it"
        elif status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
            reason = f"other users may rename the content of {parent}"
        else:
            continue
        yield Check(f"{path} above", "warn", reason, f"chmod go-w {parent}, or use another path")


def file_checks(path: Path) -> Checks:
    wrong: list[str] = []
    for file in sorted(path.iterdir()):
        status = file.lstat()
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            wrong.append(f"{file.name} is a symbolic link")
        elif status.st_uid != os.geteuid():
            wrong.append(f"{file.name} belongs to user {status.st_uid}")
        elif mode & _OTHERS:
            wrong.append(f"{file.name} has mode {mode:04o}")
        elif stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            wrong.append(f"{file.name} has {status.st_nlink} names")
    if wrong:
        more = f" and {len(wrong) - FILES_SHOWN} more" if len(wrong) > FILES_SHOWN else ""
        yield Check(
            f"{path} files",
            "warn",
            "; ".join(wrong[:FILES_SHOWN]) + more,
            f"chmod -R go= {path}; remove links, and files of other users",
        )


COMMAND = Command(
    more="Exits with 1 if a store could not work.",
    options="""
    [PATH...]        directories or block devices for a store (default: the current directory and
                     home); a directory gets a scratch file for a moment, a device is only read
    --config FILE    the settings of a store, as TOML; its paths are checked
    --measure        measure the drives of the store again, and keep the results with the store
                     [needs: --config]
    --quick          do not measure the speed of the paths
    """,
    run=run,
)
