"""The laws of a store, for one of this process. Those for a daemon's are in tests/server."""

from pathlib import Path
from typing import Any

import pytest

import kvdepot
from kvdepot.store.store import Store
from kvdepot.testing.in_place_contract import InPlaceContract
from kvdepot.testing.store_contract import Depot, StoreContract, small


@pytest.fixture(params=[False, True], ids=["private", "shared"])
def depot(tmp_path: Path, request: pytest.FixtureRequest) -> Depot:
    def opened(**settings: Any) -> Store:
        given = {**small(tmp_path / "kv"), **settings}
        given["dram"] = {**given["dram"], "shared": request.param}
        return kvdepot.open(**given)

    return opened


class TestEmbedded(StoreContract):
    """Through kvdepot.open, with private and with shared memory."""


class TestEmbeddedInPlace(InPlaceContract):
    """The same, in place."""
