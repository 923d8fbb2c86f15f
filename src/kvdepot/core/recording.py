"""The format of recorded traces: the lookups of a running depot.

The first line is `{"format": "kvdepot-trace", "version": 1, "block_tokens": 256}`. Each other line
is a request: `{"t": seconds, "tokens": n, "out": n, "keys": [...]}`, keys chained by prefix, as
hexadecimal text or any other numbers. Only full blocks have keys, so there are
at most `tokens / block_tokens` of them.
"""

import json
from collections.abc import Sequence
from typing import Final

FORMAT: Final = "kvdepot-trace"
VERSION: Final = 1


def header(block_tokens: int) -> str:
    return json.dumps({"format": FORMAT, "version": VERSION, "block_tokens": block_tokens})


def request(at_s: float, names: Sequence[int], block_tokens: int) -> str:
    """The line of a lookup. `out` is 0: a store does not know the number of output tokens."""
    keys = [f"{name:016x}" for name in names]
    line = {"t": round(at_s, 6), "tokens": len(keys) * block_tokens, "out": 0, "keys": keys}
    return json.dumps(line, separators=(",", ":"))
