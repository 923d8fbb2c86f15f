"""Two drives of speeds 1 and 3 in one tier: where a prompt lies, and how long reading it takes.

    python benchmarks/drive_spread.py --json result.json

Emulated drives. The store measures them by itself (`profile = "always"`), or not ("never": then
each gets the same); nobody tells it how fast they are. The ideal is both busy until the end.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvdepot.config.settings import load
from kvdepot.core.layout import KVLayout
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.emulation import DriveModel, EmulatedFiles

FAST_BYTES_PER_S = 90_000_000
RATIO = 3.0
BLOCK_BYTES = 512 << 10
BLOCKS = 192
ROUNDS = 3


def opened(folder: Path, tier: str, profile: str) -> Store:
    speed = FAST_BYTES_PER_S
    seek = 0.004 if tier == "hdd" else 0.0
    model = DriveModel(read_bandwidth=speed, write_bandwidth=speed, seek=seek)
    files = EmulatedFiles(lambda _: model)
    files.slow_down(str(folder / "slow"), RATIO)
    table: dict[str, Any] = {
        "path": [str(folder / "slow"), str(folder / "fast")],
        "capacity": "2GiB",
        "segment": "64MiB",
        "fsync": "never",
        "promote": False,
        "read_timeout": "60s",
        "profile": profile,
        **({"run": 4 * BLOCK_BYTES} if tier == "hdd" else {}),
    }
    dram = {"capacity": "256MiB"}
    return assemble(load(overrides={"dram": dram, tier: table}), files=files)


def measure(folder: Path, tier: str, profile: str) -> dict[str, Any]:
    with opened(folder, tier, profile) as store:
        while profile == "always" and not all(profiles(store, tier)):
            time.sleep(0.05)
        found = profiles(store, tier)
        space = store.namespace(model="spread", layout=KVLayout.opaque(BLOCK_BYTES - 4096, 1, 1))
        rounds = [one_round(store, space.keys([n] * BLOCKS)) for n in range(ROUNDS)]
    best = min(rounds, key=lambda one: one["read_s"])
    return {
        "tier": tier,
        "profile": profile,
        "emulated": True,
        "measured_bytes_per_s": [one["read_bytes_per_s"] if one else None for one in found],
        "blocks": [one["blocks"] for one in rounds],
        "share": median(one["blocks"][1] / max(1, one["blocks"][0]) for one in rounds),
        "read_s": median(one["read_s"] for one in rounds),
        "read_s_min": best["read_s"],
        "read_s_max": max(one["read_s"] for one in rounds),
        "ideal_s": rounds[0]["ideal_s"],
    }


def profiles(store: Store, tier: str) -> list[dict[str, Any]]:
    """What the store has measured of each drive; empty until it has."""
    return [drive["profile"] or {} for drive in store.stats()["tiers"][tier]["drives"]]


def one_round(store: Store, keys: Any) -> dict[str, Any]:
    nbytes = BLOCK_BYTES - 4096
    payloads = [np.random.default_rng(n).bytes(nbytes) for n in range(8)]
    some = [payloads[n % 8] for n in range(len(keys))]
    for start in range(0, len(keys), 16):
        part = slice(start, start + 16)
        assert all(store.put_many(keys[part], some[part], timeout_s=60))
        while store.stats()["dirty_bytes"] > 32 << 20:
            time.sleep(0.01)
    while store.stats()["dirty_bytes"]:
        time.sleep(0.01)
    inside = store.inspect()
    volumes = inside.volumes_of(keys)
    blocks = [volumes.count(number) for number in (0, 1)]
    inside.drop_from_memory()
    targets = [bytearray(nbytes) for _ in keys]
    started = time.monotonic()
    answers = store.get_many(keys, targets, timeout_s=60)
    read_s = time.monotonic() - started
    assert all(answers) and [bytes(target) for target in targets] == some
    total = len(keys) * BLOCK_BYTES
    return {
        "blocks": blocks,
        "read_s": read_s,
        "ideal_s": total / (FAST_BYTES_PER_S * (1 + 1 / RATIO)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    print("| tier | profile | measured MB/s | blocks, fast : slow | read | spread | of the ideal |")
    print("|---|---|---|---|---|---|---|")
    for tier in ("hdd", "ssd"):
        for profile in ("always", "never"):
            with tempfile.TemporaryDirectory(prefix="kvdepot-spread-") as folder:
                row = measure(Path(folder), tier, profile)
            rows.append(row)
            speeds = [f"{one / 1e6:.0f}" if one else "–" for one in row["measured_bytes_per_s"]]
            print(
                f"| {tier} | {profile} | {speeds[0]} and {speeds[1]} | {row['share']:.2f} : 1 "
                f"| {row['read_s']:.2f} s | {row['read_s_min']:.2f} – {row['read_s_max']:.2f} s "
                f"| {row['ideal_s'] / row['read_s']:.2f} |",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
