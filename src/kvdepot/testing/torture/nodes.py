"""Rounds of several nodes over one bucket that goes away and comes back.

Each node is a store with an SSD. Nodes put, get, remove and flush in turn, while the bucket is away
for some or all of them, and while others are closed, or lose their power. Now and then all nodes
are up, the bucket answers all of them, and they must agree: every flushed block is on each node,
and no removed one.
"""

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvdepot.config.settings import ObjectConfig
from kvdepot.core.block import PutResult
from kvdepot.core.depot import Durability
from kvdepot.store.store import Store
from kvdepot.testing.power import PowerFiles
from kvdepot.testing.torture.judge import judge_files, judge_leaks
from kvdepot.testing.torture.ledger import Ledger
from kvdepot.testing.torture.shared_bucket import (
    OUTAGES,
    BucketLink,
    ForeignFiles,
    LinkState,
    open_objects,
)
from kvdepot.testing.torture.workload import (
    ALLOWANCE_S,
    CLOSE_S,
    FLUSH_S,
    PUT_S,
    StoreCalls,
    descriptors,
    threads,
)
from kvdepot.testing.torture.world import (
    LIMIT_S,
    TierMix,
    World,
    all_blocks,
    keys_of,
    read_blocks,
)
from kvdepot.volumes.object.bucket import Bucket
from kvdepot.volumes.object.volume import BucketVolume

NODES: Final = (2, 2, 3)
SEGMENTS: Final = 64
STEPS: Final = 60
AGREE_S: Final = 20.0
"""Nodes agree within this time, and the allowance for busy machines, after an outage."""
_LOOK_S: Final = 0.02
GRACE_S: Final = (0.5, 2.0, 60.0)
_CAPACITY: Final = "64MiB"


@dataclass(slots=True)
class SharedBlocks:
    """The blocks that all nodes must have or lack. Blocks in no set may be present or not."""

    must: set[int] = field(default_factory=set)
    """Flushed on a node since they were put, and not removed since."""
    gone: set[int] = field(default_factory=set)
    """Removed on a node, and not put since."""
    spread: set[int] = field(default_factory=set)
    """Removed since the nodes agreed last. A node that does not know it yet answers a put with
    PRESENT, and drops the block later."""


class Node:
    """One store of several, whose machine may fail."""

    def __init__(
        self, number: int, world: World, bucket: Bucket, ledger: Ledger, chance: random.Random
    ) -> None:
        self.number = number
        self.world = world
        self.unflushed: set[int] = set()
        self.removed: set[int] = set()
        """Blocks that this node has removed since the nodes agreed last."""
        self.synced: set[int] = set()
        """Those of them that it knows also after a power cut."""
        self.late: set[int] = set()
        """Those of `unflushed` that were put, or not uploaded yet, while the bucket was away."""
        self.durable: set[int] = set()
        """Blocks that a flush of this node covered while the bucket lacked some."""
        self._owed: set[int] = set()
        self._bucket = bucket
        self._ledger = ledger
        self._chance = chance
        self._store: Store | None = None
        self._calls: StoreCalls | None = None
        self._files = PowerFiles(random.Random(), "auto")
        self.link = BucketLink(bucket, chance)

    @property
    def is_up(self) -> bool:
        return self._store is not None

    @property
    def store(self) -> Store:
        assert self._store is not None
        return self._store

    @property
    def calls(self) -> StoreCalls:
        assert self._calls is not None
        return self._calls

    def open(self, link: LinkState) -> None:
        """Start the node, with a bucket that answers or does not."""
        self.link = BucketLink(self._bucket, self._chance)
        self.link.become(link)
        self._files = PowerFiles(random.Random(self._chance.getrandbits(64)), self.world.mix.engine)
        self.world.bucket = self.link
        self._store = self.world.open(self._files)
        self._calls = StoreCalls(self._store, self._ledger, self._chance)

    def close(self) -> bool:
        """Stop the node orderly. False if not everything was written."""
        store, self._store = self.store, None
        self.calls.end_leases()
        done = self.calls.timed("close", 3 * CLOSE_S, lambda: store.close(FLUSH_S))
        return bool(done)

    def cut_power(self) -> None:
        store, self._store = self.store, None
        self.link.become("cut")
        self._files.cut()
        store.inspect().drives.mover.tombstone_wait_s = 0.0
        self.calls.end_leases()
        self.calls.timed("close", 3 * CLOSE_S, lambda: store.close(2.0))

    def present(self) -> set[int]:
        return {block.number for block in all_blocks() if self.store.match([block.key])}

    def tiers_of(self, number: int) -> list[str]:
        """The lower tiers that have a block."""
        state = self.store.inspect().state
        with state.lock:
            (row,) = state.catalog.rows([all_blocks()[number].key])
            return [one.name for one in state.lower_tiers if row >= 0 and one.copies.ready(row)]

    def owed(self) -> set[int]:
        """Removals of this node that may not have reached the bucket."""
        if self.is_up:
            behind = self.store.inspect().volumes.metadata.behind()
            self._owed = self.removed if any(entry.is_remote for entry in behind) else set()
        return self._owed

    def forget(self) -> None:
        """A flush reports a block that was not written once only."""
        self.unflushed.clear()
        self.late.clear()

    def hear(self) -> None:
        """Read what others have written to the bucket, and wait until it is applied."""
        for entry in self.store.inspect().volumes.entries:
            volume, deadline = entry.volume, time.monotonic() + ALLOWANCE_S
            if isinstance(volume, BucketVolume):
                while not volume.upkeep.begun and time.monotonic() < deadline:
                    time.sleep(_LOOK_S)
                volume.upkeep.step()
                while entry.has_news and time.monotonic() < deadline:
                    time.sleep(_LOOK_S)

    def reaches_bucket(self) -> bool:
        entries = self.store.inspect().volumes.entries
        return all(entry.volume.facts().up for entry in entries if entry.is_remote)


class NodesRound:
    """The nodes of one round, and what is done to them."""

    def __init__(
        self,
        nodes: list[Node],
        ledger: Ledger,
        chance: random.Random,
        server: Callable[[bool], None] | None = None,
    ) -> None:
        """`server` ends the bucket's server, or starts it again."""
        self._nodes = nodes
        self._ledger = ledger
        self._chance = chance
        self._server = server
        self._blocks = SharedBlocks()
        self._served = True

    def begin(self) -> None:
        for node in self._nodes:
            node.open("up")

    def play(self) -> None:
        choices: list[tuple[Callable[[], None], int]] = [
            (self.put, 30),
            (self.get, 14),
            (self.flush, 14),
            (self.remove, 12),
            (self.lose_bucket, 6),
            (self.end_outage, 6),
            (self.stop_node, 5),
            (self.start_node, 8),
            (self.agree, 2),
        ]
        for step in self._chance.choices(
            [call for call, _ in choices], [weight for _, weight in choices], k=STEPS
        ):
            step()
        self.agree()
        for node in self._nodes:
            node.close()

    def put(self) -> None:
        node = self._node()
        if node is None:
            return
        blocks = node.calls.prompt()
        numbers = {block.number for block in blocks}
        payloads = [block.payload for block in blocks]
        self._ledger.write("putting", numbers, nbytes=0, node=node.number)
        self._blocks.gone -= numbers
        for one in self._nodes:
            one.removed -= numbers
        answers = node.calls.timed(
            "put_many",
            PUT_S,
            lambda: node.store.put_many(keys_of(blocks), payloads, timeout_s=PUT_S),
        )
        pairs = zip(blocks, answers, strict=True)
        stored = {block.number for block, answer in pairs if answer is PutResult.STORED}
        node.unflushed |= stored - self._blocks.spread
        if not (self._served and node.link.state == "up" and node.reaches_bucket()):
            node.late |= node.unflushed

    def get(self) -> None:
        node = self._node()
        if node is not None:
            self._chance.choice(
                [node.calls.get, node.calls.get, node.calls.hold_lease, node.calls.end_lease]
            )()

    def flush(self) -> None:
        node = self._node()
        if node is None:
            return
        report = node.calls.timed("flush", FLUSH_S, lambda: node.store.flush(FLUSH_S))
        if report.ok:
            self._covered(node)
        else:
            blocks = [all_blocks()[number] for number in sorted(node.unflushed)]
            asked = partial(node.store.flush, FLUSH_S, keys=keys_of(blocks))
            answers = node.calls.timed("flush", FLUSH_S, asked).blocks
            pairs = zip(blocks, answers, strict=True)
            node.durable |= {block.number for block, one in pairs if one is Durability.DURABLE}
        self._ledger.write("flush", node.unflushed & node.durable, node=node.number, ok=report.ok)
        node.forget()

    def remove(self) -> None:
        node = self._node()
        if node is None:
            return
        blocks = node.calls.prompt() if self._chance.random() < 0.3 else node.calls.sample(4)
        numbers = {block.number for block in blocks}
        self._ledger.write("removing", numbers, node=node.number)
        node.calls.timed("remove", 4 * LIMIT_S, lambda: node.store.remove(keys_of(blocks)))
        for one in self._nodes:
            one.unflushed -= numbers
            one.durable -= numbers
        self._blocks.must -= numbers
        self._blocks.gone |= numbers
        self._blocks.spread |= numbers
        node.removed |= numbers
        if node.world.mix.fsync == "always":
            node.synced |= numbers
        self._check_gone(node, "has removed")

    def lose_bucket(self) -> None:
        """The bucket goes away, for one node or for all."""
        if self._server is not None and self._served and self._chance.random() < 0.5:
            self._served = False
            self._outage("the server is killed")
            self._server(False)
            for node in self._nodes:
                node.late |= node.unflushed
            return
        state = self._chance.choice(OUTAGES)
        some = [node for node in self._nodes if node.is_up and node.link.state == "up"]
        if some and self._chance.random() < 0.6:
            some = [self._chance.choice(some)]
        if some:
            self._outage(f"the bucket {state}", [node.number for node in some])
            for node in some:
                node.link.become(state)
                node.late |= node.unflushed

    def end_outage(self) -> None:
        if not self._served and self._server is not None:
            self._server(True)
            self._served = True
            return
        lost = [node for node in self._nodes if node.is_up and node.link.state != "up"]
        if lost:
            self._chance.choice(lost).link.become("up")

    def stop_node(self) -> None:
        """A node is closed, or its power is cut."""
        node = self._node()
        if node is None:
            return
        owed = node.owed()
        if self._chance.random() < 0.5:
            self._outage("closed", [node.number])
            if node.close():
                self._covered(node)
        else:
            self._outage("its power is cut", [node.number])
            node.cut_power()
        node.forget()
        self._blocks.gone -= owed - node.synced
        node.removed &= node.synced

    def start_node(self) -> None:
        down = [node for node in self._nodes if not node.is_up]
        if down:
            self._start(self._chance.choice(down), self._chance.choice(("up", "up", *OUTAGES)))

    def agree(self) -> None:
        """End all outages. The nodes must agree in time, and serve what they have."""
        if not self._served:
            self.end_outage()
        for node in self._nodes:
            if node.is_up:
                node.link.become("up")
            else:
                self._start(node, "up")
        deadline = time.monotonic() + AGREE_S + ALLOWANCE_S
        blocks = self._blocks
        while True:
            seen = {node.number: node.present() for node in self._nodes}
            differ = any(
                (blocks.must | node.durable) - seen[node.number] or blocks.gone & seen[node.number]
                for node in self._nodes
            )
            if not differ or time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)
        for node in self._nodes:
            number, found = node.number, seen[node.number]
            for block in sorted(node.durable - found):
                self._ledger.fault("lost", f"block {block} was durable on node {number}")
            for block in sorted(blocks.must - node.durable - found):
                have = {one.number: one.tiers_of(block) for one in self._nodes}
                text = f"block {block} was flushed and is not on node {number}, but on {have}"
                self._ledger.fault("lost", text)
            for block in sorted(blocks.gone & found):
                self._ledger.fault("back", f"block {block} was removed and stays on node {number}")
            node.durable &= found
        for node in self._nodes:
            node.hear()
        self._ledger.write("agreed", blocks.must)
        for found in seen.values():
            blocks.must &= found
            blocks.gone -= found
        blocks.spread.clear()
        for node in self._nodes:
            node.removed.clear()
            node.synced.clear()
            self._read_all(node)

    def _start(self, node: Node, link: LinkState) -> None:
        self._ledger.write("open", node=node.number, link=link)
        owed = set[int]().union(*(one.owed() for one in self._nodes))
        node.open(link)
        self._check_gone(node, "has removed")
        if link == "up" and self._served and node.reaches_bucket():
            self._check_gone(node, "was told of the removal of", self._blocks.gone - owed)

    def _check_gone(self, node: Node, why: str, gone: set[int] | None = None) -> None:
        gone = node.removed & self._blocks.gone if gone is None else gone
        for block in sorted(node.present() & gone):
            self._ledger.fault("back", f"node {node.number} {why} block {block} and serves it")

    def _read_all(self, node: Node) -> None:
        """What a node says it has can be read, unless it was dropped meanwhile."""
        blocks = [all_blocks()[number] for number in sorted(node.present())]
        right, wrong = read_blocks(node.store, blocks)
        for block in wrong:
            self._ledger.fault("wrong", f"block {block.number} has wrong bytes")
        read = {block.number for block in (*right, *wrong)}
        for block in blocks:
            if block.number not in read and node.store.match([block.key]):
                again, _ = read_blocks(node.store, [block])
                if not again and node.store.match([block.key]):
                    text = f"block {block.number} is present on {node.number} and cannot be read"
                    self._ledger.fault("lost", text)

    def _covered(self, node: Node) -> None:
        """A flush of a node has covered everything that was put and removed there."""
        self._blocks.must |= node.unflushed - node.late
        node.durable |= node.unflushed & node.late
        node.synced |= node.removed

    def _outage(self, text: str, nodes: list[int] | None = None) -> None:
        self._ledger.write("outage", text=text, nodes=nodes or "all")

    def _node(self) -> Node | None:
        up = [node for node in self._nodes if node.is_up]
        return self._chance.choice(up) if up else None


def object_settings(url: str, chance: random.Random) -> dict[str, Any]:
    return {
        "url": url,
        "capacity": _CAPACITY,
        "refresh": chance.choice((0.03, 0.2)),
        "grace": chance.choice(GRACE_S),
        "retry_initial": 0.05,
        "retry_max": 0.5,
        "read_timeout": 2.0,
        "write_timeout": 2.0,
    }


def make_nodes(
    folder: Path, settings: dict[str, Any], bucket: Bucket, ledger: Ledger, chance: random.Random
) -> list[Node]:
    nodes = []
    for number in range(chance.choice(NODES)):
        mix = replace(
            TierMix.draw(chance),
            ssds=1,
            ssd_segments=SEGMENTS,
            ssd_mode=chance.choice(("write-back", "write-through")),
            hdds=0,
            emulated=False,
            fsync=chance.choice(("flush", "flush", "always")),
        )
        world = World(folder / f"node-{number}", mix, object=settings)
        world.folder.mkdir(mode=0o700)
        world.make_folders()
        nodes.append(Node(number, world, bucket, ledger, chance))
    return nodes


def play_nodes(folder: Path, ledger: Ledger, chance: random.Random) -> None:
    """Nodes over a shared folder. Files of other programs lie in it and beside their segments."""
    root = folder / "shared"
    settings = object_settings(f"file://{root}", chance)
    bucket = open_objects(ObjectConfig(url=settings["url"], capacity=64 << 20), root)
    play_over(folder, settings, bucket, ledger, chance, others_in=root)


def play_over(
    folder: Path,
    settings: dict[str, Any],
    bucket: Bucket,
    ledger: Ledger,
    chance: random.Random,
    *,
    server: Callable[[bool], None] | None = None,
    others_in: Path | None = None,
) -> None:
    assert not bucket.list_all("")
    # The connections of a client to a server stay open for a while.
    before = (descriptors() if server is None else sys.maxsize, threads())
    nodes = make_nodes(folder, settings, bucket, ledger, chance)
    others = ForeignFiles()
    played = NodesRound(nodes, ledger, chance, server)
    played.begin()
    if others_in is not None:
        others.add(others_in, ForeignFiles.NAMES)
    for node in nodes:
        others.add(node.world.ssd_path(0), ["notes.txt"])
    played.play()
    for text in others.touched():
        ledger.fault("foreign", text)
    for node in nodes:
        judge_files(node.world, ledger)
    judge_leaks(ledger, *before)
