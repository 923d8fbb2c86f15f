"""One drive of three is pulled, filled, slowed to 1/20 or failing: how fast are the others read?

    python benchmarks/drive_faults.py --tier ssd --json result.json

Emulated drives, so slow that the machine itself hardly counts. A reader of each drive and one
writer are at work all the time, and every byte that comes is compared. Windows without and with the
fault alternate; a window begins with the fault, not when it was noticed.
"""

import argparse
import datetime
import errno
import json
import os
import platform
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvdepot.config.settings import load
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import NamespaceHandle
from kvdepot.core.layout import KVLayout
from kvdepot.io.files import Ops, Pending
from kvdepot.native import READ
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.emulation import DriveModel, EmulatedFiles

DRIVES, BAD = 3, 1
SLOWER = 20.0
FAULTS = ("pulled", "filled", "slowed", "errors")
BLOCK_BYTES = 256 << 10
BATCH = 8
WINDOW_S = {"pulled": 1.5, "filled": 1.5, "slowed": 4.0, "errors": 1.5}
"""Long enough for each to be noticed: a slow drive needs two looks at slow reads."""
BYTES_PER_S = {"ssd": 60_000_000, "hdd": 60_000_000}
SEEK_S = {"ssd": 0.0, "hdd": 0.004}


class BadFiles(EmulatedFiles):
    """Emulated drives, one of which may refuse what is asked of it."""

    def __init__(self, model: DriveModel) -> None:
        super().__init__(lambda _: model)
        self._bad_fds: set[int] = set()
        self.reads_fail = 0
        self.writes_fail = 0

    def attach(self, fd: int, drive: str) -> None:
        super().attach(fd, drive)
        (self._bad_fds.add if f"drive-{BAD}" in drive else self._bad_fds.discard)(fd)

    def run(self, ops: Ops, timeout_s: float) -> Pending | None:
        pending = super().run(ops, timeout_s)
        bad = np.isin(ops["fd"], list(self._bad_fds))
        reads = ops["opcode"] == READ
        if self.reads_fail:
            ops["result"][bad & reads] = -self.reads_fail
        if self.writes_fail:
            ops["result"][bad & ~reads] = -self.writes_fail
        return pending

    def write(self, fd: int, offset: int, data: bytes) -> None:
        if self.writes_fail and fd in self._bad_fds:
            raise OSError(self.writes_fail, os.strerror(self.writes_fail))
        super().write(fd, offset, data)


@dataclass
class Round:
    """One window without and one with the fault."""

    before_bytes_per_s: float
    during_bytes_per_s: float
    noticed_s: float
    back_s: float

    @property
    def ratio(self) -> float:
        return self.during_bytes_per_s / self.before_bytes_per_s


@dataclass
class World:
    """A store of one tier on three drives, with everybody at work."""

    folder: Path
    tier: str
    files: BadFiles
    store: Store
    space: NamespaceHandle
    payloads: dict[BlockKey, bytes] = field(default_factory=dict)
    by_drive: dict[int, list[BlockKey]] = field(default_factory=dict)
    read_bytes: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def fill(self) -> None:
        """Blocks on every drive, none in memory."""
        chance = np.random.default_rng(1)
        for number in range(30):
            keys = self.space.keys([number] * 4)
            for key in keys:
                self.payloads[key] = chance.bytes(self.space.block_bytes)
            assert all(
                self.store.put_many(keys, [self.payloads[key] for key in keys], timeout_s=60)
            )
            assert self.store.flush(120).complete
        inside, keys = self.store.inspect(), list(self.payloads)
        inside.drop_from_memory()
        for key, drive in zip(keys, inside.volumes_of(keys), strict=True):
            self.by_drive.setdefault(drive, []).append(key)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._read, args=(drive,)) for drive in self.by_drive]
        threads.append(threading.Thread(target=self._write))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()

    def _read(self, drive: int) -> None:
        keys = self.by_drive[drive][:BATCH]
        targets = [bytearray(self.space.block_bytes) for _ in keys]
        while not self.stop.is_set():
            answers = self.store.get_many(keys, targets, timeout_s=5.0)
            for key, answer, target in zip(keys, answers, targets, strict=True):
                if answer and bytes(target) != self.payloads[key]:
                    self.problems.append(f"a wrong byte in {key.hex()}")
            hits = sum(map(bool, answers))
            self.read_bytes[drive] += hits * self.space.block_bytes
            if hits < len(keys):
                self.stop.wait(0.02)  # as who computes it instead

    def _write(self) -> None:
        number = 1000
        payload = bytes(self.space.block_bytes)
        while not self.stop.wait(0.1):
            number += 1
            if not all(self.store.put_many(self.space.keys([number]), [payload], timeout_s=5)):
                self.problems.append("a put was refused")

    def speed(self, seconds: float) -> float:
        """Of all drives but the bad one."""
        others = [drive for drive in self.by_drive if drive != BAD]
        before = sum(self.read_bytes[drive] for drive in others)
        started = time.monotonic()
        time.sleep(seconds)
        after = sum(self.read_bytes[drive] for drive in others)
        return (after - before) / (time.monotonic() - started)

    def begin(self, fault: str) -> None:
        if fault == "pulled":
            (self.folder / f"drive-{BAD}").rename(self.folder / "away")
        elif fault == "slowed":
            self.files.slow_down(str(self.folder / f"drive-{BAD}" / "kv"), SLOWER)
        else:
            self.files.writes_fail = errno.ENOSPC if fault == "filled" else errno.EIO
            self.files.reads_fail = 0 if fault == "filled" else errno.EIO

    def end(self, fault: str) -> None:
        if fault == "pulled":
            (self.folder / "away").rename(self.folder / f"drive-{BAD}")
        elif fault == "slowed":
            self.files.slow_down(str(self.folder / f"drive-{BAD}" / "kv"), 1.0)
        self.files.writes_fail = self.files.reads_fail = 0

    def is_up(self) -> bool:
        drive = self.store.stats()["tiers"][self.tier]["drives"][BAD]
        return bool(drive["healthy"]) and not drive["full"]

    def wait(self, up: bool, limit_s: float) -> float:
        started = time.monotonic()
        while self.is_up() != up and time.monotonic() - started < limit_s:
            time.sleep(0.01)
        return time.monotonic() - started if self.is_up() == up else float("nan")

    def round(self, fault: str) -> Round:
        window_s = WINDOW_S[fault]
        before = self.speed(window_s)
        noticed: list[float] = []
        look = threading.Thread(target=lambda: noticed.append(self.wait(False, window_s)))
        self.begin(fault)
        look.start()
        during = self.speed(window_s)
        look.join()
        self.end(fault)
        back = self.wait(True, 60.0)
        return Round(before, during, noticed[0], back)


@contextmanager
def world_of(folder: Path, tier: str) -> Iterator[World]:
    speed = BYTES_PER_S[tier]
    files = BadFiles(DriveModel(read_bandwidth=speed, write_bandwidth=4 * speed, seek=SEEK_S[tier]))
    paths = [folder / f"drive-{number}" / "kv" for number in range(DRIVES)]
    for path in paths:
        path.parent.mkdir(parents=True)
    table: dict[str, Any] = {
        "path": [str(path) for path in paths],
        "capacity": "1500MiB",
        "segment": "16MiB",
        "fsync": "never",
        "promote": False,
        "retry_initial": "200ms",
        "retry_max": "2s",
        **({"run": 4 * BLOCK_BYTES} if tier == "hdd" else {}),
    }
    tree = {"dram": {"capacity": "64MiB"}, tier: table, "writeback": {"staging": "64MiB"}}
    with assemble(load(overrides=tree), files=files) as store:
        layout = KVLayout.opaque(BLOCK_BYTES - 4096, 1, 1)
        world = World(folder, tier, files, store, store.namespace(model="faults", layout=layout))
        world.fill()
        yield world


def measure(tier: str, rounds: int, folder: Path) -> list[dict[str, Any]]:
    rows = []
    for fault in FAULTS:
        with world_of(folder / fault, tier) as world:
            with world.at_work():
                time.sleep(1.0)
                found = [world.round(fault) for _ in range(rounds)]
            world.wait(True, 60.0)
            checked = world.store.admin.check().ok
            rows.append(describe(tier, fault, found, world.problems, checked))
        shutil.rmtree(folder / fault)
        print_row(rows[-1])
    return rows


def describe(
    tier: str, fault: str, rounds: list[Round], problems: list[str], checked: bool
) -> dict[str, Any]:
    ratios = [one.ratio for one in rounds]
    return {
        "tier": tier,
        "fault": fault,
        "emulated": True,
        "others_ratio": median(ratios),
        "others_ratio_min": min(ratios),
        "others_ratio_max": max(ratios),
        "others_bytes_per_s": median(one.before_bytes_per_s for one in rounds),
        "noticed_s": [one.noticed_s for one in rounds],
        "back_s": [one.back_s for one in rounds],
        "problems": problems,
        "check_ok": checked,
        "rounds": [asdict(one) for one in rounds],
    }


def print_row(row: dict[str, Any]) -> None:
    cells = [
        row["tier"],
        row["fault"],
        f"{row['others_bytes_per_s'] / 1e6:.0f} MB/s",
        f"{row['others_ratio']:.3f}",
        f"{row['others_ratio_min']:.3f} – {row['others_ratio_max']:.3f}",
        f"{min(row['noticed_s']):.2f} – {max(row['noticed_s']):.2f} s",
        f"{min(row['back_s']):.2f} – {max(row['back_s']):.2f} s",
        len(row["problems"]),
        "clean" if row["check_ok"] else "NOT CLEAN",
    ]
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tier", choices=("ssd", "hdd"), required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print("| tier | fault | others | ratio | spread | noticed | back | problems | check |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="kvdepot-faults-") as folder:
        rows = measure(args.tier, args.rounds, Path(folder))
    if args.json:
        when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "date": when}
        args.json.write_text(json.dumps({"rows": rows, "machine": machine}, indent=1))


if __name__ == "__main__":
    main()
