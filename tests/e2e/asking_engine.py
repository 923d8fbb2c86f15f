"""A stand-in for an engine, which asks a daemon all the time: `asking_engine.py ADDRESS SEED`.

Runs under this version of kvdepot and under the one before, with what both have. What it is told on
stdin, a word a line, is answered with a line of JSON. Bytes of a block are made from its key, so
that every hit can be compared.
"""

import hashlib
import json
import random
import sys
import threading
from typing import Any

import kvdepot

TOKENS, LAYERS, BLOCKS = 8, 4, 4
BLOCK_BYTES = LAYERS * 8200
KEPT, OTHERS = 24, 40
WAIT_S = 60.0
PAUSE_S = 0.005


class AskingEngine:
    """Requests without end, and what became of them."""

    def __init__(self, address: str, seed: int) -> None:
        self.store = kvdepot.open(address, call_timeout="30s")
        layout = kvdepot.KVLayout.opaque(BLOCK_BYTES, TOKENS, LAYERS)
        self.space = self.store.namespace(model="drill", layout=layout)
        self.counts = dict.fromkeys(("requests", "hits", "misses", "wrong", "failed"), 0)
        self.errors: list[str] = []
        self._seed = seed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def told(self, word: str) -> dict[str, Any]:
        if word == "keep":
            numbers = range(self._seed, self._seed + KEPT)
            put = all(self._put(self._keys(number)) for number in numbers)
            return {"kept": put and bool(self.store.flush(WAIT_S))}
        if word.startswith("verify"):
            first = int(word.split()[1])
            numbers = range(first, first + KEPT)
            found = [self._get(self._keys(number), WAIT_S) for number in numbers]
            return {"of": KEPT * BLOCKS, "found": sum(found)}
        if word == "stop":
            self._stop.set()
            self._thread.join()
            self.store.close()
        if word.startswith("do "):
            return self._do(word.removeprefix("do "))
        return {"counts": self.counts, "errors": self.errors[:5], "version": kvdepot.__version__}

    def _do(self, what: str) -> dict[str, Any]:
        """What only this version can."""
        try:
            if what == "session":
                keys = self._keys(self._seed)
                tokens = [self._seed, *range(1, TOKENS * BLOCKS)]
                self.store.put_many(
                    keys, [payload(key) for key in keys], timeout_s=WAIT_S, token_ids=tokens
                )
                self.store.sessions.name("drill", keys)
                return {"kept": bool(self.store.sessions.pin("drill", for_s=3600.0))}
            if what == "park":
                return self.store.sessions.evict_to_disk("drill")
            if what == "match":
                return {"tiers": list(self.store.match(self._keys(self._seed)).tiers)}
            return {"sessions": [one["name"] for one in self.store.sessions.list()]}
        except kvdepot.errors.KVDepotError as error:
            return {"error": str(error), "hint": getattr(error, "hint", "")}

    def _ask(self) -> None:
        pick = random.Random(self._seed)
        while not self._stop.wait(PAUSE_S):
            try:
                keys = self._keys(self._seed + pick.randrange(KEPT + OTHERS))
                hits = self._get(keys[: len(self.store.match(keys))])
                if hits < len(keys):
                    self._put(keys[hits:], 0.25)
            except Exception as error:  # whatever it is, a request has failed
                self.counts["failed"] += 1
                self.errors.append(f"{type(error).__name__}: {error}")
            self.counts["requests"] += 1

    def _keys(self, number: int) -> list[Any]:
        return list(self.space.keys([number, *range(1, TOKENS * BLOCKS)]))

    def _put(self, keys: list[Any], timeout_s: float = WAIT_S) -> bool:
        return all(self.store.put_many(keys, [payload(key) for key in keys], timeout_s=timeout_s))

    def _get(self, keys: list[Any], timeout_s: float | None = None) -> int:
        targets = [bytearray(BLOCK_BYTES) for _ in keys]
        answers = self.store.get_many(keys, targets, timeout_s=timeout_s)
        found = 0
        for key, target, got in zip(keys, targets, answers, strict=True):
            self.counts["hits" if got else "misses"] += 1
            found += bool(got)
            self.counts["wrong"] += bool(got) and bytes(target) != payload(key)
        return found


def payload(key: Any) -> bytes:
    """The one payload that belongs to a key."""
    return hashlib.shake_128(bytes(key)).digest(BLOCK_BYTES)


def main(address: str, seed: str) -> None:
    engine = AskingEngine(address, int(seed))
    for line in sys.stdin:
        print(json.dumps(engine.told(line.strip())), flush=True)
        if line.strip() == "stop":
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
