"""The laws of a store, for one of this process. Those for a daemon's are in tests/server."""

from pathlib import Path
from typing import Any

import pytest

from kvdepot.depot import Depot
from kvdepot.store.open import open_store
from kvdepot.testing.store_contract import InPlaceContract, OpenDepot, StoreContract, small


@pytest.fixture(params=[False, True], ids=["private", "shared"])
def depot(tmp_path: Path, request: pytest.FixtureRequest) -> OpenDepot:
    def opened(**settings: Any) -> Depot:
        given = {**small(tmp_path / "kv"), **settings}
        given["dram"] = {**given["dram"], "shared": request.param}
        return open_store(**given)

    return opened


class TestEmbedded(StoreContract):
    """Through kvdepot.open, with private and with shared memory."""


class TestEmbeddedInPlace(InPlaceContract):
    """The same, in place."""
