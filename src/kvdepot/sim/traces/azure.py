"""Azure traces: arrival and lengths only. Nothing is known to be shared, so nothing is hit.

`TIMESTAMP,ContextTokens,GeneratedTokens`, the timestamp as `2023-11-16 18:17:03.9799600`.
"""

from datetime import datetime
from typing import Final

from kvdepot.sim.requests import NO_PARENT, Request, Workload
from kvdepot.sim.traces.trace_file import BadLine, TraceFile

BLOCK_TOKENS: Final = 512
HEADER: Final = "TIMESTAMP,ContextTokens,GeneratedTokens"


def looks_like(line: str) -> bool:
    return line.lstrip("\ufeff").strip() == HEADER


def read(file: TraceFile) -> Workload:
    workload = Workload(BLOCK_TOKENS)
    started: datetime | None = None
    for number, line in file.lines():
        if number == 1 and looks_like(line):
            continue
        try:
            when, asked, answered = _fields(line)
        except BadLine as error:
            file.bad(number, str(error))
            continue
        started = started or when
        blocks = workload.new_blocks(NO_PARENT, -(-asked // BLOCK_TOKENS))
        workload.add(Request((when - started).total_seconds(), asked, answered, blocks))
    workload.sort()
    return workload


def _fields(line: str) -> tuple[datetime, int, int]:
    parts = line.strip().split(",")
    if len(parts) != 3:
        raise BadLine(f"{len(parts)} columns, and should be 3: {HEADER}")
    try:
        # Azure writes seven digits of a second; Python reads six.
        return datetime.fromisoformat(parts[0][:26]), _count(parts[1]), _count(parts[2])
    except ValueError as error:
        raise BadLine(str(error)) from error


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a number of tokens")
    return int(text)
