"""Tests of the store that run twice: in this process, and (slow) through a daemon."""

import pytest

import kvdepot
from kvdepot.volumes.log import volume


@pytest.fixture(params=["embedded", pytest.param("daemon", marks=pytest.mark.slow)])
def embedded_or_attached(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `kvdepot.open` opens in the test."""
    if request.param == "daemon":
        monkeypatch.setattr(kvdepot, "open", request.getfixturevalue("open_through_daemon"))


@pytest.fixture
def quick_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """The background thread looks at drives every 20 ms instead of every second."""
    monkeypatch.setattr(volume, "_LOOK_S", 0.02)
