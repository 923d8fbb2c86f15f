"""Damage to the files of a store, at rest or under a store that is open.

The arguments of each function are the folder of a drive, a random source, and the folder of another
drive: of another store, or of the same one at an earlier time.
"""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvdepot.format.record import PAGE

Harm = Callable[[Path, random.Random, Path], None]


def files_in(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.is_file())


def flip(file: Path, offset: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        (byte,) = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte ^ 1 << bit]))


def truncate(path: Path, rng: random.Random, _: Path) -> None:
    file = rng.choice(files_in(path))
    os.truncate(file, rng.randrange(file.stat().st_size or 1))


def extend(path: Path, rng: random.Random, _: Path) -> None:
    with rng.choice(files_in(path)).open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 3 * PAGE)))


def swap(path: Path, rng: random.Random, _: Path) -> None:
    files = files_in(path)
    one, other = rng.sample(files, 2) if len(files) > 1 else (files[0], files[0])
    one.rename(path / "between")
    if other != one:
        other.rename(one)
    (path / "between").rename(other)


def delete(path: Path, rng: random.Random, _: Path) -> None:
    rng.choice(files_in(path)).unlink()


def replace(path: Path, rng: random.Random, other: Path) -> None:
    """Overwrite a file with one of the other drive; with the same store, this is a replay."""
    source = rng.choice(files_in(other))
    shutil.copyfile(source, path / source.name)


def replace_anew(path: Path, rng: random.Random, other: Path) -> None:
    """Like `replace`, but with a new inode: processes that have the old file open keep it."""
    source = rng.choice(files_in(other))
    (path / source.name).unlink(missing_ok=True)
    shutil.copyfile(source, path / source.name)


def duplicate(path: Path, rng: random.Random, _: Path) -> None:
    segments = sorted(path.glob("segment-*"))
    if len(segments) > 1:
        one, other = rng.sample(segments, 2)
        shutil.copyfile(one, other)


def zero(path: Path, rng: random.Random, _: Path) -> None:
    file = rng.choice(files_in(path))
    pages = max(1, file.stat().st_size // PAGE)
    with file.open("r+b") as opened:
        opened.seek(PAGE * rng.randrange(pages))
        opened.write(bytes(PAGE * rng.choice((1, 1, 4))))


def overwrite(path: Path, rng: random.Random, _: Path) -> None:
    file = rng.choice(files_in(path))
    with file.open("r+b") as opened:
        opened.seek(rng.randrange(max(1, file.stat().st_size)))
        opened.write(rng.randbytes(rng.randrange(1, 4 * PAGE)))


def flip_some(path: Path, rng: random.Random, _: Path) -> None:
    for _count in range(rng.randrange(1, 20)):
        file = rng.choice(files_in(path))
        if size := file.stat().st_size:
            flip(file, rng.randrange(size), rng.randrange(8))


HARMS: Final[list[Harm]] = [
    truncate, extend, swap, delete, replace, replace_anew, duplicate, zero, overwrite, flip_some,
]  # fmt: skip
