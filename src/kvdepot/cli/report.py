"""Reports: the same sections as text for the terminal and as one HTML page with charts.

A page needs no other file. Charts are SVG with widths in percent, so that one drawing fits every
screen; their numbers stand below them as a table.
"""

import datetime
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from itertools import pairwise
from typing import Final

import kvdepot
from kvdepot.cli.machine import read_machine
from kvdepot.cli.tables import Table
from kvdepot.core.units import format_bytes

COLOURS: Final = 7
"""Styles c0, c1, … of the style sheet, for series without a colour of their own."""
_BAR: Final = 13
_NAME: Final = 18
_TOP: Final = 36
_PLOT: Final = 240
_MARGIN: Final = 3.0
"""Percent of the width that curves leave free on either side."""


def ticks(most: float, count: int = 4) -> list[float]:
    """Round numbers from 0 to at least `most`, about `count` of them, evenly spaced."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / count))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= most / count * (1 - 1e-9))
    return [number * step for number in range(math.ceil(most / step * (1 - 1e-9)) + 1)]


def label(value: float) -> str:
    """The number at a tick: 1,500 or 0.25."""
    value = round(value, 10)
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


@dataclass(frozen=True, slots=True)
class Series:
    """One value for each category, in one colour."""

    name: str
    style: str
    values: Sequence[float] = ()
    show: Callable[[float], str] = label


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars for each category, one below the other or, if `stacked`, in one line."""

    title: str
    unit: str
    categories: Sequence[str]
    series: Sequence[Series]
    stacked: bool = False
    notes: Sequence[str] = ()
    """A text at the right of each category, if any."""

    def legend(self) -> Sequence[Series]:
        return self.series if len(self.series) > 1 else ()

    def table(self) -> Table:
        heads = [
            "",
            *(f"{one.name}, {self.unit}" if self.unit else one.name for one in self.series),
        ]
        cells = [
            [name, *(one.show(one.values[number]) for one in self.series)]
            for number, name in enumerate(self.categories)
        ]
        return Table(heads, cells)

    def draw(self) -> str:
        columns = list(zip(*(one.values for one in self.series), strict=True))
        marks = ticks(max((sum(c) if self.stacked else max(c) for c in columns), default=0.0))
        room = _NAME + _BAR * (1 if self.stacked else len(self.series)) + 8
        floor = _TOP + room * len(self.categories)
        parts = [_text(0, 14, self.unit, "axis", "start")]
        for mark in marks:
            x = 100 * mark / marks[-1]
            side = "start" if mark == 0 else "end" if mark == marks[-1] else "middle"
            parts += [
                _line(x, _TOP, x, floor, "grid"),
                _text(x, floor + 16, label(mark), "tick", side),
            ]
        for number, (name, values) in enumerate(zip(self.categories, columns, strict=True)):
            top = _TOP + number * room
            parts.append(_text(0, top + 14, name, "tick", "start"))
            if self.notes:
                parts.append(_text(100, top + 14, self.notes[number], "note", "end"))
            x, top = 0.0, top + _NAME
            for one, value in zip(self.series, values, strict=True):
                width = 100 * value / marks[-1]
                tip = f"{name}, {one.name}: {one.show(value)}"
                parts.append(_box(x, top, width, one.style, tip))
                x, top = (x + width, top) if self.stacked else (x, top + _BAR)
        return _drawing(floor + 24, self.title, parts)


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    tip: str
    """The text under the pointer."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points joined by a line in this order, or single points. Those of style `mark` are large."""

    name: str
    style: str
    points: Sequence[Point]
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Curves:
    """Points over two axes. The vertical axis begins at 0, the other one at the first point."""

    title: str
    x_unit: str
    y_unit: str
    curves: Sequence[Curve]
    limit: float | None = None
    """A height that is marked as the goal."""
    x_label: Callable[[float], str] | None = None
    """Labels of a logarithmic horizontal axis with a tick at each point; None: a linear axis."""

    def legend(self) -> Sequence[Curve]:
        return [curve for curve in self.curves if curve.name]

    def table(self) -> Table:
        show = self.x_label or (lambda x: f"{x:,.6g}")
        rows = [
            [curve.name, show(point.x), f"{point.y:.4g}"]
            for curve in self.curves
            for point in curve.points
        ]
        return Table(["", self.x_unit, self.y_unit], rows)

    def draw(self) -> str:
        points = [point for curve in self.curves for point in curve.points]
        marks = ticks(max([*(point.y for point in points), self.limit or 0.0]))
        places = [self._scaled(point.x) for point in points]
        low, span = min(places), max(places) - min(places) or 1.0

        def across(x: float) -> float:
            return _MARGIN + (self._scaled(x) - low) / span * (100 - 2 * _MARGIN)

        def down(y: float) -> float:
            return _TOP + _PLOT * (1 - y / marks[-1])

        parts = [_text(0, 14, self.y_unit, "axis", "start")]
        for mark in marks:
            parts.append(_line(0, down(mark), 100, down(mark), "grid"))
            parts.append(_text(0, down(mark) - 3, label(mark), "tick", "start"))
        named = -10.0
        for x, words in self._x_ticks(points):
            if across(x) - named >= 10:
                parts.append(_text(across(x), _TOP + _PLOT + 18, words, "tick"))
                named = across(x)
        parts.append(_text(50, _TOP + _PLOT + 38, self.x_unit, "axis"))
        if self.limit is not None:
            parts.append(_line(0, down(self.limit), 100, down(self.limit), "limit"))
            parts.append(_text(100, down(self.limit) - 6, "goal", "cross", "end"))
        for curve in self.curves:
            spots = [(across(point.x), down(point.y)) for point in curve.points]
            for (x1, y1), (x2, y2) in pairwise(spots if curve.joined else []):
                parts.append(_line(x1, y1, x2, y2, f"path {curve.style}"))
            radius = 7 if curve.style == "mark" else 4
            for (x, y), point in zip(spots, curve.points, strict=True):
                shape = f'cx="{x:.2f}%" cy="{y:.1f}" r="{radius}" class="{curve.style}"'
                parts.append(f"<circle {shape}><title>{escape(point.tip)}</title></circle>")
        return _drawing(_TOP + _PLOT + 46, self.title, parts)

    def _scaled(self, x: float) -> float:
        return x if self.x_label is None else math.log(x)

    def _x_ticks(self, points: Sequence[Point]) -> Iterator[tuple[float, str]]:
        every = sorted({point.x for point in points})
        if self.x_label is not None:
            yield from ((x, self.x_label(x)) for x in every)
            return
        step = ticks(every[-1] - every[0] or every[-1])[1]
        for number in range(math.ceil(every[0] / step), int(every[-1] / step) + 1):
            yield number * step, label(number * step)


Chart = Bars | Curves


def _text(x: float, y: float, words: str, style: str, anchor: str = "middle") -> str:
    place = f'x="{x:.2f}%" y="{y:.1f}" text-anchor="{anchor}" class="{style}"'
    return f"<text {place}>{escape(words)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    points = f'x1="{x1:.2f}%" y1="{y1:.1f}" x2="{x2:.2f}%" y2="{y2:.1f}"'
    return f'<line {points} class="{style}"/>'


def _box(x: float, y: float, width: float, style: str, tip: str) -> str:
    shape = f'x="{x:.2f}%" y="{y:.1f}" width="{max(0.0, width):.2f}%" height="{_BAR - 1}"'
    return f'<rect {shape} class="{style}"><title>{escape(tip)}</title></rect>'


def _drawing(height: float, title: str, parts: Sequence[str]) -> str:
    """One SVG element; `title` is for screen readers."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="100%" height="{height:.0f}">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"])


def origin(command: str) -> dict[str, str]:
    """The origin of a report that `command` makes now, for the foot of its page."""
    facts = read_machine()
    machine = [facts.cpu, f"{facts.cores} cores", format_bytes(facts.memory_bytes), *facts.gpus]
    machine += [f"kernel {facts.kernel}", f"Python {platform.python_version()}"]
    return {
        "command": command,
        "kvdepot": kvdepot.__version__,
        "machine": ", ".join(machine),
        "date": datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="minutes"),
    }


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report. The text for the terminal leaves out captions and charts."""

    title: str
    parts: Sequence[str | Table | Chart]
    caption: str = ""
    page_only: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    title: str
    lead: str
    sections: Sequence[Section]

    def text(self) -> str:
        """The paragraphs and tables, for the terminal."""
        blocks = [self.title, self.lead]
        for section in self.sections:
            shown = [part for part in section.parts if isinstance(part, str | Table)]
            if shown and not section.page_only:
                texts = [part if isinstance(part, str) else part.text() for part in shown]
                blocks.append(f"{section.title.upper()}\n" + "\n\n".join(texts))
        return "\n\n".join(blocks)

    def html(self, made: Mapping[str, str]) -> str:
        """The page; `made` is the report's `origin`."""
        sheets = (("kvdepot.core", "palette.css"), (__package__, "report.css"))
        style = "".join(
            resources.files(at).joinpath(name).read_text("utf-8") for at, name in sheets
        )
        foot = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in made.items())
        body = [f"<h1>{escape(self.title)}</h1>", _paragraph(self.lead, "lead")]
        for section in self.sections:
            body += _section(section)
        main = "\n".join(body)
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self.title)}</title>\n<style>\n{style}</style>\n</head>\n"
            f"<body>\n<main>\n{main}\n</main>\n"
            f"<footer><dl>{foot}</dl></footer>\n</body>\n</html>\n"
        )


def _section(section: Section) -> Iterator[str]:
    yield f"<h2>{escape(section.title)}</h2>"
    if section.caption:
        yield _paragraph(section.caption, "caption")
    for part in section.parts:
        if isinstance(part, str):
            yield _paragraph(part)
        elif isinstance(part, Table):
            yield part.html(section.title)
        else:
            yield from _figure(part)
            if not any(isinstance(other, Table) for other in section.parts):
                yield part.table().html(section.title)


def _figure(chart: Chart) -> Iterator[str]:
    swatch = '<svg width="12" height="12" aria-hidden="true"><rect width="12" height="12" class='
    if entries := chart.legend():
        marks = (f'<li>{swatch}"{one.style}"/></svg> {escape(one.name)}</li>' for one in entries)
        yield f'<ul class="legend">{"".join(marks)}</ul>'
    yield chart.draw()


def _paragraph(words: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f"<p{kind}>{escape(words)}</p>"
