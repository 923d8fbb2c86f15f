"""Lookups by the engine, while others use it."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.store_contract import prompt, put, small, space_of

from kvdepot.core.block import BlockKey
from kvdepot.core.keys import Keys
from kvdepot.core.volume import TIER_NAMES
from kvdepot.index.catalog import Catalog
from kvdepot.store.engine import Caller
from kvdepot.store.open import open_store
from kvdepot.store.store import Store

CALLER = Caller("a test")
DRAM = TIER_NAMES.index("dram")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    settings = small(tmp_path / "kv")
    settings["dram"] = {**settings["dram"], "shared": True}
    with open_store(**settings) as opened:
        yield opened


def words(keys: list[BlockKey]) -> Keys:
    return np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 4)


def test_a_match_of_what_is_there_waits_for_no_other_call(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = prompt(space_of(store), 1, 8)
    assert all(put(store, keys))
    engine = store.engine
    inside, leave = threading.Event(), threading.Event()
    use = Catalog.use

    def slow(catalog: Catalog, rows: list[int]) -> None:
        inside.set()
        leave.wait(60.0)
        use(catalog, rows)

    monkeypatch.setattr(Catalog, "use", slow)
    leasing = threading.Thread(target=lambda: engine.lease(CALLER, words(keys)).release())
    leasing.start()
    assert inside.wait(60.0)
    found: list[bytes] = []
    matching = threading.Thread(target=lambda: found.append(engine.match(CALLER, words(keys))))
    matching.start()
    matching.join(20.0)
    waited = not found
    leave.set()
    leasing.join()
    matching.join()
    assert not waited
    assert found == [bytes([DRAM]) * 8]


def test_a_match_is_right_while_blocks_come_and_go(store: Store) -> None:
    """What stays is always found, what never was is not, whatever the index is doing."""
    space = space_of(store)
    stays, never = prompt(space, 1, 4), prompt(space, 2, 4)
    assert all(put(store, stays))
    engine, over = store.engine, threading.Event()
    wrong: list[bytes] = []

    def look() -> None:
        while not over.is_set():
            answers = (
                engine.match(CALLER, words(stays)),
                engine.match(CALLER, words([*stays, *never])),
            )
            wrong.extend(answer for answer in answers if len(answer) != 4)
            wrong.extend(answer for answer in [engine.match(CALLER, words(never))] if answer)

    looking = threading.Thread(target=look)
    with store.lease(stays):
        looking.start()
        for number in range(3, 150):
            keys = prompt(space, number, 4)
            put(store, keys)
            store.remove(keys)
        over.set()
        looking.join()
    assert wrong == []
