"""What other users of this machine could read or change: folders, sockets, swap, core dumps."""

import os
import resource
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvdepot.cli.doctor.machine import HERE, read_text
from kvdepot.core.private import check_folder_status, runtime_folder
from kvdepot.core.units import format_bytes
from kvdepot.errors import UnsafePathError

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_FILES_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class Exposure:
    """One thing that was looked at; without advice it is as it should be."""

    subject: str
    found: str
    advice: str = ""
    refused: bool = False
    """A store, or a daemon, does not start with it."""


def exposures(
    env: Mapping[str, str], places: Sequence[Path], stores: Sequence[Path], root: Path = HERE
) -> Iterator[Exposure]:
    """`places` may get a store, `stores` are the folders of one."""
    yield swap_exposure(root)
    yield dump_exposure(root, resource.getrlimit(resource.RLIMIT_CORE)[0])
    yield from runtime_exposures(env)
    for path in dict.fromkeys([*stores, *places]):
        if path.is_dir() or path.is_symlink():
            yield from folder_exposures(path, is_store=path in stores)


def swap_exposure(root: Path) -> Exposure:
    lines = read_text(root / "proc/swaps").splitlines()[1:]
    areas = [line.split() for line in lines if len(line.split()) >= 3]
    if not areas:
        return Exposure("swap", "off")
    named = ", ".join(f"{area[0]} ({format_bytes(int(area[2]) * 1024)})" for area in areas)
    return Exposure(
        "swap",
        f"on: {named}; blocks in memory may be written there and stay",
        "swapoff -a, swap on an encrypted device, or enough memlock for the engine to lock memory",
    )


def dump_exposure(root: Path, limit_bytes: int) -> Exposure:
    """A handler behind a pipe gets dumps whatever the limit is."""
    pattern = read_text(root / "proc/sys/kernel/core_pattern")
    to_handler = pattern.startswith("|")
    if not to_handler and (limit_bytes == 0 or not pattern):
        return Exposure("core dumps", f"off (pattern {pattern or 'none'})")
    limit = "unlimited" if limit_bytes == resource.RLIM_INFINITY else format_bytes(limit_bytes)
    where = f"to {pattern[1:].split()[0]}" if to_handler else f"as {pattern}, up to {limit}"
    return Exposure(
        "core dumps",
        f"on, {where}; memory tiers are left out, an engine's own tensors and prompts are not",
        "ulimit -c 0 (systemd: LimitCORE=0), and sysctl kernel.core_pattern=core",
    )


def runtime_exposures(env: Mapping[str, str]) -> Iterator[Exposure]:
    """Where sockets are by default, and who may connect to those that are there."""
    given = env.get("XDG_RUNTIME_DIR", "")
    try:
        folder = runtime_folder(env)
    except UnsafePathError as error:
        yield Exposure("runtime folder", str(error), error.hint)
        return
    if given and not folder.is_relative_to(given):
        found = f"XDG_RUNTIME_DIR={given} is not a folder of this user alone; {folder} is used"
        yield Exposure("runtime folder", found, f"chmod 700 {given}, or unset it")
    else:
        yield Exposure("runtime folder", str(folder))
    if not folder.is_dir():
        return
    yield from folder_exposures(folder, is_store=False)
    for path in sorted(folder.glob("*.sock")):
        yield socket_exposure(path)


def socket_exposure(path: Path) -> Exposure:
    found = path.lstat()
    mode = stat.S_IMODE(found.st_mode)
    text = f"mode {mode:04o}, of user {found.st_uid}"
    if found.st_uid != os.geteuid():
        return Exposure(str(path), text, "it is another user's: remove it, or name another socket")
    if mode & stat.S_IRWXO:
        return Exposure(str(path), f"{text}: all users may try", f"chmod o= {path}")
    return Exposure(str(path), text)


def folder_exposures(path: Path, *, is_store: bool) -> Iterator[Exposure]:
    """The folder itself, those above it, and the files of a store in it."""
    subject = f"{path} access"
    holds_store = is_store or (path / "superblock").exists()
    status = path.lstat()
    try:
        check_folder_status(path, status)
    except UnsafePathError as error:
        reason = str(error).removeprefix(f"{path}: ")
        yield Exposure(subject, reason, error.hint, refused=is_store)
    else:
        mode = stat.S_IMODE(status.st_mode)
        if holds_store and mode & _OTHERS:
            found = f"mode {mode:04o}: other users may see what is in it"
            yield Exposure(subject, found, f"chmod 700 {path}")
        else:
            yield Exposure(subject, f"mode {mode:04o}")
    yield from parent_exposures(path.absolute())
    if holds_store and os.access(path, os.R_OK | os.X_OK):
        yield from file_exposures(path)


def parent_exposures(path: Path) -> Iterator[Exposure]:
    """A folder above in which another user may rename things."""
    for parent in path.parents:
        found = parent.lstat()
        if found.st_uid not in (0, os.geteuid()):
            reason = f"{parent} belongs to user {found.st_uid}, who may replace it"
        elif found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
            reason = f"other users may rename what is in {parent}"
        else:
            continue
        yield Exposure(f"{path} above", reason, f"chmod go-w {parent}, or choose another place")


def file_exposures(path: Path) -> Iterator[Exposure]:
    wrong: list[str] = []
    for file in sorted(path.iterdir()):
        found = file.lstat()
        if stat.S_ISLNK(found.st_mode):
            wrong.append(f"{file.name} is a symbolic link")
        elif found.st_uid != os.geteuid():
            wrong.append(f"{file.name} belongs to user {found.st_uid}")
        elif stat.S_IMODE(found.st_mode) & _OTHERS:
            wrong.append(f"{file.name} has mode {stat.S_IMODE(found.st_mode):04o}")
        elif stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
            wrong.append(f"{file.name} has {found.st_nlink} names")
    if wrong:
        more = f" and {len(wrong) - _FILES_SHOWN} more" if len(wrong) > _FILES_SHOWN else ""
        yield Exposure(
            f"{path} files",
            "; ".join(wrong[:_FILES_SHOWN]) + more,
            f"chmod -R go= {path}; files of others and links: remove them",
        )
