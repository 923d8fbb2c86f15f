"""Mooncake traces: one request a line, block ids chained by prefix, 512 tokens a block.

`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`. The last
block of a prompt is the one that is not full.
"""

from typing import Final

from kvdepot.sim.requests import NotAChain, Numbering, Request, Workload
from kvdepot.sim.traces.fields import Fields, count, items, parse, seconds
from kvdepot.sim.traces.trace_file import BadLine, TraceFile

BLOCK_TOKENS: Final = 512


def looks_like(fields: Fields) -> bool:
    return "hash_ids" in fields and "input_length" in fields


def read(file: TraceFile) -> Workload:
    workload = Workload(BLOCK_TOKENS)
    numbering = Numbering(workload)
    for number, line in file.lines():
        try:
            workload.add(_request(parse(line), numbering))
        except (BadLine, NotAChain) as error:
            file.bad(number, str(error))
    workload.sort()
    return workload


def _request(fields: Fields, numbering: Numbering) -> Request:
    arrival_s = seconds(fields, "timestamp") / 1000
    asked, answered = count(fields, "input_length"), count(fields, "output_length")
    ids = items(fields, "hash_ids")
    if not all(isinstance(name, int | str) for name in ids):
        raise BadLine("hash_ids should be numbers or texts")
    blocks = -(-asked // BLOCK_TOKENS)
    if len(ids) != blocks:
        raise BadLine(f"{len(ids)} hash_ids for {asked} tokens, which make {blocks} blocks")
    return Request(arrival_s, asked, answered, numbering.chain(ids))
