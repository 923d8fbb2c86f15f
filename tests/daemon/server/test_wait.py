"""`wait_for` ends when nothing can come, in a store and through a daemon."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.store_contract import prompt, put, small, space_of

import kvdepot
from kvdepot.config.settings import load
from kvdepot.daemon.server.daemon import Daemon
from kvdepot.daemon.server.listener import Listener
from kvdepot.store.volume_set import VolumeSet

LONG_S = 1e5


@pytest.fixture(params=["here", "daemon"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[kvdepot.Depot]:
    tree = small(tmp_path / "kv")
    if request.param == "here":
        with kvdepot.open(load(overrides=tree)) as opened:
            yield opened
        return
    listener = Listener(tmp_path / "d.sock")
    daemon = Daemon(load(overrides=tree), listener)
    listener.listen()
    thread = threading.Thread(target=daemon.run)
    thread.start()
    with kvdepot.open(f"unix:{tmp_path}/d.sock") as opened:
        yield opened
    daemon.stop()
    thread.join()
    daemon.close()


def test_it_gives_up_without_a_sign(store: kvdepot.Depot) -> None:
    keys = prompt(space_of(store), 1, 6)
    assert all(put(store, keys[:2]))
    assert len(store.wait_for(keys, LONG_S, idle_s=0.05)) == 2


def test_it_gives_up_when_the_shared_tier_is_down(
    store: kvdepot.Depot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VolumeSet, "are_shared_down", property(lambda _: True))
    keys = prompt(space_of(store), 1, 6)
    assert all(put(store, keys[:2]))
    assert len(store.wait_for(keys, LONG_S, idle_s=LONG_S)) == 2


def test_it_waits_while_blocks_come(store: kvdepot.Depot) -> None:
    keys = prompt(space_of(store), 1, 6)
    found: list[int] = []
    waiting = threading.Thread(
        target=lambda: found.append(len(store.wait_for(keys, LONG_S, idle_s=LONG_S)))
    )
    waiting.start()
    for key in keys:
        assert all(put(store, [key]))
    waiting.join()
    assert found == [6]
