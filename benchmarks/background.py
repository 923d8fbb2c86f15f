"""What copying down and prefetching take from those who read: speed, and the slowest reads.

    python benchmarks/background.py [--rounds 3] [--seconds 10] [--json FILE] [--markdown FILE]

Four SSDs and twelve hard drives, all emulated at a hundredth of size and bandwidth (hybrid.py
says how). Two readers ask for ten blocks of a prompt at a time, from the SSDs and then from the
hard drives, in turns without and with as much background work as the store will do: one thread
demotes without end, another one hints without end. What was copied is forgotten again, so that
there is always something to do.
"""

import argparse
import json
import os
import platform
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import hybrid
import numpy as np

import kvdepot
from kvdepot.store.state.lower_tier import LowerTier
from kvdepot.store.store import Store
from kvdepot.testing.emulation import open_emulated

MIB: Final = 1 << 20
BLOCKS: Final = 40
READ_BLOCKS: Final = 10
READERS: Final = 2
SESSIONS: Final = 12
BLOCK_BYTES: Final = 256 * hybrid.TOKEN_BYTES // hybrid.SCALE // 4096 * 4096
TAKEN_MAX: Final = 0.10
P99_MAX: Final = 2.0
WAIT_S: Final = 300.0


@dataclass
class Round:
    """Seconds that each read took."""

    seconds: float
    reads_s: list[float] = field(default_factory=list)
    demoted: int = 0
    hinted: int = 0

    @property
    def rate(self) -> float:
        return len(self.reads_s) / self.seconds

    @property
    def p99_s(self) -> float:
        return quantiles(self.reads_s, n=100)[98]


class World:
    """A store whose prompts lie on both tiers, on SSDs only, or on hard drives only."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.state = store.inspect().state
        self.ssd, self.hdd = self.state.lower_tiers
        # A piece that happens to go on where another one ended should come from the drives too.
        store.inspect().reader.after_read = None
        layout = kvdepot.KVLayout.opaque(BLOCK_BYTES - 4096, 8, 1)
        self.space = store.namespace(model="background", layout=layout)
        payload = np.random.default_rng(1).bytes(self.space.block_bytes)
        groups = ("both", "above", "below", "hinted")
        self.prompts = {
            name: [self._prompt(number * SESSIONS + one) for one in range(SESSIONS)]
            for number, name in enumerate(groups)
        }
        modes = {"both": "write-through", "above": "write-back"}
        for name, prompts in self.prompts.items():
            store.volumes.set_write_mode("hdd", modes.get(name, "pass-through"))
            for keys in prompts:
                answers = store.put_many(keys, [payload] * len(keys), timeout_s=WAIT_S)
                if not all(answers) or not store.flush(WAIT_S).complete:
                    raise SystemExit("the emulated drives did not take the blocks")

    def _prompt(self, number: int) -> list[kvdepot.BlockKey]:
        return self.space.keys([number, *range(1, 8 * BLOCKS)])

    def rows(self, keys: Sequence[kvdepot.BlockKey]) -> list[int]:
        return self.state.catalog.rows(list(keys))

    def forget_memory(self, keys: Sequence[kvdepot.BlockKey]) -> None:
        """Drop the copies in memory that a read has made."""
        with self.state.lock:
            for row in reversed(self.rows(keys)):
                if self.state.catalog.memory.ready(row) and not self.state.catalog.leases(row):
                    self.state.memory_tiers[0].drop(row)

    def forget(self, lower: LowerTier, keys: Sequence[kvdepot.BlockKey]) -> None:
        """Drop the copies in one tier, so that they can be made again."""
        with self.state.lock:
            for row in self.rows(keys):
                if lower.copies.ready(row):
                    lower.drop(row)


def read(
    world: World, prompts: list[list[kvdepot.BlockKey]], tier: str, until_s: float, seed: int
) -> list[float]:
    """Seconds of each read of one reader."""
    rng = random.Random(seed)
    targets = [bytearray(world.space.block_bytes) for _ in range(READ_BLOCKS)]
    found = []
    while time.monotonic() < until_s:
        keys = rng.choice(prompts)
        start = rng.randrange(BLOCKS - READ_BLOCKS)
        started = time.monotonic()
        answers = world.store.get_many(keys[start : start + READ_BLOCKS], targets, timeout_s=WAIT_S)
        found.append(time.monotonic() - started)
        wrong = {answer.tier for answer in answers} - {tier}
        if wrong:
            raise RuntimeError(f"a read from {tier} was answered by {wrong}")
        world.forget_memory(keys[start : start + READ_BLOCKS])
    return found


def demote_for_ever(world: World, stop: threading.Event, done: Round) -> None:
    demoter = world.store.inspect().drives.demoters[world.ssd]
    while not stop.is_set():
        for keys in world.prompts["above"]:
            if stop.is_set():
                return
            before = world.state.counters.demoted
            demoter.demote(world.rows(keys), urgent=False)
            done.demoted += world.state.counters.demoted - before
            world.forget(world.hdd, keys)


def hint_for_ever(world: World, stop: threading.Event, done: Round) -> None:
    while not stop.is_set():
        for keys in world.prompts["hinted"]:
            hint = world.store.prefetch(keys, WAIT_S)
            while not hint.wait(0.05):
                if stop.is_set():
                    hint.cancel()
                    return
            done.hinted += hint.brought
            world.forget(world.ssd, keys)


def play(world: World, tier: str, seconds: float, *, busy: bool) -> Round:
    """Readers for a while, beside background work or alone."""
    done = Round(seconds)
    stop = threading.Event()
    works = [demote_for_ever, hint_for_ever] if busy else []
    threads = [threading.Thread(target=work, args=(world, stop, done)) for work in works]
    until_s = time.monotonic() + seconds
    prompts = world.prompts["both" if tier == "ssd" else "below"]
    for keys in prompts:
        world.forget_memory(keys)
    for thread in threads:
        thread.start()
    try:
        with ThreadPoolExecutor(READERS) as readers:
            jobs = [
                readers.submit(read, world, prompts[number::READERS], tier, until_s, number)
                for number in range(READERS)
            ]
            for job in jobs:
                done.reads_s += job.result()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return done


@contextmanager
def opened(folder: Path) -> Iterator[World]:
    size = hybrid.Size(users=4 * SESSIONS, blocks=BLOCKS)
    tree: dict[str, Any] = hybrid._settings(folder, size, hybrid.HDDS)
    # Memory for a few prompts only: reads and hints come from the drives.
    tree["dram"]["capacity"] = 4 * size.session_bytes
    tree["hdd"]["promote"] = True
    with open_emulated(hybrid.MODELS, **tree) as store:
        yield World(store)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvdepot-background-", dir=os.getcwd()))
    try:
        with opened(folder) as world:
            result = measure(world, args.rounds, args.seconds)
    finally:
        shutil.rmtree(folder)
    text = table(result, args)
    print(text)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(text + "\n")


def measure(world: World, rounds: int, seconds: float) -> dict[str, Any]:
    result: dict[str, Any] = {"emulated": True, "rounds": rounds, "seconds": seconds}
    for tier in ("ssd", "hdd"):
        # Blocks read from hard drives must stay there, or the next read finds them on SSDs.
        world.store.volumes.set_write_mode("hdd", "pass-through" if tier == "hdd" else "write-back")
        pairs = []
        for number in range(rounds):
            print(f"{tier}, round {number + 1} of {rounds}", flush=True)
            pairs.append([play(world, tier, seconds, busy=busy) for busy in (False, True)])
        taken = [1 - busy.rate / idle.rate for idle, busy in pairs]
        p99 = [busy.p99_s / idle.p99_s for idle, busy in pairs]
        result[tier] = {
            "taken": taken,
            "p99_ratio": p99,
            "idle_p99_s": [idle.p99_s for idle, _ in pairs],
            "reads": [[len(one.reads_s) for one in pair] for pair in pairs],
            "demoted": [busy.demoted for _, busy in pairs],
            "hinted": [busy.hinted for _, busy in pairs],
        }
    return result


def table(result: dict[str, Any], args: argparse.Namespace) -> str:
    lines = [
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, {date.today()}, "
        f"emulated drives, {args.rounds} rounds of {args.seconds:g} s",
        "",
        "| readers on | taken by background | bar | p99, of idle | bar | blocks demoted, hinted |",
        "|---|---|---|---|---|---|",
    ]
    for tier in ("ssd", "hdd"):
        one = result[tier]
        lines.append(
            f"| {tier} | {spread(one['taken'])} | ≤ {TAKEN_MAX} | {spread(one['p99_ratio'])} "
            f"| ≤ {P99_MAX:g} | {sum(one['demoted'])}, {sum(one['hinted'])} |"
        )
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
