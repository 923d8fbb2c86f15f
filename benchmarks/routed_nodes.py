"""Two nodes, one traffic: requests placed at random, by asking the nodes, and by Dynamo's indexer.

    python benchmarks/routed_nodes.py --json

Two real daemons; no engine: a request loads the prefix that its node has, every byte verified, and
what it would compute is put. So the figure is tokens computed, not seconds. Each arm has the same
conversations in the same order, and fresh nodes. The indexer is left out where it is not installed.
"""

import argparse
import importlib.util
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import kvdepot
from kvdepot.depot import Depot
from kvdepot.testing.daemons import DaemonProcess
from kvdepot.testing.images import payload_for

TOKENS: Final = 16
BLOCK_BYTES: Final = 32 << 10
LAYOUT: Final = kvdepot.KVLayout.opaque(BLOCK_BYTES, TOKENS)
MODEL: Final = "toy"
NODES: Final = 2
THINK_S: Final = 0.03
"""Between two requests: events take up to their interval to arrive."""
_SYSTEM_BLOCKS: Final = 4
_START_S: Final = 60.0
Place = Callable[[list[int]], int]
"""Which node a prompt goes to."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One arm."""

    arm: str
    requests: int
    tokens: int
    computed_tokens: int
    wrong_bytes: int
    requests_by_node: list[int]

    @property
    def reused(self) -> float:
        return 1 - self.computed_tokens / self.tokens


def traffic(sessions: int, turns: int, rng: random.Random) -> Iterator[list[int]]:
    """Prompts of conversations that grow, in random order; all begin with one system prompt."""
    system = [rng.randrange(50_000) for _ in range(TOKENS * _SYSTEM_BLOCKS)]
    prompts = [list(system) for _ in range(sessions)]
    order = [number for number in range(sessions) for _ in range(turns)]
    rng.shuffle(order)
    for number in order:
        more = TOKENS * rng.randrange(2, 7)
        prompts[number] += [rng.randrange(50_000) for _ in range(more)]
        yield list(prompts[number])


class Node:
    """A daemon, and the engine's side of it."""

    def __init__(self, folder: Path, number: int, ports: tuple[int, int]) -> None:
        folder.mkdir()
        token = folder / "token"
        token.touch(0o600)
        token.write_text(random.Random(number).randbytes(16).hex())
        self.events, self.replay = (f"tcp://127.0.0.1:{port}" for port in ports)
        settings = {
            "dram": {"capacity": "8MiB", "prefault": False, "huge_pages": "never"},
            "ssd": {"path": str(folder / "kv"), "capacity": "24MiB", "segment": "2MiB"},
            "writeback": {"staging": "4MiB"},
            "events": {"endpoint": self.events, "replay": self.replay, "interval": 0.01},
        }
        options = ("--http", "127.0.0.1:0", "--http-token-file", str(token))
        self.daemon = DaemonProcess(folder, settings, *options)
        self._headers = {
            "authorization": f"Bearer {token.read_text()}",
            "content-type": "application/json",
        }
        self.store: Depot = kvdepot.open(self.daemon.address)
        self.space = self.store.namespace(model=MODEL, layout=LAYOUT)

    def prefix(self, ids: list[int]) -> dict[str, Any]:
        """What the node says of a prompt."""
        url = self.daemon.ready["http"].rstrip("/") + "/api/prefix"
        return dict(post(url, {"token_ids": ids, "model": MODEL}, self._headers))

    def serve(self, ids: list[int]) -> tuple[int, int]:
        """Load what is there, put the rest. Returns tokens computed and blocks with wrong bytes."""
        keys = self.space.keys(ids)
        here = len(self.store.match(keys))
        targets = [bytearray(BLOCK_BYTES) for _ in keys[:here]]
        got = self.store.get_many(keys[:here], targets, timeout_s=10.0)
        wrong = sum(
            bool(answer) and bytes(target) != payload_for(key, BLOCK_BYTES)
            for key, target, answer in zip(keys, targets, got, strict=False)
        )
        good = next((at for at, answer in enumerate(got) if not answer), here)
        rest = keys[good:]
        payloads = [payload_for(key, BLOCK_BYTES) for key in rest]
        self.store.put_many(rest, payloads, timeout_s=10.0, token_ids=ids[TOKENS * good :])
        return TOKENS * len(rest), wrong

    def close(self) -> None:
        self.store.close()
        self.daemon.stop()


def post(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    sent = headers or {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), sent)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def indexer(folder: Path, nodes: list[Node]) -> Iterator[str]:
    """Dynamo's indexer, which follows the nodes' events. Gives its address."""
    port = free_port()
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port)]
    with (folder / "indexer.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    try:
        while not _answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "indexer.log").read_text())
            time.sleep(0.05)
        for number, node in enumerate(nodes):
            facts = {"instance_id": number, "model_name": MODEL, "block_size": TOKENS}
            addresses = {"endpoint": node.events, "replay_endpoint": node.replay}
            post(f"{url}/register", {**facts, **addresses})
        yield url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def run(arm: str, args: argparse.Namespace) -> Outcome:
    """One arm with fresh nodes."""
    rng, placed = random.Random(args.seed + 1), Counter(dict.fromkeys(range(NODES), 0))
    with tempfile.TemporaryDirectory() as name, ExitStack() as scope:
        folder = Path(name)
        nodes = []
        for number in range(NODES):
            nodes.append(Node(folder / str(number), number, (free_port(), free_port())))
            scope.callback(nodes[-1].close)
        url = scope.enter_context(indexer(folder, nodes)) if arm == "dynamo" else ""

        def longest(lengths: list[int]) -> int:
            """The node that has most, less a block for each request that it has had more."""
            ahead = {at: placed[at] - min(placed.values()) for at in range(NODES)}
            return max(range(NODES), key=lambda at: lengths[at] - TOKENS * ahead[at])

        def by_indexer(ids: list[int]) -> int:
            found = post(f"{url}/query", {"token_ids": ids, "model_name": MODEL})["instances"]
            told = [found.get(str(at), {}).get("longest_matched", 0) for at in range(NODES)]
            return longest(told)

        places: dict[str, Place] = {
            "random": lambda _: rng.randrange(NODES),
            "prefix": lambda ids: longest([node.prefix(ids)["tokens"] for node in nodes]),
            "dynamo": by_indexer,
        }
        tokens = computed = wrong = 0
        for ids in traffic(args.sessions, args.turns, random.Random(args.seed)):
            at = places[arm](ids)
            placed[at] += 1
            more, bad = nodes[at].serve(ids)
            tokens, computed, wrong = tokens + len(ids), computed + more, wrong + bad
            time.sleep(THINK_S)
    by_node = [placed[at] for at in range(NODES)]
    return Outcome(arm, sum(by_node), tokens, computed, wrong, by_node)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sessions", type=int, default=30)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    arms = ["random", "prefix", *(["dynamo"] if importlib.util.find_spec("dynamo") else [])]
    outcomes = [run(arm, args) for arm in arms]
    if args.json:
        rows = [{**_row(one), "reused": round(one.reused, 4)} for one in outcomes]
        print(json.dumps({"seed": args.seed, "arms": rows}))
    else:
        for one in outcomes:
            print(
                f"{one.arm:8} {one.requests} requests, {one.tokens:,} tokens, "
                f"{one.computed_tokens:,} computed, {one.reused:.1%} reused, by node "
                f"{one.requests_by_node}"
            )
    return 1 if any(one.wrong_bytes for one in outcomes) else 0


def _row(one: Outcome) -> dict[str, Any]:
    return {
        "arm": one.arm,
        "requests": one.requests,
        "tokens": one.tokens,
        "computed_tokens": one.computed_tokens,
        "wrong_bytes": one.wrong_bytes,
        "requests_by_node": one.requests_by_node,
    }


if __name__ == "__main__":
    sys.exit(main())
