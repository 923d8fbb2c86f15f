"""Reads that still wait in a hard drive's queue at the deadline are withdrawn, all of them."""

from pathlib import Path

import pytest
from tests.support.store_contract import BLOCK_BYTES, prompt, put, small, space_of

from kvdepot.config.settings import load
from kvdepot.core.block import CopyState
from kvdepot.store.open import assemble
from kvdepot.volumes.log.elevator import Elevator


def test_every_wave_in_the_queue_is_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = small(tmp_path / "kv")
    tree["hdd"] = tree.pop("ssd")
    tree["dram"]["capacity"] = 1 << 20  # a wave takes a quarter of it: these blocks take three
    with assemble(load(overrides=tree)) as store:
        keys = prompt(space_of(store), 1, 20)
        put(store, keys)
        assert store.flush()
    with assemble(load(overrides=tree)) as store:
        space_of(store)
        targets = [bytearray(BLOCK_BYTES) for _ in keys]
        with monkeypatch.context() as patch:
            patch.setattr(Elevator, "_start", lambda self: None)  # the drive does not turn
            answers = store.get_many(keys, targets, timeout_s=0.05)
        assert [answer.reason for answer in answers] == ["late"] * 20
        state = store.engine.state
        assert not (state.catalog.memory.state.array == int(CopyState.FILLING)).any()
        assert not state.catalog.leased
        assert all(store.get_many(keys, targets, timeout_s=10.0))
