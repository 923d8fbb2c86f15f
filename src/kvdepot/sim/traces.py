"""Reads a trace as a workload: Mooncake, coding-agent sessions, recordings of kvdepot.

A file may be plain or compressed. The first line shows the format. A line that cannot be used ends
the reading, or is skipped.

Coding-agent sessions: one session in a line, with the requests of its sub-agents inside. Block ids
are local to a session, 64 tokens each, full blocks only, run-length coded. A session has no start
time: the replay draws exponential gaps between starts, from a seed. Tools and system prompt come
first in every prompt; two sessions with equally many tokens of tools are assumed to have the same
tools, and with equally many tokens of system prompt too the same system prompt. Exact copies of
other sessions (`dup_of`) are skipped.
"""

import gzip
import json
import lzma
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TextIO, cast

import numpy as np

from kvdepot.core.recording import FORMAT, VERSION
from kvdepot.errors import ConfigError, TraceError
from kvdepot.sim.workload import (
    NO_PARENT,
    Ints,
    NotAChain,
    Numbering,
    PromptRequest,
    Workload,
)

BLOCK_TOKENS: Final = 512
"""Tokens of a block of a Mooncake trace."""
FORMATS_HINT: Final = (
    "expected JSON lines of Mooncake, of coding-agent sessions or of kvdepot record; plain, .gz or "
    ".xz"
)
BadLines = Literal["stop", "skip"]


class BadLine(ValueError):
    """A line of a trace cannot be used."""


@dataclass(slots=True)
class TraceFile:
    """The lines of one file. With `bad_lines` = `stop` the first bad one raises TraceError."""

    path: Path
    bad_lines: BadLines = "stop"
    skipped: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[tuple[int, str]]:
        """Non-empty lines with their numbers, from 1."""
        try:
            with self._open() as stream:
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        yield number, line
        except (lzma.LZMAError, EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
            raise TraceError(str(self.path), 0, f"cannot be read: {error}") from error

    def bad(self, number: int, reason: str) -> None:
        """Remember a bad line, or raise TraceError."""
        if self.bad_lines == "stop":
            raise TraceError(str(self.path), number, reason)
        self.skipped.append(f"line {number}: {reason}")

    def _open(self) -> TextIO:
        if self.path.suffix == ".gz":
            return gzip.open(self.path, "rt", encoding="utf-8")
        if self.path.suffix == ".xz":
            return lzma.open(self.path, "rt", encoding="utf-8")
        return self.path.open(encoding="utf-8")


Fields = dict[str, Any]


def parse(line: str) -> Fields:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BadLine(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadLine("not a JSON object")
    return cast(Fields, value)


def count(fields: Fields, name: str) -> int:
    """A whole number that is not negative."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadLine(f"invalid {name}: {value!r} (expected a whole number, at least 0)")
    return value


def seconds(fields: Fields, name: str) -> float:
    """A number that is not negative."""
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadLine(f"invalid {name}: {value!r} (expected a number)")
    if not math.isfinite(value) or value < 0:
        raise BadLine(f"invalid {name}: {value!r} (expected a number, at least 0)")
    return float(value)


def items(fields: Fields, name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise BadLine(f"invalid {name}: {type(value).__name__} (expected a list)")
    return value


GAP_S: Final = 60.0
_UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True)
class Replay:
    """The mean time between starts of sessions, and how many of their blocks make one block."""

    gap_s: float = GAP_S
    seed: int = 0
    merge: int = 1


def _read_sessions(file: TraceFile, replay: Replay) -> Workload:
    draw = random.Random(replay.seed)
    workload: Workload | None = None
    prefixes: dict[object, Ints] = {}
    start_s = 0.0
    for number, line in file.lines():
        try:
            fields = parse(line)
            if fields.get("dup_of") is not None:
                continue
            workload = _workload_for(fields, replay, workload)
            session = _Session(workload, prefixes, replay.merge)
            found = list(session.requests(fields, start_s))
        except (BadLine, NotAChain) as error:
            file.bad(number, str(error))
            continue
        for request in found:
            workload.add(request)
        start_s += draw.expovariate(1 / replay.gap_s)
    return Workload(64 * replay.merge) if workload is None else workload


def _workload_for(fields: Fields, replay: Replay, workload: Workload | None) -> Workload:
    """The workload, or a new one for the first session."""
    block_tokens = count(fields, "block_size") * replay.merge
    if not block_tokens:
        raise BadLine("invalid block_size: 0")
    if workload is not None and workload.block_tokens != block_tokens:
        raise BadLine("block_size differs from that of earlier sessions")
    return Workload(block_tokens) if workload is None else workload


@dataclass(slots=True)
class _Session:
    """The blocks of one session by their local ids."""

    workload: Workload
    prefixes: dict[object, Ints]
    merge: int
    numbers: Ints = field(default_factory=lambda: np.full(1024, _UNKNOWN, dtype=np.int64))

    def requests(self, fields: Fields, start_s: float) -> Iterator[PromptRequest]:
        """The session's requests, and those of its sub-agents."""
        tools, system = count(fields, "tool_tokens"), count(fields, "system_tokens")
        head: int | None = None
        for asked in items(fields, "requests"):
            if not isinstance(asked, dict):
                raise BadLine("invalid requests (expected objects)")
            at_s = start_s + seconds(asked, "t")
            if asked.get("type") == "subagent":
                yield from self.requests(asked, at_s)
                continue
            ids, tokens = _ids(asked), count(asked, "in")
            if len(ids) and head is None and tokens >= tools + system:
                head = int(ids[0])
            shares = len(ids) and ids[0] == head
            blocks = self._chain(ids[self.merge - 1 :: self.merge], tools, system, bool(shares))
            yield PromptRequest(at_s, tokens, count(asked, "out"), blocks)

    def _chain(self, ids: Ints, tools: int, system: int, shares: bool) -> Ints:
        """Dense numbers; new ids get new ones, or those of a shared prefix."""
        self._grow(int(ids.max(initial=0)) + 1)
        numbers = self.numbers[ids]
        fresh = int(np.argmax(numbers == _UNKNOWN)) if (numbers == _UNKNOWN).any() else len(ids)
        if fresh == 0 and shares:
            prefix = self._prefix(tools, system)[: len(ids)]
            numbers[: len(prefix)] = prefix
            fresh = len(prefix)
        if (numbers[fresh:] != _UNKNOWN).any() or len(np.unique(ids)) < len(ids):
            raise NotAChain(f"a known block follows block {ids[fresh]}, which is new")
        before = int(numbers[fresh - 1]) if fresh else NO_PARENT
        numbers[fresh:] = self.workload.new_blocks(before, len(ids) - fresh)
        self.numbers[ids] = numbers
        return numbers

    def _prefix(self, tools: int, system: int) -> Ints:
        """The full blocks of tools and system prompt, which other sessions may share."""
        size = self.workload.block_tokens
        of_tools = self._shared((tools,), NO_PARENT, tools // size)
        before = int(of_tools[-1]) if len(of_tools) else NO_PARENT
        more = (tools + system) // size - len(of_tools)
        return np.concatenate((of_tools, self._shared((tools, system), before, more)))

    def _shared(self, name: object, before: int, blocks: int) -> Ints:
        if name not in self.prefixes:
            self.prefixes[name] = self.workload.new_blocks(before, blocks)
        return self.prefixes[name]

    def _grow(self, size: int) -> None:
        if size > len(self.numbers):
            more = np.full(max(size, 2 * len(self.numbers)) - len(self.numbers), _UNKNOWN)
            self.numbers = np.concatenate((self.numbers, more))


def _ids(fields: Fields) -> Ints:
    runs = items(fields, "hash_ids")
    for run in runs:
        if not (isinstance(run, list) and len(run) == 2 and all(_is_count(part) for part in run)):
            raise BadLine(f"invalid hash_ids: {run!r} (expected pairs [start, count])")
    pieces = [np.arange(start, start + length, dtype=np.int64) for start, length in runs]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


Reader = Callable[[TraceFile], Workload]


def read_trace(
    path: Path, *, bad_lines: BadLines = "stop", replay: Replay | None = None
) -> Workload:
    """All requests of a trace, in the order of their arrival.

    Raises TraceError for a file of no known format, and for a bad line unless those are skipped.
    """
    file = TraceFile(path, bad_lines)
    replay = replay or Replay()
    first = next(file.lines(), None)
    if first is None:
        raise TraceError(str(path), 0, "is empty", hint=FORMATS_HINT)
    workload = _reader(path, first[1], replay)(file)
    workload.sort()
    workload.skipped = file.skipped
    return workload


def _reader(path: Path, line: str, replay: Replay) -> Reader:
    """The reader of the format that the first line has."""
    reader: Reader | None = None
    try:
        fields = parse(line)
    except BadLine as error:
        raise TraceError(str(path), 1, str(error), hint=FORMATS_HINT) from error
    if "hash_ids" in fields and "input_length" in fields:
        reader = _read_mooncake
    elif "requests" in fields and "block_size" in fields:
        return partial(_read_sessions, replay=replay)
    elif fields.get("format") == FORMAT:
        reader = _read_recording
    if reader is None:
        raise TraceError(
            str(path), 1, f"unknown format with fields {sorted(fields)[:8]}", hint=FORMATS_HINT
        )
    if replay.merge != 1:
        raise ConfigError("--merge", "only blocks of session traces can be merged")
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
        raise BadLine(f"invalid {name} (expected numbers or texts)")
    return names
