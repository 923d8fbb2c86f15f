"""Tables for the terminal and for HTML pages. Columns of numbers are aligned to the right."""

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import zip_longest
from typing import Any, Final, Self

from kvdepot.cli import output

NARROW: Final = 10
"""The least width of a column of words that is wrapped to fit a terminal."""
GAP: Final = 2
NUMBER: Final = re.compile(r"[+−×±-]? ?\d[\d,]*(\.\d+)? ?(%|×|[A-Za-zµ]+(/s)?)?")
"""`12`, `1,024`, `0.93`, `4.5GiB`, `250 us`, `1.9GiB/s`, `93 %`, `× 0.5`"""
UNKNOWN: Final = ("", "-", "–")
"""Cells that are neither a number nor a word."""


Column = str | Callable[[Any], object]
"""A column of `Table.of`: the name of a field, or a function of the row."""


class Table:
    """Rows under headings. Floats get two decimals, whole numbers commas; None is `-`."""

    def __init__(self, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        self.heads = heads
        self.rows = [[_cell(value) for value in row] for row in rows]
        columns = zip(heads, *self.rows, strict=True)
        self._numeric = [_is_numeric(cells) for _, *cells in columns]

    @classmethod
    def of(cls, rows: Iterable[Any], columns: Mapping[str, Column]) -> Self:
        """A table of dictionaries or objects, with columns by heading."""

        def value(row: Any, column: Column) -> object:
            if not isinstance(column, str):
                return column(row)
            return row[column] if isinstance(row, dict) else getattr(row, column)

        found = [[value(row, column) for column in columns.values()] for row in rows]
        return cls(list(columns), found)

    def text(self, width: int | None = None) -> str:
        """The table for a terminal of `width` columns (default: that of stdout, else no limit).

        Words are wrapped to fit. If that is not enough, each row becomes a list of its cells.
        """
        limit = width or output.width()
        natural = [max(map(len, column)) for column in zip(self.heads, *self.rows, strict=True)]
        widths = natural if limit is None else self._fitted(natural, limit)
        if widths is None:
            return self._as_lists(limit or 0)

        def lines(row: Sequence[str]) -> Iterator[str]:
            wrapped = [_wrapped(cell, room) for cell, room in zip(row, widths, strict=True)]
            for cells in zip_longest(*wrapped, fillvalue=""):
                placed = (
                    cell.rjust(room) if right else cell.ljust(room)
                    for cell, room, right in zip(cells, widths, self._numeric, strict=True)
                )
                yield (" " * GAP).join(map(output.marked, placed)).rstrip()

        rule = ["-" * room for room in widths]
        return "\n".join(line for row in (self.heads, rule, *self.rows) for line in lines(row))

    def _fitted(self, natural: list[int], limit: int) -> list[int] | None:
        """Widths that fit into `limit`: the widest columns of words shrink. None if none fit."""
        widths = list(natural)
        over = sum(widths) + GAP * (len(widths) - 1) - limit
        words = [index for index, numeric in enumerate(self._numeric) if not numeric]
        while over > 0:
            widest = max(words, key=widths.__getitem__, default=None)
            if widest is None or widths[widest] <= NARROW:
                return None
            widths[widest] -= 1
            over -= 1
        return widths

    def _as_lists(self, limit: int) -> str:
        room = max(map(len, self.heads)) + GAP

        def lines(row: Sequence[str]) -> Iterator[str]:
            for head, cell in zip(self.heads, row, strict=True):
                for number, piece in enumerate(_wrapped(cell, max(NARROW, limit - room))):
                    yield f"{'' if number else head:{room}}{piece}".rstrip()

        return "\n\n".join("\n".join(line for line in lines(row) if line) for row in self.rows)

    def html(self, name: str) -> str:
        """`name` is the label for screen readers."""
        kinds = [' class="number"' if numeric else "" for numeric in self._numeric]

        def line(tag: str, row: Sequence[str]) -> str:
            cells = zip(row, kinds, strict=True)
            inside = "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in cells)
            return f"<tr>{inside}</tr>"

        body = "\n".join(line("td", row) for row in self.rows)
        table = f"<table><thead>{line('th', self.heads)}</thead>\n<tbody>\n{body}\n</tbody></table>"
        label = f'role="group" tabindex="0" aria-label="{escape(name)}"'
        return f'<div class="wide" {label}>{table}</div>'


def _cell(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.2f}"
    return "-" if value is None else str(value)


def _wrapped(cell: str, room: int) -> list[str]:
    if len(cell) <= room:
        return [cell]
    return textwrap.wrap(cell, room, break_on_hyphens=False) or [""]


def _is_numeric(column: Sequence[str]) -> bool:
    known = [cell for cell in column if cell not in UNKNOWN]
    return sum(NUMBER.fullmatch(cell) is not None for cell in known) * 2 > len(known)
