"""The demo's table while it grows: rewritten in place on a terminal, line by line elsewhere."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Self

from kvdepot.cli import output
from kvdepot.cli.demo.result import Pass, Request, Turn

HEADS: Final = (
    "turn",
    "user",
    "prompt",
    "dram",
    "ssd",
    "computed",
    "without",
    "with",
    "speed-up",
    "answer",
)
WIDTHS: Final = (4, 9, 7, 7, 7, 9, 9, 9, 9, 10)
LEGEND: Final = (
    "prompt: tokens; dram, ssd: tokens fetched from each tier; without, with: time to first token\n"
    "* after a kill   ! after a kill and a flipped bit"
)


def cells(turn: Turn) -> tuple[str, ...]:
    """A row of the table, when both answers are there."""
    served = turn.with_depot
    marks: dict[Pass, str] = {"returned": "*", "damaged": "!"}
    return (
        f"{turn.number}{marks.get(served.number, '')}",
        turn.user,
        f"{served.prompt_tokens:,}",
        f"{served.fetched.get('dram', 0):,}",
        f"{served.fetched.get('ssd', 0):,}",
        f"{served.computed_tokens:,}",
        f"{turn.without.ttft_s:.2f} s",
        f"{served.ttft_s:.2f} s",
        f"{turn.speedup:.1f}×",
        "same" if turn.identical else "DIFFERENT",
    )


def first_cells(number: int, user: str, without: Request) -> tuple[str, ...]:
    """A row of the table, as long as there is only the answer without the depot."""
    unknown = ("",) * 3
    time_s = f"{without.ttft_s:.2f} s"
    return (str(number), user, f"{without.prompt_tokens:,}", *unknown, time_s, "", "", "")


class Lines:
    """Watches the demo and writes a line for each thing that happens."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._progress = output.Progress("starting")

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def wait(self, what: str) -> None:
        self._progress.label = what
        self._progress.advance(0)

    def begin(self, number: Pass, text: str) -> None:
        self._write(f"{LEGEND}\n\n-- {text}" if number == "without" else f"\n-- {text}")
        if number in ("without", "with"):
            self._write(aligned(HEADS))

    def computed(self, number: int, user: str, without: Request) -> None:
        self._write(aligned(first_cells(number, user, without)))

    def compared(self, turn: Turn) -> None:
        self._write(aligned(cells(turn)))


def aligned(row: tuple[str, ...]) -> str:
    """One row under the others; names are flushed left, all else right."""
    placed = (
        cell.ljust(width) if number in (1, 9) else cell.rjust(width)
        for number, (cell, width) in enumerate(zip(row, WIDTHS, strict=True))
    )
    return " ".join(placed).rstrip()


class Screen:
    """Watches the demo on a terminal: one table, rewritten in place, and what is going on below."""

    def __init__(self) -> None:
        from rich.live import Live

        self._rows: dict[tuple[str, str], tuple[str, ...]] = {}
        self._said: list[str] = []
        self._doing = ""
        self._live = Live(get_renderable=self._draw, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._doing = ""
        self._live.__exit__(kind, error, trace)

    def wait(self, what: str) -> None:
        self._doing = what

    def begin(self, number: Pass, text: str) -> None:
        self._said.append(text)

    def computed(self, number: int, user: str, without: Request) -> None:
        self._rows[str(number), user] = first_cells(number, user, without)

    def compared(self, turn: Turn) -> None:
        row = cells(turn)
        self._rows.pop((str(turn.number), turn.user), None)
        self._rows[row[0], turn.user] = row

    def _draw(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(caption=LEGEND, caption_justify="left")
        for number, head in enumerate(HEADS):
            table.add_column(head, justify="left" if number in (1, 9) else "right")
        for row in self._rows.values():
            style = "bold red" if row[-1] == "DIFFERENT" else "green" if row[-1] else "dim"
            table.add_row(*(escape(cell) for cell in row), style=style)
        said = [Text(f"• {text}") for text in self._said]
        doing = [Text(f"  {self._doing} …", style="dim")] if self._doing else []
        return Group(table, *said, *doing)


def escape(cell: str) -> Any:
    """A cell as it is, whatever brackets are in it."""
    from rich.text import Text

    return Text(cell)


def audience(as_json: bool) -> AbstractContextManager["Lines | Screen"]:
    """A table in place where stdout is a terminal and rich is installed, else lines."""
    if as_json:
        return Lines(output.say)
    if output.is_terminal():
        try:
            return Screen()
        except ImportError:
            return Lines(output.data)
    return Lines(output.data)
