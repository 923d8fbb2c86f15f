"""What a round has done, written so that it outlives its process, and what must hold for that.

A ledger is a file in memory that a parent shares with the children it forks. Each fact is a line,
written before or after something became true; what a killed child wrote is there.
"""

import json
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

Fault = Literal["wrong", "lost", "back", "broken", "late", "leaked", "unclean", "error"]
FAULTS: Final[tuple[Fault, ...]] = (
    "wrong", "lost", "back", "broken", "late", "leaked", "unclean", "error",
)  # fmt: skip


@dataclass(slots=True)
class Expectation:
    """What the facts of a round add up to. Of blocks that are in no set nothing is known.

    A removal outlives a kill when `remove` has returned, and a power cut when a flush has returned
    since, or with `fsync = "always"` at once.
    """

    must: set[int] = field(default_factory=set)
    """Blocks that a true flush covered and that were on a drive, by the index, at the end."""
    apart: set[int] = field(default_factory=set)
    """Blocks that are on a drive which is away, and must be there when it is back."""
    left_out: int = 0
    """How many drives could not be mounted at the last opening."""
    flushed: set[int] = field(default_factory=set)
    """Blocks that a true flush covered since they were put."""
    removed: set[int] = field(default_factory=set)
    """Blocks that a removal which returned took away."""
    doubtful: set[int] = field(default_factory=set)
    """Blocks whose removal one drive may know of and another not, because that one was away, or the
    end came before all had it: they may be seen until the drives meet."""
    begun: set[int] = field(default_factory=set)
    """Blocks of a removal that has not returned."""
    limbo: set[int] = field(default_factory=set)
    """Such blocks that were seen again: they may stay, or go when the drives meet."""
    synced: set[int] = field(default_factory=set)
    """Those of them whose removal a true flush covered."""
    met: set[int] = field(default_factory=set)
    """Drives that were all there at one opening: each knows of the others' numbers."""
    put_bytes: int = 0
    """Put in this round so far."""
    snapshot: bool = False
    """Whether the end told which blocks were on drives."""
    told: bool = False
    """Whether the end before the last opening did."""
    kept: dict[str, set[int]] = field(default_factory=dict)
    """Blocks under a contract that a receipt was given for, by session."""
    contracts: int = 0
    """How many contracts were found kept after an end, all ends together."""
    cuts: int = 0
    damages: int = 0
    ssds: list[int] = field(default_factory=list)
    """Drives that were there at the end; empty: as they were at first."""
    segments: int = 0
    """Of each SSD at the end; 0: as at first."""
    shrunk: bool = False
    """Whether there ever was less room than before."""

    def take(self, fact: dict[str, Any]) -> None:
        blocks = set(fact["blocks"])
        match fact["fact"]:
            case "open":
                self.told, self.snapshot = self.snapshot, False
            case "unopened":
                self.snapshot = self.told
            case "opened":
                self.left_out = fact["left_out"]
            case "returned":
                self.apart.clear()  # what it has may have to make room from now on
            case "cut":
                self.cuts += 1
            case "pinning" | "pinned" | "unpinning" | "kept":
                self._take_contract(fact, blocks)
            case "damaged":
                self.damages += fact["count"]
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
                if fact["left_out"] < self.left_out:  # one was mounted again meanwhile, as above
                    self.apart.clear()
            case "present":
                self._take_present(fact, blocks)
            case "drives":
                self.ssds, self.segments = fact["ssds"], fact["segments"]
                self.shrunk = self.shrunk or fact["shrunk"]
                self.apart.clear()

    def _take_present(self, fact: dict[str, Any], blocks: set[int]) -> None:
        """What was seen after an end is what is known from then on."""
        wanted = self.apart | (self.must if self.told else set())
        self.apart = wanted - blocks - self.removed if fact["away"] else set()
        unsynced = self.removed - self.synced if fact["cut"] else set()
        unsure = self.doubtful | self.begun | unsynced
        self.removed = (self.synced if fact["cut"] and fact["away"] else self.removed) - blocks
        self.synced = set(self.removed)
        self.met = self.met if fact["away"] else set(fact["ssds"])
        self.limbo = self.limbo | (blocks & unsure) if fact["away"] else set()
        self.doubtful, self.begun = unsure if fact["away"] else set(), set()
        self.flushed = blocks - self.limbo
        self.must = set(self.flushed)

    def _take_contract(self, fact: dict[str, Any], blocks: set[int]) -> None:
        name = fact.get("session", "")
        match fact["fact"]:
            case "pinning":  # until it has a receipt, the contract before or this one holds
                self.kept[name] = self.kept.get(name, set()) & blocks
            case "pinned":
                self.kept[name] = blocks
                self.limbo -= blocks  # written again: younger than any removal
            case "unpinning":
                self.kept.pop(name, None)
            case "kept":
                self.contracts += fact["count"]


class Ledger:
    """Facts, in order, and what they add up to. Thread-safe."""

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
        """Something that must not be."""
        self.write("fault", kind=kind, text=text, count=count)

    def catch_up(self) -> None:
        """Know what children have written."""
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
        """Write the facts down, a line of JSON each."""
        path.write_text("".join(json.dumps(fact) + "\n" for fact in self.everything()))

    def close(self) -> None:
        os.close(self._fd)
