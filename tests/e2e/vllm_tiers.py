"""kvdepot below vLLM's own CPU tier, for real: `python tests/e2e/vllm_tiers.py --json`.

Uses the environment of `tests/e2e/vllm_environments.py`, which is made when it is missing.
`contract` drives vLLM's tiering manager without a model; `restarts` asks a model before and after
`kill -9`; `times` compares first tokens from disk with vLLM's filesystem tier, both arms in turns
(8 minutes on two idle cores; computing the prompts takes three of them).
vLLM refuses tiers on a CPU: its worker is replaced by `tests/e2e/cpu_tiering_spec.py` here.
The last line with --json is `{"ok", "points"}`. Exit status 1 if a point fails.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e.e2e_points import Points, scratch
from tests.e2e.vllm_connector import find_model
from tests.e2e.vllm_environments import NEWEST, WITH_TIERS, python_with

ROOT = Path(__file__).resolve().parents[2]
NEAR = 1e-3
PAGE = 32
TOKENS = 600
TIMED_TOKENS = 6017
"""All but the last one are in whole chunks."""
TIMED_BYTES = 800_000_000
"""The size of vLLM's CPU tier: both prompts fit."""
BAR = 0.8
Seen = dict[str, Any]


@dataclass
class TierRun:
    """The folders and options of a run, and its findings."""

    python: Path
    model: Path
    folder: Path
    rounds: int
    points: Points
    _count: int = 0

    def scenario(self, name: str, depot: str, *more: str, killed: bool = False) -> Seen:
        """Run one of real_vllm_tier.py's; what it has seen."""
        self._count += 1
        out = self.folder / f"{name}-{self._count}.json"
        script = ROOT / "tests" / "e2e" / "real_vllm_tier.py"
        command = [str(self.python), str(script), name, "--model", str(self.model)]
        command += ["--depot", str(self.folder / depot), "--out", str(out), *more]
        command += ["--killed"] if killed else []
        (self.folder / depot).mkdir(exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        log = out.with_suffix(".log")
        with log.open("wb") as said:
            done = subprocess.run(
                command, env=environment, stdout=said, stderr=said, cwd=self.folder, check=False
            )
        if done.returncode != (-9 if killed else 0):
            tail = log.read_text(errors="replace")[-3000:]
            raise SystemExit(f"error: scenario {name} ended with {done.returncode}\n{tail}")
        seen: Seen = json.loads(out.read_text())
        return seen

    def ask(self, tier: str, *more: str, depot: str = "", killed: bool = False) -> list[Seen]:
        shown = ("--tier", tier, "--page", str(PAGE), *more)
        answers: list[Seen] = self.scenario("ask", depot or tier, *shown, killed=killed)["answers"]
        return answers

    def point(self, name: str, ok: bool, **figures: Any) -> None:
        self.points.add(name, ok, **figures)


def contract(run: TierRun) -> None:
    """The promises of vLLM's filesystem tier, and capacity, eviction, checksums, restart."""
    for name, seen in run.scenario("contract", "contract").items():
        run.point(f"contract: {name}", not seen["error"], **seen)


def restarts(run: TierRun) -> None:
    """The same answers without tiers, cold, and from disk after `kill -9`."""
    plain = run.ask("none")
    for name, wanted, killed in (("cold", 0, True), ("from disk after kill -9", 1, False)):
        answers = run.ask("kvdepot", killed=killed)
        cached = [one["cached"] for one in answers]
        full = [wanted * (TOKENS // PAGE * PAGE)] * len(plain)
        worst = max(
            abs(a - b)
            for one, other in zip(answers, plain, strict=True)
            for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
        )
        same = all(a["tokens"] == b["tokens"] for a, b in zip(answers, plain, strict=True))
        right = same and worst < NEAR and cached == full
        run.point(f"restarts: {name}", right, cached=cached, worst=worst)


def times(run: TierRun) -> None:
    """First token from disk in a new process, by vLLM's filesystem tier's, in turns."""
    sizes = ("--tokens", str(TIMED_TOKENS), "--cpu-bytes", str(TIMED_BYTES))
    more = (*sizes, "--prompts", "2", "--answer", "1")
    for tier in ("fs", "kvdepot"):
        run.ask(tier, *more, depot=f"times {tier}")
    seconds: dict[str, list[float]] = {"fs": [], "kvdepot": []}
    ratios = []
    full = TIMED_TOKENS // PAGE * PAGE
    hit = True
    for at in range(run.rounds):
        medians = {}
        for tier in ("fs", "kvdepot") if at % 2 else ("kvdepot", "fs"):
            answers = run.ask(tier, *more, depot=f"times {tier}")
            hit = hit and all(one["cached"] == full for one in answers)
            seconds[tier] += [one["seconds"] for one in answers]
            medians[tier] = statistics.median(one["seconds"] for one in answers)
        ratios.append(round(medians["kvdepot"] / medians["fs"], 3))
        print(f"times, round {at + 1} of {run.rounds}: {ratios[-1]}", file=sys.stderr)
    shown = {
        tier: [round(one, 3) for one in (min(all_s), statistics.median(all_s), max(all_s))]
        for tier, all_s in seconds.items()
    }
    ratio = statistics.median(seconds["kvdepot"]) / statistics.median(seconds["fs"])
    run.point("times: every full chunk is hit", hit)
    run.point(
        "times: by the fs tier",
        ratio <= BAR,
        ratio=round(ratio, 3),
        bar=BAR,
        by_round=ratios,
        load=os.getloadavg()[0],
        **shown,
    )


PARTS: dict[str, Callable[[TierRun], None]] = {
    part.__name__: part for part in (contract, restarts, times)
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--release", choices=WITH_TIERS, default=NEWEST, help="of vLLM")
    parser.add_argument("--python", type=Path, help="one that has vLLM")
    parser.add_argument("--model", type=Path, help="a model folder")
    parser.add_argument("--rounds", type=int, default=5, help="of paired measurements")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one")
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]!r} is not one of {', '.join(PARTS)}")
    try:
        python = args.python or python_with(args.release)
    except subprocess.CalledProcessError as error:
        print(f"error: vLLM cannot be installed: {error}")
        print("hint: a package index must be reachable, or give --python, one that has vLLM")
        return 2
    started = time.monotonic()
    with scratch(None, "kvdepot-tiers-", args.folder) as folder:
        run = TierRun(python, find_model(args.model), folder, args.rounds, Points(args.json))
        for name, part in PARTS.items():
            if not args.parts or name in args.parts:
                part(run)
    ok, seconds = run.points.ok, round(time.monotonic() - started)
    whole = {"ok": ok, "seconds": seconds, "points": run.points.found}
    print(json.dumps(whole) if args.json else f"{'ok' if ok else 'FAILED'} after {seconds} s")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
