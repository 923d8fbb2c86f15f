"""Torture rounds: a store is used until a power cut, a kill or damage, and then checked.

    for outcome in torture(folder, seed=1, jobs=4):
        ...

A round is determined by its seed: round `n` of a run with seed `s` has the seed `s + n`. Rounds run
in child processes; this process opens no store and has one thread. Most of their time rounds wait
for deadlines and disks, so several at a time are faster.
"""

import faulthandler
import importlib
import multiprocessing
import os
import random
import select
import shutil
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Final, Literal

from kvdepot.errors import ConfigError, DriveError, FormatError
from kvdepot.store.check.offline import audit
from kvdepot.store.check.repair import repair
from kvdepot.store.open import Mode
from kvdepot.store.store import Store
from kvdepot.testing.faults import BOUNDARIES, FaultyFiles, Kill, Operation, kill_process
from kvdepot.testing.faults import Fault as DiskFault
from kvdepot.testing.power import PowerFiles
from kvdepot.testing.torture.clients import play_clients
from kvdepot.testing.torture.damage import HARMS, files_in
from kvdepot.testing.torture.judge import judge_files, judge_leaks, judge_store, left_out
from kvdepot.testing.torture.ledger import Ledger
from kvdepot.testing.torture.nodes import play_nodes
from kvdepot.testing.torture.seaweedfs import play_seaweedfs
from kvdepot.testing.torture.workload import StoreSession, descriptors, threads
from kvdepot.testing.torture.world import (
    TierMix,
    World,
    all_blocks,
    prompts,
    read_blocks,
    residents,
)

Kind = Literal["cuts", "kills", "damages", "nodes", "clients", "seaweedfs"]
KINDS: Final[tuple[Kind, ...]] = ("cuts", "kills", "damages", "nodes", "clients")
ON_REQUEST: Final[tuple[Kind, ...]] = ("seaweedfs",)
"""Kinds that need more than this package."""
LIVES: Final = 10
TRIALS: Final = 40
HUNG_S: Final = 120.0
NODES_HUNG_S: Final = 480.0
"""Nodes wait for each other after each outage, and for a server that starts."""
MOMENTS: Final = ("before", "torn", "after", "without")


@dataclass(slots=True)
class RoundOutcome:
    """The result of one round."""

    kind: Kind
    seed: int
    done: int = 0
    """Number of cuts, kills or damages."""
    words: str = ""
    """The tiers of the round, for display."""
    faults: Counter[str] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    """Descriptions of the faults, one line each."""
    pins: int = 0
    """Number of pins that were checked after an end, of all ends together."""

    @property
    def ok(self) -> bool:
        return not self.faults


def torture(
    folder: Path,
    seed: int,
    kinds: Sequence[Kind] = KINDS,
    *,
    keep: bool = False,
    jobs: int = 1,
    more: Callable[[int], bool] = lambda begun: True,
) -> Generator[RoundOutcome]:
    """Run rounds, `jobs` at a time, each in a folder below `folder`. Yields outcomes as they end.

    `more` is called before each round with the number of rounds begun. When it returns False, the
    running rounds are completed; when the iterator is closed, they are killed.
    """
    warm_up()
    begun = 0
    running: list[RunningRound] = []
    try:
        while True:
            while len(running) < jobs and more(begun):
                number = seed + begun
                running.append(RunningRound(folder, number, kinds[number % len(kinds)], keep=keep))
                begun += 1
            if not running:
                return
            ended = connection.wait([each.answer for each in running])
            for finished in [each for each in running if each.answer in ended]:
                running.remove(finished)
                yield finished.outcome()
    finally:
        for unfinished in running:
            unfinished.kill()


def warm_up() -> None:
    """Do the work that every forked process would otherwise do before it opens a store."""
    for blocks in prompts():
        for block in blocks:
            assert block.payload
    importlib.import_module("numpy.ma")  # the first call of `numpy.unique` imports it


class RunningRound:
    """A round in a process that leads a group, so that killing the group kills its children."""

    def __init__(self, folder: Path, seed: int, kind: Kind, *, keep: bool) -> None:
        self._empty = RoundOutcome(kind, seed)
        forks = multiprocessing.get_context("fork")
        self.answer, answered = forks.Pipe(duplex=False)

        def run() -> None:
            os.setpgid(0, 0)
            answered.send(play(folder, seed, kind, keep=keep))

        self._process = forks.Process(target=run)
        self._process.start()
        answered.close()

    def outcome(self) -> RoundOutcome:
        """Wait for the end of the round. Returns its result."""
        try:
            outcome: RoundOutcome = self.answer.recv()
        except EOFError:
            outcome = self._empty
        self._process.join()
        if outcome is self._empty:
            text = f"error: its process ended with {self._process.exitcode} and without a result"
            outcome.faults["error"] += 1
            outcome.texts.append(text)
        self._close()
        return outcome

    def kill(self) -> None:
        """Kill the round and its children."""
        pid = self._process.pid
        assert pid is not None
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:  # it does not lead its group yet
            self._process.kill()
        self._process.join()
        self._close()

    def _close(self) -> None:
        self._process.close()
        self.answer.close()


def play(folder: Path, seed: int, kind: Kind, *, keep: bool = False) -> RoundOutcome:
    """Run one round; with `keep`, its folder is kept if there was a fault."""
    chance = random.Random(f"{kind} {seed}")
    place = folder / f"round-{seed}"
    world = World(place / "drives", TierMix.draw(chance))
    place.mkdir(mode=0o700)
    world.folder.mkdir(mode=0o700)
    outcome = RoundOutcome(kind, seed, words=world.mix.words)
    ledger = Ledger()
    try:
        world.make_folders()
        match kind:
            case "kills":
                _play_kills(world, ledger, chance, outcome)
            case "cuts":
                in_child(world, ledger, lambda: _play_cuts(world, ledger, chance))
            case "damages":
                in_child(world, ledger, lambda: _suffer(world, ledger, chance))
            case "nodes":
                outcome.words = "nodes over a shared folder"
                nodes = partial(play_nodes, world.folder, ledger, chance)
                in_child(world, ledger, nodes, hung_s=NODES_HUNG_S)
            case "clients":
                outcome.words = f"a daemon over {world.mix.words}"
                in_child(world, ledger, lambda: play_clients(world, ledger, chance))
            case "seaweedfs":
                outcome.words = "nodes over SeaweedFS"
                nodes = partial(play_seaweedfs, world.folder, ledger, chance)
                in_child(world, ledger, nodes, hung_s=NODES_HUNG_S)
        ledger.catch_up()
        outcome.done += ledger.expected.done
        outcome.pins = ledger.expected.pins
        for fact in ledger.everything():
            if fact["fact"] == "fault":
                outcome.faults[fact["kind"]] += fact["count"]
                outcome.texts.append(f"{fact['kind']}: {fact['text']}")
    finally:
        if outcome.ok or not keep:
            shutil.rmtree(place, ignore_errors=True)
        else:
            ledger.save(place / "ledger.jsonl")
            if not world.stacks_path.stat().st_size:
                world.stacks_path.unlink()
        ledger.close()
    return outcome


def _play_kills(world: World, ledger: Ledger, chance: random.Random, outcome: RoundOutcome) -> None:
    """Open, check, use and kill a store repeatedly."""
    for life in range(LIVES):
        seed = chance.getrandbits(64)
        _pull_or_bring_back(world, ledger, chance)
        outside_s = chance.uniform(0.0, 0.25) if chance.random() < 0.2 else None
        life_of = partial(_live, world, ledger, seed, last=False)
        code = in_child(world, ledger, life_of, outside_s)
        ledger.catch_up()
        _follow(world, ledger)
        if code == -signal.SIGKILL:
            outcome.done += 1
        else:
            ledger.fault("error", f"life {life}: exit code {code}")
            return
    world.bring_back()
    seed = chance.getrandbits(64)
    if code := in_child(world, ledger, lambda: _live(world, ledger, seed, last=True)):
        ledger.fault("error", f"the last life: exit code {code}")


def _pull_or_bring_back(world: World, ledger: Ledger, chance: random.Random) -> None:
    """Return the absent drive, take one away, or neither."""
    if chance.random() < 0.7:
        world.bring_back()
    elif world.may_lose_one(ledger.expected.drives.met):
        world.take_away(chance.choice(world.ssds))


def _follow(world: World, ledger: Ledger) -> None:
    """Take over the number and size of drives from what a child recorded."""
    drives = ledger.expected.drives
    world.ssds = drives.numbers or world.ssds
    world.ssd_segments = drives.segments or world.ssd_segments
    world.have_room_for_all()


def in_child(
    world: World,
    ledger: Ledger,
    work: Callable[[], None],
    kill_after_s: float | None = None,
    *,
    hung_s: float = HUNG_S,
) -> int:
    """Run `work` in a forked process. Returns its exit code, negative for a signal.

    Exceptions are recorded as faults. The process is killed after `hung_s`.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            faulthandler.register(signal.SIGUSR1, file=world.stacks_path.open("a"))
            threading.excepthook = lambda failed: _raised(ledger, failed.exc_value)
            work()
            code = 0
        except BaseException as error:
            _raised(ledger, error)
            raise
        finally:
            os._exit(code)
    try:
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            os.kill(pid, signal.SIGKILL)
        elif not _ends(pid, hung_s):
            ledger.fault("late", f"a process hangs for {hung_s:.0f} s; see stacks.txt")
            os.kill(pid, signal.SIGUSR1)
            _ends(pid, 1.0)
            os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _ends(pid: int, timeout_s: float) -> bool:
    """Wait for the end of a child; False at the timeout."""
    fd = os.pidfd_open(pid)
    try:
        return bool(select.select([fd], [], [], timeout_s)[0])
    finally:
        os.close(fd)


def _raised(ledger: Ledger, error: BaseException | None) -> None:
    """Record an unexpected exception."""
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    places = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    ledger.fault("error", f"{type(error).__name__}: {error} ({' > '.join(places[-8:])})")


def record_residents(ledger: Ledger, store: Store) -> None:
    """Record the blocks that the index has on drives, before the end. Takes the store's lock, and
    none of a drive, because the thread may be in a write.
    """
    ledger.write("residents", residents(store), left_out=left_out(store))


class RecordedKill:
    """Kills this process after it recorded the blocks that the index has on drives.

    Keeps the store's lock, so that no block is evicted between the record and the kill.
    """

    def __init__(self, ledger: Ledger, boundary: int) -> None:
        self._ledger = ledger
        self._boundary = boundary
        self.store: Store | None = None

    def is_due(self, operation: Operation) -> bool:
        """The `where` of a fault: True, after recording, at the write boundary of the kill."""
        due = operation.boundary == self._boundary
        if due:
            self.record()
        return due

    def record(self) -> None:
        if self.store is None:
            self._ledger.write("unopened")
        elif self.store.inspect().state.lock.acquire(timeout=10.0):
            record_residents(self._ledger, self.store)

    def kill(self) -> None:
        self.record()
        kill_process()


def _live(world: World, ledger: Ledger, seed: int, *, last: bool) -> None:
    """One life of a store, in a child: check the state after the previous life, work, be killed."""
    chance = random.Random(seed)
    if chance.random() < 0.3 or last:
        judge_files(world, ledger)
    end = RecordedKill(ledger, chance.randint(1, chance.choice((10, 60, 200))))
    files: FaultyFiles | None = None
    way = chance.choice(("boundary", "instant", "end"))
    before = (descriptors(), threads())
    if way == "boundary" and not world.mix.emulated and not last:
        kill = Kill(chance.choice(MOMENTS))
        fault = DiskFault(BOUNDARIES, kill, where=end.is_due)
        files = FaultyFiles(world.mix.engine, faults=[fault])
    ledger.write("open")
    store = end.store = world.open(files)
    judge_store(store, world, ledger)
    if last:
        store.close()
        judge_leaks(ledger, *before)
        judge_files(world, ledger)
        return
    if way == "instant":
        killer = threading.Timer(chance.uniform(0.0, 0.15), end.kill)
        killer.daemon = True
        killer.start()
    work = StoreSession(world, store, ledger, chance)
    work.run(chance.randint(4, 24))
    if chance.random() < 0.3:
        work.close()
        if chance.random() < 0.5:
            end.kill()
        end.store = None
        world.have_room_for_all()
        ledger.write("open")
        store = end.store = world.open()
        StoreSession(world, store, ledger, chance).run(chance.randint(1, 6))
    end.kill()


class TorturedFiles(PowerFiles):
    """Files whose power is cut after the blocks that the index has on drives were recorded."""

    def __init__(self, chance: random.Random, mix: TierMix, ledger: Ledger) -> None:
        late = chance.choice((0.0, 0.0, 0.0, 0.01))
        super().__init__(random.Random(chance.getrandbits(64)), mix.engine, late=late)
        self._ledger = ledger
        self.store: Store | None = None

    def cut(self) -> None:
        """Cut the power, and do not wait for tombstones any more: no drive can write them."""
        with self._lock:
            if not self.off:
                if self.store is None:
                    self._ledger.write("unopened")
                else:
                    record_residents(self._ledger, self.store)
                self._ledger.write("cut")
            super().cut()
            if self.store is not None:
                self.store.inspect().drives.mover.tombstone_wait_s = 0.0


def _play_cuts(world: World, ledger: Ledger, chance: random.Random) -> None:
    """Open, check and use a store and cut its power, repeatedly."""
    before = (descriptors(), threads())
    for _ in range(LIVES):
        _pull_or_bring_back(world, ledger, chance)
        _live_until_cut(world, ledger, chance)
        _follow(world, ledger)
        judge_leaks(ledger, *before)
    world.bring_back()
    ledger.write("open")
    store = world.open()
    judge_store(store, world, ledger, cut=True)
    store.close()
    judge_leaks(ledger, *before)
    if world.mix.fsync != "never":
        judge_files(world, ledger)


def _live_until_cut(world: World, ledger: Ledger, chance: random.Random) -> None:
    files = TorturedFiles(chance, world.mix, ledger)
    opening = chance.random() < 0.1
    if opening:
        files.cut_at = chance.randint(1, 12)
    ledger.write("open")
    try:
        store = world.open(files)
    except (ConfigError, FormatError) as error:
        if not files.off and not (files.late and isinstance(error, DriveError)):
            raise
        files.cut()  # if power is still on, the only present drive was late and left out
        return
    files.store = store
    if not files.off:
        judge_store(store, world, ledger, cut=True, files=files)
        if world.mix.fsync != "never" and chance.random() < 0.3:
            judge_files(world, ledger)
    if not files.cut_at:
        files.cut_at = files.writes + chance.randint(1, chance.choice((5, 50, 300)))
    work = StoreSession(world, store, ledger, chance, lambda: not files.off)
    work.run(chance.randint(4, 24), stop=lambda: files.off)
    if not files.off and chance.random() < 0.1:
        work.close()
    files.cut()
    work.abandon()


def _suffer(world: World, ledger: Ledger, chance: random.Random) -> None:
    """Damage copies of a closed store in many ways, and check each."""
    for name in ("older", "sound"):
        store = world.open()
        work = StoreSession(world, store, ledger, _branch(chance))
        work.run(chance.randint(10, 30))
        work.close()
        shutil.copytree(world.folder, world.folder.with_name(name))
    older, sound = world.folder.with_name("older"), world.folder.with_name("sound")
    paths = [path for path in (*world.ssd_paths, *world.hdd_paths) if path.is_dir()]
    names = [f"{path.parent.name}/kv" for path in paths]
    before = (descriptors(), threads())
    for _ in range(TRIALS):
        shutil.rmtree(world.folder)
        shutil.copytree(sound, world.folder)
        done = []
        for _ in range(chance.choice((1, 1, 2, 4, 12))):
            name, harm = chance.choice(names), chance.choice(HARMS)
            source = chance.choice((older, older, sound)) / chance.choice(names)
            how = _branch(chance)
            if files_in(world.folder / name) and source.is_dir() and files_in(source):
                harm(world.folder / name, how, source)
                done.append(f"{harm.__name__} {name}")
        ledger.write("damaged", count=len(done), text=", ".join(done))
        _look_at_damage(world, ledger, _branch(chance))
    judge_leaks(ledger, *before)


def _branch(chance: random.Random) -> random.Random:
    """A random source for a part whose number of draws depends on the store, so that later draws
    depend only on the seed.
    """
    return random.Random(chance.getrandbits(64))


def _look_at_damage(world: World, ledger: Ledger, chance: random.Random) -> None:
    """Open, read and check a damaged store: every read gives right bytes or a miss."""
    paths = [path for path in (*world.ssd_paths, *world.hdd_paths) if path.is_dir()]
    paths = [path for path in paths if files_in(path)]
    if paths and chance.random() < 0.15:
        _audit_and_repair(chance.choice(paths), ledger)
    mode: Mode = chance.choice(("rw", "rw", "r"))
    try:
        store = world.open(mode=mode)
    except FormatError as error:  # no sign of a store is left
        if mode == "r":
            return
        if "metadata is damaged" not in str(error):
            raise
        for path in paths:  # both copies of tombstones are lost: a repair must come first
            _audit_and_repair(path, ledger)
        store = world.open()
    except DriveError:  # the only drive of a tier now belongs to another store
        return
    _, wrong = read_blocks(store, all_blocks())
    for block in wrong:
        ledger.fault("wrong", f"block {block.number} has wrong bytes")
    work = StoreSession(world, store, ledger, chance)
    if chance.random() < 0.2:
        work.run(3)
    store.admin.check(deep=chance.random() < 0.2)
    work.close()


def _audit_and_repair(path: Path, ledger: Ledger) -> None:
    try:
        audit(path)
        repair(path)
    except FormatError:  # no sign of a store is left
        return
    for finding in audit(path).findings:
        ledger.fault("unclean", f"after a repair: {finding}")
