"""`bench modes`: every write mode with every eviction order, for users who come back.

A real store in three tiers, its drives emulated, everything a thousandth of the size; the SSDs
hold a tenth of what the users have, the hard drives most of it. Every cell of the table sees the
same requests.
"""

import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np

from kvdepot.bench import hybrid
from kvdepot.bench.raw import MIB
from kvdepot.bench.returns import HABITS, Habit, Visit, living_blocks, tokens, visits
from kvdepot.core.block import BlockKey
from kvdepot.core.layout import KVLayout
from kvdepot.errors import StateError
from kvdepot.policy.eviction import ORDERS
from kvdepot.store.namespace_handle import Space
from kvdepot.store.open import open_store
from kvdepot.store.store import Store

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
        found = [(first, modes, order) for modes in MODES for order in ORDERS]
        return found + [(habit, MODES[0], order) for habit in others for order in ORDERS]

    def play(self, habit: Habit, modes: Modes, order: str) -> Cell:
        requests = visits(habit, self.size.users, self.size.requests, _SEED)
        folder = self.directory / f"{habit.name}-{modes.name}-{order}"
        folder.mkdir()
        started_s = time.monotonic()
        try:
            with open_store(**_settings(folder, modes, order, living_blocks(requests))) as store:
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
        "dram": {
            "capacity": int(total_bytes * DRAM_SHARE),
            "prefault": False,
            "eviction": order,
        },
        "writeback": {"staging": 8 * MIB},
        "ssd": {
            "path": folder / "ssd",
            "capacity": int(total_bytes * SSD_SHARE),
            "segment": MIB // 4,
            "write_mode": modes.ssd,
            "eviction": order,
            "emulate": _emulated(
                hybrid.SSD_BYTES_PER_S[0], hybrid.SSDS, latency=hybrid.SSD_LATENCY_S
            ),
            **_TERMS,
        },
        "hdd": {
            "path": [folder / f"hdd-{number}" for number in range(HDD_PATHS)],
            "capacity": int(total_bytes * HDD_SHARE),
            "segment": MIB // 2,
            "run": RECORD_BYTES,
            "write_mode": modes.hdd,
            "eviction": order,
            "emulate": _emulated(
                hybrid.HDD_BYTES_PER_S[0], hybrid.HDDS / HDD_PATHS, seek=hybrid.HDD_SEEK_S
            ),
            **_TERMS,
        },
    }


_TERMS: Final = {"fsync": "never", "read_timeout": _WAIT_S}


def _emulated(bytes_per_s: int, drives: float, **times_s: float) -> dict[str, Any]:
    """Writing is not measured, and takes no time: there is enough between two requests."""
    read = int(bytes_per_s * drives * HASTE / SCALE)
    faster = {name: seconds / HASTE for name, seconds in times_s.items()}
    return {"read_bandwidth": read, "write_bandwidth": 1 << 40, **faster}


def _chain(space: Space, chains: dict[int, list[BlockKey]], visit: Visit) -> list[BlockKey]:
    """The keys of a conversation with this turn."""
    known = chains.get(visit.conversation, [])
    if len(known) < visit.after_blocks:
        known = space.keys(tokens(visit.conversation, visit.after_blocks, KEY_TOKENS))
        chains[visit.conversation] = known
    return known[: visit.after_blocks]
