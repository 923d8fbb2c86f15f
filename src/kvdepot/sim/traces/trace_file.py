"""A trace file as numbered lines, plain or compressed; checked fields of a line; bad lines."""

import gzip
import json
import lzma
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from kvdepot.errors import TraceError

BadLines = Literal["stop", "skip"]


class BadLine(ValueError):
    """One line of a trace cannot be used."""


@dataclass(slots=True)
class TraceFile:
    """The lines of one file. `bad_lines` says whether the first bad one ends it."""

    path: Path
    bad_lines: BadLines = "stop"
    skipped: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[tuple[int, str]]:
        """Lines that are not empty, with their numbers from 1."""
        try:
            with self._open() as stream:
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        yield number, line
        except (lzma.LZMAError, EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
            raise TraceError(str(self.path), 0, f"cannot be read: {error}") from error

    def bad(self, number: int, reason: str) -> None:
        """A line is bad: note it, or raise TraceError."""
        if self.bad_lines == "stop":
            raise TraceError(str(self.path), number, reason)
        self.skipped.append(f"line {number}: {reason}")

    def _open(self) -> TextIO:
        if self.path.suffix == ".gz":
            return gzip.open(self.path, "rt", encoding="utf-8")
        if self.path.suffix == ".xz":
            return lzma.open(self.path, "rt", encoding="utf-8")
        return self.path.open(encoding="utf-8")


Fields = dict[str, Any]


def parse(line: str) -> Fields:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BadLine(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadLine("not a JSON object")
    return cast(Fields, value)


def count(fields: Fields, name: str) -> int:
    """A whole number that is not negative."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadLine(f"{name} is {value!r}, and should be a whole number from 0 on")
    return value


def seconds(fields: Fields, name: str) -> float:
    """A number that is not negative."""
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadLine(f"{name} is {value!r}, and should be a number")
    if not math.isfinite(value) or value < 0:
        raise BadLine(f"{name} is {value!r}, and should be a number from 0 on")
    return float(value)


def items(fields: Fields, name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise BadLine(f"{name} is {type(value).__name__}, and should be a list")
    return value
