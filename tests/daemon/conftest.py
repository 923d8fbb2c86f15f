"""Daemons for tests: each in a process of its own, none of them outlives its test."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemon_clients import StartDaemon
from tests.support.store_contract import small

from kvdepot.testing.daemons import DaemonProcess


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[StartDaemon]:
    """Starts a daemon with the settings of the contract, and others that are given."""
    started: list[DaemonProcess] = []

    def start(*options: str, folder: str = "", **settings: Any) -> DaemonProcess:
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        given = {**small(place / "kv"), **settings}
        daemon = DaemonProcess(place, given, *options)
        started.append(daemon)
        return daemon

    yield start
    for daemon in started:
        with daemon:
            pass


@pytest.fixture
def daemon(start_daemon: StartDaemon) -> DaemonProcess:
    return start_daemon()
