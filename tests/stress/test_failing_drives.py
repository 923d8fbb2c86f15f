"""Many threads on a small store, while one drive after the other fails for a while."""

import errno
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.random_calls import DISK, RandomCalls, check_removed, check_reopened, settings

import kvdepot
from kvdepot.config.settings import load
from kvdepot.store.open import assemble
from kvdepot.testing.faults import Call, Fail, Fault, FaultyFiles, Operation


def failing(path: Path) -> dict[str, Any]:
    tree = settings(path)
    tree["ssd"].update(retry_initial="20ms", retry_max="100ms")
    return tree


class Saboteur(threading.Thread):
    """Lets one drive fail its reads for a while, then the other."""

    def __init__(self, files: FaultyFiles, seed: int) -> None:
        super().__init__()
        self.files = files
        self.random = random.Random(seed)
        self.stop = threading.Event()
        self.turns = 0

    def run(self) -> None:
        while not self.stop.wait(self.random.uniform(0.05, 0.2)):
            drive = "ab"[self.turns % 2]
            self.turns += 1
            self.files.add(
                Fault(
                    Call.RUN_READ,
                    Fail(errno.EIO),
                    where=partial(_lies_on, drive),
                    times=None,
                )
            )
            self.stop.wait(self.random.uniform(0.05, 0.2))
            self.files.clear()


def _lies_on(drive: str, operation: Operation) -> bool:
    return f"/{drive}/" in operation.path


class Unlucky(RandomCalls):
    """Threads for whom a failed read is a miss like any other."""

    reasons = (*RandomCalls.reasons, "failed", "late")


@pytest.mark.slow
@pytest.mark.stress
def test_drives_that_fail_in_turn_under_six_threads(tmp_path: Path, seed: int) -> None:
    files = FaultyFiles()
    with assemble(load(overrides=failing(tmp_path)), files=files) as store:
        calls = Unlucky(store, seed)
        saboteur = Saboteur(files, seed)
        saboteur.start()
        calls.run(6, 5.0, ["read_failed"])
        saboteur.stop.set()
        saboteur.join()
        files.clear()
        assert saboteur.turns > 4
        store.flush()
        assert store.stats()["counters"]["quarantined"] == 0
        assert store.stats()["tiers"]["ssd"]["held_bytes"] <= DISK
        assert store.admin.check(deep=False).ok
        check_removed(store, calls.removed)
    with kvdepot.open(**failing(tmp_path)) as store:
        check_reopened(store, calls)
