"""Ranges below each other on one axis, each around one middle, as inline SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvdepot.cli.report.svg import RIGHT, TOP, WIDTH_MIN, box, drawing, label, line, text, ticks

NAMES_WIDTH: Final = 250.0
ROW: Final = 40.0


@dataclass(frozen=True, slots=True)
class Range:
    """From `low` to `high`, whichever is the larger; None is beyond the axis."""

    name: str
    low: float | None
    high: float | None
    low_name: str
    high_name: str


@dataclass(frozen=True, slots=True)
class Ranges:
    """`middle` is where every range would be if its input were as given."""

    title: str
    unit: str
    rows: Sequence[Range]
    middle: float
    limit: float

    def draw(self) -> str:
        known = [end for row in self.rows for end in (row.low, row.high) if end is not None]
        marks = ticks(min(max([*known, self.middle, self.limit]), 4 * self.limit))
        floor = TOP + ROW * len(self.rows)
        parts = [text(12, TOP - 12, self.unit, "axis", "start")]
        for mark in marks:
            x = self._x(mark, marks[-1])
            parts.append(line(x, TOP, x, floor, "grid"))
            parts.append(text(x, floor + 18, label(round(mark, 10)), "tick"))
        for number, row in enumerate(self.rows):
            parts += self._row(row, TOP + ROW * number, marks[-1])
        for value, style in ((self.middle, "cut"), (self.limit, "limit")):
            x = self._x(value, marks[-1])
            parts.append(line(x, TOP - 4, x, floor, style))
        parts.append(text(self._x(self.limit, marks[-1]) + 5, TOP - 8, "goal", "cross", "start"))
        return drawing(WIDTH_MIN, floor + 28, self.title, parts)

    def _x(self, value: float, most: float) -> float:
        return NAMES_WIDTH + min(value, most) / most * (WIDTH_MIN - NAMES_WIDTH - RIGHT - 60)

    def _row(self, row: Range, top: float, most: float) -> list[str]:
        parts = [text(NAMES_WIDTH - 12, top + ROW / 2 + 4, row.name, "axis", "end")]
        middle = self._x(self.middle, most)
        if row.low == row.high:
            return [*parts, text(middle + 5, top + ROW / 2 + 4, "no difference", "tick", "start")]
        ends = ((row.low, row.low_name, "with"), (row.high, row.high_name, "ssd"))
        lowest = min(most if end is None else end for end, _, _ in ends)
        for end, name, style in ends:
            x = self._x(most if end is None else end, most)
            size = (max(1.5, abs(x - middle)), ROW - 18)
            parts.append(box(min(x, middle), top + 9, size, style, f"{row.name} {name}"))
            on_left = (most if end is None else end) == lowest and x <= middle
            words = name if end is not None and end <= most else f"{name} →"
            place = (x - 5, "end") if on_left else (x + 5, "start")
            parts.append(text(place[0], top + ROW / 2 + 4, words, "note", place[1]))
        return parts
