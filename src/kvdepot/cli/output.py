"""How commands talk: data on stdout, talk on stderr; colour on terminals only, and never needed.

The only file of the package that prints.
"""

import argparse
import contextlib
import dataclasses
import errno
import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Self, TextIO

from kvdepot.core.units import format_bytes

SILENT_S = 2.0
"""Nothing is shown of what ends sooner."""
TTY_INTERVAL_S = 0.1
LOG_INTERVAL_S = 10.0
RED, GREEN, YELLOW, CYAN = "1;31", "32", "33", "36"
"""As terminals number them."""
MARKS = {"ok": GREEN, "warn": YELLOW, "bad": RED, "stop": RED, "MISSED": RED, "down": RED}
"""Words by which people find the lines that matter, in lists and tables."""


@dataclasses.dataclass(slots=True)
class TerminalWishes:
    """What the environment asks of a terminal's look."""

    colour: bool = True


_wishes = TerminalWishes()


def respect(env: Mapping[str, str]) -> None:
    """No colour where NO_COLOR is set to anything, and on terminals that cannot show it."""
    _wishes.colour = not env.get("NO_COLOR") and env.get("TERM") != "dumb"


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def data(text: str) -> None:
    """One piece of the answer, on stdout."""
    if sys.stdout is None:
        raise OSError(errno.EBADF, "standard output is closed")
    print(text)


def document(value: object) -> None:
    """The whole answer as JSON, on stdout. Dataclasses, paths, enums and bytes are understood."""
    data(json.dumps(value, indent=2, default=plain, allow_nan=False))


def say(text: str) -> None:
    """Talk, on stderr. Where that is closed there is no reader to tell."""
    with contextlib.suppress(OSError):
        print(text, file=talk_stream())


def error(message: str, *, hint: str = "", as_json: bool = False) -> None:
    """What went wrong and what to do about it: for people, and for a script that asked for JSON."""
    say(f"{painted('error:', RED, talk_stream())} {message}")
    if hint:
        say(f"{painted('hint:', CYAN, talk_stream())} {hint}")
    if as_json and sys.stdout is not None:
        data(json.dumps({"ok": False, "error": message, "hint": hint}))


def painted(text: str, colour: str, stream: TextIO) -> str:
    """`text` in colour, where the stream is a terminal that wants it."""
    return f"\x1b[{colour}m{text}\x1b[0m" if _wishes.colour and stream.isatty() else text


def marked(cell: str) -> str:
    """A cell for stdout, in colour where it is, or begins with, one of MARKS."""
    colour = MARKS.get(cell.strip().partition(":")[0])
    if colour is None or sys.stdout is None:
        return cell
    return painted(cell, colour, sys.stdout)


def flush() -> None:
    """Raise BrokenPipeError now, where it is handled, and not at interpreter exit."""
    if sys.stdout is not None:
        sys.stdout.flush()


def is_terminal() -> bool:
    """Whether a person watches stdout as it is written."""
    return sys.stdout is not None and sys.stdout.isatty()


def width() -> int | None:
    """The columns of the terminal that stdout is; None where it is none."""
    if not is_terminal():
        return None
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except OSError:
        return None


def talk_stream() -> TextIO:
    return io.StringIO() if sys.stderr is None else sys.stderr


def discard_stdout() -> None:
    """After the reader has gone: let nothing that is still buffered fail at interpreter exit."""
    if sys.stdout is None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"no JSON form for {type(value).__name__}")


def rate(bytes_per_s: float) -> str:
    return f"{format_bytes(round(bytes_per_s))}/s"


class Progress:
    """One line on stderr about something that takes a while.

    On a terminal the line is rewritten in place and wiped at the end. Elsewhere (a log file, CI)
    nothing is written in the first two seconds, then one line every ten. Use it as a scope; call
    `advance` from one thread.
    """

    def __init__(
        self,
        label: str,
        total: int = 0,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label = label
        self.total = total
        self.done = 0
        self._stream = talk_stream() if stream is None else stream
        self._is_tty = self._stream.isatty()
        self._clock = clock
        self._next_s = clock() + (0.0 if self._is_tty else SILENT_S)
        self._shown_width = 0

    def __enter__(self) -> Self:
        self._show_if_due()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._is_tty and self._shown_width:
            self._stream.write("\r" + " " * self._shown_width + "\r")
            self._stream.flush()

    def advance(self, amount: int = 1) -> None:
        self.done += amount
        self._show_if_due()

    def _show_if_due(self) -> None:
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (TTY_INTERVAL_S if self._is_tty else LOG_INTERVAL_S)
        share = f" {min(100, 100 * self.done // self.total)} %" if self.total else ""
        text = f"{self.label} …{share}"
        if self._is_tty:
            self._stream.write("\r" + text.ljust(self._shown_width))
            self._shown_width = max(self._shown_width, len(text))
        else:
            self._stream.write(text + "\n")
        self._stream.flush()
