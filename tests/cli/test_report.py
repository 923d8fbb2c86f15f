"""Tables, charts and the pages that commands write."""

from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.support.browser import BINARY, Browser
from tests.support.waiting import until

import kvdepot
from kvdepot.cli.report import (
    Bars,
    Chart,
    Curve,
    Curves,
    Point,
    Report,
    Section,
    Series,
    origin,
    ticks,
)
from kvdepot.cli.tables import Table
from kvdepot.planner.parts import load_parts

ORIGIN = {
    "command": "kvdepot plan <x>",
    "kvdepot": "1.2.3",
    "machine": "two cores",
    "date": "today",
}
SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "br", "hr", "img", "link", "input"}


def test_table_aligns_words_left_and_numbers_right() -> None:
    text = Table(["tier", "size"], [["dram", "4GiB"], ["s", "1,024MiB"]]).text()
    assert text.splitlines() == [
        "tier      size",
        "----  --------",
        "dram      4GiB",
        "s     1,024MiB",
    ]
    assert Table(["only"], []).text() == "only\n----"


def test_a_column_of_numbers_may_have_gaps_and_a_word() -> None:
    rows = [["a", "1.5s", "-"], ["b", "", "7 %"], ["c", "12s", "-"], ["d", "overloaded", ""]]
    lines = Table(["", "p95", "busy"], rows).text().splitlines()
    assert lines[2:] == [
        "a        1.5s     -",
        "b               7 %",
        "c         12s     -",
        "d  overloaded",
    ]


def test_words_are_wrapped_before_rows_become_lists() -> None:
    table = Table(("what", "why", "n"), [("a", "because it is so and not otherwise", 1)])
    assert table.text(200) == table.text()
    wrapped = table.text(30).splitlines()
    assert max(map(len, wrapped)) <= 30 and len(wrapped) > 3
    assert "otherwise" in table.text(30)
    assert table.text(12).splitlines()[0] == "what  a"


def test_a_page_shows_the_same_table_and_escapes_it() -> None:
    table = Table(["<name>", "bytes"], [["a & b", 1], ["c", 2.5]])
    root = ElementTree.fromstring(table.html("sizes"))
    assert [cell.text for cell in root.iter("th")] == ["<name>", "bytes"]
    assert [cell.text for cell in root.iter("td")] == ["a & b", "1", "c", "2.50"]
    assert [cell.get("class") for cell in root.iter("td")] == [None, "number"] * 2
    report = Report("title", "lead", [Section("sizes", [table])])
    assert table.html("sizes") in report.html(ORIGIN)
    assert table.text() in report.text()


def test_a_row_of_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Table(["a", "b"], [["only one"]])


@pytest.mark.parametrize("logarithmic", [False, True])
def test_points_are_placed_by_their_axes(logarithmic: bool) -> None:
    points = [Point(x, y, f"tip {x:g}") for x, y in ((1.0, 0.0), (10.0, 1.0), (100.0, 2.0))]
    label = (lambda x: f"{x:g}") if logarithmic else None
    chart = Curves("t", "x", "y", [Curve("one", "c0", points)], x_label=label)
    drawing = ElementTree.fromstring(chart.draw())
    dots = drawing.iter(f"{SVG}circle")
    (x1, y1), (x2, y2), (x3, y3) = [(percent(dot, "cx"), float(dot.get("cy", ""))) for dot in dots]
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    assert (x2 - x1) / (x3 - x1) == pytest.approx(0.5 if logarithmic else 9 / 99, abs=0.01)
    words = {text.text for text in drawing.iter(f"{SVG}text")}
    assert ({"1", "10", "100"} <= words) == logarithmic


def percent(shape: ElementTree.Element, name: str) -> float:
    text = shape.get(name, "")
    assert text.endswith("%"), "a width that fits every screen"
    return float(text[:-1])


POINTS = [Point(3.0, 1.0, "a"), Point(700.0, 0.5, "b")]
SSD, HDD = Series("y", "ssd", [1 / 3, 2]), Series("z", "hdd", range(9))
CHARTS: list[Chart] = [
    Bars("one below the other", "ms", ["one", "two"], [Series("x", "dram", [1, 3]), SSD]),
    Bars("stacked", "s", [f"turn {n}" for n in range(9)], [HDD, HDD], stacked=True),
    Curves("curves", "size", "ratio", [Curve("lru", "c0", POINTS)], x_label=str),
    Curves("points", "cost", "p95", [Curve("", "mark", POINTS)], limit=0.7),
]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_a_chart_fits_every_width_and_has_its_numbers(chart: Chart) -> None:
    drawing = ElementTree.fromstring(chart.draw())
    for box in drawing.iter(f"{SVG}rect"):
        assert 0 <= percent(box, "x") <= percent(box, "x") + percent(box, "width") <= 100.01
    for text in drawing.iter(f"{SVG}text"):
        assert 0 <= percent(text, "x") <= 100, text.text
    page = Report("t", "l", [Section("part", [chart])]).html(ORIGIN)
    assert chart.table().html("part") in page
    assert all(f"{entry.name}</li>" in page for entry in chart.legend())
    given = Report("t", "l", [Section("part", [chart, Table(["a"], [["b"]])])]).html(ORIGIN)
    assert given.count("<table>") == 1, "a table that is given stands for the numbers"


def test_bars_are_drawn_to_scale() -> None:
    boxes = list(ElementTree.fromstring(CHARTS[0].draw()).iter(f"{SVG}rect"))
    widths = {
        style: [percent(box, "width") for box in boxes if box.get("class") == style]
        for style in ("dram", "ssd")
    }
    assert widths["dram"][0] / widths["dram"][1] == pytest.approx(1 / 3, abs=0.01)
    assert widths["ssd"][1] / widths["dram"][1] == pytest.approx(2 / 3, abs=0.01)


@pytest.mark.parametrize(
    ("most", "marks"),
    [(8.0, [0, 2, 4, 6, 8]), (0.3, [0, 0.1, 0.2, 0.3]), (2900, [0, 1000, 2000, 3000]), (0, [0, 1])],
)
def test_ticks_are_round_and_reach_the_top(most: float, marks: list[float]) -> None:
    assert ticks(most) == pytest.approx(marks)


class Tags(HTMLParser):
    """Fails on a tag that is closed and not open; remembers what was loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open, f"<{tag}/> outside of a drawing"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_is_well_formed_and_needs_nothing_else() -> None:
    sections = [Section(chart.title, [chart], caption="a <b>&") for chart in CHARTS]
    whole = Report("a <model>", "lead", sections).html(ORIGIN)
    tags = Tags()
    tags.feed(whole)
    assert tags.open == [] and tags.links == []
    assert "url(" not in whole and "@import" not in whole and "<script" not in whole
    assert "a <model>" in tags.text and "a <b>&" in tags.text
    assert "prefers-color-scheme: dark" in whole
    foot = whole.partition("<footer>")[2]
    for words in ("kvdepot plan &lt;x&gt;", "1.2.3", "two cores", "today"):
        assert words in foot
    here = origin("kvdepot sim")
    assert here["kvdepot"] == kvdepot.__version__ and "kernel" in here["machine"]


def test_all_tiers_have_a_colour() -> None:
    whole = Report("t", "l", []).html(ORIGIN)
    for tier in (*load_parts().tiers, "shared", "memory"):
        assert f"svg .{tier} {{ fill: var(--{tier})" in whole
        assert whole.count(f"--{tier}: #") == 2, "light and dark"


@pytest.mark.slow
@pytest.mark.skipif(BINARY is None, reason="no Chromium is installed: apt-get install chromium")
def test_a_page_in_a_browser(tmp_path: Path) -> None:
    """Nothing but tables scrolls sideways, axe finds nothing, at both widths and colours."""
    file = tmp_path / "page.html"
    table = Table([f"column {n}" for n in range(30)], [["word"] * 30])
    sections = [Section("Wide", [table])]
    sections += [Section(chart.title, [chart], caption="Words.") for chart in CHARTS]
    file.write_text(Report("A report", "What it is.", sections).html(ORIGIN))
    axe = resources.files("axe_core_python").joinpath("axe.min.js").read_text("utf-8")
    with Browser(tmp_path) as browser:
        for width, dark in ((1200, False), (400, True), (400, False)):
            browser.view(width, 900, dark=dark)
            browser.call("Page.navigate", url=file.as_uri())
            until(lambda: browser.evaluate("document.readyState") == "complete")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            browser.evaluate(axe + "; 0")
            found = browser.evaluate("axe.run().then(r => r.violations)")
            assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []
        assert browser.complaints() == []
