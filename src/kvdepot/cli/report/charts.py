"""Charts as inline SVG, in the colours of the page's style sheet: bars, curves, ranges.

A `style` is a class of the style sheet, a `tip` the text that appears under the pointer. Charts are
drawn for a given width, and have their numbers as a table too.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, Protocol

from kvdepot.cli.report.tables import Table

LEFT: Final = 64
RIGHT: Final = 16
TOP: Final = 28
BOTTOM: Final = 56
HEIGHT: Final = 300
WIDTH: Final = 930
NARROW_WIDTH: Final = 360
"""For a phone: bars lie, and names stand above what they name."""
_NARROW: Final = 600
"""Drawings below this width are laid out for a phone."""
TICK_STEPS: Final = (1, 2, 5, 10)
COLOURS: Final = 7
"""Styles c0, c1, … for series without a meaning of their own."""
LABEL_APART: Final = 118.0
"""Names of points closer to each other than this, from left to right, are left out."""
NAMES_WIDTH: Final = 250.0
RANGE_HEIGHT: Final = 40.0
TICK_APART: Final = 46.0
_LYING: Final = 13.0
"""Height of a bar that lies."""
_NAME_HEIGHT: Final = 18.0


def ticks(most: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to at least `most`, about `count` of them, evenly spaced."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in TICK_STEPS if factor * power >= raw * (1 - 1e-9))
    return [number * step for number in range(math.ceil(most / step * (1 - 1e-9)) + 1)]


def label(value: float) -> str:
    """The number at a tick: 1,500 or 0.25."""
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


class LegendEntry(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def style(self) -> str: ...


class Chart(Protocol):
    """What a page shows: wide or narrow, with a legend and a table."""

    @property
    def title(self) -> str: ...

    def draw(self, width: float = WIDTH) -> str:
        """The drawing, as SVG."""

    def legend(self) -> Sequence[LegendEntry]:
        """What the styles mean; empty where there is one only."""

    def table(self) -> Table:
        """The numbers that are drawn."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one kind, one for each category."""

    name: str
    style: str
    values: Sequence[float] = ()
    show: Callable[[float], str] = label


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars over categories, beside each other or, if `stacked`, on top of each other."""

    title: str
    unit: str
    categories: Sequence[str]
    """A line break separates the two lines of a category's name."""
    series: Sequence[Series]
    stacked: bool = False
    notes: Sequence[str] = ()
    """A word above each category, if any."""

    def legend(self) -> Sequence[LegendEntry]:
        return self.series if len(self.series) > 1 else ()

    def table(self) -> Table:
        units = "" if [one.name for one in self.series] == [self.unit] else f", {self.unit}"
        heads = ["", *(f"{one.name}{units if self.unit else ''}" for one in self.series)]
        names = [name.replace("\n", " ").strip() for name in self.categories]
        rows = [[name, *(s.values[n] for s in self.series)] for n, name in enumerate(names)]
        shown = [
            [name, *(s.show(s.values[n]) for s in self.series)] for n, name in enumerate(names)
        ]
        return Table(heads, shown, raw=rows)

    def _marks(self) -> list[float]:
        columns = zip(*(one.values for one in self.series), strict=True)
        heights = (sum(column) if self.stacked else max(column) for column in columns)
        return ticks(max(heights, default=0.0))

    def draw(self, width: float = WIDTH) -> str:
        """With many bars it is wider."""
        if width < _NARROW:
            return self._draw_lying(width)
        slot = max(58.0, (width - LEFT - RIGHT) / max(1, len(self.categories)))
        width = LEFT + slot * len(self.categories) + RIGHT
        marks = self._marks()
        parts = _y_axis(marks, width, self.unit)
        for number, name in enumerate(self.categories):
            left = LEFT + number * slot
            parts += self._category(number, left, slot, marks[-1])
            for row, words in enumerate(name.split("\n")):
                at = HEIGHT - BOTTOM + 18 + 16 * row
                parts.append(_text(left + slot / 2, at, words, "tick"))
        return _drawing(width, HEIGHT, self.title, parts)

    def _draw_lying(self, width: float) -> str:
        marks = ticks(self._marks()[-1], 3)
        bars = 1 if self.stacked else len(self.series)
        height = _NAME_HEIGHT + bars * _LYING + 8
        floor = TOP + height * len(self.categories)
        scale = (width - 2 * RIGHT) / marks[-1]
        parts = [_text(RIGHT, TOP - 12, self.unit, "axis", "start")]
        for mark in marks:
            x = RIGHT + mark * scale
            parts.append(_line(x, TOP, x, floor, "grid"))
            side = "start" if mark == 0 else "end" if mark == marks[-1] else "middle"
            parts.append(_text(x, floor + 16, label(round(mark, 10)), "tick", side))
        for number, name in enumerate(self.categories):
            top = TOP + number * height
            words = name.replace("\n", " ").strip()
            parts.append(_text(RIGHT, top + 14, words, "tick", "start"))
            if self.notes:
                parts.append(_text(width - RIGHT, top + 14, self.notes[number], "note", "end"))
            parts += self._lying(number, words, top + _NAME_HEIGHT, scale)
        return _drawing(width, floor + 24, self.title, parts)

    def _lying(self, number: int, name: str, top: float, scale: float) -> list[str]:
        """The bars of one category."""
        parts, x = [], float(RIGHT)
        for one in self.series:
            length = one.values[number] * scale
            tip = f"{name}, {one.name}: {one.show(one.values[number])}"
            parts.append(_box(x, top, (length, _LYING - 1), one.style, tip))
            if self.stacked:
                x += length
            else:
                top += _LYING
        return parts

    def _category(self, number: int, left: float, slot: float, most: float) -> list[str]:
        parts = []
        share = 0.64 / (1 if self.stacked else len(self.series))
        x, bottom, highest = left + slot * 0.18, float(HEIGHT - BOTTOM), 0.0
        for one in self.series:
            height = one.values[number] / most * (HEIGHT - TOP - BOTTOM)
            name = self.categories[number].replace("\n", " ")
            tip = f"{name}, {one.name}: {one.show(one.values[number])}"
            parts.append(_box(x, bottom - height, (slot * share, height), one.style, tip))
            highest = max(highest, HEIGHT - BOTTOM - bottom + height)
            if self.stacked:
                bottom -= height
            else:
                x += slot * share
        if self.notes:
            at = HEIGHT - BOTTOM - highest - 5
            parts.append(_text(left + slot / 2, at, self.notes[number], "note"))
        return parts


@dataclass(frozen=True, slots=True)
class Point:
    """`name` is written beside it. A point of style `mark` is large."""

    x: float
    y: float
    tip: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points joined by a line in this order, or single ones."""

    name: str
    style: str
    points: Sequence[Point]
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Curves:
    """Points over two axes. The axis across begins where the points do, the other one at 0."""

    title: str
    x_unit: str
    y_unit: str
    curves: Sequence[Curve]
    limit: float | None = None
    """A height that is marked as the goal."""
    x_label: Callable[[float], str] | None = None
    """If given, the axis across is logarithmic, with a tick at each point."""

    def legend(self) -> Sequence[LegendEntry]:
        return self.curves if self.x_label is not None else ()

    def table(self) -> Table:
        named = any(curve.name for curve in self.curves)
        rows: list[list[object]] = []
        shown: list[list[object]] = []
        for curve in self.curves:
            name = [curve.name] if named else []
            for point in curve.points:
                rows.append([*name, point.x, point.y])
                x = f"{point.x:,.6g}" if self.x_label is None else self.x_label(point.x)
                shown.append([*name, x, f"{point.y:.4g}"])
        heads = [*([""] if named else []), self.x_unit, self.y_unit]
        return Table(heads, shown, raw=rows)

    def draw(self, width: float = WIDTH) -> str:
        points = [point for curve in self.curves for point in curve.points]
        marks = ticks(max([*(point.y for point in points), self.limit or 0.0]))
        places = [self._scaled(point.x) for point in points]
        low, high = min(places), max(places)
        room = (high - low) * 0.06 or max(high, 1.0) * 0.05
        start, span = low - room, high - low + 2 * room

        def place(x: float, y: float) -> tuple[float, float]:
            across = (self._scaled(x) - start) / span * (width - LEFT - RIGHT)
            return LEFT + across, _y(y, marks[-1])

        parts, named_x = _y_axis(marks, width, self.y_unit), -TICK_APART
        for value, words in self._x_ticks(points, start, span):
            x, floor = place(value, 0.0)
            parts.append(_line(x, floor, x, floor + 5, "grid"))
            if x - named_x >= TICK_APART:
                parts.append(_text(x, floor + 20, words, "tick"))
                named_x = x
        parts.append(_text((LEFT + width) / 2, HEIGHT - 12, self.x_unit, "axis"))
        if self.limit is not None:
            y = _y(self.limit, marks[-1])
            parts.append(_line(LEFT, y, width - RIGHT, y, "limit"))
            parts.append(_text(width - RIGHT, y - 6, "goal", "cross", "end"))
        for curve in self.curves:
            parts += _curve(curve, place, width)
        return _drawing(width, HEIGHT, self.title, parts)

    def _scaled(self, x: float) -> float:
        return x if self.x_label is None else math.log(x)

    def _x_ticks(
        self, points: Sequence[Point], start: float, span: float
    ) -> list[tuple[float, str]]:
        if self.x_label is not None:
            return [(x, self.x_label(x)) for x in sorted({point.x for point in points})]
        step = ticks(span, 6)[1]
        first = int(start / step) + 1
        count = math.ceil((start + span) / step) - first
        return [(n * step, label(round(n * step, 10))) for n in range(first, first + count)]


def _curve(
    curve: Curve, place: Callable[[float, float], tuple[float, float]], width: float
) -> list[str]:
    spots = [place(point.x, point.y) for point in curve.points]
    parts, named_x = [], -LABEL_APART
    if curve.joined:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{path}" class="path {curve.style}"/>')
    large = curve.style == "mark"
    for (x, y), point in zip(spots, curve.points, strict=True):
        shape = f'cx="{x:.1f}" cy="{y:.1f}" r="{7 if large else 4}" class="{curve.style}"'
        parts.append(f"<circle {shape}><title>{escape(point.tip)}</title></circle>")
        if point.name and (x - named_x >= LABEL_APART or large):
            side, shift = ("start", 9.0) if x < width / 2 else ("end", -9.0)
            parts.append(_text(x + shift, y - 8, point.name, "note", side))
            named_x = x
    return parts


@dataclass(frozen=True, slots=True)
class Range:
    """From `low` to `high`, which may be the smaller one; None is beyond the axis."""

    name: str
    low: float | None
    high: float | None
    low_name: str
    high_name: str


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges below each other; `middle` is where each is if its input is as given."""

    title: str
    unit: str
    rows: Sequence[Range]
    middle: float
    limit: float

    def legend(self) -> Sequence[LegendEntry]:
        return ()

    def table(self) -> Table:
        heads = ("input", "at", self.unit, "at", self.unit)
        rows = [(row.name, row.low_name, row.low, row.high_name, row.high) for row in self.rows]
        shown = [[_known(cell) for cell in row] for row in rows]
        return Table(heads, shown, raw=rows)

    def draw(self, width: float = WIDTH) -> str:
        known = [end for row in self.rows for end in (row.low, row.high) if end is not None]
        narrow = width < _NARROW
        most = min(max([*known, self.middle, self.limit]), 4 * self.limit)
        marks = ticks(most, 3 if narrow else 5)
        room = RANGE_HEIGHT + _NAME_HEIGHT * narrow
        floor = TOP + room * len(self.rows)
        left = float(RIGHT) if narrow else NAMES_WIDTH
        scale = (width - left - RIGHT - 60) / marks[-1]
        parts = [_text(12, TOP - 12, self.unit, "axis", "start")]
        for mark in marks:
            x = left + mark * scale
            parts.append(_line(x, TOP, x, floor, "grid"))
            parts.append(_text(x, floor + 18, label(round(mark, 10)), "tick"))
        for number, row in enumerate(self.rows):
            top = TOP + room * number
            if narrow:
                parts.append(_text(left, top + 15, row.name, "axis", "start"))
            else:
                baseline = top + RANGE_HEIGHT / 2 + 4
                parts.append(_text(left - 12, baseline, row.name, "axis", "end"))
            parts += self._row(row, top + _NAME_HEIGHT * narrow, left, (scale, marks[-1]))
        for value, style in ((self.middle, "cut"), (self.limit, "limit")):
            x = left + min(value, marks[-1]) * scale
            parts.append(_line(x, TOP - 4, x, floor, style))
        goal = left + min(self.limit, marks[-1]) * scale
        parts.append(_text(goal + 5, TOP - 8, "goal", "cross", "start"))
        return _drawing(width, floor + 28, self.title, parts)

    def _row(self, row: Range, top: float, left: float, axis: tuple[float, float]) -> list[str]:
        """`axis`: its scale and where it ends."""
        scale, most = axis
        baseline = top + RANGE_HEIGHT / 2 + 4
        parts: list[str] = []
        middle = left + min(self.middle, most) * scale
        if row.low == row.high:
            return [*parts, _text(middle + 5, baseline, "no difference", "tick", "start")]
        ends = ((row.low, row.low_name, "c0"), (row.high, row.high_name, "c2"))
        lowest = min(most if end is None else end for end, _, _ in ends)
        for end, name, style in ends:
            value = most if end is None else end
            x = left + min(value, most) * scale
            size = (max(1.5, abs(x - middle)), RANGE_HEIGHT - 18)
            parts.append(_box(min(x, middle), top + 9, size, style, f"{row.name} {name}"))
            words = name if end is not None and end <= most else f"{name} →"
            on_left = value == lowest and x <= middle
            side = (x - 5, "end") if on_left else (x + 5, "start")
            parts.append(_text(side[0], baseline, words, "note", side[1]))
        return parts


def _y(value: float, most: float) -> float:
    return HEIGHT - BOTTOM - value / most * (HEIGHT - TOP - BOTTOM)


def _y_axis(marks: Sequence[float], width: float, unit: str) -> list[str]:
    parts = [_text(12, TOP - 12, unit, "axis", "start")]
    for mark in marks:
        y = _y(mark, marks[-1])
        parts.append(_line(LEFT, y, width - RIGHT, y, "grid"))
        parts.append(_text(LEFT - 8, y + 4, label(round(mark, 10)), "tick", "end"))
    return parts


def _known(cell: str | float | None) -> str:
    return "beyond" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def swatch(style: str) -> str:
    """A square in the colour of a style, for a legend."""
    shape = f'<rect width="12" height="12" class="{style}"/>'
    return f'<svg width="12" height="12" aria-hidden="true">{shape}</svg>'


def _text(x: float, y: float, words: str, style: str, anchor: str = "middle") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}"'
    return f"<text {place}>{escape(words)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    points = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {points} class="{style}"/>'


def _box(x: float, y: float, size: tuple[float, float], style: str, tip: str = "") -> str:
    width, height = (max(0.0, side) for side in size)
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<rect {shape} class="{style}">{inside}</rect>'


def _drawing(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """One SVG element; `title` is for screen readers."""
    frame = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {frame}>'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"])
