"""Clients in other processes: `python -m tests.support.daemon_clients VERB ADDRESS SEED SECONDS`.

hold   lease blocks, reserve slots, say so, and wait to be killed
random put, get, lease, reserve and remove at random, looking at every byte; prints what was done
diary  put and flush, one line for every prompt that is acknowledged; then get them without end
"""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.support.failures import check_data
from tests.support.store_contract import BLOCK_BYTES, LAYERS, prompt, put, space_of, tiers, touch

import kvdepot
from kvdepot.core.block import BlockKey, PutResult
from kvdepot.core.depot import Arrival, NamespaceHandle
from kvdepot.testing.daemons import DaemonProcess
from kvdepot.testing.images import payload_for

StartDaemon = Callable[..., DaemonProcess]
PROMPTS, BLOCKS = 40, 12
DIARY_PROMPTS = 300
"""Of four blocks each. What is acknowledged must be found again, so all of it must fit on disk."""


class ClientProcess:
    """One of the verbs above, in a process of its own. A scope: killed at its end."""

    def __init__(self, verb: str, address: str, seed: int = 0, seconds: float = 0.0) -> None:
        command = [sys.executable, "-m", "tests.support.daemon_clients"]
        command += [verb, address, str(seed), str(seconds)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._ready = False

    def ready(self) -> "ClientProcess":
        """Wait until it is attached."""
        if not self._ready:
            assert self.line() == {"ready": True}
            self._ready = True
        return self

    def line(self) -> Any:
        """The next thing it says."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said, "the client has ended"
        return json.loads(said)

    def kill(self) -> list[Any]:
        """kill -9. Returns what it had said and nobody had heard."""
        self.process.kill()
        said, _ = self.process.communicate()
        lines = said.splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def end(self) -> list[Any]:
        """Wait for its end, which must be a good one."""
        assert self.process.stdout is not None and self.process.stdin is not None
        self.process.stdin.close()
        said = self.process.stdout.read()  # communicate() would lose what readline() has buffered
        self.process.stdout.close()
        assert self.process.wait() == 0
        return [json.loads(line) for line in said.splitlines()]

    def __enter__(self) -> "ClientProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


def say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


class RandomClient:
    """Random calls; whatever comes back is right, or a miss."""

    def __init__(self, store: kvdepot.Depot, seed: int) -> None:
        self.store = store
        self.space: NamespaceHandle = space_of(store)
        self.rng = random.Random(seed)
        self.done: Counter[str] = Counter()

    def run(self, seconds: float) -> Counter[str]:
        until = time.monotonic() + seconds
        verbs = ["put"] * 4 + ["get"] * 6 + ["lease", "deliver", "fill", "layer"] * 2
        verbs += ["remove", "match", "touch"]
        while time.monotonic() < until:
            verb = self.rng.choice(verbs)
            # Most of the traffic goes to few prompts, as in life.
            number = min(self.rng.randrange(PROMPTS), self.rng.randrange(PROMPTS))
            keys = prompt(self.space, number, self.rng.randrange(1, BLOCKS + 1))
            self.done[verb] += getattr(self, verb)(keys)
        return self.done

    def put(self, keys: list[BlockKey]) -> int:
        payloads = [payload_for(key, BLOCK_BYTES) for key in keys]
        return sum(map(bool, self.store.put_many(keys, payloads, timeout_s=0.05)))

    def get(self, keys: list[BlockKey]) -> int:
        return len(keys) - tiers(self.store, keys).count(None)

    def layer(self, keys: list[BlockKey]) -> int:
        layer, size = self.rng.randrange(LAYERS), BLOCK_BYTES // LAYERS
        target = bytearray(size)
        if not self.store.get_many([keys[-1]], [target], layers=range(layer, layer + 1))[0]:
            return 0
        wanted = payload_for(keys[-1], BLOCK_BYTES)[layer * size : (layer + 1) * size]
        check_data(target == wanted, f"wrong bytes in layer {layer} of {keys[-1].hex()}")
        return 1

    def lease(self, keys: list[BlockKey]) -> int:
        with self.store.lease(keys) as lease:
            for index, key in enumerate(lease):
                view = lease.view(index)
                if view is not None:
                    self.compare(lease, key, bytes(view))
            self.put(prompt(self.space, self.rng.randrange(PROMPTS), 3))
            return len(lease)

    def compare(self, lease: Any, key: BlockKey, found: bytes) -> None:
        """What a lease shows is right, as long as there is a lease: not after the daemon's end."""
        check_data(found == payload_for(key, BLOCK_BYTES), f"wrong bytes in view of {key.hex()}")

    def deliver(self, keys: list[BlockKey]) -> int:
        with self.store.lease(keys) as lease:
            got: dict[int, bytes] = {}

            def sink(arrivals: list[Arrival]) -> None:
                got.update({arrival.index: bytes(arrival.view) for arrival in arrivals})

            answers = lease.deliver(sink)
            for index, answer in enumerate(answers):
                right = not answer or got[index] == payload_for(keys[index], BLOCK_BYTES)
                check_data(right, f"wrong bytes delivered for {keys[index].hex()}")
            return sum(map(bool, answers))

    def fill(self, keys: list[BlockKey]) -> int:
        with self.store.reserve(keys, timeout_s=0.05) as slots:
            indices = []
            for index, key in enumerate(keys):
                view = slots.view(index)
                if view is not None and self.rng.random() < 0.8:
                    view[:] = payload_for(key, BLOCK_BYTES)
                    indices.append(index)
            slots.seal(indices)
            return slots.outcomes.count(PutResult.STORED)

    def remove(self, keys: list[BlockKey]) -> int:
        return self.store.remove(keys[-2:])

    def match(self, keys: list[BlockKey]) -> int:
        return len(self.store.match(keys))

    def touch(self, keys: list[BlockKey]) -> int:
        return touch(self.store, keys)


def hold(store: kvdepot.Depot, seed: int) -> None:
    space = space_of(store)
    keys = prompt(space, seed, 4)
    put(store, keys)
    leases = [store.lease(keys) for _ in range(3)]
    slots = store.reserve(prompt(space, 1000 + seed, 5), timeout_s=10.0)
    say({"leased": sum(map(len, leases)), "reserved": slots.outcomes.count(PutResult.STORED)})
    sys.stdin.read()


def diary(store: kvdepot.Depot, seed: int) -> None:
    space, first = space_of(store), 10_000 * (seed + 1)
    rng = random.Random(seed)
    flushed: list[int] = []
    while True:
        if len(flushed) < DIARY_PROMPTS:
            number = first + len(flushed)
            keys = prompt(space, number, 4)
            answers = store.put_many(keys, [payload_for(key, BLOCK_BYTES) for key in keys])
            if all(answers) and store.flush():
                flushed.append(number)
                say({"number": number})
        if flushed:
            tiers(store, prompt(space, rng.choice(flushed), 4))


def main(verb: str, address: str, seed: str, seconds: str) -> None:
    with kvdepot.open(address, call_timeout="30s") as store:
        say({"ready": True})
        if verb == "hold":
            hold(store, int(seed))
        elif verb == "diary":
            diary(store, int(seed))
        else:
            done = RandomClient(store, int(seed)).run(float(seconds))
            say({"done": done, "client": store.stats()["client"]})


if __name__ == "__main__":
    main(*sys.argv[1:])
