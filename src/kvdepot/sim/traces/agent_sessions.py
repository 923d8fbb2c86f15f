"""Coding-agent sessions: one session a line, with the requests of its sub-agents inside.

Block ids are local to a session, 64 tokens each, full blocks only, run-length coded. A session
has no absolute start: the replay draws exponential gaps between starts, from a seed. Tools and
system prompt come first in every prompt; two sessions with equally many tokens of tools are taken
to have the same tools, and with as many tokens of system prompt too the same system prompt.
Exact copies of other sessions (`dup_of`) are left out.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.sim.traces.trace_file import BadLine, Fields, TraceFile, count, items, parse, seconds
from kvdepot.sim.workload import NO_PARENT, Ints, NotAChain, PromptRequest, Workload

GAP_S: Final = 60.0
_UNKNOWN: Final = -1


@dataclass(frozen=True, slots=True)
class Replay:
    """How sessions follow each other, and how many trace blocks make one of ours."""

    gap_s: float = GAP_S
    seed: int = 0
    merge: int = 1


def read(file: TraceFile, replay: Replay) -> Workload:
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
    """The workload so far, or a new one for the first session."""
    block_tokens = count(fields, "block_size") * replay.merge
    if not block_tokens:
        raise BadLine("block_size is 0")
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
                raise BadLine("requests should be objects")
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
        """Dense numbers; ids seen for the first time get new ones, or those of a shared prefix."""
        self._grow(int(ids.max(initial=0)) + 1)
        numbers = self.numbers[ids]
        fresh = int(np.argmax(numbers == _UNKNOWN)) if (numbers == _UNKNOWN).any() else len(ids)
        if fresh == 0 and shares:
            prefix = self._prefix(tools, system)[: len(ids)]
            numbers[: len(prefix)] = prefix
            fresh = len(prefix)
        if (numbers[fresh:] != _UNKNOWN).any() or len(np.unique(ids)) < len(ids):
            raise NotAChain(f"after block {ids[fresh]}, which is new, comes one that is not")
        before = int(numbers[fresh - 1]) if fresh else NO_PARENT
        numbers[fresh:] = self.workload.new_blocks(before, len(ids) - fresh)
        self.numbers[ids] = numbers
        return numbers

    def _prefix(self, tools: int, system: int) -> Ints:
        """The full blocks of tools and system prompt, which other sessions may have as well."""
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
            raise BadLine(f"hash_ids has {run!r}, and should have pairs [start, count]")
    pieces = [np.arange(start, start + length, dtype=np.int64) for start, length in runs]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31
