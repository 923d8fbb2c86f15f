"""Hard drives behind SSDs, at a hundredth of the size, on emulated drives.

    python benchmarks/hybrid.py [--quick] [--path DIR] [--html FILE] [--json] [--strict]

Sizes and bandwidths are divided by `SCALE`, seek times and latencies are not: everything takes as
long as it would on the real drives. Users come back whose context lies on hard drives only; their
first turn reads it from there, all later ones from the SSDs that it was promoted to.
Recomputing is not run: it is computed from PREFILL_S.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Final

import experiment
import numpy as np

from kvdepot.bench.raw import MIB
from kvdepot.bench.rounds import Figure
from kvdepot.cli import output
from kvdepot.cli.report import Bars, Report, Section, Series
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.layout import KVLayout
from kvdepot.errors import StateError
from kvdepot.store.open import open_store
from kvdepot.store.store import Store
from kvdepot.testing.emulation import DriveModel, open_emulated

SCALE: Final = 100
TOKENS: Final = 21_000
TOKEN_BYTES: Final = 128 << 10
"""KV of one token of an 8-billion model (32 layers, 8 heads of 128, 16 bits)."""
SSDS, HDDS = 4, 12
SSD_BYTES_PER_S: Final = (14_500_000_000, 10_000_000_000)
HDD_BYTES_PER_S: Final = (275_000_000, 275_000_000)
"""Read and write, assumed: a PCIe 5 SSD of the PS1010's class and an Exos of 30 TB."""
SSD_LATENCY_S: Final = 0.0001
HDD_SEEK_S: Final = 0.0125
"""Average seek and half a turn."""
MODELS: Final = {
    "ssd": DriveModel(
        read_bandwidth=SSD_BYTES_PER_S[0] // SCALE,
        write_bandwidth=SSD_BYTES_PER_S[1] // SCALE,
        latency=SSD_LATENCY_S,
    ),
    # Writing is not measured: what lies on the hard drives was written long ago.
    "hdd": DriveModel(
        read_bandwidth=HDD_BYTES_PER_S[0] // SCALE,
        write_bandwidth=HDD_BYTES_PER_S[1],
        seek=HDD_SEEK_S,
    ),
}
RUN_BYTES: Final = (32 << 20) // SCALE // 4096 * 4096
TURNS: Final = (1, 2, 5, 10, 20, 50)
DRIVES: Final = (4, 8, 12)
PREFILL_S: Final = 0.781
"""21,000 tokens on an H200, Llama-8B shape, bf16; queued behind each other."""
CAPACITY_RATIO: Final = 180 / 15.36
"""Of the drives: 12 × 30 TB, mirrored, to 4 × 3.84 TB."""
GAP_MAX: Final = 0.05
"""Average gap of a hybrid store to SSDs alone over 50 turns, of that of the first turn."""
SCALING_MIN: Final = {4: 1.0, 8: 1.9, 12: 2.8}
"""First-turn throughput by the number of hard drives, of that of four."""
SEQUENTIAL_MIN: Final = 0.85
"""First read of a returning session, of the hard drives' bandwidth."""
RETAINED_MIN: Final = 11.0
"""Sessions that a hybrid store keeps, of those that its SSDs alone keep."""
NEEDED_BYTES: Final = 8 << 30
_WAIT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much is played."""

    users: int = 6
    turns: int = 50
    blocks: int = TOKENS // 256
    block_tokens: int = 256
    retained_sessions: int = 60
    """That the SSDs alone can keep, where retention is counted."""

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * TOKEN_BYTES // SCALE // 4096 * 4096

    @property
    def session_bytes(self) -> int:
        return self.blocks * self.block_bytes

    def of_pages(self, tokens: int) -> "Size":
        """The same context in smaller blocks."""
        blocks = self.blocks * self.block_tokens // tokens
        return Size(self.users, self.turns, blocks, tokens, self.retained_sessions)


QUICK: Final = Size(users=3, turns=5, retained_sessions=24)


@dataclass(slots=True)
class Hybrid:
    """What was measured."""

    ttft_by_turn: dict[str, list[float]] = field(default_factory=dict)
    """Seconds, by way: recompute (computed from PREFILL_S, not run), ssd, hybrid."""
    gap_by_turns: dict[int, float] = field(default_factory=dict)
    drive_scaling: dict[int, float] = field(default_factory=dict)
    sequential_ratio: float = 0.0
    arrival_order_ratio: float = 0.0
    retained_ratio: float = 0.0


Step = tuple[str, Callable[[], None]]


@dataclass(slots=True)
class HybridPlan:
    """The experiment, step by step."""

    directory: Path
    size: Size = field(default_factory=Size)
    result: Hybrid = field(default_factory=Hybrid)

    def steps(self) -> list[Step]:
        return [
            ("turns from SSDs alone", lambda: self._turns("ssd", 0)),
            ("turns from SSDs and hard drives", lambda: self._turns("hybrid", HDDS)),
            ("4, 8 and 12 hard drives", self._scaling),
            ("a session in one piece", lambda: self._placed(in_order=True)),
            ("a session as it arrived", lambda: self._placed(in_order=False)),
            ("how much is kept", self._retained),
        ]

    def _turns(self, way: str, drives: int) -> None:
        """Everybody returns at once, turn after turn."""
        size, times = self.size, []
        with self._opened(way, drives) as world:
            world.put_all(passing=bool(drives))
        with self._opened(way, drives) as world:
            times.append(mean(world.get_all(together=True)))
            world.settle()
        # Opened anew: memory would otherwise answer the next turns, and the paper has none.
        with self._opened(way, drives, keep=False) as world:
            times += [mean(world.get_all(together=False)) for _ in range(size.turns - 1)]
        self.result.ttft_by_turn[way] = times
        queue = [PREFILL_S * (place + 1) for place in range(size.users)]
        self.result.ttft_by_turn["recompute"] = [mean(queue)] * size.turns
        if way == "hybrid":
            gaps = np.array(times) - np.array(self.result.ttft_by_turn["ssd"])
            counts = [count for count in TURNS if count <= size.turns]
            self.result.gap_by_turns = {count: float(gaps[:count].mean()) for count in counts}

    def _scaling(self) -> None:
        rates = {}
        for drives in DRIVES:
            with self._opened(f"scaling-{drives}", drives) as world:
                world.put_all(passing=True)
            with self._opened(f"scaling-{drives}", drives, keep=False) as world:
                world.store.volumes.set_write_mode("hdd", "pass-through")
                started = time.monotonic()
                world.get_all(together=True)
                rates[drives] = 1 / (time.monotonic() - started)
        self.result.drive_scaling = {n: rate / rates[DRIVES[0]] for n, rate in rates.items()}

    def _placed(self, *, in_order: bool) -> None:
        """The first read of one session whose blocks are as small as an engine's pages."""
        name = f"placed-{in_order}"
        size = self.size.of_pages(16)
        with self._opened(name, HDDS, size=size) as world:
            world.put_all(passing=True, in_order=in_order)
        with self._opened(name, HDDS, size=size, keep=False) as world:
            world.store.volumes.set_write_mode("hdd", "pass-through")
            seconds = world.get(0)
        ratio = size.session_bytes / (HDDS * HDD_BYTES_PER_S[0] / SCALE) / seconds
        if in_order:
            self.result.sequential_ratio = ratio
        else:
            self.result.arrival_order_ratio = ratio

    def _retained(self) -> None:
        """How many whole sessions are left when far more have come than fit."""
        size = self.size
        room = size.retained_sessions * 10 * 24 << 10
        kept = {}
        for way, hdd in (("ssd-room", 0), ("hybrid-room", int(room * CAPACITY_RATIO))):
            ssd: dict[str, Any] = {"path": self.directory / way / "ssd", "capacity": room}
            tree: dict[str, Any] = {"ssd": {**ssd, "segment": 256 << 10, "fsync": "never"}}
            if hdd:
                path = self.directory / way / "hdd"
                tree["hdd"] = {"path": path, "capacity": hdd, "segment": MIB, "fsync": "never"}
            (self.directory / way).mkdir()
            with open_store(dram=4 * MIB, writeback={"staging": 4 * MIB}, **tree) as store:
                coming = int(1.5 * CAPACITY_RATIO * size.retained_sessions)
                kept[way] = _sessions_kept(store, coming)
            shutil.rmtree(self.directory / way)
        self.result.retained_ratio = kept["hybrid-room"] / kept["ssd-room"]

    @contextmanager
    def _opened(
        self, name: str, drives: int, *, size: Size | None = None, keep: bool = True
    ) -> Iterator["World"]:
        """A store in a folder of its own, which is removed unless it is kept."""
        folder = self.directory / name
        folder.mkdir(exist_ok=True)
        size = size or self.size
        store = open_emulated(MODELS, **_settings(folder, size, drives))
        try:
            yield World(store, size)
        finally:
            store.close()
            if not keep:
                shutil.rmtree(folder)


class World:
    """Users of one store."""

    def __init__(self, store: Store, size: Size) -> None:
        self.store = store
        self._size = size
        layout = KVLayout.opaque(size.block_bytes - 4096, 8, 1)
        space = store.namespace(model="hybrid", layout=layout)
        self._payload = np.random.default_rng(1).bytes(space.block_bytes)
        self._keys = [_chain(space, user, size.blocks) for user in range(size.users)]
        self._targets = [bytearray(space.block_bytes) for _ in range(size.blocks)]

    def put_all(self, *, passing: bool, in_order: bool = True) -> None:
        """Every user's context, to the hard drives only if `passing`; or all users' in turns."""
        if passing:
            self.store.volumes.set_write_mode("hdd", "pass-through")
        if in_order:
            for keys in self._keys:
                self._put(keys)
        else:
            for at in range(self._size.blocks):
                self._put([keys[at] for keys in self._keys])

    def _put(self, keys: Sequence[BlockKey]) -> None:
        answers = self.store.put_many(keys, [self._payload] * len(keys), timeout_s=_WAIT_S)
        if not all(answers) or not self.store.flush(_WAIT_S).complete:
            raise StateError("the emulated drives did not take the blocks")

    def get_all(self, *, together: bool) -> list[float]:
        """Seconds that each user waits, all at the same time or one after the other."""
        users = range(self._size.users)
        if not together:
            return [self.get(user) for user in users]
        with ThreadPoolExecutor(len(users)) as threads:
            return list(threads.map(self.get, users))

    def get(self, user: int) -> float:
        targets = [memoryview(target) for target in self._targets]
        started = time.monotonic()
        answers = self.store.get_many(self._keys[user], targets, timeout_s=_WAIT_S)
        seconds = time.monotonic() - started
        if not all(answers):
            raise StateError(f"{sum(not answer for answer in answers)} blocks did not come back")
        return seconds

    def settle(self) -> None:
        """Wait until what was read has been written where it is promoted to."""
        if not self.store.flush(_WAIT_S).complete:
            raise StateError("promoted blocks were not written")


def _settings(folder: Path, size: Size, drives: int) -> dict[str, Any]:
    total = size.users * size.session_bytes
    ssd = {
        "path": [folder / f"ssd-{number}" for number in range(SSDS)],
        "capacity": 2 * total + SSDS * 32 * MIB,
        "segment": 8 * MIB,
        "fsync": "never",
        "read_timeout": _WAIT_S,
        "promote": False,
    }
    tree: dict[str, Any] = {
        "dram": {"capacity": 2 * total, "prefault": False},
        "writeback": {"staging": 64 * MIB},
        "ssd": ssd,
    }
    if drives:
        tree["hdd"] = {
            "path": [folder / f"hdd-{number}" for number in range(drives)],
            "capacity": 2 * total + drives * 32 * MIB,
            "segment": 8 * MIB,
            "run": RUN_BYTES,
            "fsync": "never",
            "read_timeout": _WAIT_S,
        }
    return tree


def _chain(space: NamespaceHandle, user: int, blocks: int) -> list[BlockKey]:
    return space.keys([user, *range(1, 8 * blocks)])


def _sessions_kept(store: Store, sessions: int) -> int:
    """Put sessions of ten blocks; how many of them are whole in the end."""
    space = store.namespace(model="room", layout=KVLayout.opaque(20 << 10, 8, 1))
    payload = bytes(space.block_bytes)
    chains = [_chain(space, number, 10) for number in range(sessions)]
    for chain in chains:
        store.put_many(chain, [payload] * len(chain), timeout_s=_WAIT_S)
    store.flush(_WAIT_S)
    return sum(len(store.match(chain)) == len(chain) for chain in chains)


def play(directory: Path, quick: bool) -> experiment.Answer:
    size = QUICK if quick else Size()
    plan = HybridPlan(directory, size)
    steps = plan.steps()
    with output.Progress("measuring", len(steps)) as progress:
        for name, step in steps:
            progress.label = name
            progress.advance(0)
            step()
            progress.advance()
    result = plan.result
    return experiment.Answer(
        document(result, size), figures(result, size), "", report(result, size)
    )


def document(result: Hybrid, size: Size) -> dict[str, Any]:
    return {
        "gap_by_turns": result.gap_by_turns,
        "drive_scaling": result.drive_scaling,
        "sequential_ratio": result.sequential_ratio,
        "arrival_order_ratio": result.arrival_order_ratio,
        "retained_ratio": result.retained_ratio,
        "ttft_s_by_turn": result.ttft_by_turn,
        "setting": {
            "scale": SCALE,
            "users": size.users,
            "turns": size.turns,
            "context_tokens": TOKENS,
            "ssds": SSDS,
            "hdds": HDDS,
            "ssd_read_bytes_per_s": SSD_BYTES_PER_S[0],
            "hdd_read_bytes_per_s": HDD_BYTES_PER_S[0],
            "hdd_seek_s": HDD_SEEK_S,
            "recompute": f"not run: {PREFILL_S} s a prompt, one after the other",
        },
    }


def figures(result: Hybrid, size: Size) -> list[Figure]:
    """The results beside what we want of them."""
    first, last = min(result.gap_by_turns), max(result.gap_by_turns)
    gap = result.gap_by_turns[last] / result.gap_by_turns[first]
    found = [
        _figure(f"gap to SSDs alone, {turns} turns", seconds, "s")
        for turns, seconds in result.gap_by_turns.items()
    ]
    judged = size.turns >= max(TURNS)
    found.append(_figure(f"gap after {last} turns, of the first", gap, "×", GAP_MAX * judged))
    found += [
        _figure(f"first turn, {drives} hard drives", ratio, "×", SCALING_MIN[drives], least=True)
        for drives, ratio in result.drive_scaling.items()
    ]
    sequential = "returning session, of the drives' bandwidth"
    return [
        *found,
        _figure(sequential, result.sequential_ratio, "×", SEQUENTIAL_MIN, least=True),
        _figure("the same, placed as it arrived", result.arrival_order_ratio, "×"),
        _figure("sessions kept", result.retained_ratio, "×", RETAINED_MIN, least=True),
    ]


def _figure(what: str, value: float, unit: str, bar: float = 0.0, *, least: bool = False) -> Figure:
    return Figure(what, value, unit, value, value, bar or None, least)


def report(result: Hybrid, size: Size) -> Report:
    """Two charts and how they were made."""
    lead = (
        f"Emulated drives at 1/{SCALE} of size and bandwidth, real seek times: "
        f"{SSDS} SSDs, {HDDS} hard drives, {size.users} users with "
        f"{TOKENS:,} tokens each. "
        f"Recomputing was not run: {PREFILL_S} s a prompt, one after the other. "
        f"{experiment.today()}, python benchmarks/hybrid.py --html."
    )
    gap = "Average gap between hybrid and SSDs alone, by number of turns"
    sections = [
        Section("Time to first token, by turn", [ttft_chart(result)]),
        Section(gap, [gap_chart(result)]),
    ]
    return Report("kvdepot: hard drives behind SSDs (emulated drives)", lead, sections)


def ttft_chart(result: Hybrid) -> Bars:
    turns = _some(len(result.ttft_by_turn["hybrid"]))
    ways = {"recompute": "without", "ssd": "ssd", "hybrid": "with"}
    series = [
        Series(way, style, [result.ttft_by_turn[way][turn - 1] for turn in turns], _seconds)
        for way, style in ways.items()
    ]
    return Bars("Time to first token", "s", [f"turn {turn}" for turn in turns], series)


def gap_chart(result: Hybrid) -> Bars:
    gaps = result.gap_by_turns
    names = [f"{turns} turns" if turns > 1 else "1 turn" for turns in gaps]
    series = [Series("hybrid less SSDs alone", "with", list(gaps.values()), _seconds)]
    notes = [_seconds(gap) for gap in gaps.values()]
    return Bars("Gap", "s", names, series, notes=notes)


def _some(turns: int) -> Sequence[int]:
    return [turn for turn in (1, 2, 3, 4, 5, 10, 20, 30, 40, 50) if turn <= turns]


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


if __name__ == "__main__":
    experiment.main(__doc__, NEEDED_BYTES, play)
