"""Tables and charts that commands share."""

from xml.etree import ElementTree

import pytest

from kvdepot.cli.report.charts import Curve, Curves, Point
from kvdepot.cli.report.page import page, section
from kvdepot.cli.report.tables import Table

SVG = "{http://www.w3.org/2000/svg}"


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
    assert html in page("title", "lead", [section("part", html)])


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
    assert ({"1", "10", "100", "one"} <= words) == logarithmic


def dots(drawing: ElementTree.Element) -> list[ElementTree.Element]:
    return list(drawing.iter(f"{SVG}circle"))
