"""A wall clock that is set back does not make a new block older than a removal before it."""

from pathlib import Path

from kvdepot.config.settings import load
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.testing.store_contract import WAIT_S, prompt, put, small, space_of


class Watch:
    """A time of day that the test sets."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def now(self) -> float:
        return self.at_s


def opened(path: Path, watch: Watch) -> Store:
    return assemble(load(overrides=small(path / "kv")), wall=watch)


def test_a_block_put_again_after_the_clock_was_set_back_stays(tmp_path: Path) -> None:
    watch = Watch(1_800_000_000.0)
    with opened(tmp_path, watch) as store:
        keys = prompt(space_of(store), 1, 4)
        others = prompt(space_of(store), 2, 4)
        assert all(put(store, [*keys, *others])) and store.flush(WAIT_S)
    with opened(tmp_path, watch) as store:
        space_of(store)
        watch.at_s += 3600
        assert store.remove(keys) == 4
        assert store.flush(WAIT_S)
    watch.at_s -= 7200
    with opened(tmp_path, watch) as store:
        space_of(store)
        assert all(put(store, keys)) and store.flush(WAIT_S)
    with opened(tmp_path, watch) as store:
        space_of(store)
        assert len(store.match(keys)) == 4
        assert len(store.match(others)) == 4
