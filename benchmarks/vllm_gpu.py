"""kvdepot under a real vLLM on a GPU: the same answers, and how fast.

Needs CUDA and vLLM 0.32 in the Python that runs it, room for 30 GiB at `--place`, 60 GiB of memory:

    PYTHONPATH=src python -m kvdepot.native.build
    PYTHONPATH=src python benchmarks/vllm_gpu.py --place /tmp/kv --json out.json --markdown out.md

Models have random weights, seeded. Every vLLM runs in a process of its own (`vllm_gpu_engine.py`),
its log in `--place`; those that are compared run side by side and are asked in turns. Parts:

    same     tokens and log-probabilities beside vLLM's own prefix hit: attention backends, eager
             and CUDA graphs, bf16 and fp8 KV; from memory, from disk in a new process, with garbage
    models   the same for models with several kinds of KV: windows, Mamba2 hybrids, MLA; and the
             room that vLLM has for KV with us and without
    memory   the first token of 21,000, 8B shape: from our memory, vLLM's OffloadingConnector,
             vLLM's own prefix hit, computed
    verified the first token from our memory, verified beside the copy and not verified, in turns
    restarts the daemon of one engine is killed and restarted while it answers: what fails, and when
             there are hits again
    decode   how long sequences decode while their KV is offloaded, and while it is not
    disk     the first token from disk, beside raw reads of the same bytes; `--decide off` (all is
             fetched; the default), `on` (what is expected to be faster) or `both`
    decide   the same with `decide` on, beside the recompute
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).resolve().parent
PROMPT = 21_000
BLOCK_TOKENS = 256
HIT = PROMPT // BLOCK_TOKENS * BLOCK_TOKENS
TOKEN_BYTES = 32 * 2 * 8 * 128 * 2
SHORT = 6 * BLOCK_TOKENS + 5
PARTS = ["same", "models", "memory", "verified", "restarts", "decode", "disk", "decide"]
SPEED = {"memory", "decode", "disk", "decide"}
KINDS = [
    (backend, eager, kv)
    for backend in ("FLASH_ATTN", "TRITON_ATTN")
    for eager in (True, False)
    for kv in ("auto", "fp8")
]


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


class Engine:
    """A vLLM process. `begin` and `end` are the halves of `do`, for several at a time."""

    living: ClassVar[list["Engine"]] = []

    def __init__(self, name: str, place: Path) -> None:
        self.name = name
        self._place = place
        self._log = (place / f"{name}.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "vllm_gpu_engine.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        Engine.living.append(self)

    def begin(self, what: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, arguments]) + "\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return dict(answer)

    def do(self, what: str, **arguments: Any) -> dict[str, Any]:
        self.begin(what, **arguments)
        return self.end()

    def open(self, shape: str, **settings: Any) -> None:
        self.begin("open", shape=shape, place=str(self._place), **settings)

    def ask(self, seed: int, tokens: int = PROMPT, answer: int = 1) -> dict[str, Any]:
        return self.do("ask", seed=seed, tokens=tokens, answer=answer)

    def again(self, seed: int, tokens: int = PROMPT, answer: int = 1) -> dict[str, Any]:
        """Ask without vLLM's own prefix cache."""
        assert self.do("forget")["forgot"]
        return self.ask(seed, tokens, answer)

    def kill(self) -> None:
        """As `kill -9` does: nothing is said good-bye to."""
        self._process.kill()
        self._process.wait()
        Engine.living.remove(self)

    @classmethod
    def kill_all(cls) -> None:
        for engine in list(cls.living):
            engine.kill()


class Rows:
    """What was measured against which bar; `save` is called with every row."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.save: Callable[[], None] = lambda: None

    def add(self, what: str, values: Sequence[float], bar: str, ok: bool, **more: Any) -> None:
        row = {"what": what, "median": statistics.median(values), "min": min(values)}
        row |= {"max": max(values), "bar": bar, "ok": ok, **more}
        self.rows.append(row)
        say(line(row))
        self.save()


def line(row: dict[str, Any]) -> str:
    spread = f"{row['min']:.3f}–{row['max']:.3f}"
    met = "met" if row["ok"] else "MISSED"
    return " | ".join([row["what"], f"{row['median']:.3f}", spread, row["bar"], met])


def middle(answers: Sequence[dict[str, Any]]) -> float:
    return float(statistics.median(answer["seconds"] for answer in answers))


def ratios(own: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> list[float]:
    return [a["seconds"] / b["seconds"] for a, b in zip(own, other, strict=True)]


def worst(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> tuple[bool, float]:
    """Whether all tokens are the same, and the largest difference of log-probabilities."""
    same = all(a["tokens"] == b["tokens"] for a, b in zip(found, wanted, strict=True))
    pairs = [
        abs(x - y)
        for a, b in zip(found, wanted, strict=True)
        for x, y in zip(a["logprobs"], b["logprobs"], strict=True)
    ]
    return same, max(pairs)


def depot(path: Path, **more: Any) -> dict[str, Any]:
    ssd = {"path": str(path), "capacity": "40GiB"}
    ssd |= {"read_timeout": "60s", "write_timeout": "60s"}
    return {"ssd": ssd, "load_timeout": "60s", "speeds": str(path.parent / "speeds"), **more}


# ---- the same answers


def same(args: argparse.Namespace, rows: Rows, notes: dict[str, Any]) -> None:
    kinds = [(*kind, tokens) for kind in KINDS for tokens in (0, BLOCK_TOKENS)]
    kinds = [kind for kind in kinds if not kind[3] or kind[:3] == KINDS[0]]
    kinds = kinds[:2] if args.quick else kinds
    say(f"same: {len(kinds)} engines, then {len(kinds)} more on their depots")
    first = _tiny(args.place, "write", kinds)
    wanted, found = {}, {}
    for kind, engine in first.items():
        cold = [engine.ask(seed, SHORT, 16) for seed in (1, 2, 3)]
        wanted[kind] = [engine.ask(seed, SHORT, 16) for seed in (1, 2, 3)]
        found[kind] = [engine.again(seed, SHORT, 16) for seed in (1, 2, 3)]
        _judge(rows, kind, "from memory", found[kind], wanted[kind], engine, "dram")
        notes[f"same {_name(kind)} cold"] = worst(cold, wanted[kind])
        assert engine.do("flush")["flushed"]
        engine.kill()
    for kind, engine in _tiny(args.place, "read", kinds).items():
        found[kind] = [engine.ask(seed, SHORT, 16) for seed in (1, 2, 3)]
        _judge(rows, kind, "from disk, new process", found[kind], wanted[kind], engine, "ssd")
        engine.do("garbage")
        found[kind] = [engine.again(seed, SHORT, 16) for seed in (1, 2, 3)]
        same, difference = worst(found[kind], wanted[kind])
        what = f"{_name(kind)}: control with garbage, log-probability"
        rows.add(what, [difference], "other tokens", not same)
        engine.kill()


MODELS = ["gemma3", "nemotron_h", "falcon_h1", "deepseek"]
LONG = 3000


def models(args: argparse.Namespace, rows: Rows, notes: dict[str, Any]) -> None:
    """Each beside vLLM's own prefix hit: from memory, from disk after a kill, with garbage."""

    def attempt(shape: str) -> None:
        try:
            _try_model(args.place, shape, rows, notes)
        except (RuntimeError, AssertionError) as error:
            rows.add(f"{shape}: {type(error).__name__}: {error}", [0.0], "runs", ok=False)

    with ThreadPoolExecutor() as pool:  # a start takes a minute, and the models are small
        list(pool.map(attempt, args.models))


def _try_model(place: Path, shape: str, rows: Rows, notes: dict[str, Any]) -> None:
    plain, own = Engine(f"{shape}-plain", place), Engine(f"{shape}-own", place)
    again = Engine(f"{shape}-again", place)
    extra = depot(place / f"depot-{shape}", dram="256MiB", decide=False)
    _open_model(plain, shape)
    _open_model(own, shape, connector="kvdepot", extra=extra)
    without, with_us = plain.end() and plain.do("space"), own.end() and own.do("space")
    plain.kill()
    share = with_us["blocks"] / without["blocks"]
    rows.add(f"{shape}: room for KV, with us / without", [share], "0.99", share >= 0.99, **with_us)
    for seed in (1, 2, 3):
        own.ask(seed, LONG, 16)
    wanted = [own.ask(seed, LONG, 16) for seed in (1, 2, 3)]
    found = [own.again(seed, LONG, 16) for seed in (1, 2, 3)]
    _judge_model(rows, f"{shape}: from memory", found, wanted)
    notes[f"{shape} counts"] = own.do("figures")
    assert own.do("flush")["flushed"]
    own.kill()
    _open_model(again, shape, connector="kvdepot", extra=extra)
    again.end()
    found = [again.ask(seed, LONG, 16) for seed in (1, 2, 3)]
    _judge_model(rows, f"{shape}: from disk, new process", found, wanted)
    again.do("saves", on=False)
    for kind in again.do("kinds")["kinds"]:
        again.do("garbage", kind=kind)
        found = [again.again(seed, LONG, 16) for seed in (1, 2, 3)]
        same, difference = worst(found, wanted)
        what = f"{shape}: control with garbage in groups of kind {kind}"
        rows.add(what, [difference], "other tokens", not same)
    again.kill()


def _open_model(engine: Engine, shape: str, **settings: Any) -> None:
    engine.open(
        shape,
        enforce_eager=True,
        max_model_len=8192,
        kv_cache_memory_bytes=2 << 30,
        gpu_memory_utilization=0.05,
        **settings,
    )


def _judge_model(rows: Rows, what: str, found: Any, wanted: Any) -> None:
    same, difference = worst(found, wanted)
    cached = [answer["cached"] for answer in found]
    local = [answer["cached"] for answer in wanted]
    ok = same and difference == 0 and cached == local and min(cached) > 0
    rows.add(
        f"{what}, log-probability", [difference], "as vLLM's hit", ok, cached=cached, local=local
    )


def _tiny(place: Path, name: str, kinds: Sequence[Any]) -> dict[Any, Engine]:
    engines = {kind: Engine(f"{name} {_name(kind)}".replace(" ", "-"), place) for kind in kinds}
    for (backend, eager, kv, tokens), engine in engines.items():
        path = place / f"depot-{_name((backend, eager, kv, tokens))}".replace(" ", "-")
        engine.open(
            "tiny",
            connector="kvdepot",
            extra=depot(path, dram="256MiB", block_tokens=tokens),
            attention_backend=backend,
            enforce_eager=eager,
            kv_cache_dtype=kv,
            max_model_len=4096,
            kv_cache_memory_bytes=1 << 30,
            gpu_memory_utilization=0.03,
        )
    for engine in engines.values():
        say(f"{engine.name}: open in {engine.end()['seconds']:.0f} s")
    return engines


def _name(kind: Sequence[Any]) -> str:
    backend, eager, kv, tokens = kind
    words = [backend, "eager" if eager else "graphs", "bf16" if kv == "auto" else kv]
    return " ".join([*words, *([str(tokens)] if tokens else [])])


def _judge(
    rows: Rows, kind: Any, where: str, found: Any, wanted: Any, engine: Engine, tier: str
) -> None:
    """Equal to vLLM's own hit, and really fetched."""
    same, difference = worst(found, wanted)
    cached = [answer["cached"] for answer in found]
    blocks = engine.do("figures").get(f"loaded_blocks:{tier}", 0)
    ok = same and difference == 0 and cached == [SHORT - 5] * 3 and blocks > 0
    what = f"{_name(kind)}: {where}, log-probability"
    rows.add(what, [difference], "same tokens, 0", ok, cached=cached, blocks=blocks)


# ---- speed


class Bench:
    """The engines of the speed parts, opened when they are needed, imported before."""

    def __init__(self, args: argparse.Namespace, names: Sequence[str]) -> None:
        self.args = args
        self.engines = {name: Engine(name, args.place) for name in names}

    def begin(self, name: str, **settings: Any) -> Engine:
        engine = self.engines[name]
        engine.open(
            "8b",
            enforce_eager=self.args.eager,
            max_model_len=32768,
            max_num_batched_tokens=16384,
            kv_cache_memory_bytes=12 << 30,
            gpu_memory_utilization=0.2,
            **settings,
        )
        return engine

    def ours(self, name: str, **more: Any) -> Engine:
        args = self.args
        more |= {"dram": args.dram, "block_tokens": args.block_tokens}
        extra = depot(args.place / "depot-8b", **more)
        return self.begin(name, connector="kvdepot", extra=extra)


def ready(*engines: Engine) -> None:
    for engine in engines:
        say(f"{engine.name}: open in {engine.end()['seconds']:.0f} s")


def verified(args: argparse.Namespace, rows: Rows, notes: dict[str, Any]) -> None:
    """One engine, asked in turns; three series, of which each has a median of its pairs."""
    bench = Bench(args, ("verified",))
    extra = {"dram": args.dram, "block_tokens": args.block_tokens, "decide": False}
    engine = bench.begin("verified", connector="kvdepot", extra={"load_timeout": "60s", **extra})
    ready(engine)
    for seed in (1, 900):
        engine.again(seed)
    engine.do("flush")
    for series in range(3):
        seen: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        loads: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(-2, args.rounds):
            for on in (True, False) if turn % 2 else (False, True):
                engine.do("verify", on=on)
                engine.ask(1)  # the device is awake
                engine.do("figures")
                answer = engine.again(1)
                assert answer["cached"] == HIT, answer["cached"]
                if turn >= 0:
                    seen[on].append(answer)
                    loads[on].append(engine.do("figures")["load_seconds:dram"])
        found = ratios(seen[True], seen[False])
        notes[f"verified {series}"] = {"seen": seen, "loads": loads}
        rows.add(
            "first token from memory, verified / not verified",
            found,
            "≤ 1.03",
            statistics.median(found) <= 1.03,
            seconds={str(on): middle(all_) for on, all_ in seen.items()},
            load_seconds={str(on): statistics.median(all_) for on, all_ in loads.items()},
        )


def restarts(args: argparse.Namespace, rows: Rows, notes: dict[str, Any]) -> None:
    """kill -9 at different moments of a request; requests go on all the while.

    The depot is in memory alone: the new daemon has nothing, so the first request after it is
    computed and saved, and a later one is a hit.
    """
    from kvdepot.testing.daemons import DaemonProcess

    seen: list[dict[str, Any]] = []
    with DaemonProcess(args.place, {"dram": args.dram}) as daemon:
        bench = Bench(args, ("restarts",))
        extra = {"socket": str(daemon.socket), "daemon": "never", "decide": False}
        extra |= {"block_tokens": args.block_tokens, "load_timeout": "10s"}
        engine = bench.begin("restarts", connector="kvdepot", extra=extra)
        ready(engine)
        wanted = engine.again(1)
        assert engine.again(1)["cached"] == HIT
        before = engine.do("locked")
        for turn in range(args.rounds):
            engine.do("forget")
            engine.begin("ask", seed=1, tokens=PROMPT, answer=8)
            time.sleep(0.02 * turn)
            daemon.kill()
            answers = [engine.end()]
            answers.append(engine.again(1))
            started = time.monotonic()
            daemon.start()
            ready_s = time.monotonic() - started
            while answers[-1]["cached"] != HIT and time.monotonic() < started + 60:
                answers.append(engine.again(1))
                if answers[-1]["cached"] != HIT:
                    engine.ask(1000 + len(seen), 3000)  # saved, or left out: never an error
            hits_s = time.monotonic() - started
            fine = all(one["tokens"][:1] == wanted["tokens"][:1] for one in answers)
            locked = engine.do("locked")
            seen.append({"ready_s": ready_s, "hits_s": hits_s, "fine": fine, "locked": locked})
            seen[-1]["cached"] = [one["cached"] for one in answers]
            say(str(seen[-1]))
    notes["restarts"] = {"before": before, "seen": seen}
    rows.add(
        "daemon killed and restarted: seconds from its start to a whole hit",
        [one["hits_s"] for one in seen],
        "≤ 10, the same first tokens",
        all(one["fine"] and one["hits_s"] <= 10 for one in seen),
    )
    for what in ("locked", "rss", "arenas"):
        found = [one["locked"][what] / before[what] for one in seen]
        texts = {"locked": "page-locked bytes", "rss": "resident memory", "arenas": "mapped arenas"}
        rows.add(f"{texts[what]} after / before", found, "≤ 1.02", max(found) <= 1.02)


def speed(args: argparse.Namespace, rows: Rows, notes: dict[str, Any]) -> None:
    ways = [way for way in ("on", "off") if args.decide in (way, "both")]
    reading = [f"disk-decide-{way}" for way in ways]
    bench = Bench(args, ("plain", "kvdepot", "offloading", "new plain", "decide", *reading))
    plain, depots = bench.begin("plain"), bench.ours("kvdepot")
    space = {"cpu_bytes_to_use": 16 << 30}
    vllm = bench.begin("offloading", connector="vllm", extra=space)
    ready(plain, depots, vllm)
    depots.do("saves", on=False)
    for engine in (plain, depots, vllm):
        engine.ask(900)
        engine.again(901)
    depots.do("saves", on=True)
    if "memory" in args.parts:
        memory(args, rows, notes, plain, depots, vllm)
    for seed in range(1, args.prompts + 1):
        depots.again(seed)
        notes[f"flush {seed}"] = depots.do("flush")
        say(f"flush {notes[f'flush {seed}']}")
    notes["writer"] = depots.do("figures")
    depots.kill()
    if "decide" in args.parts:
        new = bench.begin("new plain")
        decide(args, rows, notes, plain, new, bench.ours("decide", decide=True))
    if "disk" in args.parts or "decode" in args.parts:
        for way, name in zip(ways, reading, strict=True):
            engine = bench.ours(name, decide=way == "on")
            ready(engine)
            if "disk" in args.parts:
                disk(args, rows, notes, engine, way)
            if way != ways[-1]:
                engine.kill()
        if "decode" in args.parts:
            decode(args, rows, notes, {"plain": plain, "vllm": vllm, "none": engine})


def memory(
    args: argparse.Namespace,
    rows: Rows,
    notes: dict[str, Any],
    plain: Engine,
    depots: Engine,
    vllm: Engine,
) -> None:
    cold = [engine.again(1) for engine in (depots, vllm)]
    notes["memory cold"] = [answer["seconds"] for answer in cold]
    depots.do("flush")
    seen: dict[str, list[dict[str, Any]]] = {"kvdepot": [], "vllm": [], "local": [], "computed": []}
    loads = []
    for turn in range(args.rounds):
        seen["computed"].append(plain.again(1))
        seen["local"].append(plain.ask(1))
        depots.do("figures")
        pair = [("kvdepot", depots), ("vllm", vllm)]
        for name, engine in pair if turn % 2 else pair[::-1]:
            engine.ask(1)  # both find the device awake
            seen[name].append(engine.again(1))
        loads.append(depots.do("figures").get("load_seconds:dram"))
    notes["memory"] = {**{name: [a["seconds"] for a in all_] for name, all_ in seen.items()}}
    notes["memory load seconds"] = loads
    hits = {name: sorted({a["cached"] for a in all_}) for name, all_ in seen.items()}
    own, other = middle(seen["kvdepot"]), middle(seen["vllm"])
    rows.add(
        "first token from our memory / from vLLM's OffloadingConnector",
        ratios(seen["kvdepot"], seen["vllm"]),
        "≤ 1.0",
        own <= other,
        seconds={name: middle(all_) for name, all_ in seen.items()},
        hits=hits,
    )
    rows.add(
        "first token from our memory / computed",
        (found := ratios(seen["kvdepot"], seen["computed"])),
        "≤ 0.10",
        statistics.median(found) <= 0.10,
    )


def decode(
    args: argparse.Namespace, rows: Rows, notes: dict[str, Any], engines: dict[str, Engine]
) -> None:
    """8 sequences of 3,000 tokens, 256 more each; their prompts are offloaded meanwhile."""
    work = {"sequences": 8, "tokens": 3000, "answer": 256}
    engines = {**engines, "offload": engines["none"]}
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for turn in range(-1, args.rounds):
        # Each comes after another process: what was done before may leave the device slower.
        order = ["plain", "offload", "vllm", "none"]
        names = order[turn % 4 :] + order[: turn % 4]
        for number, name in enumerate(names):
            engine, ours = engines[name], name in ("none", "offload")
            if ours:
                engine.do("saves", on=name == "offload")
            engine.do("forget")
            answer = engine.do("decode", seed=100 + 4 * turn + number, **work)
            steps = sorted(answer.pop("steps"))
            answer |= {"step_s": statistics.median(steps), "longest_s": steps[-4:]}
            answer["clocks"] = clocks()
            if ours:
                answer["flush"] = engine.do("flush")
            if turn >= 0:
                seen[name].append({**answer, "seconds": answer["decode_s"]})
    notes["decode"] = seen
    texts = {"plain": "plain vLLM", "none": "kvdepot that saves nothing"}
    for other, text in texts.items():
        found = ratios(seen["offload"], seen[other])
        what = f"decode while offloading / {text}"
        rows.add(what, found, "≤ 1.01", statistics.median(found) <= 1.01)
    found = ratios(seen["vllm"], seen["plain"])
    rows.add("decode with vLLM's OffloadingConnector / plain vLLM", found, "–", True)


def clocks() -> str:
    """The device's clocks and why they are what they are; empty where nobody tells."""
    asked = "clocks.sm,clocks.mem,power.draw,clocks_event_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    except OSError:
        return ""


def disk(
    args: argparse.Namespace, rows: Rows, notes: dict[str, Any], engine: Engine, way: str
) -> None:
    """Each prompt once: what was read lies in memory afterwards. `way`: `decide` is on or off."""
    nbytes = HIT * TOKEN_BYTES
    raw = raw_reads(args.place / "depot-8b", nbytes)
    engine.ask(903, 3000)
    engine.do("figures")
    answers, raws, seen = [], [], []
    for seed in range(1, args.prompts + 1):
        # Whoever comes second may find the bytes in the host's memory: by turns.
        if seed % 2:
            raws.append({"seconds": raw(seed - 1)})
        answers.append(engine.again(seed))
        if not seed % 2:
            raws.append({"seconds": raw(seed - 1)})
        seen.append(engine.do("figures"))
    notes[f"disk, decide {way}"] = {"first token": answers, "raw": raws, "figures": seen}
    whole = [at for at, answer in enumerate(answers) if answer["cached"] == HIT]
    fetched = f"{len(whole)} of {len(answers)} fetched whole"
    loads = [{"seconds": seen[at]["load_seconds:ssd"]} for at in whole]
    if loads:
        shares = [1 / ratio for ratio in ratios(loads, [raws[at] for at in whole])]
        rows.add(
            f"rate of a load from disk / raw reads of the same bytes, decide {way}, {fetched}",
            shares,
            "≥ 0.9",
            statistics.median(shares) >= 0.9 and (way == "on" or len(whole) == len(answers)),
            rate=nbytes / middle(loads) / 1e9,
            raw=nbytes / middle(raws) / 1e9,
        )
    rows.add(
        f"first token of prompts on disk / raw reads, decide {way}, {fetched}",
        ratios(answers, raws),
        "–",
        way == "on" or len(whole) == len(answers),
    )


def raw_reads(path: Path, nbytes: int) -> Callable[[int], float]:
    """Direct reads of the depot's own files by the native engine, a part of `nbytes` at a time."""
    from kvdepot.bench.raw import filled
    from kvdepot.io.files import Files, io_ops
    from kvdepot.native import READ, address_of

    files = Files("auto", depth=32)
    piece = 16 << 20
    memory = filled(nbytes + (64 << 20), huge=True)
    at, _ = address_of(memory)
    places = []
    for name in sorted(path.glob("segment-*.kvs")):
        fd = os.open(name, os.O_RDONLY | os.O_DIRECT)
        places += [(fd, offset) for offset in range(0, name.stat().st_size - piece + 1, piece)]
    count = nbytes // piece

    def read(part: int, owner: object = memory) -> float:
        start = part * count % (len(places) - count)
        ops = io_ops(count)
        ops["opcode"], ops["nbytes"] = READ, piece
        for index, (fd, offset) in enumerate(places[start : start + count]):
            ops["fd"][index], ops["offset"][index] = fd, offset
            ops["address"][index] = at + index * piece
        started = time.perf_counter()
        assert files.run(ops, 120.0) is None
        assert not ops["result"].any(), ops["result"]
        return time.perf_counter() - started

    return read


def decide(
    args: argparse.Namespace,
    rows: Rows,
    notes: dict[str, Any],
    plain: Engine,
    new: Engine,
    engine: Engine,
) -> None:
    """A new process that has measured nothing yet; prompts on disk, then again. Its first request
    is compared with the first one of `new`, a plain vLLM: that takes longer than later ones.
    """
    ready(new, engine)
    first = new.again(1)
    new.kill()
    own, other, figures = [], [], []
    for turn in range(3 * args.prompts):
        seed = turn % args.prompts + 1
        other.append(plain.again(seed))
        own.append(engine.again(seed))
        figures.append(engine.do("figures"))
    notes["decide"] = {"own": own, "computed": other, "new": first, "figures": figures}
    limit = middle(other)
    found = [answer["seconds"] / limit for answer in own]
    cached = [answer["cached"] for answer in own]
    ratio = own[0]["seconds"] / first["seconds"]
    what = "first token with `decide`, the very first request / that of a new plain vLLM"
    rows.add(what, [ratio], "≤ 1.05", ratio <= 1.05, computed=found[0])
    what = "first token with `decide` / computed, all later requests, the worst counts"
    rows.add(what, found[1:], "≤ 1.05", max(found[1:]) <= 1.05, cached=cached, each=found)
    engine.kill()


def machine() -> dict[str, str]:
    import torch

    from kvdepot.native import NAME

    return {
        "gpu": torch.cuda.get_device_name(),
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
        "vllm": "0.32.0",
        "python": platform.python_version(),
        "kernel": platform.release(),
        "native": NAME,
        "date": time.strftime("%Y-%m-%d"),
        "command": "PYTHONPATH=src python " + " ".join(sys.argv),
    }


def markdown(rows: Rows, facts: dict[str, str]) -> str:
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| what | median | min–max | bar | |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {line(row)} |" for row in rows.rows)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--place", type=Path, default=Path("/tmp/kvdepot-vllm-gpu"))
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4, help="of the parts disk and decide")
    parser.add_argument(
        "--decide", choices=["on", "off", "both"], default="off", help="of the part disk"
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs in the speed parts")
    parser.add_argument("--dram", default="8GiB")
    parser.add_argument("--block-tokens", type=int, default=BLOCK_TOKENS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--quick", action="store_true", help="a look: few kinds, few rounds")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.prompts, args.eager = 2, 2, True
    shutil.rmtree(args.place, ignore_errors=True)
    args.place.mkdir(parents=True)
    rows, notes, facts = Rows(), dict[str, Any](), machine()
    failed = ""

    def save() -> None:
        if args.markdown:
            args.markdown.write_text(markdown(rows, facts))
        if args.json:
            told = {"machine": facts, "rows": rows.rows, "notes": notes, "error": failed}
            args.json.write_text(json.dumps(told, indent=1))

    rows.save = save
    asked = set(args.parts)
    parts = (
        (same, "same" in asked),
        (models, "models" in asked),
        (verified, "verified" in asked),
        (restarts, "restarts" in asked),
        (speed, asked & SPEED),
    )
    for part, wanted in parts:
        try:
            if wanted:
                part(args, rows, notes)
        except (RuntimeError, AssertionError, KeyError, BrokenPipeError) as error:
            failed += f"{part.__name__}: {type(error).__name__}: {error}\n"
            say(f"error: {failed}hint: see the logs in {args.place}")
        finally:
            Engine.kill_all()
    save()
    sys.stdout.write(markdown(rows, facts))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
