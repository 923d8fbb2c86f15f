"""Charts as inline SVG, in the colours of the page's style sheet: bars, curves, ranges, a timeline.

A `style` is a class of the style sheet, a `tip` the text that appears under the pointer.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, Protocol

LEFT: Final = 64
RIGHT: Final = 16
TOP: Final = 28
BOTTOM: Final = 56
HEIGHT: Final = 300
WIDTH: Final = 930
"""A chart with many bars is wider."""
TICK_STEPS: Final = (1, 2, 5, 10)
COLOURS: Final = 7
"""Styles c0, c1, … for series without a meaning of their own."""
LABEL_APART: Final = 118.0
"""Names of points closer to each other than this, from left to right, are left out."""
NAMES_WIDTH: Final = 250.0
RANGE_HEIGHT: Final = 40.0
LANE_HEIGHT: Final = 54.0


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

    def draw(self) -> str:
        slot = max(58.0, (WIDTH - LEFT - RIGHT) / max(1, len(self.categories)))
        width = LEFT + slot * len(self.categories) + RIGHT
        columns = zip(*(one.values for one in self.series), strict=True)
        heights = (sum(column) if self.stacked else max(column) for column in columns)
        marks = ticks(max(heights, default=0.0))
        parts = [*_y_axis(marks, width, self.unit), *_legend(self.series)]
        for number, name in enumerate(self.categories):
            left = LEFT + number * slot
            parts += self._category(number, left, slot, marks[-1])
            for row, words in enumerate(name.split("\n")):
                at = HEIGHT - BOTTOM + 18 + 16 * row
                parts.append(_text(left + slot / 2, at, words, "tick"))
        return _drawing(width, HEIGHT, self.title, parts)

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

    def draw(self) -> str:
        points = [point for curve in self.curves for point in curve.points]
        marks = ticks(max([*(point.y for point in points), self.limit or 0.0]))
        places = [self._scaled(point.x) for point in points]
        low, high = min(places), max(places)
        room = (high - low) * 0.06 or max(high, 1.0) * 0.05
        start, span = low - room, high - low + 2 * room

        def place(x: float, y: float) -> tuple[float, float]:
            across = (self._scaled(x) - start) / span * (WIDTH - LEFT - RIGHT)
            return LEFT + across, _y(y, marks[-1])

        parts = _y_axis(marks, WIDTH, self.y_unit)
        for value, words in self._x_ticks(points, start, span):
            x, floor = place(value, 0.0)
            parts.append(_line(x, floor, x, floor + 5, "grid"))
            parts.append(_text(x, floor + 20, words, "tick"))
        parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 12, self.x_unit, "axis"))
        if self.limit is not None:
            y = _y(self.limit, marks[-1])
            parts.append(_line(LEFT, y, WIDTH - RIGHT, y, "limit"))
            parts.append(_text(WIDTH - RIGHT, y - 6, "goal", "cross", "end"))
        if self.x_label is not None:
            parts += _legend(self.curves)
        for curve in self.curves:
            parts += _curve(curve, place)
        return _drawing(WIDTH, HEIGHT, self.title, parts)

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


def _curve(curve: Curve, place: Callable[[float, float], tuple[float, float]]) -> list[str]:
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
            parts.append(_text(x + 9, y - 8, point.name, "note", "start"))
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

    def draw(self) -> str:
        known = [end for row in self.rows for end in (row.low, row.high) if end is not None]
        marks = ticks(min(max([*known, self.middle, self.limit]), 4 * self.limit))
        floor = TOP + RANGE_HEIGHT * len(self.rows)
        parts = [_text(12, TOP - 12, self.unit, "axis", "start")]
        for mark in marks:
            x = self._x(mark, marks[-1])
            parts.append(_line(x, TOP, x, floor, "grid"))
            parts.append(_text(x, floor + 18, label(round(mark, 10)), "tick"))
        for number, row in enumerate(self.rows):
            parts += self._row(row, TOP + RANGE_HEIGHT * number, marks[-1])
        for value, style in ((self.middle, "cut"), (self.limit, "limit")):
            x = self._x(value, marks[-1])
            parts.append(_line(x, TOP - 4, x, floor, style))
        parts.append(_text(self._x(self.limit, marks[-1]) + 5, TOP - 8, "goal", "cross", "start"))
        return _drawing(WIDTH, floor + 28, self.title, parts)

    def _x(self, value: float, most: float) -> float:
        return NAMES_WIDTH + min(value, most) / most * (WIDTH - NAMES_WIDTH - RIGHT - 60)

    def _row(self, row: Range, top: float, most: float) -> list[str]:
        baseline = top + RANGE_HEIGHT / 2 + 4
        parts = [_text(NAMES_WIDTH - 12, baseline, row.name, "axis", "end")]
        middle = self._x(self.middle, most)
        if row.low == row.high:
            return [*parts, _text(middle + 5, baseline, "no difference", "tick", "start")]
        ends = ((row.low, row.low_name, "with"), (row.high, row.high_name, "ssd"))
        lowest = min(most if end is None else end for end, _, _ in ends)
        for end, name, style in ends:
            value = most if end is None else end
            x = self._x(value, most)
            size = (max(1.5, abs(x - middle)), RANGE_HEIGHT - 18)
            parts.append(_box(min(x, middle), top + 9, size, style, f"{row.name} {name}"))
            words = name if end is not None and end <= most else f"{name} →"
            on_left = value == lowest and x <= middle
            side = (x - 5, "end") if on_left else (x + 5, "start")
            parts.append(_text(side[0], baseline, words, "note", side[1]))
        return parts


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted, in seconds since its lane began."""

    start_s: float
    stop_s: float
    style: str
    tip: str


@dataclass(frozen=True, slots=True)
class TimelineLane:
    """One row of a timeline. `cuts` are moments that get a line and a cross."""

    name: str
    spans: Sequence[Span]
    cuts: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened when, lanes below each other on one time axis."""

    title: str
    lanes: Sequence[TimelineLane]
    kinds: Sequence[Series]
    """For the legend."""

    def draw(self) -> str:
        last = max((span.stop_s for lane in self.lanes for span in lane.spans), default=1.0)
        marks = ticks(last, 8)
        left = 110.0
        scale = (WIDTH - left - RIGHT) / marks[-1]
        floor = TOP + 12 + LANE_HEIGHT * len(self.lanes)
        parts = _legend(self.kinds, TOP - 26)
        for mark in marks:
            x = left + mark * scale
            parts.append(_line(x, TOP, x, floor, "grid"))
            parts.append(_text(x, floor + 18, label(mark), "tick"))
        parts.append(_text((left + WIDTH) / 2, floor + 38, "seconds", "axis"))
        for number, lane in enumerate(self.lanes):
            top = TOP + 12 + LANE_HEIGHT * number
            parts += self._lane(lane, top, left, scale)
        return _drawing(WIDTH, floor + 48, self.title, parts)

    def _lane(self, lane: TimelineLane, top: float, left: float, scale: float) -> list[str]:
        height = LANE_HEIGHT - 20
        parts = [_text(left - 10, top + height / 2 + 5, lane.name, "axis", "end")]
        for span in lane.spans:
            size = (max(1.0, (span.stop_s - span.start_s) * scale - 0.5), height)
            parts.append(_box(left + span.start_s * scale, top, size, span.style, span.tip))
        for cut in lane.cuts:
            x = left + cut * scale
            parts.append(_line(x, top - 6, x, top + height + 6, "cut"))
            parts.append(_text(x, top - 7, "✕", "cross"))
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


def _legend(series: Sequence[LegendEntry], y: float = TOP - 22) -> list[str]:
    parts, x = [], float(LEFT + 130)
    for one in series:
        parts.append(_box(x, y, (12, 12), one.style))
        parts.append(_text(x + 18, y + 10, one.name, "axis", "start"))
        x += 40 + 7 * len(one.name)
    return parts


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
