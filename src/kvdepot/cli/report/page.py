"""A page: one HTML file that needs nothing else, for any browser, light or dark."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources


def page(title: str, lead: str, parts: Iterable[str], *, heading: str = "") -> str:
    """The whole file: a heading (the title if none is given), a first sentence, and the parts."""
    sheets = (("kvdepot.core", "palette.css"), (__package__, "style.css"))
    style = "".join(resources.files(at).joinpath(name).read_text("utf-8") for at, name in sheets)
    body = "\n".join([f"<h1>{escape(heading or title)}</h1>", paragraph(lead, "lead"), *parts])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def section(title: str, *parts: str, caption: str = "") -> str:
    said = [paragraph(caption, "caption")] if caption else []
    framed = (f'<div class="plot">{p}</div>' if p.startswith("<svg") else p for p in parts)
    return "\n".join([f"<h2>{escape(title)}</h2>", *said, *framed])


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
