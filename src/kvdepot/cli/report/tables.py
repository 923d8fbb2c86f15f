"""Tables, for the terminal and for pages. Columns that are mostly numbers are flushed right."""

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

NUMBER: Final = re.compile(r"[+−×±-]? ?\d[\d,]*(\.\d+)? ?(%|×|[A-Za-zµ]+(/s)?)?")
"""`12`, `1,024`, `0.93`, `4.5GiB`, `250 us`, `1.9GiB/s`, `93 %`, `× 0.5`"""
UNKNOWN: Final = ("", "-", "–")
"""Neither a number nor a word."""


class Table:
    """Rows under headings. Floats get two decimals, everything else its `str`."""

    def __init__(self, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        self.heads = heads
        self.rows = [[_cell(value) for value in row] for row in rows]
        columns = zip(heads, *self.rows, strict=True)
        self._numeric = [_is_numeric(cells) for _, *cells in columns]

    def text(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.heads, *self.rows, strict=True)]

        def line(row: Sequence[str]) -> str:
            placed = (
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, self._numeric, strict=True)
            )
            return "  ".join(placed).rstrip()

        rule = ["-" * width for width in widths]
        return "\n".join([line(self.heads), line(rule), *map(line, self.rows)])

    def html(self) -> str:
        kinds = [' class="number"' if numeric else "" for numeric in self._numeric]

        def line(tag: str, row: Sequence[str]) -> str:
            cells = zip(row, kinds, strict=True)
            inside = "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in cells)
            return f"<tr>{inside}</tr>"

        body = "\n".join(line("td", row) for row in self.rows)
        table = f"<table><thead>{line('th', self.heads)}</thead>\n<tbody>\n{body}\n</tbody></table>"
        return f'<div class="wide">{table}</div>'


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _is_numeric(column: Sequence[str]) -> bool:
    known = [cell for cell in column if cell not in UNKNOWN]
    return sum(NUMBER.fullmatch(cell) is not None for cell in known) * 2 > len(known)
