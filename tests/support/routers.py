"""Routers for tests: one that follows KV events as documented, and Dynamo's own indexer."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
from tests.support.s3_servers import free_ports

from kvdepot.core.depot import Match

SessionUpdate = tuple[int, int]
"""Tokens of the leading blocks that are in memory, and of all that are here."""
_START_S: Final = 60.0


def told_by(match: Match, block_tokens: int) -> SessionUpdate:
    """What a depot says of a prompt, in the words of routers."""
    return match.blocks_in_memory * block_tokens, len(match) * block_tokens


class EventFollower:
    """A subscriber that keeps, for each medium, the blocks that it was told of."""

    def __init__(self, endpoint: str, replay: str = "", topic: str = "") -> None:
        self._context = zmq.Context()
        self.subscriber = self._context.socket(zmq.SUB)
        self.subscriber.connect(endpoint)
        self.subscriber.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._replay = replay
        self.told_anew = False
        self.blocks: dict[str, dict[int, tuple[int | None, tuple[int, ...]]]] = {}
        """Medium to hash to the parent's hash and the token ids."""
        self.topics: set[str] = set()
        self.expected: int | None = None
        self.gaps = 0

    def follow(self, wait_s: float = 0.3) -> None:
        """Take in what comes until nothing has come for so long."""
        while self.subscriber.poll(int(wait_s * 1000)):
            topic, number, batch = self.subscriber.recv_multipart()
            self.topics.add(topic.decode())
            sequence = int.from_bytes(number, "big")
            if self.expected is not None and sequence != self.expected:
                self.gaps += 1
                if self._replay:
                    self.ask_again(self.expected)
            self.take(batch)
            self.expected = max(self.expected or 0, sequence + 1)

    def ask_again(self, first: int) -> list[int]:
        """Have batches sent again. Returns their numbers."""
        asking = self._context.socket(zmq.DEALER)
        asking.connect(self._replay)
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while asking.poll(10_000):
            _, _, number, batch = asking.recv_multipart()
            sequence = int.from_bytes(number, "big", signed=True)
            if sequence == -1:
                break
            found.append(sequence)
            self.take(batch)
            self.expected = sequence + 1
        asking.close(0)
        return found

    def take(self, batch: bytes) -> None:
        _, events, _ = msgspec.msgpack.decode(batch)
        for event in events:
            match event:
                case {"type": "BlockStored"}:
                    self._stored(event)
                case {"type": "BlockRemoved"}:
                    known = self.blocks.setdefault(event["medium"], {})
                    for digest in event["block_hashes"]:
                        # What it came too late for it may not know, until all is told anew.
                        assert digest in known or not self.told_anew
                        known.pop(digest, None)
                case {"type": "AllBlocksCleared"}:
                    self.blocks.clear()
                    self.told_anew = True

    def _stored(self, event: dict[str, Any]) -> None:
        parent, size, ids = event["parent_block_hash"], event["block_size"], event["token_ids"]
        assert len(ids) == size * len(event["block_hashes"])
        known = self.blocks.setdefault(event["medium"], {})
        for at, digest in enumerate(event["block_hashes"]):
            known[digest] = (parent, tuple(ids[at * size : (at + 1) * size]))
            parent = digest

    def held(self, medium: str) -> set[tuple[int, ...]]:
        """Token ids of the blocks on a medium."""
        return {ids for _, ids in self.blocks.get(medium, {}).values()}

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> "EventFollower":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DynamoIndexer:
    """`python -m dynamo.indexer`, in a process of its own. A scope: killed at its end."""

    def __init__(self, folder: Path) -> None:
        self._port = free_ports(1)[0]
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self._port)]
        with (folder / "indexer.log").open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + _START_S
        while not self._is_up():
            assert self._process.poll() is None, (folder / "indexer.log").read_text()
            assert time.monotonic() < deadline, "the indexer does not answer"
            time.sleep(0.05)

    def register(self, number: int, addresses: tuple[str, str], block_tokens: int) -> None:
        """Have it follow a depot: where it publishes, and where it replays."""
        told = dict(zip(("endpoint", "replay_endpoint"), addresses, strict=True))
        facts = {"instance_id": number, "model_name": "m", "block_size": block_tokens}
        self._post("/register", {**facts, **told})

    def query(self, token_ids: list[int]) -> dict[int, SessionUpdate]:
        """What it knows of a prompt, by depot."""
        found = self._post("/query", {"token_ids": token_ids, "model_name": "m"})
        return {
            int(number): (facts["cpu"], facts["disk"])
            for number, facts in found["instances"].items()
        }

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5):
                return True
        except OSError:
            return False

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        url, sent = f"http://127.0.0.1:{self._port}{path}", {"content-type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), sent)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return {"instances": {}}
            raise

    def __enter__(self) -> "DynamoIndexer":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
