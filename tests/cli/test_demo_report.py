"""The demo's report and the arithmetic behind it, from a made-up demo."""

import dataclasses
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from kvdepot.cli.demo.play import (
    Answer,
    ComparedTurn,
    DemoResult,
    DemoSetting,
    FlippedBit,
    ServerStart,
    Stage,
    fetched_by_tier,
    ratio_by_tier,
    slow_reason,
)
from kvdepot.cli.demo.report import as_page, spread
from kvdepot.cli.report.charts import ticks
from kvdepot.cli.report.page import Origin

ORIGIN = Origin("kvdepot demo", "1.2.3", "two cores", "today")
VOID = {"meta", "br", "hr", "img", "link", "input"}
SVG = "{http://www.w3.org/2000/svg}"


def request(stage: Stage, ttft_s: float, **origin: int) -> Answer:
    computed = 1000 - sum(origin.values())
    reply = (1000, [1, 2], "<b>&", ttft_s, ttft_s + 1, origin, computed)
    return Answer(*reply, stage=stage, started_s=10.0)


def turn(stage: Stage, ttft_s: float, **origin: int) -> ComparedTurn:
    return ComparedTurn(
        1, "Ada", "a < b?", request("without", 8.0), request(stage, ttft_s, **origin)
    )


@pytest.fixture
def result() -> DemoResult:
    turns = [
        turn("with", 8.0),
        turn("with", 0.5, dram=900, ssd=50),
        turn("with", 1.0, dram=950),
        turn("returned", 2.0, ssd=950),
        turn("damaged", 4.0, ssd=600),
    ]
    starts = [
        ServerStart(0.0, 5.0, "without"),
        ServerStart(20.0, 25.0, "with"),
        ServerStart(30.0, 34.0, "returned", kill_s=29.0),
        ServerStart(40.0, 46.0, "damaged", kill_s=39.0),
    ]
    setting = DemoSetting("a <model>", "cpu", 1, 3, 24, 2, 900, 46_080, 32, 64 << 20, "/tmp/store")
    return DemoResult(setting, turns, starts, FlippedBit("segment-000001.kvs", 4711), 50.0)


def test_ratios_are_medians_of_sound_turns_by_tier(result: DemoResult) -> None:
    assert ratio_by_tier(result.turns) == {"dram": (0.5 + 1.0) / 2 / 8.0, "ssd": 0.25}
    assert ratio_by_tier(result.turns[:1]) == {"dram": None, "ssd": None}


def test_tokens_are_added_by_tier(result: DemoResult) -> None:
    assert fetched_by_tier(result.turns) == {"dram": 1850, "ssd": 1600}


def test_slow_turns_are_explained(result: DemoResult) -> None:
    reasons = [slow_reason(turn, result.turns) for turn in result.turns]
    assert reasons[0] == "the depot had nothing of it yet: all 1,000 tokens were computed, and kept"
    assert reasons[1:3] == ["", ""]
    assert reasons[4] == "a damaged block was noticed: 400 of 1,000 tokens were computed"
    new = turn("with", 7.0, dram=100)
    assert slow_reason(new, [new]) == "900 of 1,000 tokens were new to the depot"
    disk = turn("returned", 7.0, ssd=900)
    assert slow_reason(disk, [disk]).startswith("a process that has just started read 900 tokens")
    told = result.document()["turns"]
    assert [one["why_slow"] for one in told] == reasons
    assert reasons[0] in as_page(result, ORIGIN)


def test_without_is_the_median_of_its_measurements(result: DemoResult) -> None:
    without = dataclasses.replace(request("without", 8.0), again_s=(9.0, 4.0, 10.0))
    one = ComparedTurn(1, "Ada", "?", without, request("with", 1.0, dram=900))
    assert (one.speedup, spread(without)) == (8.5, "4.00–10.00 s")
    assert spread(request("without", 8.0)) == ""
    result.turns[0] = one
    assert result.document()["turns"][0]["ttfts_without_s"] == [4.0, 8.0, 9.0, 10.0]
    assert "4.00–10.00 s" in as_page(result, ORIGIN)


def test_restarts_are_summed_up(result: DemoResult) -> None:
    after = result.document()["after_restart"]
    assert after == {
        "kills": 2,
        "restart_s": 5.0,
        "turns": 1,
        "identical": True,
        "fetched": {"dram": 0, "ssd": 950},
        "computed_tokens": 50,
        "ttft_ratio": 0.25,
    }


def test_one_other_token_is_not_identical(result: DemoResult) -> None:
    assert result.document()["identical"] is True
    result.turns[1].with_depot.ids[-1] += 1
    document = result.document()
    assert (document["identical"], document["turns"][1]["identical"]) == (False, False)
    assert "DIFFERENT" in as_page(result, ORIGIN)


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


def test_page_is_well_formed_and_needs_nothing_else(result: DemoResult) -> None:
    page = as_page(result, ORIGIN)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert all(link.startswith("data:text/csv") for link in tags.links)
    assert "url(" not in page and "@import" not in page and "<script" not in page
    assert "a <model>" in tags.text and "<b>&" in tags.text
    assert "prefers-color-scheme: dark" in page


def test_page_has_the_numbers(result: DemoResult) -> None:
    page = as_page(result, ORIGIN)
    for number in (
        "8.0×",
        "0.50 s",
        "950",
        "64MiB",
        "segment-000001.kvs, byte 4,711",
        "46,080",
        "350 tokens",
    ):
        assert number in page, number


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_plots_are_drawn_to_scale(result: DemoResult) -> None:
    sized = [one for one in drawings(as_page(result, ORIGIN)) if one.get("role") == "img"]
    ttft, _, tokens, _, timeline, _ = sized
    heights = {
        kind: [float(box.get("height", "")) for box in bars(ttft, kind)]
        for kind in ("without", "with")
    }
    assert heights["without"] == [heights["without"][0]] * 5
    assert heights["with"][1] / heights["without"][1] == pytest.approx(0.5 / 8, abs=0.01)
    dram = [float(box.get("height", "")) for box in bars(tokens, "dram")]
    assert dram[2] / dram[1] == pytest.approx(950 / 900, abs=0.01)
    assert len(bars(timeline, "start")) == 4
    assert len([one for one in timeline.iter(f"{SVG}line") if one.get("class") == "cut"]) == 2


def bars(drawing: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    """Rectangles of a class, without the small square of the legend."""
    found = [box for box in drawing.iter(f"{SVG}rect") if box.get("class") == kind]
    return [box for box in found if box.find(f"{SVG}title") is not None or kind == "start"]


@pytest.mark.parametrize(
    ("most", "marks"),
    [(8.0, [0, 2, 4, 6, 8]), (0.3, [0, 0.1, 0.2, 0.3]), (2900, [0, 1000, 2000, 3000]), (0, [0, 1])],
)
def test_ticks_are_round_and_reach_the_top(most: float, marks: list[float]) -> None:
    assert ticks(most) == pytest.approx(marks)
