"""The audit of hits: what it finds, whether it cries wolf, and what it costs.

    python benchmarks/audit.py [--json] [--quick] [--part faults|alarms|cost]

faults   SmolLM2 through transformers, in float32 and bfloat16: for each fault of
         tests/support/wrong_producers.py the hits until it is found. Bar: 50. And 50 hits of what
         is right, each audited: no alarm, and the answers of the model alone.
alarms   hits of a stand-in engine whose numbers are right, with the noise that engines have: small
         layers of attention in numpy, whose sums are split at random and rounded to the dtype at
         every step. Every hit is audited. Bar: no alarm in 100,000.
cost     SmolLM2: 50 hits of a known prompt with an answer, with and without the audit, hit by hit
         in turn. Bar: 0.99 of the throughput without. 13 minutes on an idle machine.

Ends with {"ok", "points"}.
"""

import argparse
import itertools
import json
import logging
import os
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support import wrong_producers

import kvdepot
from kvdepot.adapters.audit import BlockAuditor, HitChooser
from kvdepot.adapters.hf import DepotModel, attach, smollm2
from kvdepot.config.settings import AuditConfig
from kvdepot.core.layout import KVLayout
from kvdepot.store.store import Store

HITS_MAX = 50
HITS = 100_000
COST_BAR = 0.99
AUDIT = AuditConfig(share=1 / HITS_MAX)
BLOCK = 32
WIDTH, HEADS, LAYERS = 64, 2, 3
"""Of the stand-in."""
_LOG = logging.getLogger("benchmarks.audit")


def depot() -> Store:
    return kvdepot.open(dram={"capacity": "512MiB", "huge_pages": "never", "prefault": False})


def smol(dtype: torch.dtype) -> Any:
    folder = smollm2.prepare(Path.home() / ".cache" / "kvdepot" / "models")
    kinds: Any = transformers.AutoModelForCausalLM
    model = kinds.from_pretrained(folder, local_files_only=True)
    return model.to(dtype).eval()


def prompt(tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1000, 40000, (1, tokens), generator=generator)


def ask(model: DepotModel, ids: torch.Tensor, answer: int) -> torch.Tensor:
    said: torch.Tensor = model.generate(
        ids, do_sample=False, max_new_tokens=answer, min_new_tokens=answer
    )
    model.flush()
    return said


def hits_until_found(model: Any, fault: str) -> int | None:
    """None: not within the bar."""
    ids = prompt(4 * BLOCK + 3, seed=1)
    with (
        depot() as store,
        attach(model, store, name="m", revision="1", block_tokens=BLOCK, audit=AUDIT) as served,
    ):
        (group,) = served._parts.binding.groups
        wrong = wrong_producers.FAULTS[fault](model, ids)
        wrong_producers.put(store, group.space, ids, wrong)
        for hit in range(1, HITS_MAX + 1):
            ask(served, ids, 1)
            if store.audits.list()["quarantined"]:
                return hit
    return None


def right_hits(model: Any) -> dict[str, Any]:
    """Hits of what the model itself has put, each audited."""
    ids = prompt(4 * BLOCK + 3, seed=1)
    wanted = model.generate(ids, do_sample=False, max_new_tokens=4, min_new_tokens=4)
    other = 0
    with (
        depot() as store,
        attach(model, store, block_tokens=BLOCK, audit=AuditConfig(share=1)) as served,
    ):
        for _ in range(HITS_MAX + 1):
            other += not torch.equal(ask(served, ids, 4), wanted)
        known = store.audits.list()
    return {"compared": known["compared"], "alarms": known["mismatched"], "other_answers": other}


def faults(quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    right: dict[str, Any] = {}
    for dtype in (torch.float32,) if quick else (torch.float32, torch.bfloat16):
        model = smol(dtype)
        name = str(dtype).removeprefix("torch.")
        found[name] = {fault: hits_until_found(model, fault) for fault in wrong_producers.FAULTS}
        right[name] = right_hits(model)
    ok = all(hits is not None for one in found.values() for hits in one.values())
    for name, one in right.items():
        ok = ok and one["compared"] == HITS_MAX and not one["alarms"]
        ok = ok and (name != "float32" or not one["other_answers"])
    facts = {"bar_hits": HITS_MAX, "model": smollm2.NAME, "emulated": ["fp8 scales lost"]}
    return {"ok": ok, **facts, "hits_until_found": found, "right": right}


class StandIn:
    """A few layers of attention. Each run sums in an order of its own, and rounds as the dtype
    does: K and V of the same tokens differ as they do between batches and kernels.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._chance = np.random.default_rng(11)
        size = (LAYERS, WIDTH, WIDTH)
        self._weights = {
            name: self._chance.standard_normal(size).astype(np.float32) / WIDTH**0.5
            for name in ("q", "k", "v", "o")
        }
        self._embedding = self._chance.standard_normal((1000, WIDTH)).astype(np.float32)

    def _round(self, array: Any) -> Any:
        if self._dtype == "float32":
            return array
        if self._dtype == "float16":
            return array.astype(np.float16).astype(np.float32)
        bits = array.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)

    def _times(self, left: Any, right: Any) -> Any:
        """A product whose sum is taken in parts, cut anywhere."""
        cuts = sorted(self._chance.integers(1, left.shape[-1], 2).tolist())
        spans = itertools.pairwise([0, *cuts, left.shape[-1]])
        parts = [self._round(left[..., a:b] @ right[..., a:b, :]) for a, b in spans if a < b]
        self._chance.shuffle(parts)
        total = parts[0]
        for part in parts[1:]:
            total = self._round(total + part)
        return total

    def run(self, tokens: Any) -> bytes:
        """K and V of all layers, as a block of float32 or of 16 bits."""
        state, out = self._embedding[tokens], []
        count = len(tokens)
        mask = np.triu(np.full((count, count), -np.inf, np.float32), 1)
        for layer in range(LAYERS):
            normal = self._round(state / np.sqrt((state**2).mean(axis=1, keepdims=True) + 1e-6))
            q, k, v = (self._times(normal, self._weights[name][layer]) for name in "qkv")
            out += [k, v]
            heads = [part.reshape(count, HEADS, -1).transpose(1, 0, 2) for part in (q, k, v)]
            scores = self._times(heads[0], heads[1].transpose(0, 2, 1)) / (WIDTH / HEADS) ** 0.5
            shares = np.exp(scores + mask - scores.max(axis=2, keepdims=True))
            shares = self._round(shares / shares.sum(axis=2, keepdims=True))
            mixed = self._times(shares, heads[2]).transpose(1, 0, 2).reshape(count, WIDTH)
            state = self._round(state + self._times(mixed, self._weights["o"][layer]))
        numbers = np.stack(out)
        if self._dtype == "float32":
            return numbers.tobytes()
        if self._dtype == "float16":
            return numbers.astype(np.float16).tobytes()
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def alarms(hits: int) -> dict[str, Any]:
    """`hits` over all dtypes together, each audited."""
    found = {}
    dtypes: tuple[Any, ...] = ("float32", "float16", "bfloat16")
    for dtype in dtypes:
        engine = StandIn(dtype)
        layout = KVLayout.gqa(
            layers=LAYERS,
            kv_heads=HEADS,
            head_dim=WIDTH // HEADS,
            dtype=dtype,
            block_tokens=BLOCK,
        )
        config = AuditConfig(share=1)
        chooser = HitChooser(config)
        with depot() as store:
            space = store.namespace(model="stand-in", layout=layout)
            auditor = BlockAuditor(store, config, "stand-in", _LOG)
            chance = np.random.default_rng(5)
            prompts = [chance.integers(0, 1000, BLOCK) for _ in range(200)]
            for tokens in prompts:
                store.put_many([space.keys(tokens)[0]], [engine.run(tokens)])[0]
            for number in range(-(-hits // len(dtypes))):
                tokens = prompts[number % len(prompts)]
                (key,) = space.keys(tokens)
                if chooser.choose(key, busy=False):
                    auditor.check(key, engine.run(tokens), layout)
            known = store.audits.list()
            found[dtype] = {name: known[name] for name in ("compared", "mismatched")}
    compared = sum(one["compared"] for one in found.values())
    mismatched = sum(one["mismatched"] for one in found.values())
    return {
        "ok": compared >= hits and not mismatched,
        "engine": "stand-in",
        "hits": compared,
        "alarms": mismatched,
        "by_dtype": found,
    }


def cost(rounds: int, hits: int, answer: int) -> dict[str, Any]:
    """Each round has a depot of its own, and `hits` in each arm; the arms take turns."""
    model = smol(torch.float32)
    ids = prompt(20 * BLOCK + 3, seed=2)
    ratios: list[float] = []
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for turn in range(rounds):
        with (
            depot() as audited,
            depot() as plain,
            attach(model, audited, block_tokens=BLOCK, audit=AUDIT) as one,
            attach(model, plain, block_tokens=BLOCK, audit=AuditConfig(share=0)) as other,
        ):
            arms = {"with": one, "without": other}
            for served in arms.values():
                ask(served, ids, answer)
            spent = dict.fromkeys(arms, 0.0)
            for hit in range(hits):
                for arm in sorted(arms, reverse=bool((turn + hit) % 2)):
                    started = time.perf_counter()
                    ask(arms[arm], ids, answer)
                    spent[arm] += time.perf_counter() - started
            assert audited.audits.list()["compared"] == -(-hits // HITS_MAX)
            assert plain.audits.list()["compared"] == 0
        for arm in arms:
            seconds[arm].append(round(spent[arm], 3))
        ratios.append(spent["without"] / spent["with"])
        print(f"cost, round {turn + 1} of {rounds}: {ratios[-1]:.4f}", file=sys.stderr)
    return {
        "ok": statistics.median(ratios) >= COST_BAR,
        "bar": COST_BAR,
        "throughput_ratio": round(statistics.median(ratios), 4),
        "ratios": [round(one, 4) for one in sorted(ratios)],
        "seconds": seconds,
        "hits": hits,
        "prompt_tokens": ids.shape[1],
        "answer_tokens": answer,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument("--quick", action="store_true", help="float32, 3,000 hits, one round")
    parser.add_argument("--part", choices=("faults", "alarms", "cost"), action="append")
    args = parser.parse_args()
    logging.disable(logging.ERROR)
    points: dict[str, Any] = {}
    for part in args.part or ("faults", "alarms", "cost"):
        if part == "faults":
            points[part] = faults(args.quick)
        elif part == "alarms":
            points[part] = alarms(3000 if args.quick else HITS)
        else:
            points[part] = cost(*((1, 10, 8) if args.quick else (5, HITS_MAX, 16)))
    result = {
        "ok": all(one["ok"] for one in points.values()),
        "points": points,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cpus, {platform.release()}, load {os.getloadavg()[0]:.1f}",
    }
    if args.json:
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        for name, point in points.items():
            print(f"{'ok  ' if point['ok'] else 'MISS'} {name}: {json.dumps(point)}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
