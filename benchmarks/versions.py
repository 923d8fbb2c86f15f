"""Two checkouts in turns: is the newer one as fast? Compares rows of `kvdepot bench`.

    python benchmarks/versions.py /tmp/kvdepot-0.2.0 --rounds 7 [--bench store daemon] [--json]

The older checkout needs its C extension (`python setup.py build_ext --inplace`). Each round runs
every benchmark once with each checkout, the order turned round by round. A row's figure is the
median over the rounds of new bytes a second divided by old ones of the same round; exit status 1
if one is below 0.97. Run it on an idle machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
LEAST: Final = 0.97
OPTIONS: Final = {
    "store": ["--rounds", "3", "--size", "512MiB", "--block", "128KiB,1MiB,4MiB,32MiB"],
    "daemon": ["--rounds", "3"],
}
Row = tuple[str, ...]


def measure(checkout: Path, bench: str, path: str | None) -> dict[Row, float]:
    """Bytes a second by row of one run."""
    command = [sys.executable, "-m", "kvdepot", "bench", bench, "--json", *OPTIONS[bench]]
    done = subprocess.run(
        command + (["--path", path] if path else []),
        env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        cwd="/",
        stdout=subprocess.PIPE,
        check=True,
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return {
        (bench, row["tier"], row["op"], str(row["block_bytes"])): row["bytes_per_s"] for row in rows
    }


def compare(old: Path, benches: list[str], rounds: int, path: str | None) -> dict[Row, list[float]]:
    """For each row that both have, new by old in each round."""
    ratios: dict[Row, list[float]] = defaultdict(list)
    for number in range(rounds):
        for bench in benches:
            order = [old, ROOT] if number % 2 else [ROOT, old]
            print(f"round {number + 1} of {rounds}: {bench}", file=sys.stderr)
            speeds = {checkout: measure(checkout, bench, path) for checkout in order}
            for row, before in speeds[old].items():
                if before and row in speeds[ROOT]:
                    ratios[row].append(speeds[ROOT][row] / before)
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bench", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--path")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = compare(args.old.resolve(), args.bench, args.rounds, args.path)
    rows: list[dict[str, Any]] = [
        {
            "row": " ".join(row),
            "median": round(statistics.median(each), 3),
            "least": round(min(each), 3),
            "most": round(max(each), 3),
            "rounds": len(each),
        }
        for row, each in found.items()
    ]
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        for one in rows:
            mark = "" if one["median"] >= LEAST else f"  below {LEAST}"
            print(f"{one['row']:60} {one['median']:6} ({one['least']}–{one['most']}){mark}")
    return int(any(one["median"] < LEAST for one in rows))


if __name__ == "__main__":
    raise SystemExit(main())
