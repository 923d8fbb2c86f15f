"""One node of a site, in a process of its own: `python site_node.py SETTINGS.json`.

Takes commands as lines of JSON and answers each with one. Under load it asks for random prompts of
a set that all nodes share; a block's bytes follow from its key, so a wrong one is seen.
"""

import faulthandler
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey
from kvdepot.core.clock import WallClock
from kvdepot.core.layout import KVLayout
from kvdepot.store.open import assemble
from kvdepot.testing.images import payload_for

TOKENS = 16
BLOCK = 65536
BLOCKS = 8
PROMPTS = 24


class SkewedClock(WallClock):
    """A calendar that is wrong."""

    def __init__(self, skew_s: float) -> None:
        self._skew_s = skew_s

    def now(self) -> float:
        return super().now() + self._skew_s


class SiteNode:
    """A store, and the load on it."""

    def __init__(self, settings: dict[str, Any], skew_s: float, seed: int) -> None:
        self.store = assemble(load(overrides=settings), wall=SkewedClock(skew_s))
        self.space = self.store.namespace(model="m", layout=KVLayout.opaque(BLOCK, TOKENS))
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.longest_s = 0.0
        self._chance = random.Random(seed)
        self._loaded = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def keys(self, number: int) -> list[BlockKey]:
        return self.space.keys([number, *range(1, TOKENS * BLOCKS)])

    def get(self, keys: list[BlockKey]) -> list[str | None]:
        """Where each block came from; every byte is looked at."""
        intos = [bytearray(BLOCK) for _ in keys]
        answers = self.store.get_many(keys, intos)
        for key, into, answer in zip(keys, intos, answers, strict=True):
            self.counts[answer.tier or "miss"] += 1
            if answer and bytes(into) != payload_for(key, BLOCK):
                self.counts["wrong"] += 1
        return [answer.tier for answer in answers]

    def put(self, keys: list[BlockKey]) -> None:
        self.store.put_many(keys, [payload_for(key, BLOCK) for key in keys])

    def _work(self) -> None:
        while not self._ended.is_set():
            if not self._loaded.wait(0.1):
                continue
            started_s = time.monotonic()
            try:
                self._one()
            except Exception as error:
                self.counts["failed"] += 1
                self.errors.append(repr(error)[:300])
            self.longest_s = max(self.longest_s, time.monotonic() - started_s)
            self.counts["requests"] += 1
            time.sleep(0.02)

    def _one(self) -> None:
        keys = self.keys(self._chance.randrange(PROMPTS))
        found = len(self.store.match(keys))
        self.get(keys[:found])
        if self._chance.random() < 0.02:
            self.store.remove(keys[-2:])
        self.put(keys)

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        what, number = command["do"], int(command.get("number", 0))
        if what == "load":
            (self._loaded.set if command["on"] else self._loaded.clear)()
            return {}
        if what == "put":
            self.put(self.keys(number))
            return {"ok": bool(self.store.flush(60.0))}
        if what == "wait":
            limit_s = command["seconds"]
            found = self.store.wait_for(self.keys(number), limit_s, idle_s=limit_s)
            return {"found": len(found)}
        if what == "get":
            return {"tiers": self.get(self.keys(number)), "wrong": self.counts["wrong"]}
        if what == "where":
            return {"tiers": self.store.match(self.keys(number)).tiers}
        if what == "flush":
            return {"ok": bool(self.store.flush(60.0))}
        if what == "check":
            return self.store.admin.check().as_dict()
        if what == "report":
            facts = {"errors": self.errors[:3], "longest_s": round(self.longest_s, 3)}
            stats = self.store.stats()
            up = stats["tiers"]["object"]["healthy"]
            return {**self.counts, **facts, "up": up, "site": stats["site"]}
        self._ended.set()
        self._thread.join()
        return {"ok": self.store.close(60.0).complete}


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    told = json.loads(Path(sys.argv[1]).read_text())
    node = SiteNode(told["settings"], told["skew_s"], told["seed"])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(node.obey(command)), flush=True)
        if command["do"] == "close":
            return


if __name__ == "__main__":
    main()
