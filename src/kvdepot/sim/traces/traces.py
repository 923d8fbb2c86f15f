"""Any trace file as a workload: the format is told from the first line."""

from pathlib import Path

from kvdepot.errors import ConfigError, TraceError
from kvdepot.sim import sessions
from kvdepot.sim.requests import Workload
from kvdepot.sim.traces import azure, mooncake, recording
from kvdepot.sim.traces.fields import parse
from kvdepot.sim.traces.trace_file import BadLine, BadLines, TraceFile

FORMATS_HINT = (
    "formats: Mooncake (.jsonl), coding-agent sessions (.jsonl), Azure (.csv), kvdepot recordings"
    " (.jsonl); each plain, .gz or .xz"
)


def read_trace(
    path: Path, *, bad_lines: BadLines = "stop", replay: sessions.Replay | None = None
) -> Workload:
    """All requests of a trace, in the order of their arrival.

    Raises TraceError for a file of no known format, and for a bad line unless those are skipped.
    """
    file = TraceFile(path, bad_lines)
    replay = replay or sessions.Replay()
    first = next(file.lines(), None)
    if first is None:
        raise TraceError(str(path), 0, "is empty", hint=FORMATS_HINT)
    kind = _kind(path, first[1])
    if kind == "sessions":
        workload = sessions.read(file, replay)
    elif replay.merge != 1:
        raise ConfigError("--block-tokens", "only blocks of session traces can be merged")
    else:
        reader = {"azure": azure.read, "mooncake": mooncake.read, "recording": recording.read}
        workload = reader[kind](file)
    workload.skipped = file.skipped
    return workload


def _kind(path: Path, line: str) -> str:
    if azure.looks_like(line):
        return "azure"
    try:
        fields = parse(line)
    except BadLine as error:
        raise TraceError(str(path), 1, str(error), hint=FORMATS_HINT) from error
    for kind, module in (("mooncake", mooncake), ("sessions", sessions), ("recording", recording)):
        if module.looks_like(fields):
            return kind
    raise TraceError(str(path), 1, f"fields {sorted(fields)[:8]}", hint=FORMATS_HINT)
