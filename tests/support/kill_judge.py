"""Killing children, and judging what they leave behind."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.support.crash_workload import FULL, ROOMY, SPACES, PinnedRows, Plan, payload_of, register
from tests.support.failures import DataError, check_data
from tests.support.waiting import eventually

from kvdepot.core.block import BlockKey
from kvdepot.core.keys import check_key
from kvdepot.errors import KVDepotError
from kvdepot.io.files import EngineKind
from kvdepot.store.check.offline import audit
from kvdepot.store.open import assemble
from kvdepot.store.store import Store

ROOT = Path(__file__).parents[2]
OURS = re.compile(r"superblock|lock|metadata-[ab]|segment-\d{6}\.kvs")
KILLED = -9


class Children:
    """The fork server, from the parent's side."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.seconds = 0.0
        """How long the last child lived."""

    def run(self, plan: Plan) -> int:
        """Exit code of one child; KILLED when it was."""
        stdin, stdout = self._pipes()
        stdin.write(plan.as_json() + "\n")
        stdin.flush()
        answer = json.loads(stdout.readline())
        self.seconds = answer["seconds"]
        return int(answer["code"])

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


@contextmanager
def children() -> Iterator[Children]:
    environment = {
        **os.environ,
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
    }
    command = [sys.executable, "-m", "tests.support.killed_server"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Children(process)


def kill(forks: Children, plan: Plan) -> bool:
    """One child killed as planned, judged; its folder is kept when something is wrong.

    False: it came to its end before. How blocks fall into batches is up to the threads, so the last
    boundaries are not always reached.
    """
    Path(plan.folder).mkdir()
    try:
        code = forks.run(plan)
        check_data(code in (KILLED, 0), f"the child found a fault: exit code {code}")
        judge(plan)
    except AssertionError as error:
        error.add_note(f"{plan}")
        raise
    except KVDepotError as error:
        raise DataError(f"the store cannot be used after the kill: {plan}") from error
    shutil.rmtree(plan.folder)
    return code == KILLED


def kill_at_random_instants(forks: Children, folder: Path, seed: int, runs: int) -> None:
    """Children of all sorts, each killed by the parent some time in its life."""
    chance = random.Random(seed)
    (folder / "whole").mkdir()
    assert forks.run(Plan(str(folder / "whole"), seed, ROOMY)) == 0
    life_s = forks.seconds
    killed = 0
    for number in range(runs):
        engines: tuple[EngineKind, ...] = ("auto", "threads", "python")
        plan = Plan(
            str(folder / str(number)),
            chance.getrandbits(32),
            chance.choice((ROOMY, FULL)),
            drives=chance.choice((1, 1, 2)),
            engine=chance.choice(engines),
            kill_after_s=chance.uniform(0.0, life_s),
            below=chance.choice(("", "write-back", "write-through", "pass-through")),
        )
        killed += kill(forks, plan)
    assert killed >= runs // 2


def judge(plan: Plan) -> PinnedRows:
    """Everything that must hold after a child's end, however it came. Returns its promises."""
    promises = PinnedRows.read(plan.diary)
    judge_audit(plan)
    store = assemble(plan.config())
    try:
        present = judge_store(store, plan, promises)
        judge_files(store, plan)
        judge_usable(store, promises)
    finally:
        closed = store.close()
    assert closed, "what is left cannot be closed cleanly"
    judge_audit(plan)
    with assemble(plan.config()) as again:
        judge_files(again, plan)
        register(again)
        now = find(again, promises.known)
        assert again.admin.check().ok
        if plan.roomy:
            check_data(now == present, "a clean reopen changed what is there")
        check_data(not now & promises.gone, "a removed block came back at the second reopen")
    return promises


def judge_store(store: Store, plan: Plan, promises: PinnedRows) -> set[BlockKey]:
    report = store.admin.check()
    check_data(report.ok, [str(finding) for finding in report.findings])
    register(store)
    present = find(store, promises.known)
    check_data(not present & promises.gone, "a removed block came back")
    if plan.roomy:
        lost = promises.there - present
        check_data(not lost, f"{len(lost)} acknowledged blocks are lost")
    check_data(store.stats()["counters"]["quarantined"] == 0, "blocks are quarantined")
    return present


def judge_residency(plan: Plan, promises: PinnedRows) -> None:
    """What `match` says of a block is where it is read from; what it does not name is not there."""
    with assemble(plan.config()) as store:
        register(store)
        for key in sorted(promises.known):
            named = store.match([key]).tiers
            into = bytearray(len(payload_of(key)))
            got = store.get_many([key], [into])[0]
            # In between read-ahead may have brought it to memory, or a reclaim have dropped the
            # copy in the faster tier: then that is what `match` says now.
            now = store.match([key]).tiers
            ahead = bool(named) and got.tier == "dram"
            said = {*(named or (None,)), *(now if named else ())}
            assert ahead or got.tier in said, f"{key.hex()}: {named}, {now}, but {got}"
            check_data(got.tier is None or into == payload_of(key), f"wrong bytes for {key.hex()}")


def find(store: Store, keys: set[BlockKey]) -> set[BlockKey]:
    """Those of the keys that the store gives back; their bytes must be right."""
    present = set()
    for key in keys:
        into = bytearray(len(payload_of(check_key(key))))
        if store.get_many([key], [into])[0]:
            check_data(into == payload_of(key), f"wrong bytes for {key.hex()}")
            present.add(key)
    return present


def judge_files(store: Store, plan: Plan) -> None:
    """The books agree with the directory, and nothing else lies there."""
    assert store.flush(), "what was read from below is on its way up"
    folders = plan.paths + plan.hdd_paths
    names = [name for path in folders for name in os.listdir(path) if name != "superblock.new"]
    assert all(OURS.fullmatch(name) for name in names), f"orphans: {sorted(names)}"
    assert eventually(lambda: files_bytes(plan) == held_bytes(store)), "the books are wrong"
    ssd = store.stats()["tiers"]["ssd"]
    assert ssd["used_bytes"] <= ssd["held_bytes"] <= plan.capacity_bytes


def files_bytes(plan: Plan) -> int:
    files = [file for path in plan.paths for file in path.glob("segment-*.kvs")]
    return sum(file.stat().st_size for file in files)


def held_bytes(store: Store) -> int:
    return int(store.stats()["tiers"]["ssd"]["held_bytes"])


def judge_usable(store: Store, promises: PinnedRows) -> None:
    """The store goes on: a new block can be put, flushed and read."""
    (key,) = SPACES["small"].keys([7, 7, 7, 7])
    assert store.put_many([key], [payload_of(key)], timeout_s=10.0)[0]
    assert store.flush()
    assert find(store, {key})
    store.remove(key)


def judge_audit(plan: Plan) -> None:
    """The offline check finds nothing. A drive that never came to be has nothing to check."""
    for path in plan.paths + plan.hdd_paths:
        if (path / "superblock").exists():
            report = audit(path)
            check_data(report.ok, [str(finding) for finding in report.findings])
