"""Build the C fast path. Everything else about the package is in pyproject.toml.

The extension is optional: without a compiler the package installs all the same and uses the
Python fallback.
"""

import os
import runpy
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
NATIVE = ROOT / "src" / "kvdepot" / "native"
BUILD = runpy.run_path(str(NATIVE / "build.py"))  # not imported: kvdepot itself needs numpy


def from_root(path: Path) -> str:
    return Path(os.path.relpath(path, ROOT)).as_posix()


setup(
    ext_modules=[
        Extension(
            "kvdepot.native._native",
            sources=[from_root(NATIVE / source) for source in BUILD["SOURCES"]],
            depends=[from_root(NATIVE / header) for header in BUILD["HEADERS"]],
            extra_compile_args=list(BUILD["COMPILE_ARGS"]),
            extra_link_args=list(BUILD["LINK_ARGS"]),
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
