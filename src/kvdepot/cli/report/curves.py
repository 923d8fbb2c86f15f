"""Curves over a logarithmic axis, as inline SVG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kvdepot.cli.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH_MIN, drawing, text, ticks
from kvdepot.cli.report.svg import line as straight

_COLOURS = ("#4269d0", "#97bbf5", "#efb118", "#9c6b4e", "#ff725c", "#6cc5b0", "#9498a0")


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curves:
    """Several curves in one frame; millions of `unit` on the x axis."""

    title: str
    x_title: str
    curves: Sequence[Curve]
    unit: str = "tokens"

    def draw(self) -> str:
        marks = ticks(max(y for curve in self.curves for _, y in curve.points))
        places = sorted({x for curve in self.curves for x, _ in curve.points})
        parts = [part for mark in marks for part in self._level(mark, marks[-1])]
        for x in places:
            at = self._x(x, places)
            parts.append(text(at, HEIGHT - BOTTOM + 18, f"{x / 1e6:g}M", "tick"))
        parts.append(text(WIDTH_MIN / 2, HEIGHT - BOTTOM + 40, self.x_title, "tick"))
        for number, curve in enumerate(self.curves):
            parts += self._curve(curve, number, places, marks[-1])
        return drawing(WIDTH_MIN, HEIGHT, self.title, parts)

    def _level(self, mark: float, most: float) -> list[str]:
        y = self._y(mark, most)
        return [
            straight(LEFT, y, WIDTH_MIN - RIGHT, y, "grid"),
            text(LEFT - 8, y + 4, f"{mark:g}", "tick", "end"),
        ]

    def _curve(self, curve: Curve, number: int, places: list[float], most: float) -> list[str]:
        colour = _COLOURS[number % len(_COLOURS)]
        at = [(self._x(x, places), self._y(y, most)) for x, y in curve.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
        for (x, y), (place, value) in zip(at, curve.points, strict=True):
            tip = escape(f"{curve.name}, {place / 1e6:g}M {self.unit}: {value:.4f}")
            spot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">'
            parts.append(f"{spot}<title>{tip}</title></circle>")
        left = LEFT + 110 * number
        parts.append(f'<rect x="{left}" y="6" width="12" height="12" fill="{colour}"/>')
        parts.append(text(left + 18, 16, curve.name, "tick", "start"))
        return parts

    @staticmethod
    def _x(x: float, places: list[float]) -> float:
        span = math.log(places[-1] / places[0]) or 1.0
        inside = WIDTH_MIN - LEFT - RIGHT - 40
        return LEFT + 20 + math.log(x / places[0]) / span * inside

    @staticmethod
    def _y(y: float, most: float) -> float:
        return HEIGHT - BOTTOM - y / most * (HEIGHT - TOP - BOTTOM)
