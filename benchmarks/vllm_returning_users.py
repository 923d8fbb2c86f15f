"""Users who come back to a real vLLM: plain, vLLM's OffloadingConnector, kvdepot; wall times.

Needs vLLM 0.32 in the Python that runs it, CUDA, and room for the working set at `--place`:

    PYTHONPATH=src python -m kvdepot.native.build
    PYTHONPATH=src python benchmarks/vllm_returning_users.py --place /tmp/kv --json out.json

An 8B shape with random weights and room for 60,000 tokens on the GPU. 60 users come with prompts of
10,000 tokens, of which all share the first half; then each comes again, in another order, with
1,500 tokens more (the answer of the first time is not part of that); 8 prompts are in flight. The
connectors have 24 GiB of memory, which is half of what the users bring; kvdepot has a disk behind.
`--users 40` takes two thirds of memory and disk for the same shares: memory is given by user, the
GPU's room is not. `--memory-share 1.1` has the whole working set in memory. Each arm is one
process; all are started at once and asked one after the other, `--order` says how. `--eager` starts
in half the time, but its steps wait for the processor, which makes all arms slower and the disk's
part larger. On a processor: `--dry-run`, a tiny model, only to see that it runs.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from vllm_gpu import Engine, depot, say

ARMS = ("plain", "offloading", "kvdepot")
BARS = (
    ("second turns: wall time of kvdepot / plain", "wall_s", "plain", 0.60),
    ("second turns: wall time of kvdepot / OffloadingConnector", "wall_s", "offloading", 0.70),
    ("first visits: p95 of the first token of kvdepot / plain", "first_p95_s", "plain", 1.02),
)
TOKEN_BYTES = {"8b": 32 * 2 * 8 * 128 * 2, "tiny": 4 * 2 * 2 * 64 * 2}


class Load:
    """Who asks what, in which order."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.users = args.users
        half = args.prompt // 2
        self._pieces = [[[1, half], [100 + user, args.prompt - half]] for user in range(self.users)]
        self._more = args.more
        self.tokens = half + self.users * (args.prompt - half + args.more)

    def first(self) -> list[list[list[int]]]:
        return list(self._pieces)

    def second(self, seed: int) -> list[list[list[int]]]:
        order = random.Random(seed).sample(range(self.users), self.users)
        return [[*self._pieces[user], [10_000 + user, self._more]] for user in order]


def opened(args: argparse.Namespace, load: Load) -> dict[str, Engine]:
    """All arms, ready."""
    token_bytes = TOKEN_BYTES[args.shape]
    memory = int(load.tokens * token_bytes * args.memory_share)
    extra = depot(args.place / "depot", dram=f"{memory >> 20}MiB", block_tokens=args.block_tokens)
    extra["ssd"]["capacity"] = f"{(load.tokens * token_bytes * 11 // 10 >> 20) + 1024}MiB"
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "offloading": {"connector": "vllm", "extra": {"cpu_bytes_to_use": memory}},
        "kvdepot": {"connector": "kvdepot", "extra": extra},
    }
    engines = {name: Engine(name, args.place) for name in args.order}
    for name, engine in engines.items():
        more: dict[str, Any] = {} if args.dry_run else {"gpu_memory_utilization": 0.3}
        engine.open(
            args.shape,
            enforce_eager=args.eager,
            max_model_len=2 * args.prompt,
            max_num_batched_tokens=min(8192, 2 * args.prompt),
            kv_cache_memory_bytes=args.gpu_tokens * token_bytes,
            **settings[name],
            **more,
        )
    for engine in engines.values():
        say(f"{engine.name}: open in {engine.end()['seconds']:.0f} s")
    return engines


def measure(args: argparse.Namespace, load: Load, engine: Engine) -> dict[str, Any]:
    how = {"in_flight": args.in_flight, "answer": args.answer}
    engine.do("serve", asked=[[[7, args.prompt]], [[8, args.prompt // 2]]], **how)  # awake
    first = engine.do("serve", asked=load.first(), **how)
    say(f"{engine.name}: first visits in {first['seconds']:.1f} s")
    notes: dict[str, Any] = {}
    if engine.name == "kvdepot":
        notes = {"flush": engine.do("flush"), "first": engine.do("figures")}
    second = engine.do("serve", asked=load.second(args.seed), **how)
    say(f"{engine.name}: second turns in {second['seconds']:.1f} s")
    if engine.name == "kvdepot":
        notes["second"] = engine.do("figures")
    return {
        "first_wall_s": first["seconds"],
        "wall_s": second["seconds"],
        "first_p95_s": quantile(first["first_token_s"]),
        "second_p95_s": quantile(second["first_token_s"]),
        "second_mean_s": statistics.mean(second["first_token_s"]),
        "second_cached": sum(second["cached"]),
        "notes": notes,
        "raw": {"first": first, "second": second},
    }


def quantile(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1] if len(values) > 1 else values[0]


def report(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of arms that were both measured."""
    rows = []
    for what, field, other, bar in BARS:
        if "kvdepot" in found and other in found:
            ratio = found["kvdepot"][field] / found[other][field]
            rows.append({"what": what, "ratio": ratio, "bar": bar, "ok": ratio <= bar})
    return rows


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--place", type=Path, default=Path("/tmp/kvdepot-returning-users"))
    parser.add_argument("--order", nargs="+", default=list(ARMS), choices=ARMS, help="of the arms")
    parser.add_argument("--users", type=int, default=60)
    parser.add_argument("--prompt", type=int, default=10_000, help="tokens, the first half shared")
    parser.add_argument("--more", type=int, default=1_500, help="tokens of the second turn")
    parser.add_argument("--answer", type=int, default=16, help="tokens")
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--memory-share", type=float, default=0.5, help="of the working set")
    parser.add_argument("--gpu-tokens", type=int, default=60_000)
    parser.add_argument("--block-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1, help="of the order of the second turns")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: a faster start")
    parser.add_argument("--dry-run", action="store_true", help="tiny, for a machine without a GPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.shape = "8b"
    if args.dry_run:
        args.shape, args.users, args.prompt, args.more = "tiny", 6, 640, 128
        args.gpu_tokens, args.block_tokens = 4096, 128
    return args


def main() -> int:
    args = parsed()
    load = Load(args)
    needed = load.tokens * TOKEN_BYTES[args.shape] * 5 // 4
    shutil.rmtree(args.place, ignore_errors=True)
    args.place.mkdir(parents=True)
    free = shutil.disk_usage(args.place).free
    if free < needed and "kvdepot" in args.order:
        sys.stderr.write(
            f"error: {args.place} has {free >> 30} GiB, {needed >> 30} GiB are needed\n"
            f"hint: --users {max(1, args.users * free // needed - 1)}\n"
        )
        return 2
    facts = {name: value for name, value in vars(args).items() if name not in ("place", "json")}
    facts |= {"working_set_tokens": load.tokens, "date": time.strftime("%Y-%m-%d")}
    say(json.dumps(facts))
    found: dict[str, dict[str, Any]] = {}
    failed = ""
    try:
        for name, engine in opened(args, load).items():
            found[name] = measure(args, load, engine)
            engine.kill()
            if args.json:
                told = {"settings": facts, "rows": report(found), "arms": found}
                args.json.write_text(json.dumps(told, indent=1))
    except (RuntimeError, BrokenPipeError, KeyError) as error:
        failed = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"error: {failed}\nhint: see the logs in {args.place}\n")
    finally:
        Engine.kill_all()
    for name, arm in found.items():
        figures = ", ".join(
            f"{field} {arm[field]:.3f}" for field in arm if isinstance(arm[field], float)
        )
        sys.stdout.write(f"{name}: {figures}, cached {arm['second_cached']:,}\n")
    for row in report(found):
        met = "met" if row["ok"] else "MISSED"
        sys.stdout.write(f"{row['what']}: {row['ratio']:.3f} (≤ {row['bar']}, {met})\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
