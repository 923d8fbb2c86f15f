"""kvdepot before a real llama-server: `python tests/e2e/llama_proxy.py --json`.

Prints one line for each point of what must hold, and at the end all of them as `{"ok", "points"}`;
exit status 1 if one fails. Stages may be named: tokens, audit, crowd, kills, misses, speed.
The last two measure: their verdicts are for an idle machine.

Where tokens are compared each is computed by itself (n_ubatch=1): llama.cpp's results depend on how
many tokens it computes at once, with or without a cache.
"""

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e.e2e_points import Points, scratch
from tests.support.llama_library import LlamaContext
from tests.support.llama_server import LlamaServer, ask
from tests.support.swapped_payloads import keys_in, swap_payloads
from tests.support.waiting import eventually

import kvdepot
from kvdepot.adapters.hf import smollm2
from kvdepot.adapters.llama_cpp import SequenceCache
from kvdepot.config.settings import AuditConfig
from kvdepot.store.store import Store

SENTENCE = "The lighthouse keeper counts ships, gulls and storms, and writes them into a book. "
ALONE = {"n_ctx": 4096, "n_ubatch": 1, "n_parallel": 4}
QUESTIONS = [f"Question {at}: what is written on page {at * 37 % 101}?" for at in range(20)]
MEMORY = Path("/dev/shm")
BESIDE = 0.02
"""What a miss may take beside the computation, by all that it takes without the proxy."""
FAILED = (urllib.error.URLError, OSError, ValueError)
"""How a request ends when its server dies."""


class Proxy:
    """`kvdepot proxy llama-server` as a process."""

    def __init__(self, upstream: str, slots: Path, disk: Path, *more: str) -> None:
        command = [sys.executable, "-m", "kvdepot", "proxy", "llama-server", "--json"]
        command += ["--upstream", upstream, "--listen", ":0", "--slots", str(slots)]
        command += ["--set", "dram.capacity=512MiB", "--set", f"ssd.path={disk}"]
        command += ["--set", "ssd.capacity=1GiB", *more]
        self._log = (slots / "proxy.log").open("ab")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log)
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["url"]

    def status(self) -> Any:
        return ask(self.url, "/kvdepot/status")

    def until_ready(self) -> None:
        if not eventually(lambda: bool(self.status()["ready"])):
            raise SystemExit(f"error: not ready: {self.status()['reason']}")

    def until_stored(self, blocks: int) -> None:
        if not eventually(lambda: self.status()["stored_blocks"] >= blocks):
            raise SystemExit(f"error: {blocks} blocks were not stored: {self.status()}")

    def until_saved(self, slots: int) -> None:
        if not eventually(lambda: self.status()["saved_slots"] >= slots):
            raise SystemExit(f"error: {slots} slots were not saved: {self.status()}")

    def until_audited(self, blocks: int) -> None:
        if not eventually(lambda: self.status()["audited_blocks"] >= blocks):
            raise SystemExit(f"error: {blocks} blocks were not audited: {self.status()}")

    def end(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()


@dataclass
class Run:
    """Where everything is, and what was found."""

    folder: Path
    slots: Path
    """In memory, as the guide has it."""
    points: Points
    tokens: int
    rounds: int
    model: Path = field(default_factory=smollm2.gguf_file)

    @property
    def restarts(self) -> int:
        """Of the stage speed: each is a start of the server."""
        return max(3, self.rounds // 3)

    def server(self, **params: object) -> LlamaServer:
        return LlamaServer(self.model, self.slots, **params)

    def point(self, name: str, ok: bool, **figures: Any) -> None:
        self.points.add(name, ok, **figures)


def answer(url: str, text: str, count: int = 6) -> tuple[str, int]:
    """The answer, and the number of prompt tokens that were not computed."""
    body = {"prompt": text, "max_tokens": count, "temperature": 0}
    found = ask(url, "/v1/completions", body, 600.0)
    return found["choices"][0]["text"], found["timings"]["cache_n"]


def tokens(run: Run) -> None:
    """Greedy tokens with and without: cold, warm, after restarts of both, f16 and q8_0."""
    prompt = SENTENCE * 3 + "What does he count?"
    for kind in ("f16", "q8_0"):
        params = {**ALONE, "cache_type_k": kind, "cache_type_v": kind}
        disk = run.folder / f"depot-{kind}"
        with run.server(**params) as server:
            without = answer(server.url, prompt)[0]
            proxy = Proxy(server.url, run.slots, disk)
            proxy.until_ready()
            cold = answer(proxy.url, prompt)
            run.point(f"{kind}: cold", cold == (without, 0), cached=cold[1])
            proxy.until_stored(1)
            warm = answer(proxy.url, prompt)
            run.point(f"{kind}: warm", warm[0] == without and warm[1] > 0, cached=warm[1])
            server.kill()
            with run.server(**params, port=server.port):
                proxy.until_ready()
                found = answer(proxy.url, prompt)
                right = found[0] == without and found[1] >= 32
                run.point(f"{kind}: after a restart of the server", right, cached=found[1])
            proxy.end()
        with run.server(**params) as server:
            proxy = Proxy(server.url, run.slots, disk)
            proxy.until_ready()
            found = answer(proxy.url, prompt)
            right = found[0] == without and found[1] >= 32
            run.point(f"{kind}: from disk, after restarts of both", right, cached=found[1])
            proxy.end()


def audit(run: Run) -> None:
    """Every hit is computed again: no alarm; then blocks in the wrong place are found."""
    for kind in ("f16", "q8_0"):
        audited_server(run, kind)
    audited_sequences(run)


def audited_server(run: Run, kind: str) -> None:
    prompts = [f"Story {at}. " + SENTENCE * 4 + "What does he count?" for at in range(3)]
    params = {**ALONE, "n_parallel": 1, "cache_type_k": kind, "cache_type_v": kind}
    disk, rounds, name = run.folder / f"depot-audit-{kind}", 4, f"audit, {kind}"
    with run.server(**params) as server:
        wanted = [answer(server.url, prompt)[0] for prompt in prompts]
        proxy = Proxy(server.url, run.slots, disk, "--audit", "1")
        proxy.until_ready()
        for at, prompt in enumerate(prompts):
            answer(proxy.url, prompt)
            proxy.until_saved(at + 1)
        hits = wrong = cached = 0
        for prompt, text in list(zip(prompts, wanted, strict=True)) * rounds:
            found = answer(proxy.url, prompt)
            hits, wrong, cached = hits + 1, wrong + (found[0] != text), cached + found[1]
            proxy.until_audited(hits)
        status = proxy.status()
        alarms = status["mismatched_blocks"]
        run.point(f"{name}: no alarm", status["audited_blocks"] == hits and not alarms, hits=hits)
        run.point(f"{name}: the same answers", not wrong and cached > 0, cached=cached)
        proxy.end()
    with depot_at(disk) as store:
        moved = swap_payloads(store, keys_in(store))
        assert store.flush(60.0)
    with run.server(**params) as server:
        proxy = Proxy(server.url, run.slots, disk, "--audit", "1")
        proxy.until_ready()
        hit = answer(proxy.url, prompts[0])[1]
        proxy.until_audited(1)
        status = proxy.status()
        found_it = status["mismatched_blocks"] == 1 and status["quarantined"]
        run.point(f"{name}: blocks in the wrong place are found", found_it, cached=hit, moved=moved)
        server.kill()
        with run.server(**params, port=server.port):
            proxy.until_ready()
            after = [answer(proxy.url, prompt) for prompt in prompts]
        right = [one[0] for one in after] == wanted and status["failed"] == 0
        run.point(f"{name}: answered without", right and after[0][1] == 0)
        proxy.end()
    with depot_at(disk) as store:
        (one,) = store.audits.list()["quarantined"]
        shown = {what: one[what] for what in ("error", "tolerance", "layer")}
        run.point(f"{name}: the quarantine outlives the proxy", True, **shown)


def depot_at(disk: Path) -> Store:
    dram = {"capacity": "512MiB", "prefault": False, "huge_pages": "never"}
    return kvdepot.open(dram=dram, ssd={"path": str(disk), "capacity": "1GiB"})


def audited_sequences(run: Run) -> None:
    """The same with SequenceCache, in Python."""
    prompts = [[1, *range(300 + 50 * at, 346 + 50 * at)] for at in range(3)]
    share = AuditConfig(share=1)
    dram = {"capacity": "64MiB", "prefault": False, "huge_pages": "never"}
    with (
        kvdepot.open(dram=dram) as store,
        LlamaContext(run.model, unified=True) as llama,
    ):
        place = llama.library, llama.context
        cache = SequenceCache(store, *place, model=run.model, block_tokens=16, audit=share)

        def asked(tokens: list[int]) -> tuple[list[float], int]:
            known = cache.restore(tokens, 1)
            if not known:
                llama.forget(1)
            logits = llama.decode(tokens[known:], known, 1)
            cache.store(tokens, 1)
            return logits, known

        wanted = [asked(tokens)[0] for tokens in prompts]
        found = [asked(tokens) for tokens in prompts * 5]
        known = store.audits.list()
        right = found == [(logits, 16) for logits in wanted] * 5
        quiet = known["compared"] == len(found) and not known["mismatched"]
        run.point("audit, Python: no alarm, same logits", right and quiet, hits=len(found))
        swap_payloads(store, keys_in(store))
        hit = asked(prompts[0])[1]
        caught = len(store.audits.list()["quarantined"]) == 1
        run.point("audit, Python: blocks in the wrong place are found", caught, cached=hit)
        after = [asked(tokens) for tokens in prompts]
        right = after == [(logits, 0) for logits in wanted]
        run.point("audit, Python: computed from then on", right)


def crowd(run: Run) -> None:
    """20 conversations with one beginning over 4 slots, at the same time; bytes on disk."""
    prompts = [SENTENCE * 3 + question for question in QUESTIONS]
    with run.server(**ALONE) as server:
        wanted = [answer(server.url, prompt, 3)[0] for prompt in prompts]
        proxy = Proxy(server.url, run.slots, run.folder / "depot-crowd", "--block-tokens", "16")
        proxy.until_ready()
        with ThreadPoolExecutor(8) as threads:
            for turn in ("first", "second"):
                found = list(threads.map(lambda prompt: answer(proxy.url, prompt, 3), prompts))
                wrong = sum(one[0] != text for one, text in zip(found, wanted, strict=True))
                cached = sum(one[1] for one in found)
                run.point(f"20 conversations over 4 slots, {turn}", not wrong, cached=cached)
        distinct = set()
        for prompt in prompts:
            ids = ask(server.url, "/tokenize", {"content": prompt, "add_special": True})["tokens"]
            distinct |= {tuple(ids[: end + 16]) for end in range(0, len(ids) - 15, 16)}
        status = proxy.status()
        proxy.end()
    command = [
        sys.executable,
        "-m",
        "kvdepot",
        "inspect",
        str(run.folder / "depot-crowd"),
        "--json",
    ]
    held = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    run.point("nothing failed", status["failed"] == 0, last=status["last_failure"])
    # Blocks that end in an answer are distinct tokens, too: at most one for each conversation.
    fair = len(distinct) <= held["blocks"] <= len(distinct) + len(prompts)
    share = held["live_bytes"] / (held["blocks"] * status["block_bytes"])
    run.point(
        "shared prefixes once: bytes on disk at most 1.05 of the distinct tokens' KV",
        fair and share <= 1.05,
        blocks=held["blocks"],
        distinct_in_prompts=len(distinct),
        share=round(share, 4),
    )


def kills(run: Run) -> None:
    """The server is killed at random under load: right answers, or failures while it was dead."""
    rng = random.Random(5)
    prompts = [SENTENCE + question for question in QUESTIONS[:6]]
    params = {**ALONE, "n_ctx": 2048}
    server = run.server(**params)
    wanted = {prompt: answer(server.url, prompt, 3)[0] for prompt in prompts}
    proxy = Proxy(server.url, run.slots, run.folder / "depot-kills", "--block-tokens", "16")
    proxy.until_ready()
    over = threading.Event()
    dead: list[tuple[float, float]] = []
    seen: list[tuple[float, float, str]] = []

    def client(seed: int) -> None:
        choose = random.Random(seed)
        while not over.is_set():
            prompt = choose.choice(prompts)
            began = time.monotonic()
            try:
                text, _ = answer(proxy.url, prompt, 3)
                outcome = "right" if text == wanted[prompt] else "wrong"
            except FAILED:
                outcome = "failed"
                over.wait(0.1)
            seen.append((began, time.monotonic(), outcome))

    with ThreadPoolExecutor(4) as threads:
        clients = [threads.submit(client, seed) for seed in range(4)]
        for _ in range(4):
            over.wait(rng.uniform(2, 6))
            killed = time.monotonic()
            server.kill()
            server = run.server(**params, port=server.port)
            dead.append((killed, time.monotonic()))
            eventually(lambda: bool(proxy.status()["ready"]), 5.0)
        over.set()
        for one in clients:
            one.result()
    counts = {kind: sum(one[2] == kind for one in seen) for kind in ("right", "wrong", "failed")}
    extra = sum(
        outcome == "failed" and not any(began <= end and ended >= start for start, end in dead)
        for began, ended, outcome in seen
    )
    run.point(
        "killed at random: no wrong answer", counts["right"] > 0 and not counts["wrong"], **counts
    )
    run.point("killed at random: no failure but its own", not extra, extra=extra)
    restored = proxy.status()["restored"]
    run.point("killed at random: prefixes were restored", restored > 0, restored=restored)
    proxy.end()
    server.kill()


def misses(run: Run) -> None:
    """What the proxy adds to a prompt that is not known: with it and without it in turns.

    Judged twice: the whole request by the spread of requests without the proxy, and what a request
    takes beside the computation, which the server tells, by a share: a busy machine widens the
    spread, but not that share.
    """
    params = {"n_ctx": 2048, "n_parallel": 1}
    with run.server(**params) as server:
        proxy = Proxy(server.url, run.slots, run.folder / "depot-misses")
        proxy.until_ready()
        seconds: dict[str, list[float]] = {"direct": [], "proxy": []}
        beside: dict[str, list[float]] = {"direct": [], "proxy": []}
        for at in range(-1, run.rounds):  # the first round is not counted
            order = ("direct", "proxy") if at % 2 else ("proxy", "direct")
            for way in order:
                prompt = f"{at + 2} {way}. " + SENTENCE * 20  # nothing of it is known
                took, computed = timed(server.url if way == "direct" else proxy.url, prompt)
                if way == "proxy":
                    proxy.until_saved(at + 2)
                if at >= 0:
                    seconds[way].append(took)
                    beside[way].append(took - computed)
        restored = proxy.status()["restored"]
        proxy.end()
    low, _, high = statistics.quantiles(seconds["direct"], n=4)
    pairs = zip(seconds["proxy"], seconds["direct"], strict=True)
    added = statistics.median(one - other for one, other in pairs)
    outside = statistics.median(beside["proxy"]) - statistics.median(beside["direct"])
    unseen = outside <= BESIDE * statistics.median(seconds["direct"])
    run.point(
        "a request without a hit: what is added is within the spread of those without the proxy",
        added <= high - low and unseen and not restored,
        added_ms=round(1e3 * added, 1),
        beside_the_computation_ms=round(1e3 * outside, 1),
        spread_ms=round(1e3 * (high - low), 1),
        direct_ms=round(1e3 * statistics.median(seconds["direct"]), 1),
        rounds=run.rounds,
    )


def speed(run: Run) -> None:
    """The first token after a long prefix: computed, from memory, from disk after restarts."""
    params = {"n_ctx": run.tokens + 512, "n_parallel": 1}
    disk = run.folder / "depot-speed"
    with run.server(**params) as server:
        each = len(ask(server.url, "/tokenize", {"content": SENTENCE})["tokens"])
        prompt = SENTENCE * (run.tokens // each) + "What does he count?"
        length = len(ask(server.url, "/tokenize", {"content": prompt})["tokens"])
        proxy = Proxy(server.url, run.slots, disk)
        proxy.until_ready()
        cold = first_token(proxy.url, prompt)
        proxy.until_stored(length // 32 - 1)
        server.kill()
        memory = []
        for _ in range(run.restarts):
            with run.server(**params, port=server.port) as fresh:
                proxy.until_ready()
                memory.append(first_token(proxy.url, prompt))
                fresh.kill()
        proxy.end()
    drive = []
    for _ in range(run.restarts):
        with run.server(**params) as server:
            proxy = Proxy(server.url, run.slots, disk)
            proxy.until_ready()
            drive.append(first_token(proxy.url, prompt))
            proxy.end()
    for name, found, bar in (("memory", memory, 30), ("disk, after restarts", drive, 20)):
        ratio = cold / statistics.median(found)
        spread = [round(cold / one, 1) for one in (max(found), min(found))]
        shown = [round(one, 3) for one in found]
        run.point(
            f"first token from {name}: at least {bar} times sooner",
            ratio >= bar,
            ratio=round(ratio, 1),
            bar=bar,
            spread=spread,
            computed_s=round(cold, 2),
            restored_s=shown,
            prompt_tokens=length,
        )


def first_token(url: str, prompt: str) -> float:
    return timed(url, prompt)[0]


def timed(url: str, prompt: str) -> tuple[float, float]:
    """The seconds until the first token, and how many of them the server computed."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    began = time.monotonic()
    found = ask(url, "/v1/completions", body, 600.0)["timings"]
    took = time.monotonic() - began
    return took, (found["prompt_ms"] + found["predicted_ms"]) / 1e3


STAGES = {one.__name__: one for one in (tokens, audit, crowd, kills, misses, speed)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--prompt-tokens", type=int, default=3500, help="of the stage speed")
    parser.add_argument("--rounds", type=int, default=15, help="of the stage misses")
    args = parser.parse_args()
    unknown = [name for name in args.stages if name not in STAGES]
    if unknown:
        parser.error(f"there is no stage {unknown[0]}; stages: {', '.join(STAGES)}")
    started = time.monotonic()
    memory = MEMORY if MEMORY.is_dir() else None
    with (
        scratch(None, "kvdepot-e2e-llama-") as folder,
        scratch(None, "kvdepot-e2e-llama-", memory) as slots,
    ):
        run = Run(folder, slots, Points(args.json), args.prompt_tokens, max(2, args.rounds))
        for name in args.stages or STAGES:
            STAGES[name](run)
    ok, seconds = run.points.ok, round(time.monotonic() - started)
    whole = {"ok": ok, "seconds": seconds, "points": run.points.found}
    print(json.dumps(whole) if args.json else f"{'ok' if ok else 'FAILED'} after {seconds} s")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
