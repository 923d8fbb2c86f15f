"""Offloading and onboarding in place, where the store is our own; the laws that every store obeys
are in tests.support.store_contract."""

import errno
import threading
from pathlib import Path

import pytest
from tests.support.store_contract import BLOCK_BYTES, Collector, expected, fill, prompt, space_of

import kvdepot
from kvdepot.config.settings import load
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.faults import Call, Fail, Fault, FaultyFiles


def config(path: Path | None, dram: int = 4 << 20) -> kvdepot.Config:
    parts: dict[str, object] = {
        "dram": {"capacity": dram, "huge_pages": "never", "prefault": False},
        "writeback": {"staging": 1 << 20},
    }
    if path is not None:
        parts["ssd"] = {"path": str(path), "capacity": "64MiB", "segment": "1MiB"}
    return load(overrides=parts)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return assemble(config(tmp_path / "kv"))


def test_memory_comes_first_then_the_disk(tmp_path: Path) -> None:
    with assemble(config(tmp_path / "kv")) as store:
        keys = prompt(space_of(store), 1, 6)
        fill(store, keys)
        assert store.flush()
    with assemble(config(tmp_path / "kv")) as store:
        space_of(store)
        target = bytearray(BLOCK_BYTES)
        assert store.get_many([keys[4]], [target])[0]
        sink = Collector()
        with store.lease(keys) as lease:
            answers = lease.deliver(sink)
            assert sink.got == expected(keys)
            assert {index: bytes(view) for index, view in sink.lasting.items()} == expected(keys)
        assert [answer.tier for answer in answers] == ["ssd"] * 4 + ["dram", "ssd"]
        assert next(iter(sink.got)) == 4
        assert sink.calls >= 2


def test_a_failing_disk_costs_only_what_is_on_it(tmp_path: Path) -> None:
    with assemble(config(tmp_path / "kv")) as store:
        keys = prompt(space_of(store), 1, 6)
        fill(store, keys)
        assert store.flush()
    files = FaultyFiles("auto", faults=[])
    with assemble(config(tmp_path / "kv"), files=files) as store:
        space_of(store)
        target = bytearray(BLOCK_BYTES)
        assert store.get_many([keys[0]], [target])[0]
        with store.lease(keys) as lease:
            files.add(Fault(Call.RUN_READ, Fail(errno.EIO), times=None))
            sink = Collector()
            answers = lease.deliver(sink, timeout_s=5.0)
        assert answers[0] and not any(answers[1:])
        assert {answer.reason for answer in answers[1:]} == {"failed"}
        assert list(sink.got) == [0]


def test_close_waits_for_a_reservation(store: Store) -> None:
    keys = prompt(space_of(store), 1, 1)
    slots = store.reserve(keys)
    closed = threading.Event()

    def close() -> None:
        store.close()
        closed.set()

    thread = threading.Thread(target=close)
    thread.start()
    assert not closed.wait(0.2)
    slots.close()
    thread.join(30.0)
    assert closed.is_set()
