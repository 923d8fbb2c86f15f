"""Our own traces, see core/recording.py."""

from kvdepot.core.recording import FORMAT, VERSION
from kvdepot.sim.requests import NotAChain, Numbering, Request, Workload
from kvdepot.sim.traces.fields import Fields, count, items, parse, seconds
from kvdepot.sim.traces.trace_file import BadLine, TraceFile


def looks_like(fields: Fields) -> bool:
    return fields.get("format") == FORMAT


def read(file: TraceFile) -> Workload:
    lines = file.lines()
    number, line = next(lines)
    fields = parse(line)
    if fields.get("version") != VERSION or not count(fields, "block_tokens"):
        file.bad(number, f"version {fields.get('version')!r}; this kvdepot reads {VERSION}")
    workload = Workload(count(fields, "block_tokens"))
    numbering = Numbering(workload)
    for number, line in lines:
        try:
            workload.add(_request(parse(line), numbering, workload.block_tokens))
        except (BadLine, NotAChain) as error:
            file.bad(number, str(error))
    workload.sort()
    return workload


def _request(fields: Fields, numbering: Numbering, block_tokens: int) -> Request:
    keys, tokens = items(fields, "keys"), count(fields, "tokens")
    if not all(isinstance(key, int | str) for key in keys):
        raise BadLine("keys should be numbers or texts")
    if len(keys) > tokens // block_tokens:
        raise BadLine(f"{len(keys)} keys for {tokens} tokens; a block has {block_tokens}")
    arrival_s, answered = seconds(fields, "t"), count(fields, "out")
    return Request(arrival_s, tokens, answered, numbering.chain(keys))
