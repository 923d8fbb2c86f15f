"""A daemon's store obeys the laws of a store, and passes the tests that were written for one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.store import test_store, test_store_bad_input

import kvdepot
from kvdepot.core.depot import Depot
from kvdepot.testing.daemons import DaemonStore, open_daemon
from kvdepot.testing.in_place_contract import InPlaceContract
from kvdepot.testing.store_contract import OpenDepot, StoreContract, small

corner = test_store_bad_input.corner


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[OpenDepot]:
    """Opens stores of daemons; those that are still there at the end are killed."""
    stores: list[Any] = []

    def opens(**settings: Any) -> Depot:
        folder = tmp_path / f"daemon-{len(stores)}"
        folder.mkdir()
        store = open_daemon(folder, settings)
        stores.append(store)
        return store

    yield opens
    for store in stores:
        assert isinstance(store, DaemonStore)
        with store.daemon:
            pass


@pytest.fixture
def depot(opened: OpenDepot, tmp_path: Path) -> OpenDepot:
    return lambda **settings: opened(**{**small(tmp_path / "kv"), **settings})


class TestDaemon(StoreContract):
    """Through a socket."""


class TestDaemonInPlace(InPlaceContract):
    """The same, in place."""


@pytest.mark.slow
class Through:
    """Runs tests that were written for a store of this process through a daemon."""

    @pytest.fixture(autouse=True)
    def through_a_daemon(self, opened: OpenDepot, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kvdepot, "open", opened)


class TestPutAndGet(Through, test_store.TestPutAndGet):
    pass


class TestLayers(Through, test_store.TestLayers):
    pass


class TestEviction(Through, test_store.TestEviction):
    pass


class TestClose(Through, test_store.TestClose):
    pass


class TestBadBuffers(Through, test_store_bad_input.TestBuffers):
    pass


class TestBadKeys(Through, test_store_bad_input.TestKeys):
    pass


class TestBadLayers(Through, test_store_bad_input.TestLayers):
    pass
