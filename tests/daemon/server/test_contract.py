"""A daemon's store obeys the laws of a store. More tests of stores run through one: tests/store."""

from pathlib import Path

import pytest
from tests.support.store_contract import InPlaceContract, OpenDepot, StoreContract, small


@pytest.fixture
def depot(open_through_daemon: OpenDepot, tmp_path: Path) -> OpenDepot:
    return lambda **settings: open_through_daemon(**{**small(tmp_path / "kv"), **settings})


class TestDaemon(StoreContract):
    """Through a socket."""


class TestDaemonInPlace(InPlaceContract):
    """The same, in place."""
