"""The demo's report: one HTML file that needs nothing else, for any browser, light or dark."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources

from kvdepot.cli.demo.result import TIERS, Pass, Request, Result, Turn, ratio_by_tier
from kvdepot.cli.report.svg import Bars, Lane, Series, Span, Timeline
from kvdepot.core.units import format_bytes

WORDS: dict[Pass, str] = {
    "without": "without",
    "with": "",
    "returned": "restart",
    "damaged": "bit flip",
}
TABLE_HEADS = (
    "turn",
    "user",
    "",
    "prompt tokens",
    "from dram",
    "from ssd",
    "computed",
    "TTFT without",
    "TTFT with",
    "speed-up",
    "answer",
)
TEXT_COLUMNS = {"user", "", "answer"}


def render(result: Result) -> str:
    """The whole page."""
    title = f"kvdepot demo: {result.setting.model}"
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="lead">{escape(introduction(result))}</p>',
            tiles(result),
            *section("Time to first token, turn by turn", TTFT_CAPTION, ttft_plot(result)),
            *section("Where the prompt's KV came from", tokens_caption(result), tier_plot(result)),
            *section("What happened when", TIMELINE_CAPTION, timeline(result)),
            "<h2>All turns</h2>",
            f'<div class="wide">{turns_table(result.turns)}</div>',
            "<h2>What was said</h2>",
            f'<p class="caption">{escape(TALK_CAPTION)}</p>',
            f'<div class="wide">{talk_table(result.turns)}</div>',
            "<h2>How this was measured</h2>",
            facts(result),
        ]
    )
    return whole(title, body)


def whole(title: str, body: str) -> str:
    """A page that needs nothing else: the style sheet is inside."""
    style = resources.files(__package__).joinpath("style.css").read_text("utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


TTFT_CAPTION = (
    "Seconds from a question to the first token of its answer. The number above a pair says how "
    "many times faster the depot made it. The first turn of all finds the depot empty."
)
TIMELINE_CAPTION = (
    "Each row starts with its first serving process. A solid bar is the time to the first token, "
    "its pale end the rest of the answer. A cross is a SIGKILL. The first row also answers the "
    "turns that follow the restarts."
)
TALK_CAPTION = (
    "The answers are the model's own, and a model of this size is often wrong. What counts here is "
    "that the depot never changes a token of them."
)


def introduction(result: Result) -> str:
    setting = result.setting
    kills = sum(start.kill_s is not None for start in result.starts)
    return (
        f"{setting.users} users, {setting.turns} turns each, over one document of "
        f"{setting.shared_tokens:,} tokens; then the serving process was killed {kills} times, "
        "and everybody came back."
    )


def section(title: str, caption: str, plot: str) -> Iterable[str]:
    yield f"<h2>{escape(title)}</h2>"
    yield f'<p class="caption">{escape(caption)}</p>'
    yield f'<div class="plot">{plot}</div>'


def tiles(result: Result) -> str:
    right = sum(turn.identical for turn in result.turns)
    count = len(result.turns)
    found = [
        tile(
            f"{right} of {count}",
            "answers the same, token for token",
            "good" if right == count else "bad",
        )
    ]
    for tier, ratio in ratio_by_tier(result.turns).items():
        if ratio is not None:
            words = f"sooner to the first token, mostly from {tier}"
            found.append(tile(f"{1 / ratio:.1f}×", words))
    again = f"{result.recomputed_tokens:,} tokens"
    found.append(tile(again, "computed again for one flipped bit on disk"))
    return f'<div class="tiles">{"".join(found)}</div>'


def tile(number: str, words: str, style: str = "") -> str:
    inside = f'<b class="{style}">{escape(number)}</b><span>{escape(words)}</span>'
    return f'<div class="tile">{inside}</div>'


def categories(turns: Sequence[Turn]) -> list[str]:
    return [f"{turn.user} {turn.number}\n{WORDS[turn.with_depot.number]}" for turn in turns]


def ttft_plot(result: Result) -> str:
    turns = result.turns
    without = Series("without depot", "without", [t.without.ttft_s for t in turns], seconds)
    with_depot = Series("with depot", "with", [t.with_depot.ttft_s for t in turns], seconds)
    return Bars(
        title="Time to first token by turn, without and with the depot",
        unit="TTFT, seconds",
        categories=categories(turns),
        series=(without, with_depot),
        notes=[f"{turn.speedup:.1f}×" for turn in turns],
    ).draw()


def tier_plot(result: Result) -> str:
    turns = result.turns
    series = [
        Series(f"from {tier}", tier, [t.with_depot.fetched.get(tier, 0) for t in turns])
        for tier in TIERS
    ]
    series.append(Series("computed", "computed", [t.with_depot.computed_tokens for t in turns]))
    return Bars(
        title="Prompt tokens by where their KV came from",
        unit="prompt tokens",
        categories=categories(turns),
        series=series,
        stacked=True,
    ).draw()


def tokens_caption(result: Result) -> str:
    setting = result.setting
    moved = {
        tier: sum(turn.with_depot.fetched.get(tier, 0) for turn in result.turns) for tier in TIERS
    }
    sizes = " and ".join(
        f"{format_bytes(count * setting.token_bytes)} from {tier}" for tier, count in moved.items()
    )
    return (
        f"A token has {setting.token_bytes:,} bytes of KV in this model; {sizes} in all. Memory, "
        f"{format_bytes(setting.dram_bytes)}, holds the document and little else, so much of what "
        "users said and heard comes back from disk, and after a kill everything does."
    )


def timeline(result: Result) -> str:
    without = lane(result, "without depot", lambda number: number == "without")
    with_depot = lane(result, "with depot", lambda number: number != "without")
    kinds = [
        Series("process starts", "start", ()),
        Series("to first token, without", "without", ()),
        Series("to first token, with", "with", ()),
        Series("rest of the answer", "decode", ()),
    ]
    return Timeline("Requests over time", (without, with_depot), kinds).draw()


def lane(result: Result, name: str, belongs: Callable[[Pass], bool]) -> Lane:
    starts = [start for start in result.starts if belongs(start.serves)]
    zero_s = starts[0].started_s
    spans = [
        Span(
            s.started_s - zero_s,
            s.ready_s - zero_s,
            "start",
            f"start, {seconds(s.ready_s - s.started_s)}",
        )
        for s in starts
    ]
    for turn in result.turns:
        spans += [
            span
            for request in requests_of(turn)
            if belongs(request.number)
            for span in request_spans(turn, request, zero_s)
        ]
    cuts = [start.kill_s - zero_s for start in starts if start.kill_s is not None]
    return Lane(name, spans, cuts)


def requests_of(turn: Turn) -> list[Request]:
    """The question repeated after the damage was not asked without the depot again."""
    again = turn.with_depot.number == "damaged"
    return [turn.with_depot] if again else [turn.without, turn.with_depot]


def request_spans(turn: Turn, request: Request, zero_s: float) -> list[Span]:
    first_s = request.started_s + request.ttft_s - zero_s
    pale = "decode-without" if request.number == "without" else "decode"
    solid = "without" if request.number == "without" else "with"
    tip = f"{turn.user}, turn {turn.number}: first token after {seconds(request.ttft_s)}"
    return [
        Span(request.started_s - zero_s, first_s, solid, tip),
        Span(first_s, request.started_s + request.seconds - zero_s, pale, tip),
    ]


def seconds(value: float) -> str:
    return f"{value:.2f} s"


def turns_table(turns: Sequence[Turn]) -> str:
    return table(TABLE_HEADS, (turn_cells(turn) for turn in turns))


def turn_cells(turn: Turn) -> list[str]:
    served = turn.with_depot
    misses = ", ".join(f"{count} {reason}" for reason, count in served.misses.items())
    word = WORDS[served.number] + (f" ({misses})" if misses else "")
    counts = (served.prompt_tokens, *(served.fetched.get(tier, 0) for tier in TIERS))
    return [
        str(turn.number),
        turn.user,
        word,
        *(f"{count:,}" for count in (*counts, served.computed_tokens)),
        seconds(turn.without.ttft_s),
        seconds(served.ttft_s),
        f"{turn.speedup:.1f}×",
        "same" if turn.identical else "DIFFERENT",
    ]


def talk_table(turns: Sequence[Turn]) -> str:
    rows = (
        [t.user, t.question, t.with_depot.text] for t in turns if t.with_depot.number != "damaged"
    )
    return table(("user", "question", "answer"), rows, numbers=False)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    kinds = ["" if not numbers or head in TEXT_COLUMNS else ' class="number"' for head in heads]
    top = "".join(f"<th{kind}>{escape(head)}</th>" for head, kind in zip(heads, kinds, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        + "</tr>\n"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead>\n<tbody>\n{body}</tbody></table>"


def facts(result: Result) -> str:
    setting, machine = result.setting, result.machine
    described = {
        "model": f"{setting.model}, float32, on {setting.device}",
        "TTFT": "from the request's arrival in the serving process to its first new token; greedy, "
        f"{setting.new_tokens} new tokens a turn; loading the model is not counted",
        "without": "plain transformers: each turn computes its whole prompt",
        "with": f"kvdepot, blocks of {setting.block_tokens} tokens, "
        f"{format_bytes(setting.dram_bytes)} of memory over disk in {setting.path}",
        "flipped bit": f"{result.damage.file}, byte {result.damage.offset:,}",
        "machine": f"{machine.get('cpu', '')}, {machine.get('cores', '')} cores, "
        f"{format_bytes(machine.get('memory_bytes', 0))}, kernel {machine.get('kernel', '')}",
        "date": machine.get("date", ""),
        "command": result.command,
        "took": f"{result.seconds:.0f} s",
    }
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in described.items())
    return f"<dl>{rows}</dl>"
