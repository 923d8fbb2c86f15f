"""How the demo is shown: a table that grows, a summary, and a page with charts."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Self

from kvdepot.cli import output
from kvdepot.cli.demo.play import (
    TIERS,
    Answer,
    ComparedTurn,
    DemoResult,
    Stage,
    fetched_by_tier,
    ratio_by_tier,
    slow_reason,
)
from kvdepot.cli.report.charts import Bars, Chart, Series, Span, Timeline, TimelineLane
from kvdepot.cli.report.page import Origin, facts, page, section, tiles
from kvdepot.cli.report.tables import Table
from kvdepot.core.units import format_bytes

COLUMNS: Final = {
    "turn": 4, "user": 9, "prompt": 7, "dram": 7, "ssd": 7, "computed": 9, "without": 9,
    "spread": 12, "with": 9, "speed-up": 9, "answer": 10,
}  # fmt: skip
"""Of the table of turns, with the width that each has while lines are written."""
TEXT_COLUMNS: Final = ("user", "answer")
LEGEND: Final = (
    "prompt: tokens; dram, ssd: tokens fetched from each tier; without, with: time to first token\n"
    "without: the median of several measurements; spread: the shortest and the longest of them\n"
    "* after a kill   ! after a kill and a flipped bit"
)
MARKS: Final[dict[Stage, str]] = {"returned": "*", "damaged": "!"}
AFTER: Final[dict[Stage, str]] = {"returned": "restart", "damaged": "bit flip"}
TTFT_CAPTION: Final = (
    "Seconds from a question to the first token of its answer. The number above a pair says how "
    "many times faster the depot made it. The first turn of all finds the depot empty."
)
TIMELINE_CAPTION: Final = (
    "Each row starts with its first serving process. A solid bar is the time to the first token, "
    "its pale end the rest of the answer. A cross is a SIGKILL. The first row also answers the "
    "turns that follow the restarts."
)
TALK_CAPTION: Final = (
    "The answers are the model's own, and a model of this size is often wrong. What counts here is "
    "that the depot never changes a token of them."
)


def turn_cells(turn: ComparedTurn) -> list[str]:
    served = turn.with_depot
    counts = (served.prompt_tokens, *(served.fetched.get(tier, 0) for tier in TIERS))
    return [
        f"{turn.number}{MARKS.get(served.stage, '')}",
        turn.user,
        *(f"{count:,}" for count in (*counts, served.computed_tokens)),
        seconds(turn.without.median_ttft_s),
        spread(turn.without),
        seconds(served.ttft_s),
        f"{turn.speedup:.1f}×",
        "same" if turn.identical else "DIFFERENT",
    ]


def first_cells(number: int, user: str, without: Answer) -> list[str]:
    tokens = f"{without.prompt_tokens:,}"
    first = seconds(without.median_ttft_s)
    return [str(number), user, tokens, "", "", "", first, spread(without), "", "", ""]


def spread(answer: Answer) -> str:
    """`0.81–0.93 s`; empty where it was measured once."""
    times = answer.ttfts_s
    return f"{times[0]:.2f}–{times[-1]:.2f} s" if len(times) > 1 else ""


def seconds(value: float) -> str:
    return f"{value:.2f} s"


class LineDisplay:
    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._progress = output.Progress("starting")

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._progress.__exit__(*failure)

    def wait(self, what: str) -> None:
        self._progress.label = what
        self._progress.advance(0)

    def begin(self, stage: Stage, text: str) -> None:
        self._write(f"{LEGEND}\n\n-- {text}" if stage == "without" else f"\n-- {text}")
        if stage in ("without", "with"):
            self._write_row(list(COLUMNS))

    def computed(self, number: int, user: str, without: Answer) -> None:
        self._write_row(first_cells(number, user, without))

    def compared(self, turn: ComparedTurn) -> None:
        self._write_row(turn_cells(turn))

    def _write_row(self, cells: Sequence[str]) -> None:
        placed = (
            cell.ljust(width) if name in TEXT_COLUMNS else cell.rjust(width)
            for cell, (name, width) in zip(cells, COLUMNS.items(), strict=True)
        )
        self._write(" ".join(placed).rstrip())


class ScreenDisplay:
    """One table on a terminal, rewritten in place, and what is going on below it."""

    def __init__(self) -> None:
        from rich.live import Live

        self._rows: dict[tuple[str, str], list[str]] = {}
        self._said: list[str] = []
        self._doing = ""
        self._live = Live(get_renderable=self._draw, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._doing = ""
        self._live.stop()

    def wait(self, what: str) -> None:
        self._doing = what

    def begin(self, stage: Stage, text: str) -> None:
        self._said.append(text)

    def computed(self, number: int, user: str, without: Answer) -> None:
        self._rows[str(number), user] = first_cells(number, user, without)

    def compared(self, turn: ComparedTurn) -> None:
        row = turn_cells(turn)
        self._rows.pop((str(turn.number), turn.user), None)
        self._rows[row[0], turn.user] = row

    def _draw(self) -> Any:
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(caption=LEGEND, caption_justify="left")
        for name in COLUMNS:
            table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right")
        for row in self._rows.values():
            style = "bold red" if row[-1] == "DIFFERENT" else "green" if row[-1] else "dim"
            table.add_row(*map(Text, row), style=style)
        said = [Text(f"• {text}") for text in self._said]
        doing = [Text(f"  {self._doing} …", style="dim")] if self._doing else []
        return Group(table, *said, *doing)


def choose_display(as_json: bool) -> AbstractContextManager[LineDisplay | ScreenDisplay]:
    """A table in place where stdout is a terminal and rich is installed, else lines."""
    if output.is_terminal() and not as_json:
        try:
            return ScreenDisplay()
        except ImportError:
            pass
    return LineDisplay(output.say if as_json else output.data)


def summary(result: DemoResult) -> str:
    different = [turn for turn in result.turns if not turn.identical]
    lines = [
        f"wrong: turn {turn.number} of {turn.user} has another answer with the depot"
        for turn in different
    ]
    count = len(result.turns)
    lines.append(
        f"{len(different)} of {count} answers differ"
        if different
        else f"all {count} answers are the same, token for token"
    )
    lines += [
        f"slow: turn {turn.number}{MARKS.get(turn.with_depot.stage, '')} of {turn.user}, "
        f"{turn.speedup:.1f}×: {reason}"
        for turn in result.turns
        if (reason := slow_reason(turn, result.turns))
    ]
    lines += [
        f"time to first token, mostly from {tier}: 1/{1 / ratio:.1f} of the recompute"
        for tier, ratio in ratio_by_tier(result.turns).items()
        if ratio is not None
    ]
    lines.append(
        f"the flipped bit was noticed: {result.recomputed_tokens:,} more tokens were computed, and "
        "nothing else happened"
        if result.recomputed_tokens > 0
        else "the flipped bit was in nothing that was read"
    )
    lines.append(f"memory tier: {format_bytes(result.setting.dram_bytes)}")
    return "\n".join([*lines, f"report: {result.report}"])


def as_page(result: DemoResult, origin: Origin) -> str:
    setting = result.setting
    kills = sum(start.kill_s is not None for start in result.starts)
    lead = (
        f"{setting.users} users, {setting.turns} turns each, over one document of "
        f"{setting.shared_tokens:,} tokens; then the serving process was killed {kills} times, "
        "and all users came back."
    )
    said = [
        (turn.user, turn.question, turn.with_depot.text)
        for turn in result.turns
        if turn.with_depot.stage != "damaged"
    ]
    told = [(_after(turn), slow_reason(turn, result.turns)) for turn in result.turns]
    rows = [[*turn_cells(turn), *words] for turn, words in zip(result.turns, told, strict=True)]
    turns = Table([*COLUMNS, "", "why slow"], rows)
    talk = Table(("user", "question", "answer"), said)
    charts: dict[str, tuple[str, Chart]] = {
        "Time to first token, turn by turn": (TTFT_CAPTION, _ttft_chart(result)),
        "Where the prompt's KV came from": (_tokens_caption(result), _tokens_chart(result)),
        "What happened when": (TIMELINE_CAPTION, _timeline(result)),
    }
    parts = [
        _tiles(result),
        *(section(title, chart, caption=text) for title, (text, chart) in charts.items()),
        section("All turns", turns, caption=LEGEND),
        section("What was said", talk, caption=TALK_CAPTION),
        section("How this was measured", facts(_facts(result))),
    ]
    return page(f"kvdepot demo: {setting.model}", lead, parts, origin=origin)


def _after(turn: ComparedTurn) -> str:
    """`restart`, `bit flip (1 corrupt)`."""
    served = turn.with_depot
    misses = ", ".join(f"{count} {reason}" for reason, count in served.misses.items())
    return AFTER.get(served.stage, "") + (f" ({misses})" if misses else "")


def _tiles(result: DemoResult) -> str:
    right, count = sum(turn.identical for turn in result.turns), len(result.turns)
    verdict = "good" if right == count else "bad"
    found = [(f"{right} of {count}", "answers the same, token for token", verdict)]
    for tier, ratio in ratio_by_tier(result.turns).items():
        if ratio is not None:
            found.append(
                (f"{1 / ratio:.1f}×", f"sooner to the first token, mostly from {tier}", "")
            )
    again = "computed again for one flipped bit on disk"
    return tiles([*found, (f"{result.recomputed_tokens:,} tokens", again, "")])


def _categories(turns: Sequence[ComparedTurn]) -> list[str]:
    return [f"{turn.user} {turn.number}\n{AFTER.get(turn.with_depot.stage, '')}" for turn in turns]


def _ttft_chart(result: DemoResult) -> Bars:
    turns = result.turns
    times = [turn.without.median_ttft_s for turn in turns]
    without = Series("without depot", "without", times, seconds)
    with_depot = Series("with depot", "with", [t.with_depot.ttft_s for t in turns], seconds)
    return Bars(
        title="Time to first token by turn, without and with the depot",
        unit="TTFT, seconds",
        categories=_categories(turns),
        series=(without, with_depot),
        notes=[f"{turn.speedup:.1f}×" for turn in turns],
    )


def _tokens_chart(result: DemoResult) -> Bars:
    turns = result.turns
    series = [
        Series(f"from {tier}", tier, [t.with_depot.fetched.get(tier, 0) for t in turns])
        for tier in TIERS
    ]
    series.append(Series("computed", "computed", [t.with_depot.computed_tokens for t in turns]))
    title = "Prompt tokens by where their KV came from"
    return Bars(title, "prompt tokens", _categories(turns), series, stacked=True)


def _tokens_caption(result: DemoResult) -> str:
    setting = result.setting
    sizes = " and ".join(
        f"{format_bytes(count * setting.token_bytes)} from {tier}"
        for tier, count in fetched_by_tier(result.turns).items()
    )
    return (
        f"A token has {setting.token_bytes:,} bytes of KV in this model; {sizes} in all. Memory, "
        f"{format_bytes(setting.dram_bytes)}, holds the document and little else, so much of what "
        "users said and heard comes back from disk, and after a kill everything does."
    )


def _timeline(result: DemoResult) -> Timeline:
    lanes = (_lane(result, "without depot", False), _lane(result, "with depot", True))
    kinds = [
        Series("process starts", "start"),
        Series("to first token, without", "without"),
        Series("to first token, with", "with"),
        Series("rest of the answer", "decode"),
    ]
    return Timeline("Requests over time", lanes, kinds)


def _lane(result: DemoResult, name: str, depot: bool) -> TimelineLane:
    starts = [start for start in result.starts if (start.serves != "without") == depot]
    zero_s = starts[0].started_s
    spans = []
    for start in starts:
        tip = f"start, {seconds(start.ready_s - start.started_s)}"
        spans.append(Span(start.started_s - zero_s, start.ready_s - zero_s, "start", tip))
    for turn in result.turns:
        # The question that is repeated after the damage is not asked without the depot again.
        if depot or turn.with_depot.stage != "damaged":
            spans += _answer_spans(turn, turn.with_depot if depot else turn.without, zero_s)
    cuts = [start.kill_s - zero_s for start in starts if start.kill_s is not None]
    return TimelineLane(name, spans, cuts)


def _answer_spans(turn: ComparedTurn, answer: Answer, zero_s: float) -> list[Span]:
    started_s = answer.started_s - zero_s
    first_s = started_s + answer.ttft_s
    styles = ("without", "decode-without") if answer.stage == "without" else ("with", "decode")
    tip = f"{turn.user}, turn {turn.number}: first token after {seconds(answer.ttft_s)}"
    return [
        Span(started_s, first_s, styles[0], tip),
        Span(first_s, started_s + answer.seconds, styles[1], tip),
    ]


def _facts(result: DemoResult) -> dict[str, str]:
    setting = result.setting
    return {
        "model": f"{setting.model}, float32, on {setting.device}",
        "TTFT": "from the request's arrival in the serving process to its first new token; greedy, "
        f"{setting.new_tokens} new tokens a turn; loading the model is not counted",
        "without": "plain transformers: each turn computes its whole prompt; the median of "
        f"{setting.repeats} measurements of each first token",
        "with": f"kvdepot, blocks of {setting.block_tokens} tokens, "
        f"{format_bytes(setting.dram_bytes)} of memory over disk in {setting.path}",
        "flipped bit": f"{result.damage.file}, byte {result.damage.offset:,}",
        "took": f"{result.seconds:.0f} s",
    }
