"""Plots as inline SVG: axes, bars and a timeline, in the colours of the page's style sheet."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

LEFT: Final = 64
RIGHT: Final = 16
TOP: Final = 28
BOTTOM: Final = 56
HEIGHT: Final = 300
WIDTH_MIN: Final = 930
TEXT_STEPS: Final = (1, 2, 5, 10)


def ticks(most: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to at least `most`, about `count` of them, evenly spaced."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in TEXT_STEPS if factor * power >= raw * (1 - 1e-9))
    return [number * step for number in range(math.ceil(most / step * (1 - 1e-9)) + 1)]


def label(value: float) -> str:
    """A tick's number: 1,500 or 0.25."""
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def text(x: float, y: float, words: str, style: str = "", anchor: str = "middle") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    points = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {points} class="{style}"/>'


def box(x: float, y: float, size: tuple[float, float], style: str, tip: str = "") -> str:
    """A filled rectangle; `tip` appears when one points at it."""
    width, height = (max(0.0, side) for side in size)
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<rect {shape} class="{style}">{inside}</rect>'


def drawing(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """One SVG element. `title` is for those who cannot see it."""
    frame = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {frame}>'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"])


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one kind, one for each category. `style` is a class of the style sheet."""

    name: str
    style: str
    values: Sequence[float]
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
    notes: Sequence[str] = field(default_factory=list)
    """A word above each category, if any."""

    def draw(self) -> str:
        slot = max(58.0, (WIDTH_MIN - LEFT - RIGHT) / max(1, len(self.categories)))
        width = LEFT + slot * len(self.categories) + RIGHT
        marks = ticks(self._most())
        parts = [*y_axis(marks, width, self.unit), *legend(self.series)]
        for number, name in enumerate(self.categories):
            left = LEFT + number * slot
            parts += self._category(number, left, slot, marks[-1])
            for row, words in enumerate(name.split("\n")):
                at = HEIGHT - BOTTOM + 18 + 16 * row
                parts.append(text(left + slot / 2, at, words, "tick"))
        return drawing(width, HEIGHT, self.title, parts)

    def _most(self) -> float:
        columns = zip(*(one.values for one in self.series), strict=True)
        combine = sum if self.stacked else max
        return max((combine(column) for column in columns), default=0.0)

    def _category(self, number: int, left: float, slot: float, most: float) -> list[str]:
        parts = []
        share = 0.64 / (1 if self.stacked else len(self.series))
        x, bottom, highest = left + slot * 0.18, float(HEIGHT - BOTTOM), 0.0
        for one in self.series:
            height = one.values[number] / most * (HEIGHT - TOP - BOTTOM)
            name = self.categories[number].replace("\n", " ")
            tip = f"{name}, {one.name}: {one.show(one.values[number])}"
            parts.append(box(x, bottom - height, (slot * share, height), one.style, tip))
            highest = max(highest, HEIGHT - BOTTOM - bottom + height)
            if self.stacked:
                bottom -= height
            else:
                x += slot * share
        if self.notes:
            at = HEIGHT - BOTTOM - highest - 5
            parts.append(text(left + slot / 2, at, self.notes[number], "note"))
        return parts


def y_axis(marks: Sequence[float], width: float, unit: str) -> list[str]:
    parts = [text(12, TOP - 12, unit, "axis", "start")]
    for mark in marks:
        y = HEIGHT - BOTTOM - mark / marks[-1] * (HEIGHT - TOP - BOTTOM)
        parts.append(line(LEFT, y, width - RIGHT, y, "grid"))
        parts.append(text(LEFT - 8, y + 4, label(mark), "tick", "end"))
    return parts


def legend(series: Sequence[Series], y: float = TOP - 22) -> list[str]:
    parts, x = [], float(LEFT + 130)
    for one in series:
        parts.append(box(x, y, (12, 12), one.style))
        parts.append(text(x + 18, y + 10, one.name, "axis", "start"))
        x += 40 + 7 * len(one.name)
    return parts


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted, in seconds since its lane began."""

    start_s: float
    stop_s: float
    style: str
    tip: str


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a timeline. `cuts` are moments that get a line and a cross."""

    name: str
    spans: Sequence[Span]
    cuts: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened when, lanes below each other on one time axis."""

    title: str
    lanes: Sequence[Lane]
    kinds: Sequence[Series]
    """For the legend."""

    lane_height: float = 54.0

    def draw(self) -> str:
        last = max((span.stop_s for lane in self.lanes for span in lane.spans), default=1.0)
        marks = ticks(last, 8)
        width, left = float(WIDTH_MIN), 110.0
        scale = (width - left - RIGHT) / marks[-1]
        floor = TOP + 12 + self.lane_height * len(self.lanes)
        parts = legend(self.kinds, TOP - 26)
        for mark in marks:
            x = left + mark * scale
            parts.append(line(x, TOP, x, floor, "grid"))
            parts.append(text(x, floor + 18, label(mark), "tick"))
        parts.append(text((left + width) / 2, floor + 38, "seconds", "axis"))
        for number, lane in enumerate(self.lanes):
            top = TOP + 12 + self.lane_height * number
            parts += self._lane(lane, top, left, scale)
        return drawing(width, floor + 48, self.title, parts)

    def _lane(self, lane: Lane, top: float, left: float, scale: float) -> list[str]:
        height = self.lane_height - 20
        parts = [text(left - 10, top + height / 2 + 5, lane.name, "axis", "end")]
        for span in lane.spans:
            size = (max(1.0, (span.stop_s - span.start_s) * scale - 0.5), height)
            parts.append(box(left + span.start_s * scale, top, size, span.style, span.tip))
        for cut in lane.cuts:
            x = left + cut * scale
            parts.append(line(x, top - 6, x, top + height + 6, "cut"))
            parts.append(text(x, top - 7, "✕", "cross"))
        return parts
