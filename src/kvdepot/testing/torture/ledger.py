"""The ledger of a torture round: its actions, and the state of the store that they imply.

A ledger is a file in memory that a parent shares with its forked children, so lines of a killed
child are kept. Each fact is a line, written before or after the event.
"""

import json
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

Fault = Literal["wrong", "foreign", "lost", "back", "broken", "late", "leaked", "unclean", "error"]
FAULTS: Final[tuple[Fault, ...]] = (
    "wrong", "foreign", "lost", "back", "broken", "late", "leaked", "unclean", "error",
)  # fmt: skip


@dataclass(slots=True)
class Drives:
    """The SSDs of a round, as its facts tell."""

    numbers: list[int] = field(default_factory=list)
    """Those at the end; empty: the initial ones."""
    segments: int = 0
    """Segments of each SSD at the end; 0: the initial number."""
    shrunk: bool = False
    """True if the capacity was ever reduced."""
    left_out: int = 0
    """Number of drives that could not be mounted at the last opening."""
    met: set[int] = field(default_factory=set)
    """Drives that were present together at one opening and know each other's numbers."""


@dataclass(slots=True)
class Expectation:
    """The state that the facts of a round imply. Blocks that are in no set may be present or not.

    A removal survives a kill once `remove` has returned, and a power cut once a later flush has
    returned; with `fsync = "always"` at once.
    """

    must: set[int] = field(default_factory=set)
    """Blocks that a successful flush covered and that the index had on a drive at the end."""
    apart: set[int] = field(default_factory=set)
    """Blocks on an absent drive that must be present when it returns."""
    flushed: set[int] = field(default_factory=set)
    """Blocks that a successful flush covered since they were put."""
    removed: set[int] = field(default_factory=set)
    """Blocks of removals that have returned."""
    doubtful: set[int] = field(default_factory=set)
    """Removed blocks whose tombstones are not on all drives, because one was absent or the end came
    before: they may be seen until all drives were open together."""
    begun: set[int] = field(default_factory=set)
    """Blocks of a removal that has not returned."""
    limbo: set[int] = field(default_factory=set)
    """Doubtful or begun blocks that were seen again: they may stay or be removed later."""
    synced: set[int] = field(default_factory=set)
    """Removed blocks whose removal a successful flush covered."""
    drives: Drives = field(default_factory=Drives)
    put_bytes: int = 0
    """Bytes put in this round."""
    snapshot: bool = False
    """True if the blocks on drives were recorded at the end."""
    had_snapshot: bool = False
    """`snapshot` of the end before the last opening."""
    kept: dict[str, set[int]] = field(default_factory=dict)
    """Pinned blocks with a receipt, by session."""
    pins: int = 0
    """Number of pins that were found intact after an end, of all ends together."""
    done: int = 0
    """Number of cuts, damages or outages."""

    def take(self, fact: dict[str, Any]) -> None:
        blocks = set(fact["blocks"])
        match fact["fact"]:
            case "open":
                self.had_snapshot, self.snapshot = self.snapshot, False
            case "unopened":
                self.snapshot = self.had_snapshot
            case "opened":
                self.drives.left_out = fact["left_out"]
            case "returned":
                self.apart.clear()  # its blocks may be evicted from now on
            case "cut" | "damaged" | "outage":
                self.done += fact.get("count", 1)
            case "pinning" | "pinned" | "unpinning" | "kept":
                self._take_pin(fact, blocks)
            case "putting":
                for some in (self.removed, self.doubtful, self.synced, self.flushed):
                    some -= blocks
                self.put_bytes += fact["nbytes"]
            case "stayed":
                self.flushed |= blocks
            case "flushed":
                self.flushed |= blocks - self.limbo
                self.synced |= set(fact["removed"]) & self.removed
            case "removing":
                self.kept = {name: some - blocks for name, some in self.kept.items()}
                self.flushed -= blocks
                self.must -= blocks
                self.apart -= blocks
                self.begun |= blocks
            case "removed":
                self.flushed -= blocks
                self.apart -= blocks
                self.begun -= blocks
                self.removed |= blocks
                self.doubtful |= blocks if fact["away"] else set()
                if fact["durable"]:
                    self.synced |= blocks
            case "residents":
                self.snapshot = True
                self.must = self.flushed & blocks
                if fact["left_out"] < self.drives.left_out:  # one returned, as above
                    self.apart.clear()
            case "present":
                self._take_present(fact, blocks)
            case "drives":
                drives = self.drives
                drives.numbers, drives.segments = fact["ssds"], fact["segments"]
                drives.shrunk = drives.shrunk or fact["shrunk"]
                self.apart.clear()

    def _take_present(self, fact: dict[str, Any], blocks: set[int]) -> None:
        """Replace the expected state by the blocks that were seen after an end."""
        wanted = self.apart | (self.must if self.had_snapshot else set())
        self.apart = wanted - blocks - self.removed if fact["away"] else set()
        unsynced = self.removed - self.synced if fact["cut"] else set()
        unsure = self.doubtful | self.begun | unsynced
        self.removed = (self.synced if fact["cut"] and fact["away"] else self.removed) - blocks
        self.synced = set(self.removed)
        self.drives.met = self.drives.met if fact["away"] else set(fact["ssds"])
        self.limbo = self.limbo | (blocks & unsure) if fact["away"] else set()
        self.doubtful, self.begun = unsure if fact["away"] else set(), set()
        self.flushed = blocks - self.limbo
        self.must = set(self.flushed)

    def _take_pin(self, fact: dict[str, Any], blocks: set[int]) -> None:
        name = fact.get("session", "")
        match fact["fact"]:
            case "pinning":  # until the receipt, the previous pin or this one holds
                self.kept[name] = self.kept.get(name, set()) & blocks
            case "pinned":
                self.kept[name] = blocks
                self.limbo -= blocks  # rewritten, so newer than any removal
            case "unpinning":
                self.kept.pop(name, None)
            case "kept":
                self.pins += fact["count"]


class Ledger:
    """Facts in order, and the state that they imply. Thread-safe."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("kvdepot-torture", os.MFD_CLOEXEC)
        self._read = 0
        self._lock = threading.Lock()
        self.expected = Expectation()

    def write(self, fact: str, blocks: Iterable[int] = (), **more: Any) -> None:
        line = {"fact": fact, "blocks": sorted(blocks), **more}
        with self._lock:
            line["at_s"] = round(time.monotonic(), 3)
            os.write(self._fd, json.dumps(line).encode() + b"\n")
            self._take_in()

    def fault(self, kind: Fault, text: str, count: int = 1) -> None:
        """Record a violation."""
        self.write("fault", kind=kind, text=text, count=count)

    def catch_up(self) -> None:
        """Read the facts that children have written."""
        with self._lock:
            self._take_in()

    def _take_in(self) -> None:
        raw = os.pread(self._fd, os.fstat(self._fd).st_size - self._read, self._read)
        self._read += len(raw)
        for line in raw.splitlines():
            self.expected.take(json.loads(line))

    def everything(self) -> list[dict[str, Any]]:
        raw = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        return [json.loads(line) for line in raw.splitlines()]

    def save(self, path: Path) -> None:
        """Write the facts to a file, one line of JSON each."""
        path.write_text("".join(json.dumps(fact) + "\n" for fact in self.everything()))

    def close(self) -> None:
        os.close(self._fd)
