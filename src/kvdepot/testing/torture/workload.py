"""The workload of a torture round: random calls of every kind, drawn from a seed."""

import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, Literal, TypeVar

from kvdepot.core.block import PutResult
from kvdepot.core.depot import Durability, Lease
from kvdepot.depot import Depot
from kvdepot.errors import ConfigError, StoreClosedError
from kvdepot.store.store import Store
from kvdepot.store.volume_set import VolumeSet
from kvdepot.testing.torture.ledger import Ledger
from kvdepot.testing.torture.world import (
    LIMIT_S,
    SEGMENT_BYTES,
    SPACES,
    Block,
    World,
    all_blocks,
    keys_of,
    prompts,
    read_blocks,
    residents,
)

ALLOWANCE_S: Final = 20.0
"""A call may return this much after its deadline, because test machines are busy."""
PUT_S: Final = 0.5
FLUSH_S: Final = 5.0
CLOSE_S: Final = 30.0
PIN_S: Final = 30.0
Answer = TypeVar("Answer")
Trusted = Callable[[], bool]
"""False if results prove nothing about the disk any more, because the power was cut."""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


class StoreCalls:
    """Calls to a store that must return in time, with right bytes or a miss."""

    def __init__(self, store: Depot, ledger: Ledger, chance: random.Random) -> None:
        self.store = store
        self._ledger = ledger
        self._chance = chance
        self._leases: list[Lease] = []

    def get(self) -> None:
        blocks = self.prompt() if self._chance.random() < 0.5 else self.sample(6)
        _, wrong = self.timed("get_many", LIMIT_S, lambda: read_blocks(self.store, blocks))
        for block in wrong:
            self._ledger.fault("wrong", f"block {block.number} has wrong bytes")

    def hold_lease(self) -> None:
        keys = keys_of(self.prompt())
        self._leases.append(self.timed("lease", 0.0, lambda: self.store.lease(keys)))
        if len(self._leases) > 3:
            self.end_lease()

    def end_lease(self) -> None:
        if self._leases:
            lease = self._leases.pop(self._chance.randrange(len(self._leases)))
            self.timed("release", 0.0, lease.release)

    def end_leases(self) -> None:
        while self._leases:
            self._leases.pop().release()

    def hint(self) -> None:
        self.store.prefetch(keys_of(self.prompt()), 0.5)

    def prompt(self) -> list[Block]:
        """The beginning of a prompt."""
        whole = self._chance.choice(prompts())
        return list(whole[: self._chance.randint(1, len(whole))])

    def sample(self, count: int) -> list[Block]:
        return self._chance.sample(all_blocks(), count)

    def timed(self, label: str, limit_s: float, work: Callable[[], Answer]) -> Answer:
        """Make a call, and record a fault if it returns late."""
        started = time.monotonic()
        answer = work()
        took_s = time.monotonic() - started
        if took_s > limit_s + ALLOWANCE_S:
            self._ledger.fault("late", f"{label} took {took_s:.1f} s")
        return answer


class DriveChanges:
    """Changes of the SSDs of an open store, made concurrently with its calls, one at a time."""

    def __init__(self, world: World, calls: StoreCalls, ledger: Ledger, trusted: Trusted) -> None:
        self.was_away = bool(world.away())
        """True if a drive was absent at any time since the store was opened."""
        self._world = world
        self._calls = calls
        self._ledger = ledger
        self._trusted = trusted
        self._change: threading.Thread | None = None

    def drain_or_add(self, chance: random.Random) -> None:
        world = self._world
        self.wait()
        others = [number for number in range(4) if number not in {*world.ssds, *world.away()}]
        if len(world.ssds) > 1 and (chance.random() < 0.6 or not others):
            going = chance.choice(world.ssds)
            self._begin(lambda: self._drain(going))
        elif others and not world.ssd_path(others[0]).exists():
            self._begin(lambda: self._add(others[0]))

    def resize(self, chance: random.Random) -> None:
        self.wait()
        segments = max(3, self._world.ssd_segments + chance.choice((-2, -1, 1, 2)))
        self._begin(lambda: self._resize(segments))

    def pull_a_drive(self, chance: random.Random) -> None:
        """Take a drive away until it is brought back."""
        self.wait()
        if self._world.may_lose_one(self._ledger.expected.drives.met):
            self.was_away = True
            self._world.take_away(chance.choice(self._world.ssds))

    def bring_back(self) -> None:
        if self._world.away():
            self._ledger.write("returned")
            self._world.bring_back()

    def wait(self) -> None:
        """Wait for the end of a change."""
        if self._change is not None:
            self._change.join(CLOSE_S + ALLOWANCE_S)
            if self._change.is_alive():
                self._world.write_stacks("a drain or resize does not end")
                self._ledger.fault("late", "a drain or resize does not end; see stacks.txt")
            self._change = None

    def _drain(self, number: int) -> None:
        world, volumes = self._world, self._calls.store.volumes
        self._record(shrunk=True)
        path = world.ssd_path(number)
        self._calls.timed("drain", 4 * LIMIT_S, lambda: volumes.drain("ssd", path))
        if self._trusted():
            world.ssds = [one for one in world.ssds if one != number]
            self._record()

    def _add(self, number: int) -> None:
        world, volumes = self._world, self._calls.store.volumes
        path = world.ssd_path(number)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        world.ssds = [*world.ssds, number]
        self._record()
        self._calls.timed("add", 4 * LIMIT_S, lambda: volumes.add("ssd", path))

    def _resize(self, segments: int) -> None:
        """Resize. The next opening uses the larger of both sizes: shrinking may still wait for
        leases, and a drive that is opened smaller than it is drops blocks.
        """
        world, volumes = self._world, self._calls.store.volumes
        shrunk = segments < world.ssd_segments
        world.ssd_segments = max(segments, world.ssd_segments)
        self._record(shrunk=shrunk)
        nbytes = segments * len(world.ssds) * SEGMENT_BYTES
        self._calls.timed("resize", 4 * LIMIT_S, lambda: volumes.resize("ssd", nbytes))

    def _begin(self, work: Callable[[], None]) -> None:
        def change() -> None:
            try:
                work()
            except (ConfigError, StoreClosedError) as error:
                self._ledger.write("refused", text=str(error))
            except OSError as error:
                if self._trusted():
                    raise
                self._ledger.write("refused", text=str(error))

        self._change = threading.Thread(target=change, name="torture-change", daemon=True)
        self._change.start()

    def _record(self, *, shrunk: bool = False) -> None:
        world = self._world
        self._ledger.write("drives", ssds=world.ssds, segments=world.ssd_segments, shrunk=shrunk)


class StoreSession:
    """All calls to an open store with drives, until it is closed or its power is cut."""

    def __init__(
        self,
        world: World,
        store: Store,
        ledger: Ledger,
        chance: random.Random,
        trusted: Trusted = lambda: True,
    ) -> None:
        self.world = world
        self.store = store
        self.calls = StoreCalls(store, ledger, chance)
        self.drives = DriveChanges(world, self.calls, ledger, trusted)
        self._ledger = ledger
        self._chance = chance
        self._trusted = trusted
        self._unflushed: set[int] = set()
        self._removed: set[int] = set()
        """Blocks removed since the last flush."""

    def run(self, steps: int, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Make `steps` calls, or fewer if `stop` returns True."""
        calls, drives, chance = self.calls, self.drives, self._chance
        choices: list[tuple[Callable[[], None], int]] = [
            (self.put, 40),
            (calls.get, 16),
            (calls.hold_lease, 8),
            (calls.end_lease, 4),
            (self.remove, 8),
            (self.remove_namespace, 1),
            (self.flush, 16),
            (calls.hint, 4),
            (self.pin, 6),
            (self.unpin, 2),
            (partial(drives.drain_or_add, chance), 4),
            (partial(drives.resize, chance), 4),
            (partial(drives.pull_a_drive, chance), 1),
            (drives.bring_back, 2),
        ]
        for step in chance.choices(
            [call for call, _ in choices], [weight for _, weight in choices], k=steps
        ):
            if stop():
                return
            step()

    def close(self) -> bool:
        """Close the store. If that succeeds, the puts count as flushed."""
        self.drives.bring_back()
        self.calls.end_leases()
        self.drives.wait()
        closed = self.calls.timed("close", 3 * CLOSE_S, lambda: self.store.close(CLOSE_S))
        if closed:
            self._covered(set(self._unflushed))
        return bool(closed)

    def abandon(self) -> None:
        """Close a store without power, which cannot flush."""
        self.calls.end_leases()
        self.calls.timed("close", 3 * CLOSE_S, lambda: self.store.close(2.0))
        self.drives.wait()
        self.world.bring_back()

    def put(self) -> None:
        self._put(self.calls.prompt())

    def _put(self, blocks: list[Block]) -> None:
        numbers = {block.number for block in blocks}
        flushed = numbers & self._ledger.expected.flushed
        self._ledger.write(
            "putting",
            numbers,
            nbytes=sum(block.nbytes + SEGMENT_BYTES // 8 for block in blocks),
        )
        keys, payloads = keys_of(blocks), [block.payload for block in blocks]
        answers = self.calls.timed(
            "put_many", PUT_S, lambda: self.store.put_many(keys, payloads, timeout_s=PUT_S)
        )
        pairs = list(zip(blocks, answers, strict=True))
        present = {block.number for block, answer in pairs if answer is PutResult.PRESENT}
        stayed = present & flushed & set(residents(self.store))
        self._ledger.write("stayed", stayed)
        self._unflushed |= {block.number for block, answer in pairs if answer} - stayed
        self._removed -= numbers

    def pin(self) -> None:
        """Pin a prompt. The pin may be refused; with a receipt, the blocks must stay."""
        blocks = self.calls.prompt()
        self._put(blocks)
        name, numbers = f"prompt {blocks[0].prompt}", [block.number for block in blocks]
        self._ledger.write("pinning", numbers, session=name)
        self.store.sessions.name(name, keys_of(blocks))
        limit_s = PIN_S + 4 * LIMIT_S
        receipt = self.calls.timed(
            "pin", limit_s, lambda: self.store.sessions.pin(name, for_s=86400)
        )
        if receipt and self._trusted():
            self._ledger.write("pinned", numbers, session=name)

    def unpin(self) -> None:
        if self._ledger.expected.kept:
            name = self._chance.choice(sorted(self._ledger.expected.kept))
            self._ledger.write("unpinning", session=name)
            if any(one["name"] == name for one in self.store.sessions.list()):
                self.calls.timed("unpin", 4 * LIMIT_S, lambda: self.store.sessions.unpin(name))

    def remove(self) -> None:
        blocks = self.calls.prompt() if self._chance.random() < 0.3 else self.calls.sample(4)
        self._remove(blocks, lambda: self.store.remove(keys_of(blocks)))

    def remove_namespace(self) -> None:
        number = self._chance.randrange(len(SPACES))
        blocks = [block for block in all_blocks() if block.space == number]
        space = self.store.namespace(SPACES[number])
        self._remove(blocks, lambda: self.store.remove(namespace=space))

    def flush(self) -> None:
        """Flush. Blocks evicted unwritten are reported by one flush only, so forget the rest."""
        report = self.calls.timed("flush", FLUSH_S, lambda: self.store.flush(FLUSH_S))
        if report.ok:
            self._covered(set(self._unflushed))
        elif report.complete:
            blocks = [all_blocks()[number] for number in sorted(self._unflushed)]
            asked = partial(self.store.flush, FLUSH_S, keys=keys_of(blocks))
            answers = self.calls.timed("flush", FLUSH_S, asked).blocks
            pairs = zip(blocks, answers, strict=True)
            self._covered({block.number for block, one in pairs if one is Durability.DURABLE})
        self._unflushed.clear()

    def _remove(self, blocks: list[Block], work: Callable[[], int]) -> None:
        numbers = {block.number for block in blocks}
        self._unflushed -= numbers
        self._ledger.write("removing", numbers)
        self.calls.timed("remove", 4 * LIMIT_S, work)
        owing = _owing(self.store.inspect().volumes)
        if not self._trusted():
            return
        if owing == "all":  # counted as `removal_unrecorded`: the blocks may come back
            self._ledger.write("unrecorded", numbers)
            return
        always = self.world.mix.fsync == "always"
        away = self.drives.was_away or owing == "some"
        self._ledger.write("removed", numbers, durable=always, away=away)
        self._removed |= numbers

    def _covered(self, blocks: set[int]) -> None:
        """Record that a flush was complete: these blocks and all removals are on drives."""
        if self._trusted():
            self._ledger.write("flushed", blocks, removed=sorted(self._removed))
            self._unflushed -= blocks
            self._removed.clear()


def _owing(volumes: VolumeSet) -> Literal["none", "some", "all"]:
    """The part of the present volumes that has not written all tombstones yet."""
    behind = volumes.metadata.behind()
    present = [entry for entry in volumes.entries if not (entry.retired or entry.error)]
    owing = [entry for entry in present if entry in behind and not entry.volume.facts().lost]
    if not owing:
        return "none"
    return "all" if all(entry in behind for entry in present) else "some"
