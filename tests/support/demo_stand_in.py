"""A serving process that plays the demo without a model: same pipes, answers made of the question.

Keeps what it has seen in a file that looks like a segment, so that it can be killed and come back.
Takes its orders from the environment: STAND_IN is empty, `differ`, `hang`, `die` or `refuse`.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SEGMENT_BYTES = 1 << 20
SHARED_TOKENS = 1000
TOKEN_BYTES = 100


def say(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


def answer(request: dict[str, Any], settings: dict[str, Any], mood: str) -> dict[str, Any]:
    asked = json.dumps(request["messages"]).encode()
    ids = list(hashlib.sha256(asked).digest()[: request["new_tokens"]])
    depot = settings["store"] is not None
    if mood == "differ" and depot:
        ids[-1] += 1
    segment = Path(settings["store"]["ssd"]["path"], "segment-000000.kvs") if depot else None
    known = segment is not None and segment.exists()
    damaged = known and segment is not None and any(segment.read_bytes())
    if segment is not None and not known:
        segment.parent.mkdir()
        segment.write_bytes(bytes(SEGMENT_BYTES))
    prompt = SHARED_TOKENS + 40 * len(request["messages"])
    fetched = {"ssd": 300 if damaged else SHARED_TOKENS} if known else {}
    return {
        "prompt_tokens": prompt,
        "ids": ids,
        "text": " ".join(map(str, ids[:3])),
        "ttft_s": 1.0 if damaged else 0.1 if known else 2.0,
        "seconds": 2.5,
        "fetched": fetched,
        "computed_tokens": prompt - sum(fetched.values()),
        "misses": {"corrupt": 1} if damaged else {},
    }


def main() -> None:
    mood = os.environ.get("STAND_IN", "")
    settings = json.loads(sys.argv[1])
    if mood == "refuse":
        say({"is": "error", "message": "no such model", "hint": "take another"})
        return
    if mood == "die":
        raise SystemExit("something broke")
    say({"is": "progress", "text": "getting up"})
    ready = {"model": "stand-in", "device": "cpu", "context_tokens": 8192}
    sizes = {"shared_tokens": SHARED_TOKENS, "token_bytes": TOKEN_BYTES}
    say({"is": "ready", **ready, **sizes, "load_s": 0.0, "open_s": 0.0})
    for line in sys.stdin:
        while mood == "hang":
            time.sleep(60)
        say({"is": "answer", **answer(json.loads(line), settings, mood)})


if __name__ == "__main__":
    main()
