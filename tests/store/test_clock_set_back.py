"""A wall clock that is set back does not make a new block older than a removal before it."""

from pathlib import Path

from tests.support.store_contract import WAIT_S, prompt, put, small, space_of

from kvdepot.config.settings import load
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.clocks import ManualClock


def opened(path: Path, clock: ManualClock) -> Store:
    return assemble(load(overrides=small(path / "kv")), wall=clock)


def test_a_block_put_again_after_the_clock_was_set_back_stays(tmp_path: Path) -> None:
    clock = ManualClock(1.8e9)
    with opened(tmp_path, clock) as store:
        keys = prompt(space_of(store), 1, 4)
        others = prompt(space_of(store), 2, 4)
        assert all(put(store, [*keys, *others])) and store.flush(WAIT_S)
    with opened(tmp_path, clock) as store:
        space_of(store)
        clock.advance(3600)
        assert store.remove(keys) == 4
        assert store.flush(WAIT_S)
    clock = ManualClock(clock.now() - 7200)
    with opened(tmp_path, clock) as store:
        space_of(store)
        assert all(put(store, keys)) and store.flush(WAIT_S)
    with opened(tmp_path, clock) as store:
        space_of(store)
        assert len(store.match(keys)) == 4
        assert len(store.match(others)) == 4
