"""Hours of vLLM traffic in minutes, with faults: `python tests/e2e/vllm_soak.py --json`.

A real vLLM server with a small random model on a CPU, and a daemon on a disk below the kernel
(`tests/support/disk.py`). Users ask prompts that share beginnings and come back, and give some up.
Meanwhile, in every round, the disk becomes slow, and full, and the daemon is killed and started
again, this in the first half only: in the second half one daemon goes through everything else.
Every answer must be that of a plain vLLM, asked before. At one request every ten seconds six hours
are 2,160 requests; fewer fail the run, in proportion for less than 20 minutes. On a busy machine it
goes on for longer until they are made.

Growth: after each phase, when no request is under way, memory, threads, descriptors and shared
memory of vLLM's processes and of the daemon are taken, and bytes and files in the depot's folder.
The line through those of the second half (least squares) may rise by no more than `GROWTH` from its
first to its last. For vLLM the same holds for the ends of all rounds but the first, except for its
memory: vLLM keeps kernels for each number of tokens that it meets (oneDNN, 128 for each layer's
product), which took until the middle of the run. The folder may never have more bytes than its
capacity and a segment. Exit status 1 if a point fails. Needs root, for the disk.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e.e2e_points import Points, scratch
from tests.e2e.vllm_connector import NEAR, ROOT, find_model, unique
from tests.e2e.vllm_environments import NEWEST, python_with
from tests.e2e.vllm_servers import Server
from tests.support.disk import Disk, are_there

SIX_HOURS = 2160
"""Requests, at one every ten seconds."""
MINUTES = 20.0
PROMPTS = 96
ANSWER = 8
DISK_MIB = 128
DEPOT_MIB = 64
SEGMENT_MIB = 4
SLOW_BYTES_PER_S = 2 << 20
FAST_BYTES_PER_S = 400 << 20
ABORTED = 0.1
MEMORY = {"engine": 48 << 20, "daemon": 8 << 20}
GROWTH = {"threads": 1, "descriptors": 2, "shared_bytes": 1 << 20, "files": 1}
"""Limits for all processes together. Allocators are not exact, and pools start threads late."""
PHASES = ("healthy", "daemon killed", "disk slow", "healthy", "disk full", "healthy")
ROUND_MINUTES = 2.5
Seen = dict[str, Any]
Sizes = dict[str, int]


def prompts() -> list[list[int]]:
    """Conversations of 300 to 900 tokens; six in turn share a beginning of 256."""
    chance = random.Random(3)
    return [
        unique(number // 6, 256) + unique(1000 + number, chance.randrange(50, 650))
        for number in range(PROMPTS)
    ]


@dataclass
class Service:
    """The daemon of a depot, started and killed as a service manager would."""

    folder: Path
    disk: Disk
    process: "subprocess.Popen[bytes] | None" = None
    starts: int = 0

    def __post_init__(self) -> None:
        self.settings.write_text(
            '[dram]\ncapacity = "16MiB"\n\n[ssd]\n'
            f'path = "{self.kept}"\ncapacity = "{DEPOT_MIB}MiB"\n'
            f'segment = "{SEGMENT_MIB}MiB"\nretry_initial = "100ms"\nretry_max = "2s"\n'
        )

    @property
    def kept(self) -> Path:
        return self.disk.mount / "kv"

    @property
    def settings(self) -> Path:
        return self.folder / "depot.toml"

    @property
    def socket(self) -> Path:
        return self.folder / "depot.sock"

    def start(self) -> None:
        command = [sys.executable, "-m", "kvdepot", "serve", "--config", str(self.settings)]
        self.starts += 1
        with (self.folder / f"daemon-{self.starts}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--socket", str(self.socket)],
                env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise RuntimeError(f"the daemon did not start: {log.name}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass
class Traffic:
    """Users who ask, all the time, until `stop`; what became of it, by phase."""

    server: Server
    answers: list[Seen]
    seed: int
    phase: str = "healthy"
    counts: Counter[str] = field(default_factory=Counter)
    fetched: Counter[str] = field(default_factory=Counter)
    """Tokens from the depot."""
    errors: list[str] = field(default_factory=list)
    _open: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)
    _busy: Counter[int] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _users: list[threading.Thread] = field(default_factory=list)

    def start(self, users: int) -> None:
        self._open.set()
        for number in range(users):
            thread = threading.Thread(target=self._use, args=(number,), daemon=True)
            self._users.append(thread)
            thread.start()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No request is under way."""
        self._open.clear()
        wait_for(lambda: not any(self._busy.values()), "requests to end")
        time.sleep(2.0)  # vLLM's own processes come to rest
        yield
        self._open.set()

    @property
    def requests(self) -> int:
        with self._lock:
            return sum(self.counts[kind] for kind in ("answered", "given up", "failed"))

    def carry_on(self, seconds: float, requests: float) -> None:
        """Until both are over, on a busy machine for no more than three times as long."""
        begun, before = time.monotonic(), self.requests
        while (passed_s := time.monotonic() - begun) < 3 * seconds:
            if passed_s >= seconds and self.requests - before >= requests:
                return
            time.sleep(0.2)

    def count_fetched(self, phase: str) -> int:
        """Add what came from the depot since the last time, as vLLM counts it."""
        hits = "vllm:external_prefix_cache_hits_total"
        tokens = sum(
            value for name, value in self.server.metrics().items() if name.startswith(hits)
        )
        self.fetched[phase] += int(tokens) - self.fetched.total()
        return self.fetched[phase]

    def stop(self) -> None:
        self._over.set()
        self._open.set()
        for thread in self._users:
            thread.join()

    def _use(self, number: int) -> None:
        chance = random.Random(self.seed * 1000 + number)
        asked = prompts()
        while not self._over.is_set():
            self._open.wait()
            with self._lock:
                self._busy[number] = 1
            try:
                which = chance.randrange(len(asked))
                if chance.random() < ABORTED:
                    self._give_up(asked[which], chance.random() * 0.5)
                else:
                    self._ask(which, asked[which])
            finally:
                self._busy[number] = 0

    def _ask(self, which: int, prompt: list[int]) -> None:
        phase, wanted = self.phase, self.answers[which]
        try:
            found = self.server.ask(prompt, ANSWER)
        except (OSError, http.client.HTTPException, ValueError) as error:
            with self._lock:
                self.counts["failed"] += 1
                self.errors.append(f"{phase}: {type(error).__name__}: {error}"[:300])
            return
        pairs = zip(found["logprobs"], wanted["logprobs"], strict=True)
        right = found["tokens"] == wanted["tokens"]
        right = right and all(abs(one - other) < NEAR for one, other in pairs)
        with self._lock:
            self.counts["answered"] += 1
            self.counts["wrong"] += not right

    def _give_up(self, prompt: list[int], after_s: float) -> None:
        """A client that goes away before its answer."""
        body = {"model": self.server.model, "prompt": prompt, "max_tokens": 64, "stream": True}
        line = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            line.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            time.sleep(after_s)
        except OSError as error:
            with self._lock:
                self.counts["failed"] += 1
                self.errors.append(f"{self.phase}: {error}"[:300])
        finally:
            line.close()
        with self._lock:
            self.counts["given up"] += 1


def wait_for(done: Callable[[], bool], what: str) -> None:
    limit_s = time.monotonic() + 300
    while not done():
        if time.monotonic() > limit_s:
            raise RuntimeError(f"waited in vain for {what}")
        time.sleep(0.05)


def sizes(processes: list[int]) -> Sizes:
    """Resident memory, threads, descriptors, and shared memory that is mapped, of all together.

    The sockets and segments among the descriptors are shown, and have no limits of their own.
    """
    found = Counter(memory_bytes=0, threads=0, descriptors=0, shared_bytes=0, sockets=0, segments=0)
    for process in processes:
        entry = Path(f"/proc/{process}")
        with contextlib.suppress(OSError):
            lines = (entry / "status").read_text().splitlines()
            status = dict(line.split(":", 1) for line in lines)
            found["memory_bytes"] += int(status["VmRSS"].split()[0]) * 1024
            found["threads"] += int(status["Threads"])
            for descriptor in (entry / "fd").iterdir():
                found["descriptors"] += 1
                with contextlib.suppress(OSError):  # closed meanwhile
                    target = os.readlink(descriptor)
                    found["sockets"] += target.startswith("socket:")
                    found["segments"] += "/segment-" in target
            for line in (entry / "maps").read_text().splitlines():
                if "/memfd:" in line or "/dev/shm/" in line:
                    first, last = line.split(" ", 1)[0].split("-")
                    found["shared_bytes"] += int(last, 16) - int(first, 16)
    return dict(found)


def folder_sizes(folder: Path) -> Sizes:
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return {"bytes": sum(each.st_blocks * 512 for each in files), "files": len(files)}


@contextlib.contextmanager
def trouble(phase: str, service: Service) -> Iterator[None]:
    """Begin the trouble of a phase, and end it afterwards."""
    if phase == "daemon killed":
        service.kill()
        yield
        service.start()
    elif phase == "disk slow":
        service.disk.limit(SLOW_BYTES_PER_S)
        yield
        service.disk.limit(FAST_BYTES_PER_S)
    elif phase == "disk full":
        filler = service.disk.mount / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 20)):
                pass
        yield
        filler.unlink()
    else:
        yield


@dataclass
class Measured:
    """The sizes after each phase, and the number of the daemon's start."""

    turn: int
    life: int
    engine: Sizes
    daemon: Sizes
    folder: Sizes


def soak(
    args: argparse.Namespace, server: Server, traffic: Traffic, service: Service
) -> list[Measured]:
    """All rounds; what was measured after each phase."""
    rounds = max(2, round(args.minutes / ROUND_MINUTES))
    phase_s = args.minutes * 60 / rounds / len(PHASES)
    found = []
    traffic.start(args.users)
    for turn in range(rounds):
        for phase in PHASES:
            if phase == "daemon killed" and turn >= (rounds + 1) // 2:
                phase = "healthy"
            traffic.phase = phase
            with trouble(phase, service):
                traffic.carry_on(phase_s, least_requests(args) / rounds / len(PHASES))
            with traffic.paused():
                found.append(measure(turn, server, service))
                fetched = traffic.count_fetched(phase)
            said = {**traffic.counts, "fetched tokens": fetched}
            last = found[-1]
            mib = {"vLLM": last.engine, "daemon": last.daemon}
            grown = {name: f"{each['memory_bytes'] >> 20} MiB" for name, each in mib.items()}
            print(
                f"round {turn + 1} of {rounds}, {phase}: {said} {grown}",
                file=sys.stderr,
                flush=True,
            )
    traffic.stop()
    return found


def least_requests(args: argparse.Namespace) -> int:
    minutes: float = args.minutes
    return round(SIX_HOURS * min(1.0, minutes / MINUTES))


def measure(turn: int, server: Server, service: Service) -> Measured:
    assert service.process is not None
    engine, daemon = sizes(server.processes()), sizes([service.process.pid])
    return Measured(turn, service.starts, engine, daemon, folder_sizes(service.kept))


def rise(values: list[int]) -> float:
    """The rise of the line through them, from the first to the last."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    spread = sum((at - middle) ** 2 for at in range(len(values)))
    slope = sum((at - middle) * (value - mean) for at, value in enumerate(values))
    return slope / spread * (len(values) - 1) if spread else 0.0


def growth(name: str, measured: list[Sizes], *, with_memory: bool) -> tuple[bool, Seen]:
    """True if nothing has grown, and the growth."""
    most = {**GROWTH, **({"memory_bytes": MEMORY.get(name, 0)} if with_memory else {})}
    grown = {what: round(rise([each[what] for each in measured]), 1) for what in measured[0]}
    kept = all(grown[what] <= most[what] for what in grown if what in most)
    return kept, {"grown": grown, "first": measured[0], "last": measured[-1]}


def judge(
    run: Points,
    args: argparse.Namespace,
    traffic: Traffic,
    measured: list[Measured],
    service: Service,
) -> None:
    counts = dict(traffic.counts)
    requests, least = traffic.requests, least_requests(args)
    hours = round(requests / SIX_HOURS * 6, 2)
    enough = requests >= least
    run.add("the traffic of six hours", enough, requests=requests, hours=hours, least=least)
    run.add("no request failed", not counts.get("failed"), **counts, errors=traffic.errors[:5])
    right = counts.get("answered", 0) > 0 and not counts.get("wrong")
    run.add("no answer is wrong", right, **counts)
    fetched = dict(sorted(traffic.fetched.items()))
    used = all(fetched.get(phase, 0) > 0 for phase in ("healthy", "disk slow", "disk full"))
    run.add("prompts come from the depot", used, fetched_tokens=fetched)
    run.add("the daemon was killed", service.starts > 1, starts=service.starts)
    half = (measured[-1].turn + 2) // 2
    late = [each for each in measured if each.turn >= half]
    ends = {each.turn: each for each in measured}
    alone = all(each.life == service.starts for each in late)
    later = [each.engine for each in ends.values() if each.turn > 0]
    kept, figures = growth("engine", later, with_memory=False)
    run.add("no growth of the engine after the first round", kept, **figures)
    for name, taken in (
        ("engine", [each.engine for each in late]),
        ("daemon", [each.daemon for each in late]),
        ("folder", [each.folder for each in late]),
    ):
        kept, figures = growth(name, taken, with_memory=True)
        run.add(f"no growth of the {name} in the second half", kept and alone, **figures)
    most = max(each.folder["bytes"] for each in measured)
    run.add("the folder is bounded", most <= (DEPOT_MIB + SEGMENT_MIB) << 20, most_bytes=most)


OPTIONS = ("--num-gpu-blocks-override", "48", "--max-num-batched-tokens", "512")
"""So few pages that most prompts have left vLLM's own cache when they come back."""


def plain_answers(python: Path, folder: Path) -> list[Seen]:
    """The answers of a vLLM without kvdepot; kept from an earlier run in this folder."""
    model, kept = folder / "model", folder / "answers.json"
    if not kept.exists():
        script = ROOT / "tests" / "e2e" / "tiny_models.py"
        command = [str(python), str(script), "llama", str(find_model(None)), str(model)]
        subprocess.run(command, check=True, capture_output=True)
        with Server(python, model, folder / "plain.log", None, *OPTIONS) as plain:
            kept.write_text(json.dumps([plain.ask(prompt, ANSWER) for prompt in prompts()]))
    found: list[Seen] = json.loads(kept.read_text())
    return found


def carry_out(args: argparse.Namespace, folder: Path, run: Points) -> None:
    python = python_with(NEWEST)
    answers = plain_answers(python, folder)
    shutil.rmtree(folder / "disk", ignore_errors=True)
    disk = Disk(folder / "disk", DISK_MIB, bytes_per_s=FAST_BYTES_PER_S)
    service = Service(folder, disk)
    try:
        service.start()
        extra = {"socket": str(service.socket), "daemon": "never", "speeds": str(folder / "speeds")}
        with Server(python, folder / "model", folder / "server.log", extra, *OPTIONS) as server:
            traffic = Traffic(server, answers, args.seed)
            measured = soak(args, server, traffic, service)
            judge(run, args, traffic, measured, service)
    finally:
        if service.process is not None and service.process.poll() is None:
            service.process.send_signal(signal.SIGTERM)
            service.process.wait(60)
        disk.remove()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of traffic")
    parser.add_argument("--users", type=int, default=4, help="who ask at the same time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--keep", type=Path, help="a folder for logs, model and plain answers, used again"
    )
    args = parser.parse_args()
    if not are_there():
        print("error: a disk that can be slowed needs root, nbdkit, nbdfuse and mkfs.ext4")
        return 2
    started, run = time.monotonic(), Points(args.json)
    with scratch(args.keep, "kvdepot-soak-") as folder:
        carry_out(args, folder, run)
    ok, seconds = run.ok, round(time.monotonic() - started)
    whole = {"ok": ok, "seconds": seconds, "points": run.found}
    print(json.dumps(whole) if args.json else f"{'ok' if ok else 'FAILED'} after {seconds} s")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
