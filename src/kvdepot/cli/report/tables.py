"""Tables, for the terminal and for pages. Columns that are mostly numbers are flushed right."""

import base64
import csv
import io
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import zip_longest
from typing import Final

from kvdepot.cli import output

NARROW: Final = 10
"""Columns of words are not made narrower than this to fit a terminal."""
GAP: Final = 2
NUMBER: Final = re.compile(r"[+−×±-]? ?\d[\d,]*(\.\d+)? ?(%|×|[A-Za-zµ]+(/s)?)?")
"""`12`, `1,024`, `0.93`, `4.5GiB`, `250 us`, `1.9GiB/s`, `93 %`, `× 0.5`"""
UNKNOWN: Final = ("", "-", "–")
"""Neither a number nor a word."""


class Table:
    """Rows under headings. Floats get two decimals, everything else its `str`.

    `raw`: the same rows with all digits, for CSV; else those that are shown.
    """

    def __init__(
        self,
        heads: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        raw: Iterable[Sequence[object]] | None = None,
    ) -> None:
        self.heads = heads
        given = [list(row) for row in rows]
        self._raw = given if raw is None else [list(row) for row in raw]
        self.rows = [[_cell(value) for value in row] for row in given]
        columns = zip(heads, *self.rows, strict=True)
        self._numeric = [_is_numeric(cells) for _, *cells in columns]

    def text(self, width: int | None = None) -> str:
        """For a terminal of `width` columns, by default that of stdout; else as wide as it is.

        Words are wrapped to fit; where that is not enough each row becomes a list of its cells.
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
        """Widths that fit into `limit`, taken from the widest columns of words; None: no way."""
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

    def csv(self) -> str:
        """With headings, as RFC 4180 has it; what is not known is empty."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(self.heads)
        writer.writerows(["" if cell is None else cell for cell in row] for row in self._raw)
        return text.getvalue()

    def html(self, name: str = "") -> str:
        """With a `name` it can be saved as NAME.csv, and has a label for screen readers."""
        kinds = [' class="number"' if numeric else "" for numeric in self._numeric]

        def line(tag: str, row: Sequence[str]) -> str:
            cells = zip(row, kinds, strict=True)
            inside = "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in cells)
            return f"<tr>{inside}</tr>"

        body = "\n".join(line("td", row) for row in self.rows)
        table = f"<table><thead>{line('th', self.heads)}</thead>\n<tbody>\n{body}\n</tbody></table>"
        spoken = f' role="group" tabindex="0" aria-label="{escape(name)}"' if name else ""
        return f'<div class="wide"{spoken}>{table}</div>{self._saved(name) if name else ""}'

    def _saved(self, name: str) -> str:
        file = "-".join(re.findall(r"[a-z0-9]+", name.lower())) + ".csv"
        inside = base64.b64encode(self.csv().encode()).decode()
        link = f'href="data:text/csv;charset=utf-8;base64,{inside}" download="{file}"'
        return f'<p class="csv"><a {link} aria-label="{escape(name)} as CSV">CSV</a></p>'


def _wrapped(cell: str, room: int) -> list[str]:
    if len(cell) <= room:
        return [cell]
    return textwrap.wrap(cell, room, break_on_hyphens=False) or [""]


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _is_numeric(column: Sequence[str]) -> bool:
    known = [cell for cell in column if cell not in UNKNOWN]
    return sum(NUMBER.fullmatch(cell) is not None for cell in known) * 2 > len(known)
