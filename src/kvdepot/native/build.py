"""Compile `_native` in place: `python -m kvdepot.native.build`.

Needs a C compiler and Python's headers, nothing else. `SOURCES` and `COMPILE_ARGS` are what a
`setup.py` needs to build the same extension; it uses only the stable ABI of Python 3.11.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

DIRECTORY: Final = Path(__file__).resolve().parent
SOURCES: Final = tuple(
    f"{noun}.c"
    for noun in ("stripes", "checksum", "copy", "batch", "uring", "threads", "engine", "module")
)
HEADERS: Final = tuple(f"{noun}.h" for noun in ("bytes", "batch", "lanes", "engine"))
COMPILE_ARGS: Final = (
    "-std=gnu11",
    "-O3",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-missing-field-initializers",
    "-DPy_LIMITED_API=0x030B0000",
)
LINK_ARGS: Final = ("-pthread",)
EXTENSION: Final = "_native.abi3.so"


def compiler() -> str:
    """The first of $CC, cc, gcc, clang on PATH. FileNotFoundError if there is none."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    raise FileNotFoundError("no C compiler on PATH: tried $CC, cc, gcc, clang")


def build(target: Path = DIRECTORY / EXTENSION, extra: tuple[str, ...] = ()) -> Path:
    """Compile and link to `target`, which is replaced atomically."""
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    include = sysconfig.get_paths()["include"]
    sources = [str(DIRECTORY / source) for source in SOURCES]
    flags = [*COMPILE_ARGS, *extra, "-shared", "-fPIC", f"-I{include}"]
    try:
        subprocess.run([compiler(), *flags, "-o", partial, *sources, *LINK_ARGS], check=True)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def main() -> int:
    try:
        print(build())
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        print(f"error: {error}\nhint: kvdepot works without it, but slower", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
