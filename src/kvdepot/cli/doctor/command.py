"""`kvdepot doctor`: what this machine offers a store, and what to do where it falls short.

Facts come from `machine`; here each becomes one line: ok, info (nothing to do), warn (works, but
slower, smaller or more open to others than it should) or bad (a store cannot work there).
"""

import argparse
import importlib
import platform
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy

from kvdepot import native
from kvdepot.cli import output
from kvdepot.cli.doctor import drives, machine, privacy
from kvdepot.config import settings as config
from kvdepot.core.units import format_bytes
from kvdepot.errors import ConfigError

MEMLOCK_MIN_BYTES = 1 << 30
OPEN_FILES_MIN = 4096
FREE_MIN_BYTES = 1 << 30
SHARED_MEMORY_MIN_BYTES = 1 << 30
NUMPY_MIN = (1, 26)
SPEED_SLOW_BYTES_PER_S = 500e6


class Status(StrEnum):
    OK = "ok"
    INFO = "info"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Check:
    subject: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Soft limits of this process; None is unlimited."""

    memlock_bytes: int | None
    open_files: int | None
    open_files_hard: int | None


@dataclass(frozen=True, slots=True)
class Native:
    """Whether the C extension is in use, and whether it can use io_uring; each with the reason."""

    loaded: bool
    reason: str
    uring: bool
    uring_reason: str


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "doctor",
        description="What this machine offers a store, and what to do where it falls short. "
        "Exits with 1 if a store could not work.",
    )
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="directory or block device for a store (default: the current directory and home); "
        "a directory gets a scratch file for a moment, a device is only read",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a store's TOML file: its paths are looked at, and what is known of their speed",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="with --config: measure the store's drives anew, a few seconds each, and keep it",
    )
    parser.add_argument("--quick", action="store_true", help="do not measure the paths' speed")
    output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    settings = config.load(args.config, env=args.env) if args.config else None
    if args.measure and settings is None:
        raise ConfigError("--measure", "needs the store's settings", hint="add --config FILE")
    if args.measure and settings is not None:
        drives.measure(settings)
    own = [path for tier in settings.file_tiers for path in tier.path] if settings else []
    home = Path(args.env.get("HOME") or Path.cwd())
    paths = args.paths or own or list(dict.fromkeys([Path.cwd(), home]))
    facts = machine.read_machine(nvidia_smi=shutil.which("nvidia-smi"))
    checks = [
        *software_checks(read_native()),
        *machine_checks(facts),
        *limit_checks(read_limits()),
        *shared_memory_checks(Path("/dev/shm")),
        *paths_checks(paths, measure=None if args.quick else speed_check),
        *drive_checks(paths),
        *privacy_checks(args.env, paths, own),
    ]
    healthy = all(check.status is not Status.BAD for check in checks)
    if args.json:
        output.document({"ok": healthy, "checks": checks, "machine": facts})
    else:
        show(checks)
    return 0 if healthy else 1


def show(checks: Sequence[Check]) -> None:
    """One line a check, and what to do about it below; a summary on stderr."""
    width = max(len(check.subject) for check in checks)
    for check in checks:
        output.data(
            f"{output.marked(f'{check.status:<4}')}  {check.subject:<{width}}  {check.found}"
        )
        if check.advice:
            output.data(f"{'':<4}  {'':<{width}}  -> {check.advice}")
    counts = {status: sum(check.status is status for check in checks) for status in Status}
    output.say(f"{counts[Status.BAD]} bad, {counts[Status.WARN]} to improve")


def read_native() -> Native:
    usable, reason = native.uring_available()
    try:
        importlib.import_module("kvdepot.native._native")
    except ImportError as error:
        return Native(loaded=False, reason=str(error), uring=usable, uring_reason=reason)
    return Native(loaded=True, reason="", uring=usable, uring_reason=reason)


def read_limits() -> ProcessLimits:
    def known(value: int) -> int | None:
        return None if value == resource.RLIM_INFINITY else value

    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ProcessLimits(known(memlock), known(files), known(files_hard))


def judged(subject: str, good: bool, found: str, advice: str) -> Check:
    """Ok, or a warning with advice."""
    return Check(subject, Status.OK, found) if good else Check(subject, Status.WARN, found, advice)


def software_checks(fast_path: Native) -> Iterator[Check]:
    yield Check("python", Status.OK, f"{platform.python_version()} on {platform.platform()}")
    enough = tuple(int(part) for part in numpy.__version__.split(".")[:2]) >= NUMPY_MIN
    status = Status.OK if enough else Status.BAD
    yield Check("numpy", status, numpy.__version__, "" if enough else "pip install 'numpy>=1.26'")
    missing = f"the C extension is missing, slow Python code is in use ({fast_path.reason})"
    yield judged(
        "native",
        fast_path.loaded,
        "the C extension is in use" if fast_path.loaded else missing,
        "apt-get install gcc python3-dev, then install kvdepot again (here: ./dev setup)",
    )
    if not fast_path.loaded and not fast_path.uring:
        yield Check("io_uring", Status.INFO, "not used: it needs the C extension")
        return
    refused = f"not available: {fast_path.uring_reason}; a thread pool does the I/O"
    yield judged(
        "io_uring",
        fast_path.uring,
        "available" if fast_path.uring else refused,
        "allow io_uring in the container's seccomp profile, "
        "and set sysctl kernel.io_uring_disabled=0",
    )


def machine_checks(facts: machine.MachineFacts) -> Iterator[Check]:
    features = ", ".join(facts.features) or "no vector extensions known to us"
    yield Check("cpu", Status.INFO, f"{facts.cpu}, {facts.cores} cores usable; {features}")
    yield memory_check(facts)
    nodes = facts.numa_nodes
    yield Check("numa", Status.INFO, "1 node" if nodes == 1 else f"{nodes} nodes")
    yield huge_page_check(facts.huge_pages)
    yield slower_memory_check(facts)
    for disk in facts.disks:
        yield Check(f"disk {disk.name}", Status.INFO, describe(disk))
    for gpu in facts.gpus:
        yield Check("gpu", Status.OK, f"{gpu.name}, driver {gpu.driver or 'unknown'}")
    if not facts.gpus:
        advice = "for a GPU machine: install the NVIDIA driver, and give the container the GPU"
        yield Check("gpu", Status.INFO, "none found; the store itself needs none", advice)


def slower_memory_check(facts: machine.MachineFacts) -> Check:
    """What a cxl tier could be made of."""
    nodes = [f"NUMA node {node} (no processors)" for node in facts.far_nodes]
    if not nodes and not facts.dax_devices:
        found = "no /dev/dax* and no NUMA node without processors; ordinary memory would stand in"
        return Check("cxl", Status.INFO, found)
    ways = [f"cxl.node = {node}" for node in facts.far_nodes]
    ways += [f'cxl.path = "{device}"' for device in facts.dax_devices]
    return Check("cxl", Status.OK, ", ".join([*nodes, *facts.dax_devices]), " or ".join(ways))


def memory_check(facts: machine.MachineFacts) -> Check:
    available = format_bytes(facts.memory_available_bytes)
    found = f"{format_bytes(facts.memory_bytes)}, {available} available"
    if facts.memory_limit_bytes < facts.memory_bytes:
        found += f"; this container may use {format_bytes(facts.memory_limit_bytes)}"
    return Check("memory", Status.INFO, found)


def huge_page_check(pages: machine.HugePages) -> Check:
    found = (
        f"{pages.free} of {pages.total} free, {format_bytes(pages.size_bytes)} each; "
        f"transparent: {pages.transparent or 'unknown'}, for shared memory: "
        f"{pages.shmem or 'unknown'}"
    )
    if pages.free or pages.shmem in ("always", "advise", "within_size", "force"):
        return Check("huge pages", Status.OK, found)
    shared = (
        "sysctl vm.nr_hugepages=N, or as root "
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    )
    if pages.transparent in ("always", "madvise"):
        return Check("huge pages", Status.OK, found, f"only for dram.shared = true: {shared}")
    return Check("huge pages", Status.WARN, found, f"disk reads take twice as long: {shared}")


def limit_checks(limits: ProcessLimits) -> Iterator[Check]:
    memlock, files = limits.memlock_bytes, limits.open_files
    enough = memlock is None or memlock >= MEMLOCK_MIN_BYTES
    found = "unlimited" if memlock is None else format_bytes(memlock)
    yield judged(
        "memlock",
        enough,
        found if enough else f"only {found} may be locked in memory",
        "ulimit -l unlimited (containers: --ulimit memlock=-1), at least the DRAM tier's size",
    )
    enough = files is None or files >= OPEN_FILES_MIN
    found = "unlimited" if files is None else str(files)
    hard = "unlimited" if limits.open_files_hard is None else str(limits.open_files_hard)
    yield judged(
        "open files",
        enough,
        found if enough else f"at most {found}",
        f"ulimit -n {OPEN_FILES_MIN} or more (hard limit here: {hard})",
    )


def shared_memory_checks(path: Path) -> Iterator[Check]:
    try:
        free_bytes = shutil.disk_usage(path).free
    except OSError as error:
        advice = "mount -t tmpfs tmpfs /dev/shm; until then an arena cannot be shared there"
        yield Check(str(path), Status.WARN, error.strerror or str(error), advice)
        return
    found = f"{format_bytes(free_bytes)} free"
    advice = "containers: --shm-size, at least the DRAM tier's size"
    yield judged(str(path), free_bytes >= SHARED_MEMORY_MIN_BYTES, found, advice)


def paths_checks(
    paths: Sequence[Path], *, measure: Callable[[machine.PathFacts], Check] | None
) -> Iterator[Check]:
    """Each path's checks; a filesystem that several paths share is measured once."""
    measured: dict[object, str] = {}
    for path in paths:
        facts = machine.read_path(path)
        yield from path_checks(facts)
        if facts.problem or measure is None:
            continue
        device = path.stat().st_rdev if facts.is_device else path.stat().st_dev
        if device in measured:
            found = f"on the same filesystem as {measured[device]}"
            yield Check(f"{path} speed", Status.INFO, found)
        else:
            measured[device] = str(path)
            yield measure(facts)


def path_checks(facts: machine.PathFacts) -> Iterator[Check]:
    if facts.problem:
        advice = "create it, mount its disk, or give a directory you may write to"
        if facts.is_device:
            advice = "run as root or in the device's group; containers: --device"
        yield Check(facts.path, Status.BAD, facts.problem, advice)
        return
    where = f"{facts.filesystem}, {format_bytes(facts.free_bytes)} of "
    where += f"{format_bytes(facts.total_bytes)} free"
    if facts.disk is not None:
        where += f", on {facts.disk.name} ({describe(facts.disk)})"
    roomy = facts.free_bytes >= FREE_MIN_BYTES
    yield judged(facts.path, roomy, where, "make room, or choose a larger disk")
    advice = "put the store on ext4, xfs or a raw device; else the page cache holds it twice"
    refusal = facts.direct_refusal
    yield judged(f"{facts.path} O_DIRECT", not refusal, refusal or "works", advice)


def privacy_checks(
    env: Mapping[str, str], paths: Sequence[Path], stores: Sequence[Path]
) -> Iterator[Check]:
    """What other users of this machine could get at; `stores` are folders that have to be safe."""
    for seen in privacy.exposures(env, paths, stores):
        bad = Status.BAD if seen.refused else Status.WARN
        yield Check(seen.subject, bad if seen.advice else Status.OK, seen.found, seen.advice)


def drive_checks(paths: Sequence[Path]) -> Iterator[Check]:
    """What stores at these paths have kept of their drives' speed."""
    for path in paths:
        known = drives.kept_profile(path)
        if known is not None:
            yield Check(f"{path} store", Status.INFO, drives.profile_text(known))


def describe(disk: machine.Disk) -> str:
    # Virtual disks often claim to turn, so this is what the disk says and not a judgement.
    kind = "says it is rotational" if disk.rotational else "not rotational"
    return ", ".join(part for part in (disk.model, format_bytes(disk.size_bytes), kind) if part)


def speed_check(facts: machine.PathFacts, *, size_bytes: int = machine.SPEED_BYTES) -> Check:
    """Measure it, unless the measurement would take more than a quarter of the free space."""
    subject = f"{facts.path} speed"
    if facts.free_bytes < 4 * size_bytes and not facts.is_device:
        return Check(subject, Status.INFO, "not measured: too little free space")
    total_bytes = size_bytes if facts.is_device else 2 * size_bytes
    try:
        with output.Progress(f"measuring {facts.path}", total_bytes) as progress:
            speed = machine.measure_speed(facts, size_bytes=size_bytes, advance=progress.advance)
    except OSError as error:
        advice = "look at the kernel log (dmesg) and the disk's health (smartctl)"
        return Check(subject, Status.BAD, f"the disk failed: {error.strerror or error}", advice)
    found = f"read {output.rate(speed.read_bytes_per_s)}"
    if speed.write_bytes_per_s is not None:
        found += f", write {output.rate(speed.write_bytes_per_s)}"
    found += " (O_DIRECT" if speed.direct else " (through the page cache"
    found += f", {format_bytes(machine.SPEED_CHUNK_BYTES)} × {machine.SPEED_THREADS} threads)"
    advice = "fine for a cold tier; a GPU often recomputes faster than this disk reads"
    return judged(subject, speed.read_bytes_per_s >= SPEED_SLOW_BYTES_PER_S, found, advice)
