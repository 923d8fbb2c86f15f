"""Places that commands write to: reports, scratch directories, the cache of models."""

import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvdepot.cli.machine import PathFacts, read_path
from kvdepot.core.private import write_private_file
from kvdepot.core.units import format_bytes
from kvdepot.errors import ConfigError

IN_MEMORY = ("tmpfs", "ramfs")


def choose_parent(given: Path | None, needed_bytes: int) -> PathFacts:
    """The given directory, else a usable one: temporary ones, then the current one.

    Prefers a disk to a filesystem in memory. Raises ConfigError if the free space is too small.
    """
    if given is not None:
        if not given.is_dir():
            reason = f"{given} is not a directory" if given.exists() else f"{given} does not exist"
            raise ConfigError("--path", reason, hint=f"mkdir -p {given}")
        candidates = [given]
    else:
        candidates = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]
    usable = []
    for path in candidates:
        facts = read_path(path)
        if not facts.problem and not facts.is_device and facts.free_bytes >= needed_bytes:
            usable.append(facts)
    if not usable:
        places = ", ".join(map(str, candidates))
        raise ConfigError(
            "path",
            f"no writable directory with {format_bytes(needed_bytes)} free among {places}",
            hint="give one with --path",
        )
    return next((facts for facts in usable if facts.filesystem not in IN_MEMORY), usable[0])


@contextmanager
def scratch_directory(parent: Path, prefix: str, *, keep: bool = False) -> Iterator[Path]:
    """A new directory in `parent`, removed with its content, also after Ctrl-C or SIGTERM.

    Call it from the main thread. Inside the scope SIGTERM ends the command like Ctrl-C.
    """
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield path
    finally:
        signal.signal(signal.SIGTERM, before)
        if not keep:
            shutil.rmtree(path, ignore_errors=True)


def write_page(path: Path, page: str) -> None:
    """Write a report, readable by this user alone; to a pipe or a terminal without a new file."""
    if path.exists() and not path.is_file():
        path.write_text(page, encoding="utf-8")
    else:
        write_private_file(path, page.encode())


def models_folder(env: Mapping[str, str]) -> Path:
    """The cache of model weights, by the rules of the XDG base directories."""
    given = Path(env.get("XDG_CACHE_HOME", ""))
    base = given if given.is_absolute() else Path(env.get("HOME", "/root")) / ".cache"
    return base / "kvdepot" / "models"
