"""Every write mode with every eviction order, for users who come back, on emulated drives.

    python benchmarks/modes.py [--quick] [--path DIR] [--html FILE] [--json] [--strict]

A real store in three tiers, its drives emulated, everything a thousandth of the size; the SSDs
hold a tenth of what the users have, the hard drives most of it. Every cell of the table sees the
same requests.
"""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any, Final

import experiment
import hybrid
import numpy as np

from kvdepot.bench.raw import MIB
from kvdepot.bench.rounds import Figure
from kvdepot.cli import output
from kvdepot.cli.report import Bars, Report, Section, Series
from kvdepot.cli.tables import Table
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.layout import KVLayout
from kvdepot.errors import StateError
from kvdepot.policy.placing.reclaim import RULES
from kvdepot.store.store import Store
from kvdepot.testing.emulation import DriveModel, open_emulated

SCALE: Final = 1024
"""Bytes that stand for one: a block of 256 tokens is 32 KiB."""
HASTE: Final = 20
"""Seconds that one second of the run stands for."""
BLOCK_TOKENS: Final = 256
RECORD_BYTES: Final = BLOCK_TOKENS * hybrid.TOKEN_BYTES // SCALE
KEY_TOKENS: Final = 8
HDD_PATHS: Final = 3
"""Each as fast as a third of the hard drives; one SSD path as fast as all SSDs."""
SSD_SHARE: Final = 1 / 10
DRAM_SHARE: Final = SSD_SHARE / 4
HDD_SHARE: Final = 0.8
"""Of the blocks of all users."""
PREFILL_S_PER_TOKEN: Final = hybrid.PREFILL_S / hybrid.TOKENS
_WAIT_S: Final = 300.0
_SEED: Final = 5
OF_BEST_MIN: Final = 0.98
OF_LRU_MIN: Final = 0.99
"""Hits of the default eviction order, of those of the best one and of LRU, in every write mode."""


_FIRST_BLOCKS: Final = (2, 9)
_TURN_BLOCKS: Final = (1, 4)
_BLOCKS_MAX: Final = 32
"""Then the user begins a new conversation."""
_SHARED_BLOCKS: Final = 2
"""A system prompt, the same for everybody."""


@dataclass(frozen=True, slots=True)
class Habit:
    """Who comes back how often."""

    name: str
    exponent: float
    """The user of rank n comes with a weight of n to the power of this, negative."""
    strangers: float = 0.0
    """The share of requests by users who come once and never again."""


HABITS: Final = (Habit("zipf", 1.0), Habit("flat", 0.6), Habit("strangers", 1.0, 0.5))


@dataclass(frozen=True, slots=True)
class Visit:
    """One request: a conversation, how long it was, and how long it is with this turn."""

    conversation: int
    before_blocks: int
    after_blocks: int


def visits(habit: Habit, users: int, requests: int, seed: int) -> list[Visit]:
    """Everybody once, in any order; then as the habit says."""
    draw = np.random.default_rng(seed)
    weights = np.arange(1.0, users + 1) ** -habit.exponent
    first = draw.permutation(users)
    later = draw.choice(users, requests, p=weights / weights.sum())
    strange = draw.random(requests) < habit.strangers
    found: list[Visit] = []
    open_now: dict[int, tuple[int, int]] = {}
    conversations = 0
    for user in [*first.tolist(), *np.where(strange, -1, later).tolist()]:
        conversation, blocks = open_now.get(user, (conversations, 0))
        if user < 0 or not blocks or blocks >= _BLOCKS_MAX:
            conversation, blocks = conversations, 0
            conversations += 1
        grown = int(draw.integers(*(_TURN_BLOCKS if blocks else _FIRST_BLOCKS)))
        before = blocks or _SHARED_BLOCKS
        found.append(Visit(conversation, before, before + grown))
        open_now[user] = (conversation, before + grown)
    return found


def tokens(conversation: int, blocks: int, block_tokens: int) -> list[int]:
    """Of a conversation: those of the system prompt, then its own."""
    shared = _SHARED_BLOCKS * block_tokens
    own = range(blocks * block_tokens - shared)
    return [*range(shared), conversation + 1, *own][: blocks * block_tokens]


def living_blocks(found: list[Visit]) -> int:
    """Blocks of every conversation as long as it is in the end."""
    longest: dict[int, int] = {}
    for visit in found:
        longest[visit.conversation] = visit.after_blocks
    return sum(longest.values()) - _SHARED_BLOCKS * (len(longest) - 1)


@dataclass(frozen=True, slots=True)
class Modes:
    """A write mode for each of the two file tiers."""

    name: str
    ssd: str
    hdd: str


MODES: Final = (
    Modes("write-back", "write-back", "write-back"),
    Modes("write-through", "write-through", "write-through"),
    Modes("selective", "write-through-selective", "write-through"),
    Modes("pass-through", "write-back", "pass-through"),
)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is played."""

    users: int = 240
    requests: int = 560
    habits: tuple[Habit, ...] = HABITS


QUICK: Final = Size(users=80, requests=40, habits=HABITS[:1])
NEEDED_BYTES: Final = 1 << 30
HEADS: Final = (
    "users", "write mode", "eviction", "dram", "ssd", "hdd", "hits",
    "SSD written MB", "per byte read", "TTFT ms", "thrashed",
)  # fmt: skip
_ABOUT: Final = (
    "Emulated drives as fast as {ssds} SSDs and {hdds} hard drives, sizes a {scale}th, time "
    "{haste} times faster. {users} users, {requests} requests, of which the first half is not "
    "counted. The SSDs hold a tenth of their blocks, memory a quarter of that, the hard drives "
    "{hdd:.0%}. TTFT: fetching as measured, times {haste}, and computing what was missed or is "
    "new at {prefill_us:.1f} us a token, which was not run."
)


@dataclass(frozen=True, slots=True)
class Cell:
    """What one mode and one order came to, after the first half of the requests."""

    habit: str
    mode: str
    order: str
    hits: dict[str, float]
    """Of the blocks that users had before: the share that came from each tier."""
    ssd_written_bytes: int
    ssd_read_bytes: int
    delivered_bytes: int
    ttft_s: float
    """Mean: fetching as measured, the rest of the prompt as computed from PREFILL_S_PER_TOKEN."""
    thrashed: bool
    seconds: float
    """That the cell took."""

    @property
    def hit_ratio(self) -> float:
        return sum(self.hits.values())

    @property
    def fast_ratio(self) -> float:
        """From memory or an SSD."""
        return self.hits["dram"] + self.hits["ssd"]

    @property
    def written_per_read(self) -> float | None:
        """Bytes written to the SSDs for each byte that users read from them."""
        return self.ssd_written_bytes / self.ssd_read_bytes if self.ssd_read_bytes else None


@dataclass(slots=True)
class ModesPlan:
    """The table, cell by cell. Habits after the first are played in the default mode only."""

    directory: Path
    size: Size = field(default_factory=Size)

    def cells(self) -> list[tuple[Habit, Modes, str]]:
        first, *others = self.size.habits
        found = [(first, modes, order) for modes in MODES for order in RULES]
        return found + [(habit, MODES[0], order) for habit in others for order in RULES]

    def play(self, habit: Habit, modes: Modes, order: str) -> Cell:
        requests = visits(habit, self.size.users, self.size.requests, _SEED)
        folder = self.directory / f"{habit.name}-{modes.name}-{order}"
        folder.mkdir()
        started_s = time.monotonic()
        try:
            settings = _settings(folder, modes, order, living_blocks(requests))
            with open_emulated(_MODELS, **settings) as store:
                world = World(store)
                half = len(requests) // 2
                world.serve(requests[:half])
                before = world.tally()
                ttft_s = world.serve(requests[half:])
                return _cell(
                    (habit.name, modes.name, order), before, world.tally(), ttft_s, started_s
                )
        finally:
            shutil.rmtree(folder)


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts at one moment."""

    asked: int
    hits: Counter[str]
    ssd_written_bytes: int
    held_below: int


class World:
    """The users of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._space = store.namespace(
            model="modes", layout=KVLayout.opaque(RECORD_BYTES - 4096, KEY_TOKENS, 1)
        )
        self._payload = np.random.default_rng(1).bytes(self._space.block_bytes)
        self._targets: list[bytearray] = []
        self._chains: dict[int, list[BlockKey]] = {}
        self._asked = 0
        self._hits: Counter[str] = Counter()

    def serve(self, requests: Sequence[Visit]) -> float:
        """One after the other; the mean time to the first token."""
        return mean(self._serve(visit) for visit in requests)

    def _serve(self, visit: Visit) -> float:
        keys = _chain(self._space, self._chains, visit)
        store, before = self._store, keys[: visit.before_blocks]
        while len(self._targets) < len(before):
            self._targets.append(bytearray(self._space.block_bytes))
        targets = [memoryview(target) for target in self._targets]
        started_s = time.monotonic()
        found = len(store.match(before))
        answers = store.get_many(before[:found], targets[:found], timeout_s=_WAIT_S)
        fetched_s = (time.monotonic() - started_s) * HASTE
        good = next((index for index, got in enumerate(answers) if not got), found)
        self._asked += len(before)
        self._hits.update(got.tier or "" for got in answers[:good])
        new = keys[good:]
        if not all(store.put_many(new, [self._payload] * len(new), timeout_s=_WAIT_S)):
            raise StateError("the emulated drives did not take the blocks")
        store.flush(_WAIT_S)
        return fetched_s + len(new) * BLOCK_TOKENS * PREFILL_S_PER_TOKEN

    def tally(self) -> Tally:
        stats = self._store.stats()
        drives = stats["tiers"]["ssd"]["drives"]
        written = sum(drive["written"]["bytes"] for drive in drives)
        held = stats["counters"]["held_below"]
        return Tally(self._asked, self._hits.copy(), written, held)


def _cell(
    names: tuple[str, str, str], before: Tally, after: Tally, ttft_s: float, started_s: float
) -> Cell:
    habit, mode, order = names
    asked, hits = after.asked - before.asked, after.hits - before.hits
    payload_bytes = RECORD_BYTES - 4096
    return Cell(
        habit=habit,
        mode=mode,
        order=order,
        hits={tier: hits[tier] / asked for tier in ("dram", "ssd", "hdd")},
        ssd_written_bytes=after.ssd_written_bytes - before.ssd_written_bytes,
        ssd_read_bytes=hits["ssd"] * payload_bytes,
        delivered_bytes=hits.total() * payload_bytes,
        ttft_s=ttft_s,
        thrashed=after.held_below > before.held_below,
        seconds=time.monotonic() - started_s,
    )


def _settings(folder: Path, modes: Modes, order: str, blocks: int) -> dict[str, Any]:
    total_bytes = blocks * RECORD_BYTES
    return {
        "dram": {"capacity": int(total_bytes * DRAM_SHARE), "prefault": False, "eviction": order},
        "writeback": {"staging": 8 * MIB},
        "ssd": {
            "path": folder / "ssd",
            "capacity": int(total_bytes * SSD_SHARE),
            "segment": MIB // 4,
            "write_mode": modes.ssd,
            "eviction": order,
            **_TERMS,
        },
        "hdd": {
            "path": [folder / f"hdd-{number}" for number in range(HDD_PATHS)],
            "capacity": int(total_bytes * HDD_SHARE),
            "segment": MIB // 2,
            "run": RECORD_BYTES,
            "write_mode": modes.hdd,
            "eviction": order,
            **_TERMS,
        },
    }


_TERMS: Final = {"fsync": "never", "read_timeout": _WAIT_S}


def _model(bytes_per_s: int, drives: float, **times_s: float) -> DriveModel:
    """Writing is not measured, and takes no time: there is enough between two requests."""
    read = int(bytes_per_s * drives * HASTE / SCALE)
    faster = {name: seconds / HASTE for name, seconds in times_s.items()}
    return DriveModel(read_bandwidth=read, write_bandwidth=1 << 40, **faster)


_MODELS: Final = {
    "ssd": _model(hybrid.SSD_BYTES_PER_S[0], hybrid.SSDS, latency=hybrid.SSD_LATENCY_S),
    "hdd": _model(hybrid.HDD_BYTES_PER_S[0], hybrid.HDDS / HDD_PATHS, seek=hybrid.HDD_SEEK_S),
}


def _chain(
    space: NamespaceHandle, chains: dict[int, list[BlockKey]], visit: Visit
) -> list[BlockKey]:
    """The keys of a conversation with this turn."""
    known = chains.get(visit.conversation, [])
    if len(known) < visit.after_blocks:
        known = space.keys(tokens(visit.conversation, visit.after_blocks, KEY_TOKENS))
        chains[visit.conversation] = known
    return known[: visit.after_blocks]


def play(directory: Path, quick: bool) -> experiment.Answer:
    size = QUICK if quick else Size()
    plan = ModesPlan(directory, size)
    cells = []
    with output.Progress("measuring", len(plan.cells())) as progress:
        for habit, way, order in plan.cells():
            progress.label = f"{habit.name} users, {way.name}, {order}"
            progress.advance(0)
            cells.append(plan.play(habit, way, order))
            progress.advance()
    text = _table(cells).text() + "\n"
    return experiment.Answer(document(cells, size), figures(cells), text, report(cells, size))


def about(size: Size) -> str:
    """How the figures came about."""
    return _ABOUT.format(
        ssds=hybrid.SSDS,
        hdds=hybrid.HDDS,
        scale=SCALE,
        haste=HASTE,
        users=size.users,
        requests=size.users + size.requests,
        hdd=HDD_SHARE,
        prefill_us=PREFILL_S_PER_TOKEN * 1e6,
    )


def document(cells: Sequence[Cell], size: Size) -> dict[str, Any]:
    return {
        "about": about(size),
        "modes": list(MODES),
        "users": list(size.habits),
        "cells": [
            {
                **output.plain(cell),
                "hit_ratio": cell.hit_ratio,
                "fast_ratio": cell.fast_ratio,
                "ssd_written_per_read": cell.written_per_read,
            }
            for cell in cells
        ],
    }


def figures(cells: Sequence[Cell]) -> list[Figure]:
    """The default order beside the best one and beside LRU."""
    found: list[Figure] = []
    measures: dict[str, Callable[[Cell], float]] = {
        "hits": lambda cell: cell.hit_ratio,
        "hits in memory and SSDs": lambda cell: cell.fast_ratio,
    }
    for (habit, mode), group in groupby(cells, lambda cell: (cell.habit, cell.mode)):
        by_order = {cell.order: cell for cell in group}
        for what, measure in measures.items():
            ours = measure(by_order["default"])
            best = max(by_order.values(), key=measure)
            for name, other, bar in (
                (f"the best, {best.order}", best, OF_BEST_MIN),
                ("lru", by_order["lru"], OF_LRU_MIN),
            ):
                ratio = ours / measure(other) if measure(other) else 1.0
                label = f"{habit} users, {mode}: {what}, of {name}"
                found.append(Figure(label, ratio, "×", ratio, ratio, bar, bar_is_least=True))
    return found


def _row(cell: Cell) -> list[str]:
    per_read = cell.written_per_read
    return [
        cell.habit,
        cell.mode,
        cell.order,
        *(f"{cell.hits[tier]:.3f}" for tier in ("dram", "ssd", "hdd")),
        f"{cell.hit_ratio:.3f}",
        f"{cell.ssd_written_bytes / 1e6:.0f}",
        "" if per_read is None else f"{per_read:.2f}",
        f"{cell.ttft_s * 1e3:.0f}",
        "yes" if cell.thrashed else "",
    ]


def report(cells: Sequence[Cell], size: Size) -> Report:
    """A chart of hits and one of wear for each kind of users, and the table."""
    title = "kvdepot: write modes and eviction orders (emulated drives)"
    lead = f"{about(size)} {experiment.today()}, python benchmarks/modes.py --html."
    sections = []
    for habit, group in groupby(cells, lambda cell: cell.habit):
        some = list(group)
        came = "Where their blocks came from."
        sections.append(Section(f"{habit} users", [_hits_chart(some)], came))
        sections.append(Section("Their wear", [_wear_chart(some)], "Written to the SSDs."))
    return Report(title, lead, [*sections, Section("All figures", [_table(cells)])])


def _table(cells: Sequence[Cell]) -> Table:
    return Table(HEADS, [_row(cell) for cell in cells])


def _hits_chart(cells: Sequence[Cell]) -> Bars:
    styles = {"dram": "with", "ssd": "ssd", "hdd": "without"}
    series = [
        Series(tier, style, [cell.hits[tier] for cell in cells], lambda value: f"{value:.1%}")
        for tier, style in styles.items()
    ]
    return Bars("Hits by tier", "", _names(cells), series, stacked=True)


def _wear_chart(cells: Sequence[Cell]) -> Bars:
    megabytes = [cell.ssd_written_bytes / 1e6 for cell in cells]
    series = [Series("written to SSDs", "ssd", megabytes, lambda value: f"{value:.0f} MB")]
    return Bars("SSD writes", "MB", _names(cells), series)


def _names(cells: Sequence[Cell]) -> list[str]:
    return [f"{cell.order}, {cell.mode}" for cell in cells]


if __name__ == "__main__":
    experiment.main(__doc__, NEEDED_BYTES, play)
