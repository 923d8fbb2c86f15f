"""Tables and charts that commands share."""

import base64
import csv
import re
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.support.browser import BINARY, Browser
from tests.support.waiting import until

import kvdepot
from kvdepot.cli.report.charts import (
    NARROW_WIDTH,
    Bars,
    Chart,
    Curve,
    Curves,
    Point,
    Range,
    Ranges,
    Series,
    ticks,
)
from kvdepot.cli.report.page import Origin, page, section, tiles
from kvdepot.cli.report.tables import Table
from kvdepot.planner.parts import load_parts

ORIGIN = Origin("kvdepot plan <x>", "1.2.3", "two cores", "today")
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


def test_a_page_shows_the_same_table_and_escapes_it() -> None:
    html = Table(["<name>", "bytes"], [["a & b", 1], ["c", 2.5]]).html()
    root = ElementTree.fromstring(html)
    assert [cell.text for cell in root.iter("th")] == ["<name>", "bytes"]
    assert [cell.text for cell in root.iter("td")] == ["a & b", "1", "c", "2.50"]
    assert [cell.get("class") for cell in root.iter("td")] == [None, "number"] * 2
    assert html in page("title", "lead", [section("part", html)], origin=ORIGIN)


def test_a_row_of_another_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Table(["a", "b"], [["only one"]])


@pytest.mark.parametrize("logarithmic", [False, True])
def test_points_are_placed_by_their_axes(logarithmic: bool) -> None:
    points = [Point(x, y, f"tip {x:g}") for x, y in ((1.0, 0.0), (10.0, 1.0), (100.0, 2.0))]
    curves = [Curve("one", "c0", points)]
    label = (lambda x: f"{x:g}") if logarithmic else None
    drawing = ElementTree.fromstring(Curves("t", "x", "y", curves, x_label=label).draw())
    places = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in dots(drawing)]
    (x1, y1), (x2, y2), (x3, y3) = places
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    share = (x2 - x1) / (x3 - x1)
    assert share == pytest.approx(0.5 if logarithmic else 9 / 99, abs=0.01)
    words = {text.text for text in drawing.iter(f"{SVG}text")}
    assert ({"1", "10", "100"} <= words) == logarithmic


def dots(drawing: ElementTree.Element) -> list[ElementTree.Element]:
    return list(drawing.iter(f"{SVG}circle"))


POINTS = [Point(3.0, 1.0, "a"), Point(700.0, 0.5, "b", "the chosen one")]
SSD, HDD = Series("y", "ssd", [1 / 3, 2]), Series("z", "hdd", range(9))
CHARTS: list[Chart] = [
    Bars("beside", "ms", ["one\nafter", "two"], [Series("x", "dram", [1, 3]), SSD]),
    Bars("stacked", "s", [f"turn {n}" for n in range(9)], [HDD, HDD], stacked=True),
    Curves("curves", "size", "ratio", [Curve("lru", "c0", POINTS)], x_label=str),
    Curves("points", "cost", "p95", [Curve("", "mark", POINTS)], limit=0.7),
    Ranges("ranges", "s", [Range("prefill", 1.0, None, "× 0.5", "× 2")], 2.0, 3.0),
]  # fmt: skip


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_a_chart_fits_a_phone(chart: Chart) -> None:
    drawing = ElementTree.fromstring(chart.draw(NARROW_WIDTH))
    assert drawing.get("viewBox", "").split()[2] == str(NARROW_WIDTH)
    for box in drawing.iter(f"{SVG}rect"):
        right = float(box.get("x", "")) + float(box.get("width", ""))
        assert 0 <= float(box.get("x", "")) <= right <= NARROW_WIDTH
    for text in drawing.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x", "")) <= NARROW_WIDTH, text.text


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


def test_page_is_well_formed_and_needs_nothing_else() -> None:
    parts = [section(chart.title, chart, caption="a <b>&") for chart in CHARTS]
    whole = page("a <model>", "lead", parts, origin=ORIGIN)
    tags = Tags()
    tags.feed(whole)
    assert tags.open == []
    assert all(link.startswith("data:text/csv") for link in tags.links)
    assert "url(" not in whole and "@import" not in whole and "<script" not in whole
    assert "a <model>" in tags.text and "a <b>&" in tags.text
    assert "prefers-color-scheme: dark" in whole


def test_bars_are_drawn_to_scale() -> None:
    drawing = ElementTree.fromstring(CHARTS[0].draw())
    first, second = bar_heights(drawing, "dram")
    assert first / second == pytest.approx(1 / 3, abs=0.01)
    assert bar_heights(drawing, "ssd")[1] / second == pytest.approx(2 / 3, abs=0.01)


def bar_heights(drawing: ElementTree.Element, style: str) -> list[float]:
    found = [box for box in drawing.iter(f"{SVG}rect") if box.get("class") == style]
    return [float(box.get("height", "")) for box in found]


@pytest.mark.parametrize(
    ("most", "marks"),
    [(8.0, [0, 2, 4, 6, 8]), (0.3, [0, 0.1, 0.2, 0.3]), (2900, [0, 1000, 2000, 3000]), (0, [0, 1])],
)
def test_ticks_are_round_and_reach_the_top(most: float, marks: list[float]) -> None:
    assert ticks(most) == pytest.approx(marks)


def test_numbers_are_under_a_chart_and_can_be_saved() -> None:
    html = section("How soon", CHARTS[0])
    (link,) = re.findall(
        r'href="data:text/csv;charset=utf-8;base64,([^"]*)" download="([^"]*)"', html
    )
    assert link[1] == "how-soon.csv"
    rows = list(csv.reader(base64.b64decode(link[0]).decode().splitlines()))
    assert rows == [["", "x, ms", "y, ms"], ["one after", "1", str(1 / 3)], ["two", "3", "2"]]
    assert html.index("</svg>") < html.index("<table>")
    given = section("How soon", CHARTS[0], Table(["a"], [["b"]]))
    assert given.count("<table>") == 1, "a table that is given stands for the numbers"


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_every_chart_has_its_numbers(chart: Chart) -> None:
    assert len(chart.table().rows) >= 1
    html = section("part", chart)
    assert all(f"{entry.name}</li>" in html for entry in chart.legend())


def test_the_foot_says_where_it_comes_from() -> None:
    foot = page("t", "l", [], origin=ORIGIN).partition("<footer>")[2]
    for words in ("kvdepot plan &lt;x&gt;", "1.2.3", "two cores", "today"):
        assert words in foot
    here = Origin.of("kvdepot sim")
    assert here.version == kvdepot.__version__ and "kernel" in here.machine


def test_all_tiers_have_a_colour() -> None:
    whole = page("t", "l", [], origin=ORIGIN)
    for tier in (*load_parts().tiers, "shared", "memory"):
        assert f"svg .{tier} {{ fill: var(--{tier})" in whole
        assert len(re.findall(rf"--{tier}: #[0-9a-f]{{6}}", whole)) == 2, "light and dark"


@pytest.mark.slow
@pytest.mark.skipif(BINARY is None, reason="no Chromium is installed: apt-get install chromium")
def test_a_page_in_a_browser(tmp_path: Path) -> None:
    """Nothing but tables scrolls sideways, axe finds nothing, at both widths and colours."""
    file = tmp_path / "page.html"
    table = Table([f"column {n}" for n in range(30)], [["word"] * 30])
    parts = [tiles([("1", "of all", "good")]), section("Wide", table)]
    parts += [section(chart.title, chart, caption="Words.") for chart in CHARTS]
    file.write_text(page("A report", "What it is.", parts, origin=ORIGIN))
    axe = resources.files("axe_core_python").joinpath("axe.min.js").read_text("utf-8")
    with Browser(tmp_path) as browser:
        for width, dark in ((1200, False), (400, True), (400, False)):
            browser.view(width, 900, dark=dark)
            browser.call("Page.navigate", url=file.as_uri())
            until(lambda: browser.evaluate("document.readyState") == "complete")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            shown = "getComputedStyle(document.querySelector('.narrow')).display"
            assert browser.evaluate(shown) == ("none" if width > 640 else "block")
            browser.evaluate(axe + "; 0")
            found = browser.evaluate("axe.run().then(r => r.violations)")
            assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []
        assert browser.complaints() == []
