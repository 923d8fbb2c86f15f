"""Prints answers on stdout and messages on stderr, with colour on terminals only.

The only file of the package that prints.
"""

import contextlib
import dataclasses
import errno
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Self, TextIO

from kvdepot.core.units import format_bytes

SILENT_S = 2.0
"""Work that ends sooner shows no progress."""
TTY_INTERVAL_S = 0.1
LOG_INTERVAL_S = 10.0
RED, GREEN, YELLOW, CYAN = "1;31", "32", "33", "36"
"""ANSI colours."""
MARKS = {"ok": GREEN, "warn": YELLOW, "bad": RED, "stop": RED, "MISSED": RED, "down": RED}
"""Words that are coloured in lists and tables."""
_settings = {"colour": True}


def use_terminal_settings(env: Mapping[str, str]) -> None:
    """No colour if NO_COLOR is set, and on terminals without colours."""
    _settings["colour"] = not env.get("NO_COLOR") and env.get("TERM") != "dumb"


def data(text: str) -> None:
    """Print one part of the answer on stdout."""
    if sys.stdout is None:
        raise OSError(errno.EBADF, "standard output is closed")
    print(text)


def document(value: object) -> None:
    """Print the whole answer as JSON; dataclasses, paths, enums and bytes are converted."""
    data(json.dumps(value, indent=2, default=plain, allow_nan=False))


def json_line(value: Mapping[str, Any]) -> None:
    """Print one line of JSON and flush it, for readers of a command that keeps running."""
    data(json.dumps(value))
    flush()


def say(text: str) -> None:
    """Print a message on stderr, if it is open."""
    with contextlib.suppress(OSError):
        print(text, file=talk_stream())


def error(message: str, *, hint: str = "", as_json: bool = False) -> None:
    """Print an error and its hint on stderr; with `as_json` also as JSON on stdout."""
    say(f"{painted('error:', RED, talk_stream())} {message}")
    if hint:
        say(f"{painted('hint:', CYAN, talk_stream())} {hint}")
    if as_json and sys.stdout is not None:
        data(json.dumps({"ok": False, "error": message, "hint": hint}))


def painted(text: str, colour: str, stream: TextIO) -> str:
    """`text` in colour, if the stream is a terminal with colours."""
    return f"\x1b[{colour}m{text}\x1b[0m" if _settings["colour"] and stream.isatty() else text


def marked(cell: str) -> str:
    """A cell for stdout, in colour if it is, or begins with, one of MARKS."""
    colour = MARKS.get(cell.strip().partition(":")[0])
    if colour is None or sys.stdout is None:
        return cell
    return painted(cell, colour, sys.stdout)


def flush() -> None:
    """Raise BrokenPipeError now, and not at interpreter exit, where it is not handled."""
    if sys.stdout is not None:
        sys.stdout.flush()


def is_terminal() -> bool:
    """True if stdout is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def width() -> int | None:
    """The columns of the terminal of stdout; None without a terminal."""
    return shutil.get_terminal_size().columns if is_terminal() else None


def talk_stream() -> TextIO:
    return io.StringIO() if sys.stderr is None else sys.stderr


def discard_stdout() -> None:
    """Drop buffered output for a closed pipe, so that interpreter exit does not fail."""
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
    """A line of progress on stderr.

    On a terminal the line is rewritten in place and removed at the end. In a log file nothing is
    written in the first two seconds, then one line every ten. Use it as a scope; call `advance`
    and `reach` from one thread.
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
        self.reach(self.done + amount)

    def reach(self, done: int, total: int | None = None) -> None:
        """`done` of `total` are done; the total is unchanged if it is None."""
        self.done = done
        self.total = self.total if total is None else total
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
