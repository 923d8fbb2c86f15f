"""kvdepot beside vLLM's own tiering and LMCache, under a real vLLM on a CPU.

    python benchmarks/vllm_peers.py --json         # about 25 minutes on two idle cores
    python benchmarks/vllm_peers.py --parts memory --arms kvdepot tiering    # about 3 minutes
    python benchmarks/vllm_peers.py --quick --rounds 2 --disk-rounds 1    # whether all of it runs

SmolLM2 in float32, one server an arm, all with the same core, the same few pages (28 of 128 tokens)
and the same memory (256 MiB) and folder behind; arms take turns in every round. `memory`: a prompt
of 3,000 tokens that vLLM has forgotten. `disk`: everything killed, the page cache dropped, a new
server. `turns`: 8 users with 4 turns each, two in flight, whose KV is four times what the server
has room for; plain vLLM and LMCache, to which no close bar applies, do this once. Medians of
rounds, and the bars of kvdepot against the others. Environments with vLLM and LMCache are made when
they are missing. Exit status 1 if a bar is missed or an arm has no hits. vLLM refuses its tiers on
a CPU: its worker is replaced by `tests/e2e/cpu_tiering_spec.py`.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.e2e.vllm_connector import find_model, unique  # noqa: E402
from tests.e2e.vllm_environments import NEWEST, python_with, python_with_lmcache  # noqa: E402
from tests.e2e.vllm_servers import Server, free_port, kill_daemon  # noqa: E402

ARMS = ("plain", "kvdepot", "tiering", "lmcache")
PAGE_TOKENS = 128
PAGES = 28
MEMORY_BYTES = 256 << 20
SETTLE_S = 5.0
"""For saves in the background, the same in all arms."""
REST_S = 2.0
"""Before each round of an arm: a worker of vLLM turns on its core for a second after its last
request, and all arms have the same core."""
ANSWER = 16
IN_FLIGHT = 2
Bar = tuple[str, str, float]
BARS: tuple[Bar, ...] = (
    ("memory", "tiering", 1.0),
    ("disk", "tiering", 0.9),
    ("turns", "tiering", 0.95),
    ("turns", "plain", 0.42),
)
"""Part, other arm, and the most that kvdepot's time by its time may be."""
Seen = dict[str, Any]


@dataclass(frozen=True)
class Prompts:
    """How long they are, in tokens, and how many."""

    again: int = 3000
    """The one of `memory` and `disk`."""
    users: int = 8
    turns: int = 4
    first: int = 640
    more: int = 368
    """Of each turn after a user's first."""


QUICK = Prompts(again=600, users=3, turns=2, first=300, more=100)


@dataclass
class Arm:
    """One way to keep KV, with a server that is started, asked and killed."""

    name: str
    folder: Path
    model: Path
    prompts: Prompts = Prompts()
    server: Server | None = None
    helper: "subprocess.Popen[bytes] | None" = None
    """LMCache's own server."""
    starts: int = 0
    saved: list[int] = field(default_factory=list)
    """The prompt of one part, which the arm has been given."""
    _shared: set[Path] = field(default_factory=set)

    def start(self) -> None:
        self.starts += 1
        python = python_with_lmcache() if self.name == "lmcache" else python_with(NEWEST)
        options = ["--num-gpu-blocks-override", str(PAGES), "--block-size", str(PAGE_TOKENS)]
        options += [
            "--max-num-batched-tokens",
            "4096",
            "--max-model-len",
            "3328",
            "--enable-prefix-caching",
        ]
        transfer = self._transfer()
        if transfer is not None:
            shared = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
            options += ["--kv-transfer-config", json.dumps({**shared, **transfer})]
        log = self.folder / f"{self.name}-{self.starts}.log"
        self.server = Server(python, self.model, log, None, *options)
        self._shared = {
            Path(line[line.index("/dev/shm/") :])
            for process in self.server.processes()
            for line in Path(f"/proc/{process}/maps").read_text().splitlines()
            if "/dev/shm/vllm_offload_" in line
        }

    def _transfer(self) -> Seen | None:
        kept = self.folder / f"kept {self.name}"
        kept.mkdir(exist_ok=True)
        if self.name == "kvdepot":
            disk = {"path": str(kept), "capacity": "8GiB"}
            extra: Seen = {"dram": "256MiB", "ssd": disk, "socket": str(self.socket)}
            return {
                "kv_connector": "KVDepotConnector",
                "kv_connector_module_path": "kvdepot.adapters.vllm",
                "kv_connector_extra_config": {**extra, "speeds": str(self.folder / "speeds")},
            }
        if self.name == "tiering":
            tier = {"type": "fs", "root_dir": str(kept), "n_read_threads": 2, "n_write_threads": 2}
            extra = {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "tests.e2e.cpu_tiering_spec",
                "cpu_bytes_to_use": MEMORY_BYTES,
                "secondary_tiers": [tier],
            }
            return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
        if self.name == "lmcache":
            port = self._start_lmcache(kept)
            extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
            extra["lmcache.mp.mq_timeout"] = 30
            return {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
        return None

    def _start_lmcache(self, kept: Path) -> int:
        """Its server, with chunks of vLLM's pages: much faster here than its default of 256."""
        port = free_port()
        adapter = {"type": "fs_native", "base_path": str(kept), "num_workers": 2}
        options: Seen = {
            "--host": "127.0.0.1",
            "--port": port,
            "--l1-size-gb": MEMORY_BYTES / (1 << 30),
            "--chunk-size": PAGE_TOKENS,
            "--eviction-policy": "LRU",
            "--http-host": "127.0.0.1",
            "--http-port": free_port(),
            "--prometheus-port": free_port(),
            "--supported-transfer-mode": "auto",
            "--shm-name": f"lmcache-{os.getpid()}-{self.starts}",
            "--l2-adapter": json.dumps(adapter),
        }
        code = "from lmcache.cli.main import main; main()"
        flat = [str(each) for pair in options.items() for each in pair]
        with (self.folder / f"lmcache-server-{self.starts}.log").open("wb") as log:
            self.helper = subprocess.Popen(
                [str(python_with_lmcache()), "-c", code, "server", *flat],
                env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return port

    @property
    def socket(self) -> Path:
        return self.folder / "kvdepot.sock"

    def kill(self) -> None:
        """kill -9 of everything; the files stay."""
        if self.server is not None:
            self.server.kill()
        if self.helper is not None:
            os.killpg(self.helper.pid, signal.SIGKILL)
            self.helper.wait()
            self.helper = None
        if self.name == "kvdepot":
            kill_daemon(self.socket)
        for path in self._shared:  # vLLM leaves its memory behind
            path.unlink(missing_ok=True)

    def ask(self, prompt: list[int], tokens: int = 1) -> Seen:
        assert self.server is not None
        return self.server.ask(prompt, tokens)

    def forget(self) -> None:
        assert self.server is not None
        self.server.forget()

    def worker_cpu_s(self) -> float:
        """Of the process that computes: what a busy machine adds to seconds is not in it."""
        assert self.server is not None
        ticks = 0.0
        for process in self.server.processes():
            name, _, rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")
            if "Worker" in name:
                user, system = rest.split()[11:13]
                ticks += int(user) + int(system)
        return ticks / os.sysconf("SC_CLK_TCK")


def in_memory(arm: Arm, fresh: int) -> Seen:
    """From the arm's memory; vLLM has forgotten it."""
    prompt = prepare(arm, fresh)
    arm.forget()
    return arm.ask(prompt)


def on_disk(arm: Arm, fresh: int) -> Seen:
    """Of a new server: everything was killed."""
    prompt = prepare(arm, fresh)
    arm.kill()
    dropped = drop_page_cache()
    arm.start()
    arm.ask(unique(fresh + 1, 200))
    return {**arm.ask(prompt), "page_cache_dropped": dropped}


def prepare(arm: Arm, fresh: int) -> list[int]:
    """The part's prompt, computed once, with time to save it."""
    if not arm.saved:
        arm.saved = unique(fresh, arm.prompts.again)
        arm.ask(arm.saved)
        time.sleep(SETTLE_S)
    return arm.saved


def in_turns(arm: Arm, fresh: int) -> Seen:
    """Users who come back with longer prompts; the seconds of all of it."""
    chance, sizes = random.Random(fresh), arm.prompts
    told = [unique(fresh * 100 + user, sizes.first) for user in range(sizes.users)]
    cached = 0
    started = time.perf_counter()
    for turn in range(sizes.turns):
        order = chance.sample(range(sizes.users), sizes.users)
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            answers = list(pool.map(lambda user: arm.ask(told[user], ANSWER), order))
        cached += sum(answer["cached"] for answer in answers)
        for user in order:
            told[user] = told[user] + unique(fresh * 1000 + 10 * turn + user, sizes.more)
    return {"seconds": time.perf_counter() - started, "cached": cached}


def drop_page_cache() -> bool:
    """Without that files of other stores come from memory: they read through it."""
    subprocess.run(["sync"], check=True)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


PARTS: dict[str, Callable[[Arm, int], Seen]] = {
    "memory": in_memory,
    "disk": on_disk,
    "turns": in_turns,
}


def measure(args: argparse.Namespace, arms: list[Arm]) -> dict[str, dict[str, list[Seen]]]:
    """For each part and arm what was seen in each round; the arms take turns."""
    found: dict[str, dict[str, list[Seen]]] = {}
    fresh = random.Random(args.seed).randrange(1 << 20) * 1000
    for part in args.parts:
        rounds = {"memory": args.rounds, "disk": args.disk_rounds, "turns": args.turn_rounds}[part]
        found[part] = {}
        fresh += 1000
        for arm in arms:
            arm.saved = []
        for turn in range(rounds):
            takes_part = [arm for arm in arms if turn < rounds_of(arm.name, part, rounds)]
            shift = turn % len(takes_part)
            for arm in takes_part[shift:] + takes_part[:shift]:
                time.sleep(REST_S)
                started, cpu_s = time.perf_counter(), arm.worker_cpu_s()
                seen = PARTS[part](arm, fresh + turn if part == "turns" else fresh)
                kept = {name: seen[name] for name in ("seconds", "cached")}
                if part == "turns":
                    kept["worker_cpu_s"] = round(arm.worker_cpu_s() - cpu_s, 2)
                found[part].setdefault(arm.name, []).append(kept)
                took_s = time.perf_counter() - started
                said = f"{part} {turn + 1} of {rounds}, {arm.name}: {kept}, took {took_s:.1f} s"
                print(said, file=sys.stderr, flush=True)
    return found


def rounds_of(arm: str, part: str, rounds: int) -> int:
    if arm == "plain" and part == "disk":
        return 0
    return 1 if part == "turns" and arm in ("plain", "lmcache") else rounds


def summary(found: dict[str, dict[str, list[Seen]]], bars_of: Sequence[Bar] = BARS) -> Seen:
    """Medians with their spread, and the bars."""
    rows: Seen = {}
    for part, arms in found.items():
        for arm, seen in arms.items():
            seconds = sorted(one["seconds"] for one in seen)
            rows.setdefault(part, {})[arm] = {
                "median_s": round(statistics.median(seconds), 3),
                "spread_s": [round(seconds[0], 3), round(seconds[-1], 3)],
                **{
                    what: [one[what] for one in seen]
                    for what in ("cached", "worker_cpu_s")
                    if what in seen[0]
                },
            }
    bars = []
    for part, other, bar in bars_of:
        if part in found and {"kvdepot", other} <= set(found[part]):
            mine = [one["seconds"] for one in found[part]["kvdepot"]]
            theirs = [one["seconds"] for one in found[part][other]]
            ratio = statistics.median(mine) / statistics.median(theirs)
            ratios = [min(mine) / max(theirs), max(mine) / min(theirs)]
            bars.append(
                {
                    "bar": f"{part}: kvdepot / {other}",
                    "ratio": round(ratio, 3),
                    "spread": [round(ratios[0], 3), round(ratios[1], 3)],
                    "at_most": bar,
                    "met": ratio <= bar,
                }
            )
    silent = [
        f"{part}: {arm}"
        for part, arms in rows.items()
        for arm, row in arms.items()
        if arm != "plain" and not all(row["cached"])
    ]
    met = all(bar["met"] for bar in bars)
    return {"ok": met and not silent, "bars": bars, "without_hits": silent, "parts": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rounds", type=int, default=11, help="of memory")
    parser.add_argument("--disk-rounds", type=int, default=3, help="each with new servers")
    parser.add_argument("--turn-rounds", type=int, default=3, help="of the users' turns")
    parser.add_argument("--quick", action="store_true", help="short prompts, without the bars")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, help="keep depots and logs here")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="kvdepot-peers-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = find_model(None)
    prompts = QUICK if args.quick else Prompts()
    arms = [Arm(name, folder, model, prompts) for name in args.arms]
    started = time.monotonic()
    try:
        with ThreadPoolExecutor(len(arms)) as pool:
            list(pool.map(Arm.start, arms))
        for arm in arms:
            arm.ask(unique(1, 200))
        whole = summary(measure(args, arms), () if args.quick else BARS)
    finally:
        for arm in arms:
            arm.kill()
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    whole["seconds"] = round(time.monotonic() - started)
    if args.json:
        print(json.dumps(whole))
    else:
        for part, rows in whole["parts"].items():
            for arm, row in rows.items():
                print(f"{part:7} {arm:8} {row['median_s']:8.3f} s  {row['spread_s']}")
        for bar in whole["bars"]:
            said = "met" if bar["met"] else "MISSED"
            print(f"{bar['bar']}: {bar['ratio']} of {bar['at_most']}, {said}, {bar['spread']}")
    return 0 if whole["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
