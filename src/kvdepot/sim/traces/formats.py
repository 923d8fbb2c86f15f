"""Any trace file as a workload: Mooncake, Azure, coding-agent sessions, kvdepot recordings.

The format is told from the first line. A line that makes no sense stops the reading or is left out,
as the caller says.
"""

from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final

from kvdepot.core.recording import FORMAT, VERSION
from kvdepot.errors import ConfigError, TraceError
from kvdepot.sim.traces import agent_sessions
from kvdepot.sim.traces.trace_file import (
    BadLine,
    BadLines,
    Fields,
    TraceFile,
    count,
    items,
    parse,
    seconds,
)
from kvdepot.sim.workload import NO_PARENT, NotAChain, Numbering, PromptRequest, Workload

BLOCK_TOKENS: Final = 512
"""Of Mooncake traces; also taken for Azure traces, which have no blocks."""
AZURE_HEADER: Final = "TIMESTAMP,ContextTokens,GeneratedTokens"
FORMATS_HINT: Final = (
    "formats: Mooncake (.jsonl), coding-agent sessions (.jsonl), Azure (.csv), kvdepot recordings"
    " (.jsonl); each plain, .gz or .xz"
)
Reader = Callable[[TraceFile], Workload]


def read_trace(
    path: Path, *, bad_lines: BadLines = "stop", replay: agent_sessions.Replay | None = None
) -> Workload:
    """All requests of a trace, in the order of their arrival.

    Raises TraceError for a file of no known format, and for a bad line unless those are skipped.
    """
    file = TraceFile(path, bad_lines)
    replay = replay or agent_sessions.Replay()
    first = next(file.lines(), None)
    if first is None:
        raise TraceError(str(path), 0, "is empty", hint=FORMATS_HINT)
    workload = _reader(path, first[1], replay)(file)
    workload.sort()
    workload.skipped = file.skipped
    return workload


def _reader(path: Path, line: str, replay: agent_sessions.Replay) -> Reader:
    """The reader of the format that the first line has."""
    reader: Reader | None = None
    if line.lstrip("\ufeff").strip() == AZURE_HEADER:
        reader = _read_azure
    else:
        try:
            fields = parse(line)
        except BadLine as error:
            raise TraceError(str(path), 1, str(error), hint=FORMATS_HINT) from error
        if "hash_ids" in fields and "input_length" in fields:
            reader = _read_mooncake
        elif "requests" in fields and "block_size" in fields:
            return partial(agent_sessions.read, replay=replay)
        elif fields.get("format") == FORMAT:
            reader = _read_recording
    if reader is None:
        raise TraceError(str(path), 1, f"fields {sorted(fields)[:8]}", hint=FORMATS_HINT)
    if replay.merge != 1:
        raise ConfigError("--block-tokens", "only blocks of session traces can be merged")
    return reader


def _add_lines(
    file: TraceFile,
    lines: Iterator[tuple[int, str]],
    workload: Workload,
    request: Callable[[Fields, Numbering], PromptRequest],
) -> Workload:
    """One request a line, as JSON."""
    numbering = Numbering(workload)
    for number, line in lines:
        try:
            workload.add(request(parse(line), numbering))
        except (BadLine, NotAChain) as error:
            file.bad(number, str(error))
    return workload


def _read_mooncake(file: TraceFile) -> Workload:
    """Block ids chained by prefix; the last block of a prompt may be partly filled.

    `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`
    """
    return _add_lines(file, file.lines(), Workload(BLOCK_TOKENS), _mooncake_request)


def _mooncake_request(fields: Fields, numbering: Numbering) -> PromptRequest:
    arrival_s = seconds(fields, "timestamp") / 1000
    asked, answered = count(fields, "input_length"), count(fields, "output_length")
    ids = _names(fields, "hash_ids")
    blocks = -(-asked // BLOCK_TOKENS)
    if len(ids) != blocks:
        raise BadLine(f"{len(ids)} hash_ids for {asked} tokens, which make {blocks} blocks")
    return PromptRequest(arrival_s, asked, answered, numbering.chain(ids))


def _read_recording(file: TraceFile) -> Workload:
    """Our own traces, see core/recording.py."""
    lines = file.lines()
    number, line = next(lines)
    fields = parse(line)
    if fields.get("version") != VERSION or not count(fields, "block_tokens"):
        file.bad(number, f"version {fields.get('version')!r}; this kvdepot reads {VERSION}")
    size = count(fields, "block_tokens")
    return _add_lines(file, lines, Workload(size), partial(_recorded_request, block_tokens=size))


def _recorded_request(fields: Fields, numbering: Numbering, block_tokens: int) -> PromptRequest:
    keys, tokens = _names(fields, "keys"), count(fields, "tokens")
    if len(keys) > tokens // block_tokens:
        raise BadLine(f"{len(keys)} keys for {tokens} tokens; a block has {block_tokens}")
    arrival_s, answered = seconds(fields, "t"), count(fields, "out")
    return PromptRequest(arrival_s, tokens, answered, numbering.chain(keys))


def _names(fields: Fields, name: str) -> list[int | str]:
    names = items(fields, name)
    if not all(isinstance(one, int | str) for one in names):
        raise BadLine(f"{name} should be numbers or texts")
    return names


def _read_azure(file: TraceFile) -> Workload:
    """Arrival and lengths only: nothing is known to be shared, so nothing is hit.

    The timestamp is as `2023-11-16 18:17:03.9799600`.
    """
    workload = Workload(BLOCK_TOKENS)
    started: datetime | None = None
    for number, line in file.lines():
        if number == 1:
            continue
        try:
            when, asked, answered = _azure_fields(line)
        except BadLine as error:
            file.bad(number, str(error))
            continue
        started = started or when
        blocks = workload.new_blocks(NO_PARENT, -(-asked // BLOCK_TOKENS))
        workload.add(PromptRequest((when - started).total_seconds(), asked, answered, blocks))
    return workload


def _azure_fields(line: str) -> tuple[datetime, int, int]:
    parts = line.strip().split(",")
    if len(parts) != 3:
        raise BadLine(f"{len(parts)} columns, and should be 3: {AZURE_HEADER}")
    for text in parts[1:]:
        if not text.isdecimal():
            raise BadLine(f"{text!r} is not a number of tokens")
    try:
        # Azure writes seven digits of a second; Python reads six.
        return datetime.fromisoformat(parts[0][:26]), int(parts[1]), int(parts[2])
    except ValueError as error:
        raise BadLine(str(error)) from error
