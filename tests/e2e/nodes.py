"""Several machines over one bucket: `python tests/e2e/nodes.py --json`, or `./dev e2e nodes`.

    site    three nodes with drives and (as root) networks of their own over a real S3 server and a
            real NATS server; nodes, both servers and a link are killed under load, the clocks are
            wrong, the bucket is emptied
    vllm    a real vLLM is killed for good; another one answers its prompts from the bucket, one of
            them from memory after a hint

Prints one line for each point of what must hold; with --json each line is an object, and the last
one has them all. Exit status 1 if one fails.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e.e2e_points import Points, scratch
from tests.e2e.machines import Machines
from tests.e2e.vllm_servers import Server, kill_daemon
from tests.support.nats_broker import NatsBroker
from tests.support.s3_servers import SeaweedServer

from kvdepot.config.settings import ObjectConfig
from kvdepot.volumes.object.bucket import Bucket, MissingObjectError, open_bucket
from kvdepot.volumes.object.manifest import DATA, Manifest, ManifestName, in_force

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("a", "b", "c")
SKEW_S = {"a": 0.0, "b": 7200.0, "c": -7200.0}
GRACE_S = 4.0
WAIT_S = 120.0
LIMIT_S = 1200
FULL = 8
PACKAGES = ("obstore>=0.12.1,<0.13", "nats-py>=2.10,<3")
Seen = dict[str, Any]


class NodeProcess:
    """One node, which can be killed and started again with the same drive."""

    def __init__(self, name: str, site: "Site") -> None:
        self.name = name
        self._site = site
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        site, told = self._site, self._site.folder / f"{self.name}.json"
        settings = {"settings": site.settings(self.name), "skew_s": SKEW_S[self.name], "seed": 7}
        told.write_text(json.dumps(settings))
        program = str(ROOT / "tests" / "e2e" / "site_node.py")
        with (site.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                site.machines.command(self.name, [sys.executable, program, str(told)]),
                env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._line()["ready"]

    def ask(self, do: str, **more: Any) -> Seen:
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()
        return self._line()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    stream.close()
            self.process = None

    def _line(self) -> Seen:
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            log = (self._site.folder / f"{self.name}.log").read_text(errors="replace")
            raise SystemExit(f"error: node {self.name} ended\n{log[-3000:]}")
        seen: Seen = json.loads(line)
        return seen


class Site:
    """Three nodes, a bucket, a broker."""

    def __init__(self, folder: Path, machines: Machines) -> None:
        self.folder = folder
        self.machines = machines
        self.weed = SeaweedServer(folder / "weed", machines.host)
        self.broker = NatsBroker(host=machines.host)
        self.nodes = {name: NodeProcess(name, self) for name in NAMES}

    def settings(self, name: str) -> Seen:
        tree: Seen = {
            "dram": {"capacity": "8MiB", "prefault": False, "huge_pages": "never"},
            "ssd": {
                "path": str(self.folder / f"drive {name}"), "capacity": "32MiB", "segment": "4MiB"
            },
            "writeback": {"staging": "4MiB"},
            "object": self.object(),
            "nats": {"servers": [self.broker.url], "node": name, "site": "e2e"},
        }  # fmt: skip
        return tree

    def object(self) -> Seen:
        found = self.weed.settings("site", refresh="1s", grace=f"{GRACE_S}s", read_timeout="3s")
        return {**found, "credentials_file": str(found["credentials_file"])}

    def bucket(self) -> Bucket:
        found = self.object() | {"capacity": 64 << 20, "refresh": 1.0, "grace": GRACE_S}
        found |= {"retry_initial": 0.1, "retry_max": 1.0, "read_timeout": 3.0}
        found["credentials_file"] = Path(found["credentials_file"])
        return open_bucket(ObjectConfig(**found))

    def close(self) -> None:
        for node in self.nodes.values():
            node.kill()
        self.broker.kill()
        self.weed.kill()

    def everyone(self, do: str, **more: Any) -> dict[str, Seen]:
        return {name: node.ask(do, **more) for name, node in self.nodes.items()}


def eventually(true: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not (done := true()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return done


def onboarded(site: Site, points: Points) -> None:
    """A block offloaded on one is onboarded on the others, byte-identical."""
    written = site.nodes["a"].ask("put", number=1000)["ok"]
    for name in ("b", "c"):
        node = site.nodes[name]
        found = node.ask("wait", number=1000, seconds=WAIT_S)["found"]
        got = node.ask("get", number=1000)
        right = found == FULL and None not in got["tiers"] and not got["wrong"]
        points.add(f"1 offloaded on a, onboarded on {name}", written and right, **got)
    started_s = time.monotonic()
    site.nodes["a"].ask("put", number=1001)
    known = eventually(lambda: len(site.nodes["b"].ask("where", number=1001)["tiers"]) == FULL)
    seconds = round(time.monotonic() - started_s, 2)
    messages = site.nodes["b"].ask("report")["site"]["messages"]
    points.add("1 told by NATS", known and messages["received"] > 0, seconds=seconds, **messages)


def faults(site: Site, points: Points, outage_s: float) -> None:
    """Everything that can go goes, under load."""
    nodes = site.nodes
    site.everyone("load", on=True)
    time.sleep(outage_s)
    before = tally(site)
    kept = nodes["b"].ask("report")
    nodes["b"].kill()
    time.sleep(outage_s)
    nodes["b"].start()
    nodes["b"].ask("load", on=True)
    site.broker.kill()
    time.sleep(outage_s)
    site.broker.start()
    site.weed.kill()
    time.sleep(outage_s)
    site.weed.start()
    if site.machines.apart:
        site.machines.cut("c", off=True)
        time.sleep(outage_s)
        site.machines.cut("c", off=False)
    emptied = empty(site.bucket())
    time.sleep(outage_s)
    up = eventually(lambda: all(one["up"] for one in site.everyone("report").values()))
    points.add("1 the bucket works again for all", up, emptied_objects=emptied)
    back = eventually(
        lambda: all(one["site"]["connected"] for one in site.everyone("report").values())
    )
    points.add("1 the broker works again for all", back)
    time.sleep(outage_s)
    site.everyone("load", on=False)
    seen = tally(site)
    wrong, failed = seen["wrong"] + kept.get("wrong", 0), seen["failed"] + kept.get("failed", 0)
    figures = {"requests": seen["requests"] + kept.get("requests", 0), "wrong": wrong}
    figures |= {"failed": failed, "errors": seen["errors"], "longest_s": seen["longest_s"]}
    figures |= {"tiers": seen["tiers"], "network_apart": site.machines.apart}
    busy = seen["requests"] > before["requests"] // 2
    points.add("1 no wrong byte, no failed request", busy and not wrong and not failed, **figures)


def tally(site: Site) -> Seen:
    reports = site.everyone("report").values()
    total: Seen = {
        name: sum(one.get(name, 0) for one in reports) for name in ("requests", "wrong", "failed")
    }
    tiers = ("dram", "ssd", "object", "miss")
    total["tiers"] = {tier: sum(one.get(tier, 0) for one in reports) for tier in tiers}
    total["errors"] = [error for one in reports for error in one["errors"]][:3]
    total["longest_s"] = max(one["longest_s"] for one in reports)
    return total


def empty(bucket: Bucket) -> int:
    paths = [one.path for one in bucket.list_all("")]
    bucket.delete(paths)
    return len(paths)


def converged(site: Site, points: Points) -> None:
    """All see the same again, and what each has is right."""
    names = list(site.nodes)
    flushed = {name: one["ok"] for name, one in site.everyone("flush").items()}
    points.add("1 all is durable again", all(flushed.values()), **flushed)
    for at, name in enumerate(names):
        number = 2000 + at
        site.nodes[name].ask("put", number=number)
        other = site.nodes[names[at - 1]]
        found = other.ask("wait", number=number, seconds=WAIT_S)["found"]
        got = other.ask("get", number=number)
        right = found == FULL and None not in got["tiers"] and not got["wrong"]
        points.add(f"1 converged: from {name} to {other.name}", right, **got)
    for name, seen in site.everyone("check").items():
        found = {"blocks": seen["blocks"], "findings": len(seen["findings"])}
        points.add(f"1 check on {name}", seen["ok"], **found, first=seen["findings"][:3])


def collected(site: Site, points: Points) -> None:
    """Nodes end, two of them without a word: the third one's collection leaves no orphan."""
    site.nodes["b"].kill()
    site.nodes["c"].kill()
    bucket = site.bucket()
    clean = eventually(lambda: not orphans(bucket)[0] and not orphans(bucket)[1])
    stray, absent = orphans(bucket)
    objects = len(bucket.list_all(DATA))
    points.add(
        "1 no orphaned object", clean, objects=objects, orphans=len(stray), missing=len(absent)
    )
    points.add("1 the last node closes in order", site.nodes["a"].ask("close")["ok"])


def orphans(bucket: Bucket) -> tuple[set[str], set[str]]:
    """Data objects that no manifest lists, and those listed that are not there."""
    paths = [one.path for one in bucket.list_all("")]
    names = [name for name in map(ManifestName.parse, paths) if name is not None]
    listed: set[str] = set()
    for name in in_force(names):
        try:
            listed |= {one.path for one in Manifest.parse(bucket.get(name.path)).objects}
        except MissingObjectError:
            continue  # it may have been replaced since
    there = {path for path in paths if path.startswith(DATA)}
    return there - listed, listed - there


def site(points: Points, folder: Path, rounds: int, outage_s: float) -> None:
    with Machines(list(NAMES)) as machines, ExitStack() as scope:
        one = Site(folder, machines)
        scope.callback(one.close)
        one.weed.start()
        one.broker.start()
        for node in one.nodes.values():
            node.start()
        onboarded(one, points)
        for _ in range(rounds):
            faults(one, points, outage_s)
            converged(one, points)
        collected(one, points)


def vllm(points: Points, folder: Path, python: Path, model: Path) -> None:
    """3: machine A is gone for good; B answers from the bucket, and after a hint from memory."""
    ensure_packages(python)
    weed, broker = SeaweedServer(folder / "weed for vllm"), NatsBroker()
    first, second = [prompt(number) for number in (1, 2)]
    sockets = [folder / f"{name}.sock" for name in NAMES[:2]]

    def extra(name: str) -> Seen:
        bucket = weed.settings("vllm", capacity="2GiB", refresh="1s")
        bucket["credentials_file"] = str(bucket["credentials_file"])
        nats = {"servers": [broker.url], "node": name, "site": "vllm"}
        tree = {"dram": "256MiB", "object": bucket, "nats": nats, "decide": False}
        return {**tree, "socket": str(folder / f"{name}.sock"), "model": "e2e"}

    try:
        weed.start()
        broker.start()
        with Server(python, model, folder / "vllm a.log", extra("a")) as server:
            wanted = [server.ask(one) for one in (first, second)]
            assert flush(sockets[0]), "what A computed is not in the bucket"
        kill_daemon(sockets[0])
        with Server(python, model, folder / "vllm b.log", extra("b")) as server:
            answer = server.ask(first)
            told = {name: answer[name] for name in ("cached", "prompt", "seconds")}
            same = answer["tokens"] == wanted[0]["tokens"]
            full = len(first) // 128 * 128
            points.add("3 B answers from the bucket", same and answer["cached"] == full, **told)
            hinted(points, folder, broker, second)
            tiers = loaded(server)
            answer = server.ask(second)
            more = {tier: count - tiers.get(tier, 0) for tier, count in loaded(server).items()}
            same = answer["tokens"] == wanted[1]["tokens"] and answer["cached"] == full
            only = {tier for tier, count in more.items() if count} == {"dram"}
            told = {name: answer[name] for name in ("cached", "prompt", "seconds")}
            points.add("3 hinted 2 s ahead: served from memory", same and only, loaded=more, **told)
    finally:
        for path in sockets:
            kill_daemon(path)
        broker.kill()
        weed.kill()


def hinted(points: Points, folder: Path, broker: NatsBroker, tokens: list[int]) -> None:
    """Say what B will be asked for, and give it 2 seconds."""
    (folder / "tokens.json").write_text(json.dumps(tokens))
    command = [sys.executable, "-m", "kvdepot", "hint", "--set", f"nats.servers={broker.url}"]
    command += ["--set", "nats.site=vllm", "--node", "b", "--within", "2s", "--json"]
    command += ["--tokens", str(folder / "tokens.json"), "--model", "e2e"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    points.add("3 the hint is sent", done.returncode == 0, said=(done.stdout + done.stderr)[:200])
    time.sleep(2.0)


def loaded(server: Server) -> dict[str, float]:
    """Blocks that vLLM has loaded, by tier."""
    found: dict[str, float] = {}
    for name, value in server.metrics().items():
        if "kvdepot_loaded_blocks_total" in name and 'tier="' in name:
            tier = name.partition('tier="')[2].partition('"')[0]
            found[tier] = found.get(tier, 0) + value
    return found


def flush(sock: Path) -> bool:
    import kvdepot

    with kvdepot.open(f"unix:{sock}") as store:
        return bool(store.flush(WAIT_S))


def prompt(number: int) -> list[int]:
    return [1000 + (number * 7919 + at * 104729) % 39000 for at in range(1500)]


def ensure_packages(python: Path) -> None:
    """vLLM's environment needs what the bucket and the broker need."""
    tried = subprocess.run(
        [str(python), "-c", "import nats, obstore"], capture_output=True, check=False
    )
    if tried.returncode:
        pip = [str(python), "-m", "pip", "-q", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, "--no-deps", *PACKAGES], check=True, stdout=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description="Several machines over one bucket.")
    parser.add_argument("parts", nargs="*", help="site, vllm (default: both)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="of faults")
    parser.add_argument("--outage", type=float, default=5.0, help="seconds of each fault")
    parser.add_argument("--folder", type=Path, help="keep drives, logs and settings here")
    parser.add_argument("--python", type=Path, help="one that has vLLM")
    parser.add_argument("--model", type=Path, help="a model folder")
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in ("site", "vllm")]
    if unknown:
        parser.error(f"{unknown[0]!r} is not one of site, vllm")
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT_S)
    points, started_s = Points(args.json), time.monotonic()
    with scratch(args.folder, "kvdepot-nodes-") as folder:
        if not args.parts or "site" in args.parts:
            site(points, folder, args.rounds, args.outage)
        if not args.parts or "vllm" in args.parts:
            from tests.e2e.vllm_connector import find_model
            from tests.e2e.vllm_environments import NEWEST, python_with

            python = args.python or python_with(NEWEST)
            vllm(points, folder, python, find_model(args.model))
    ok, seconds = points.ok, round(time.monotonic() - started_s)
    whole = {"ok": ok, "seconds": seconds, "points": summary(points.found)}
    print(json.dumps(whole) if args.json else f"{'ok' if ok else 'FAILED'} after {seconds} s")
    return 0 if ok else 1


def too_long(*_: object) -> None:
    """Something hangs: end in order, so that nothing is left running."""
    raise SystemExit(f"error: not done after {LIMIT_S} s")


def summary(found: list[Seen]) -> dict[str, Seen]:
    """By number what was seen for each point of what must hold."""
    points: dict[str, Seen] = {}
    for one in found:
        number, _, name = one["point"].partition(" ")
        part = points.setdefault(number, {"ok": True, "checks": {}})
        part["ok"] = part["ok"] and one["ok"]
        part["checks"][name] = {what: one[what] for what in one if what != "point"}
    return points


if __name__ == "__main__":
    sys.exit(main())
