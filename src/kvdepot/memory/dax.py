"""A DAX device, or a file that stands for one, as memory."""

import fcntl
import os
import stat
from pathlib import Path

from kvdepot.core.units import format_bytes
from kvdepot.errors import ConfigError


def open_device(setting: str, path: Path, nbytes: int) -> int:
    """A descriptor that can be mapped, ours alone until it is closed. ConfigError if too small."""
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
    """Bytes that can be mapped; 0 for what is neither a DAX device nor a file."""
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
        raise ConfigError(setting, f"{path} is no DAX device, and no file that has bytes")
    if found < nbytes:
        raise ConfigError(
            setting,
            f"{path} has {format_bytes(found)}, less than the capacity of {format_bytes(nbytes)}",
            hint="give less capacity, or a larger device",
        )
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(setting, f"{path} is in use by another store") from error
