"""What an idle daemon costs: `python benchmarks/idle_daemon.py --json`.

A daemon with a drive, HTTP and two attached clients that do not ask, after blocks were put and
read. Processor time of the whole process over rounds of some seconds, and its memory besides what
the clients map (the arena and staging, which are all of its shared memory). Bars: 0.5 % of a core,
60 MB. Exit status 1 if one is missed.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import kvdepot
from kvdepot.testing.daemons import DaemonProcess

CORE_SHARE = 0.005
MEMORY_BYTES = 60_000_000
SETTLE_S = 15.0
"""Write-back, threads without work and the first measurement of the drive end meanwhile."""
TOKENS, LAYERS = 16, 4
BLOCK_BYTES = LAYERS * 65536
BLOCKS = 64


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int) -> dict[str, int]:
    """Resident bytes of a process, by kind."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    facts = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    return {
        name: 1024 * int(facts[field][0])
        for name, field in (("own", "RssAnon"), ("files", "RssFile"), ("shared", "RssShmem"))
    }


def use(store: kvdepot.Depot) -> None:
    """Some blocks in and out."""
    layout = kvdepot.KVLayout.opaque(BLOCK_BYTES, TOKENS, LAYERS)
    keys = store.namespace(model="idle", layout=layout).keys(range(TOKENS * BLOCKS))
    store.put_many(keys, [bytes(BLOCK_BYTES)] * BLOCKS)
    store.flush()
    store.get_many(keys, [bytearray(BLOCK_BYTES) for _ in keys])


def measure(folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    settings = {
        "dram": {"capacity": "256MiB"},
        "ssd": {"path": str(folder / "kv"), "capacity": "1GiB"},
    }
    with (
        DaemonProcess(folder, settings, "--http", "127.0.0.1:0") as daemon,
        kvdepot.open(daemon.address) as one,
        kvdepot.open(daemon.address) as other,
    ):
        use(one)
        use(other)
        time.sleep(SETTLE_S)
        shares = []
        for _ in range(rounds):
            before, began_s = cpu_seconds(daemon.pid), time.monotonic()
            time.sleep(seconds)
            spent = cpu_seconds(daemon.pid) - before
            shares.append(spent / (time.monotonic() - began_s))
        memory = memory_bytes(daemon.pid)
    besides = memory["own"] + memory["files"]
    return {
        "core_share": statistics.median(shares),
        "core_share_min": min(shares),
        "core_share_max": max(shares),
        "core_share_bar": CORE_SHARE,
        "memory_bytes": besides,
        "memory_bar": MEMORY_BYTES,
        "memory": memory,
        "rounds": rounds,
        "seconds": seconds,
        "ok": statistics.median(shares) < CORE_SHARE and besides < MEMORY_BYTES,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0, help="of one round")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvdepot-idle-") as folder:
        found = measure(Path(folder), args.rounds, args.seconds)
    if args.json:
        print(json.dumps(found))
    else:
        share = f"{100 * found['core_share']:.2f} % of a core"
        spread = f"{100 * found['core_share_min']:.2f}–{100 * found['core_share_max']:.2f}"
        print(f"{share} ({spread}; bar {100 * CORE_SHARE})")
        memory = found["memory_bytes"] / 1e6
        print(f"{memory:.1f} MB besides its arena (bar {MEMORY_BYTES / 1e6:.0f})")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
