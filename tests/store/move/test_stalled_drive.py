"""Calls on a drive that stalls end in their time; the drive's own threads wait for it."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.store_contract import prompt, put, space_of
from tests.support.stores import settings
from tests.support.waiting import eventually

from kvdepot.config.settings import load
from kvdepot.store.move import mover
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.faults import Call, Fault, FaultyFiles, Stall

ENOUGH_S = 20.0
"""Many times longer than any call may take here, and much shorter than the stall."""


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles(timeout_s=0.2)


@pytest.fixture
def store(tmp_path: Path, files: FaultyFiles, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(mover, "_TOMBSTONE_WAIT_S", 0.05)
    ssd = {"capacity": "2MiB", "write_timeout": "200ms", "retry_initial": "1ms"}
    tree = settings(tmp_path, ssd={**ssd, "retry_max": "10ms", "promote": False})
    del tree["hdd"]
    opened = assemble(load(overrides=tree), files=files)
    yield opened
    files.clear()
    opened.close()


def in_time(call: Callable[[], object]) -> bool:
    """Whether a call ends while the drive stalls."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return eventually(lambda: not thread.is_alive(), ENOUGH_S)


def test_metadata_that_stalls_does_not_hold_up_others(store: Store, files: FaultyFiles) -> None:
    keys = prompt(space_of(store), 1, 4)
    put(store, keys)
    assert store.flush()
    writes = frozenset({Call.RUN_WRITE, Call.WRITE, Call.SYNC})
    files.add(Fault(writes, Stall(), times=None))
    calls = [lambda key=key: store.remove(key) for key in keys]
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    assert in_time(lambda: store.namespace(model="another", layout=space_of(store).layout))
    assert in_time(lambda: store.flush(0.2))
    assert eventually(lambda: not any(thread.is_alive() for thread in threads), ENOUGH_S)
    assert in_time(lambda: store.close(0.5))
