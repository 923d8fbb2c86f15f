"""The GPU path: the bus, the time to the first token, and what the model notices of a transfer.

Needs CUDA, torch, triton and transformers, and nothing else:

    PYTHONPATH=src python -m kvdepot.native.build
    PYTHONPATH=src python benchmarks/gpu.py --path /tmp/kv-bench --json gpu.json --markdown gpu.md

Every ratio is of two things measured in the same run, in turns; the spread is over rounds.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvdepot
from kvdepot.adapters.tensors import KVTensors, open_mover
from kvdepot.bench.raw import filled
from kvdepot.io.files import Files, io_ops
from kvdepot.native import NAME, READ, address_of

LAYERS, HEADS, DIM = 32, 8, 128
PAGE, PAGES_PER_BLOCK = 16, 16
BLOCK_TOKENS = PAGE * PAGES_PER_BLOCK
PROMPT_TOKENS = 21_000
BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
DEVICE = torch.device("cuda")


@dataclass
class Ratio:
    """One comparison: seconds of ours and of the limit, round by round."""

    what: str
    bar: str
    own_s: list[float] = field(default_factory=list)
    limit_s: list[float] = field(default_factory=list)
    nbytes: int = 0
    faster_is_more: bool = True
    """The ratio is a share of the limit's speed; else it is own time / limit's time."""

    def values(self) -> list[float]:
        pairs = zip(self.own_s, self.limit_s, strict=True)
        return [limit / own if self.faster_is_more else own / limit for own, limit in pairs]

    def line(self) -> list[str]:
        values = self.values()
        own, limit = statistics.median(self.own_s), statistics.median(self.limit_s)
        rate = f"{self.nbytes / own / 1e9:.1f} of {self.nbytes / limit / 1e9:.1f} GB/s"
        times = f"{own * 1e3:.1f} against {limit * 1e3:.1f} ms"
        return [
            self.what,
            f"{statistics.median(values):.3f}",
            f"{min(values):.3f}–{max(values):.3f}",
            self.bar,
            rate if self.nbytes and self.faster_is_more else times,
        ]


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def seconds(work: Callable[[], object], *, settled: bool = True) -> float:
    """How long it takes; `settled`: until nothing is under way on the device any more."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if settled:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def alternate(
    ratio: Ratio,
    own: Callable[[], object],
    limit: Callable[[], object],
    rounds: int,
    *,
    settled: bool = True,
    before: Callable[[], object] = torch.cuda.synchronize,
) -> None:
    """`before` each run, so that both find the device in the same state: an idle one is slower."""
    for _ in range(3):
        own()
        limit()
    for number in range(rounds):
        for which in ("own", "limit") if number % 2 else ("limit", "own"):
            before()
            taken = seconds(own if which == "own" else limit, settled=settled)
            (ratio.own_s if which == "own" else ratio.limit_s).append(taken)
    say(" | ".join(ratio.line()))


def settle(store: kvdepot.Store) -> None:
    """Wait until the memory has been touched, which goes on behind an open store."""
    store.inspect().wait_for_prefault()


def layout() -> kvdepot.KVLayout:
    return kvdepot.KVLayout.gqa(
        layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="bfloat16", block_tokens=BLOCK_TOKENS
    )


def bus(rounds: int) -> list[Ratio]:
    """Scattered 16-token pages of 32 layers to and from the arena, beside a plain copy."""
    pages = 2 * BLOCKS * PAGES_PER_BLOCK
    caches = [
        torch.randn(2, pages, PAGE, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
        for _ in range(LAYERS)
    ]
    tensors = KVTensors([tuple(cache) for cache in caches], "page token head dim")
    chosen = np.random.default_rng(7).permutation(pages)[: BLOCKS * PAGES_PER_BLOCK]
    pieces = [tensors.pages(part) for part in np.split(chosen, BLOCKS)]
    with kvdepot.open(dram="8GiB") as store, open_mover(lambda: store.memory, DEVICE) as mover:
        settle(store)
        keys = store.namespace(model="bus", layout=layout()).keys(range(PROMPT_TOKENS))
        nbytes = BLOCKS * layout().block_bytes
        with store.reserve(keys) as slots:
            views = [view for view in map(slots.view, range(BLOCKS)) if view is not None]
            assert len(views) == BLOCKS
            flat = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
            host = torch.frombuffer(store.memory[0], dtype=torch.uint8)[:nbytes]
            assert host.is_pinned()
            mover.offload(pieces, views).wait()
            before = [cache[:, chosen].clone() for cache in caches]
            for cache in caches:
                cache.zero_()
            mover.onboard(views, pieces).synchronize()
            for cache, old in zip(caches, before, strict=True):
                assert torch.equal(cache[:, chosen], old), "a round trip changed bytes"
            del before
            down = Ratio("pages to arena / plain copy", "≥ 0.95", nbytes=nbytes)
            alternate(
                down,
                lambda: mover.offload(pieces, views).wait(),
                lambda: host.copy_(flat, non_blocking=True),
                rounds,
            )
            up = Ratio("arena to pages / plain copy", "≥ 0.95", nbytes=nbytes)
            alternate(
                up,
                lambda: mover.onboard(views, pieces).synchronize(),
                lambda: flat.copy_(host, non_blocking=True),
                rounds,
            )
    return [down, up]


def llama() -> LlamaForCausalLM:
    """The shape of Llama-3.1-8B with random weights."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=HEADS,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        torch_dtype="bfloat16",
    )
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with DEVICE:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def first_token(model: Any, ids: torch.Tensor) -> int:
    """The token itself, on the host."""
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=1,
            do_sample=False,
            pad_token_id=0,
        )
    return int(made[0, -1])


@contextmanager
def depot(path: Path) -> Iterator[kvdepot.Store]:
    ssd = {"path": str(path), "capacity": "24GiB", "read_timeout": "60s"}
    with kvdepot.open(dram="8GiB", ssd=ssd) as store:
        settle(store)
        yield store


def raw_read(path: Path, nbytes: int) -> Callable[[], None]:
    """Direct reads of the store's own files by the native engine, in pieces as large as a block."""
    files = Files("auto", depth=32)
    memory = filled(nbytes + (64 << 20), huge=True)
    at, _ = address_of(memory)
    piece = layout().block_bytes
    places = []
    for name in sorted(path.glob("segment-*.kvs")):
        fd = os.open(name, os.O_RDONLY | os.O_DIRECT)
        places += [(fd, offset) for offset in range(0, name.stat().st_size - piece, piece)]
    places = places[: nbytes // piece]
    assert len(places) == nbytes // piece

    def read(owner: object = memory) -> None:
        for start in range(0, len(places), 2):
            ops = io_ops(len(places[start : start + 2]))
            ops["opcode"] = READ
            for index, (fd, offset) in enumerate(places[start : start + 2]):
                ops["fd"][index], ops["offset"][index] = fd, offset
                ops["address"][index] = at + (start + index) * piece
                ops["nbytes"][index] = piece
            assert files.run(ops, 60.0) is None
            assert not ops["result"].any(), ops["result"]

    return read


def ttft(path: Path, rounds: int) -> tuple[list[Ratio], list[str]]:
    """The first token of a 21,000-token prompt: recomputed, from DRAM, from disk."""
    from kvdepot.adapters.hf import attach

    notes = []
    model = llama()
    chance = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 128000, (1, PROMPT_TOKENS), generator=chance).to(DEVICE)
    nbytes = BLOCKS * layout().block_bytes
    expected = first_token(model, ids)
    memory = Ratio("first token from DRAM / recompute", "≤ 0.10", faster_is_more=False)
    miss = Ratio("first token of a miss / recompute", "–", faster_is_more=False)
    with depot(path) as store:
        served = attach(model, store, revision="bench", block_tokens=BLOCK_TOKENS)
        assert first_token(served, ids) == expected
        served.flush()
        assert store.flush(timeout_s=300.0).complete
        alternate(
            memory,
            lambda: first_token(served, ids),
            lambda: first_token(model, ids),
            rounds,
            settled=False,
            before=lambda: first_token(model, ids),
        )
        assert first_token(served, ids) == expected
        notes.append(f"DRAM: {served.last}")
        others = iter(torch.randint(0, 128000, (rounds + 1, 1, PROMPT_TOKENS), generator=chance))

        def unseen() -> None:
            first_token(served, next(others).to(DEVICE))
            notes.append(f"miss: {served.last}")
            # The offload goes on behind the first token; the next round must not wait for it.

        for _ in range(min(rounds, 4)):
            first_token(model, ids)
            miss.own_s.append(seconds(unseen, settled=False))
            served.flush()
            assert store.flush(timeout_s=300.0).complete
            first_token(model, ids)
            miss.limit_s.append(seconds(lambda: first_token(model, ids), settled=False))
        say(" | ".join(miss.line()))
        assert store.flush(timeout_s=300.0).complete
        served.close()
    disk = Ratio("first token from disk / raw read", "≤ 1.15", faster_is_more=False, nbytes=nbytes)
    raw = raw_read(path, nbytes)
    for _ in range(min(rounds, 6)):
        with depot(path) as store:
            served = attach(model, store, revision="bench", block_tokens=BLOCK_TOKENS)
            disk.limit_s.append(seconds(raw))
            torch.cuda.synchronize()
            started = time.perf_counter()
            made = first_token(served, ids)
            disk.own_s.append(time.perf_counter() - started)
            assert made == expected
            notes.append(f"disk: {served.last}")
            served.close()
    say(" | ".join(disk.line()))
    return [memory, miss, disk], notes


def slowdown(path: Path, rounds: int) -> list[Ratio]:
    """Matrix products while blocks come from disk, beside the same without."""
    left = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    right = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)

    def work() -> None:
        for _ in range(700):
            torch.mm(left, right)

    shape = (2, BLOCKS * PAGES_PER_BLOCK, PAGE, HEADS, DIM)
    targets = [torch.empty(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(LAYERS)]
    tensors = KVTensors([tuple(target) for target in targets], "page token head dim")
    pages = np.split(np.arange(BLOCKS * PAGES_PER_BLOCK), BLOCKS)
    pieces = [tensors.pages(part) for part in pages]
    ratio = Ratio("matrix products beside reads from disk / alone", "≤ 1.03", faster_is_more=False)
    ssd = {"path": str(path), "capacity": "24GiB", "read_timeout": "60s"}
    with (
        kvdepot.open(dram="256MiB", ssd=ssd) as store,
        open_mover(lambda: store.memory, DEVICE) as mover,
    ):
        space = store.namespace(model="slow", layout=layout())
        keys = space.keys(range(PROMPT_TOKENS))
        source = np.zeros(layout().block_bytes, dtype=np.uint8)
        for key in keys:
            assert store.put_many([key], [source], timeout_s=60.0)[0]
        assert store.flush(timeout_s=300.0).complete
        moved = 0
        stop = threading.Event()

        def sink(arrivals: list[Any]) -> None:
            nonlocal moved
            views = [arrival.view for arrival in arrivals]
            mover.onboard(views, [pieces[arrival.index] for arrival in arrivals]).synchronize()
            moved += sum(map(len, views))
            if stop.is_set():
                raise InterruptedError

        def traffic() -> None:
            while not stop.is_set():
                with store.lease(keys) as lease:
                    try:
                        lease.deliver(sink, timeout_s=60.0)
                    except InterruptedError:
                        return

        work()
        started, busy_s = 0, 0.0
        for _ in range(rounds):
            ratio.limit_s.append(seconds(work))
            stop.clear()
            thread = threading.Thread(target=traffic)
            thread.start()
            while moved == started:
                time.sleep(0.01)
            before = moved
            ratio.own_s.append(own := seconds(work))
            busy_s += own
            started += moved - before
            stop.set()
            thread.join()
            started = moved
        say(" | ".join(ratio.line()))
    return [ratio]


def machine() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "native": NAME,
        "date": time.strftime("%Y-%m-%d"),
        "command": "PYTHONPATH=src python " + " ".join(sys.argv),
    }


def markdown(ratios: list[Ratio], facts: dict[str, str]) -> str:
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| what | median | min–max | bar | |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(ratio.line()) + " |" for ratio in ratios]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, default=Path("/tmp/kvdepot-gpu-bench"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", nargs="+", default=["bus", "ttft", "slowdown"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        say("error: no CUDA device")
        return 2
    shutil.rmtree(args.path, ignore_errors=True)
    args.path.mkdir(parents=True)
    ratios: list[Ratio] = []
    notes: list[str] = []
    if "bus" in args.parts:
        ratios += bus(args.rounds)
    if "ttft" in args.parts:
        more, notes = ttft(args.path / "ttft", args.rounds)
        ratios += more
    if "slowdown" in args.parts:
        ratios += slowdown(args.path / "slowdown", args.rounds)
    facts = machine()
    say(markdown(ratios, facts))
    for note in notes:
        say(note)
    if args.markdown:
        args.markdown.write_text(markdown(ratios, facts))
    if args.json:
        rows = [{**asdict(ratio), "ratios": ratio.values()} for ratio in ratios]
        args.json.write_text(json.dumps({"machine": facts, "rows": rows, "notes": notes}, indent=1))
    shutil.rmtree(args.path, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
