"""A page: one HTML file that needs nothing else, for any browser, light, dark or on paper."""

import datetime
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Self

import kvdepot
from kvdepot.cli.doctor.machine import read_machine
from kvdepot.cli.report.charts import NARROW_WIDTH, Chart, swatch
from kvdepot.cli.report.tables import Table
from kvdepot.core.units import format_bytes


@dataclass(frozen=True, slots=True)
class Origin:
    """How a report came to be; stands at its foot."""

    command: str
    version: str
    machine: str
    date: str

    @classmethod
    def of(cls, command: str) -> Self:
        """A report that `command` makes here and now."""
        found = read_machine()
        gpus = "".join(f", {gpu.name}" for gpu in found.gpus)
        machine = (
            f"{found.cpu}, {found.cores} cores, {format_bytes(found.memory_bytes)}{gpus}, "
            f"kernel {found.kernel}, Python {platform.python_version()}"
        )
        date = datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="minutes")
        return cls(command, kvdepot.__version__, machine, date)

    def html(self) -> str:
        told = {
            "command": self.command,
            "kvdepot": self.version,
            "machine": self.machine,
            "date": self.date,
        }
        return f"<footer>{facts(told)}</footer>"


def page(title: str, lead: str, parts: Iterable[str], *, origin: Origin, heading: str = "") -> str:
    """The whole file: a heading (the title if none is given), a first sentence, and the parts."""
    sheets = (("kvdepot.core", "palette.css"), (__package__, "style.css"))
    style = "".join(resources.files(at).joinpath(name).read_text("utf-8") for at, name in sheets)
    body = "\n".join([f"<h1>{escape(heading or title)}</h1>", paragraph(lead, "lead"), *parts])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n{origin.html()}\n</body>\n</html>\n"
    )


def section(title: str, *parts: str | Table | Chart, caption: str = "") -> str:
    """A heading and what belongs to it; tables can be saved, and under a chart are its numbers.

    A table that follows a chart stands for these.
    """
    said = [paragraph(caption, "caption")] if caption else []
    shown: list[str] = []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            shown.append(part)
        elif isinstance(part, Table):
            shown.append(part.html(title))
        else:
            shown.append(figure(part))
            if not any(isinstance(other, Table) for other in parts[number + 1 :]):
                shown.append(part.table().html(title))
    return "\n".join([f"<h2>{escape(title)}</h2>", *said, *shown])


def figure(chart: Chart) -> str:
    """The legend, and the drawing for wide and for narrow screens: the style sheet shows one."""
    marks = "".join(
        f"<li>{swatch(one.style)} {escape(one.name)}</li>" for one in chart.legend() if one.name
    )
    legend = f'<ul class="legend">{marks}</ul>\n' if marks else ""
    wide, narrow = chart.draw(), chart.draw(NARROW_WIDTH)
    spoken = f'role="group" tabindex="0" aria-label="{escape(chart.title)}"'
    return f'{legend}<div class="plot" {spoken}>{wide}</div>\n<div class="narrow">{narrow}</div>'


def paragraph(words: str, style: str = "", *, strong: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    start = f"<b>{escape(strong)}</b> " if strong else ""
    return f"<p{kind}>{start}{escape(words)}</p>"


def tiles(found: Iterable[Sequence[str]]) -> str:
    """Large numbers side by side: each a number, what it is, and perhaps `good` or `bad`."""
    boxes = []
    for number, words, *style in found:
        kind = f' class="{style[0]}"' if style else ""
        inside = f"<b{kind}>{escape(number)}</b><span>{escape(words)}</span>"
        boxes.append(f'<div class="tile">{inside}</div>')
    return f'<div class="tiles">{"".join(boxes)}</div>'


def facts(described: Mapping[str, object]) -> str:
    rows = (f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in described.items())
    return f"<dl>{''.join(rows)}</dl>"
