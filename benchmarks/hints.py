"""What a hint is worth: a session on an emulated hard drive is fetched with and without one.

Each round fetches one session for every lead: the seconds between the hint and the request, which
a request would spend in an engine's queue. The drive is a file of this machine, delayed as a hard
drive would be; every block is compared with what was put.

    python benchmarks/hints.py [--json] [--rounds N] [--path FOLDER]
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from kvdepot.core.block import BlockKey
from kvdepot.core.layout import KVLayout
from kvdepot.core.units import format_bytes
from kvdepot.store.store import Store
from kvdepot.testing.emulation import DriveModel, open_emulated

BLOCK_BYTES = 1 << 20
BLOCK_TOKENS = 16
DRIVE = DriveModel(read_bandwidth=275 * 10**6, write_bandwidth=275 * 10**6, seek=0.0125)
LEADS_S = (0.0, 0.1, 0.25, 0.5, 1.0)
"""The first is without a hint."""
DRAM_BYTES = 1 << 30


def opened(folder: Path, models: dict[str, DriveModel], **hdd: Any) -> Store:
    return open_emulated(
        models,
        dram={"capacity": DRAM_BYTES, "prefault": True},
        ssd={"path": str(folder / "ssd"), "capacity": "4GiB"},
        hdd={"path": str(folder / "hdd"), "capacity": "8GiB", "segment": "256MiB", **hdd},
    )


def session(store: Store, number: int, blocks: int) -> list[BlockKey]:
    space = store.namespace(model="hints", layout=KVLayout.opaque(BLOCK_BYTES, BLOCK_TOKENS))
    return space.keys([number, *range(1, BLOCK_TOKENS * blocks)])


def payload(key: BlockKey) -> bytes:
    return key * (BLOCK_BYTES // len(key))


def fill(folder: Path, sessions: int, blocks: int) -> None:
    """Sessions on the hard drive only, which is not slowed down for it."""
    with opened(folder, {}, write_mode="pass-through") as store:
        for number in range(sessions):
            keys = session(store, number, blocks)
            assert all(store.put_many(keys, [payload(key) for key in keys], timeout_s=60.0))
            assert store.flush(60.0).complete


def fetch(store: Store, keys: list[BlockKey], lead_s: float) -> dict[str, Any]:
    """Hint, wait as in a queue, get."""
    targets = [bytearray(BLOCK_BYTES) for _ in keys]
    hint = store.prefetch(keys, 30.0) if lead_s else None
    time.sleep(lead_s)
    started = time.perf_counter()
    answers = store.get_many(keys, targets, timeout_s=60.0)
    spent_s = time.perf_counter() - started
    if hint is not None:
        hint.wait(30.0)
    wrong = sum(bytes(target) != payload(key) for key, target in zip(keys, targets, strict=True))
    tiers = Counter(answer.tier or answer.reason for answer in answers)
    return {"seconds": spent_s, "tiers": dict(tiers), "wrong": wrong}


def measure(folder: Path, rounds: int, blocks: int) -> dict[str, list[dict[str, Any]]]:
    last = rounds * len(LEADS_S)
    fill(folder, last + 1, blocks)
    found: dict[str, list[dict[str, Any]]] = {str(lead_s): [] for lead_s in LEADS_S}
    with opened(folder, {"hdd": DRIVE}) as store:
        fetch(store, session(store, last, blocks), 0.0)  # memory is touched, files are open
        store.flush(60.0)
        number = 0
        for turn in range(rounds):
            for lead_s in LEADS_S if turn % 2 else LEADS_S[::-1]:
                keys = session(store, number, blocks)
                found[str(lead_s)].append(fetch(store, keys, lead_s))
                store.flush(60.0)
                number += 1
        assert store.admin.check(deep=False)
    return found


def summary(rounds: list[dict[str, Any]], blocks: int) -> dict[str, Any]:
    seconds = [one["seconds"] for one in rounds]
    tiers: Counter[str] = Counter()
    for one in rounds:
        tiers.update(one["tiers"])
    return {
        "median_s": statistics.median(seconds),
        "seconds": seconds,
        "min_s": min(seconds),
        "max_s": max(seconds),
        "share_by_tier": {tier: n / (blocks * len(rounds)) for tier, n in sorted(tiers.items())},
        "wrong": sum(one["wrong"] for one in rounds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=128, help="of 1 MiB, in a session")
    parser.add_argument("--path", type=Path, help="where the drives' files lie")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvdepot-hints-", dir=args.path))
    try:
        found = measure(folder, args.rounds, args.blocks)
    finally:
        shutil.rmtree(folder)
    leads = {lead: summary(rounds, args.blocks) for lead, rounds in found.items()}
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cpus, {platform.release()}, load {os.getloadavg()[0]:.1f}",
        "numpy": np.__version__,
        "session_bytes": args.blocks * BLOCK_BYTES,
        "rounds": args.rounds,
        "drive": asdict(DRIVE),
        "emulated": True,
        "drive_s": args.blocks * BLOCK_BYTES / 275e6,
        "get_by_lead_s": leads,
    }
    if args.json:
        json.dump(result, sys.stdout, indent=2)
        print()
        return 0
    print(f"{args.blocks} MiB on one hard drive (emulated: {format_bytes(DRIVE.read_bandwidth)}/s)")
    print(f"{'hint before':>12}  {'get, median':>12}  {'range':>16}  from")
    for lead, one in leads.items():
        share = ", ".join(f"{tier} {part:.0%}" for tier, part in one["share_by_tier"].items())
        name = "none" if lead == "0.0" else f"{lead} s"
        spread = f"{one['min_s']:.3f} to {one['max_s']:.3f}"
        print(f"{name:>12}  {one['median_s']:>10.3f} s  {spread:>16}  {share}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
