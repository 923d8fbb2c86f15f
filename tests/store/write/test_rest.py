"""While a call waits for the disk, what is put later is left for a while, unless it presses."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.small_store import IN_DRAM, prompt, put, settings, space_of, tiers
from tests.support.stores import counter
from tests.support.waiting import eventually, until

from kvdepot.config.settings import load
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.store.write import write_back
from kvdepot.testing.faults import Call, Fault, FaultyFiles, Stall

A_PROMPT = 4


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A call waits for its disk all the while, and a prompt was written since."""
    config = load(overrides=settings(tmp_path / "kv", read_timeout="10min"))
    monkeypatch.setattr(write_back, "backoff_s", lambda spent_s, share: 600.0)
    monkeypatch.setattr(write_back, "_REST_S_MAX", 600.0)
    with assemble(config) as before:
        put(before, prompt(space_of(before), 0, A_PROMPT))
        assert before.flush()
    files = FaultyFiles()
    opened = assemble(config, files=files)
    stall = Stall()
    waiting = Fault(Call.RUN_READ, stall, times=None)
    files.add(waiting)
    reader = threading.Thread(target=tiers, args=(opened, prompt(space_of(opened), 0, A_PROMPT)))
    reader.start()
    until(lambda: waiting.hits > 0)
    put(opened, prompt(space_of(opened), 1, A_PROMPT))
    until(lambda: counter(opened, "written") > 0)
    yield opened
    files.clear()
    stall.release()
    reader.join()
    opened.close()


def written(store: Store, blocks: int) -> bool:
    return counter(store, "written") >= blocks


def test_it_leaves_the_disk_to_the_reader_until_a_flush(store: Store) -> None:
    put(store, prompt(space_of(store), 2, A_PROMPT))
    assert not eventually(lambda: written(store, 2 * A_PROMPT), timeout_s=0.3)
    assert store.flush(60.0)
    assert written(store, 2 * A_PROMPT)


def test_it_writes_when_memory_fills(store: Store) -> None:
    blocks = 2 * A_PROMPT
    for number in range(2, 2 + IN_DRAM // 4 // A_PROMPT + 2):
        put(store, prompt(space_of(store), number, A_PROMPT))
        blocks += A_PROMPT
    until(lambda: written(store, blocks - IN_DRAM // 4 - A_PROMPT))
