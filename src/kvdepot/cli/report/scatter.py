"""Points over two axes, some of them joined by a line, as inline SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from kvdepot.cli.report.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH_MIN,
    drawing,
    label,
    line,
    text,
    ticks,
    y_axis,
)

LABEL_APART: Final = 118.0
"""Names closer to each other than this, from left to right, are left out."""


@dataclass(frozen=True, slots=True)
class Point:
    """`tip` appears when one points at it, `name` is written beside it."""

    x: float
    y: float
    style: str
    tip: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Scatter:
    """The axis across begins where the points do, the other one at 0."""

    title: str
    x_unit: str
    y_unit: str
    points: Sequence[Point]
    joined: Sequence[Point] = ()
    """Drawn as one line, in this order."""

    limit: float | None = None
    """A height that is marked."""

    def draw(self) -> str:
        every = [*self.joined, *self.points]
        marks = ticks(max(max(point.y for point in every), self.limit or 0.0))
        left, span = self._across(every)
        parts = y_axis(marks, WIDTH_MIN, self.y_unit)
        parts += self._x_axis(left, span)
        if self.limit is not None:
            y = self._y(self.limit, marks[-1])
            parts.append(line(LEFT, y, WIDTH_MIN - RIGHT, y, "limit"))
            parts.append(text(WIDTH_MIN - RIGHT, y - 6, "goal", "cross", "end"))
        if self.joined:
            path = " ".join(
                f"{self._x(point.x, left, span):.1f},{self._y(point.y, marks[-1]):.1f}"
                for point in self.joined
            )
            parts.append(f'<polyline points="{path}" class="path"/>')
        parts += self._dots(every, left, span, marks[-1])
        return drawing(WIDTH_MIN, HEIGHT, self.title, parts)

    def _across(self, every: Sequence[Point]) -> tuple[float, float]:
        low, high = min(point.x for point in every), max(point.x for point in every)
        room = (high - low) * 0.06 or max(high, 1.0) * 0.05
        return low - room, high - low + 2 * room

    def _x(self, value: float, left: float, span: float) -> float:
        return LEFT + (value - left) / span * (WIDTH_MIN - LEFT - RIGHT)

    def _y(self, value: float, most: float) -> float:
        return HEIGHT - BOTTOM - value / most * (HEIGHT - TOP - BOTTOM)

    def _x_axis(self, left: float, span: float) -> list[str]:
        step = ticks(span, 6)[1]
        parts = []
        mark = (int(left / step) + 1) * step
        while mark < left + span:
            x = self._x(mark, left, span)
            parts.append(line(x, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 5, "grid"))
            parts.append(text(x, HEIGHT - BOTTOM + 20, label(round(mark, 10)), "tick"))
            mark += step
        parts.append(text((LEFT + WIDTH_MIN) / 2, HEIGHT - 12, self.x_unit, "axis"))
        return parts

    def _dots(self, every: Sequence[Point], left: float, span: float, most: float) -> list[str]:
        parts, named_x = [], -LABEL_APART
        for point in every:
            x, y = self._x(point.x, left, span), self._y(point.y, most)
            size = 7 if point.style == "mark" else 4
            tip = f"<title>{escape(point.tip)}</title>"
            shape = f'cx="{x:.1f}" cy="{y:.1f}" r="{size}" class="{point.style}"'
            parts.append(f"<circle {shape}>{tip}</circle>")
            if point.name and (x - named_x >= LABEL_APART or point.style == "mark"):
                parts.append(text(x + 9, y - 8, point.name, "note", "start"))
                named_x = x
        return parts
