"""The laws of a store, for one of this process, whose memory is private.

Those for a daemon's, whose memory is shared, are in tests/daemon/server/test_contract.py.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.support.store_contract import InPlaceContract, OpenDepot, StoreContract, small

from kvdepot.depot import Depot
from kvdepot.store.open import open_store


@pytest.fixture
def depot(tmp_path: Path) -> OpenDepot:
    def opened(**settings: Any) -> Depot:
        return open_store(**{**small(tmp_path / "kv"), **settings})

    return opened


class TestEmbedded(StoreContract):
    """Through kvdepot.open."""


class TestEmbeddedInPlace(InPlaceContract):
    """The same, in place."""
