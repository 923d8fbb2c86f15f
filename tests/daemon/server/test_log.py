"""The daemon and its clients say who comes and goes, and not too often."""

import logging
import threading
import time
from pathlib import Path

import pytest
from tests.support.raw_client import RawClient
from tests.support.store_contract import small

import kvdepot
from kvdepot.config.settings import load
from kvdepot.core.log import RateLimitedLog
from kvdepot.daemon.client import connections as client_side
from kvdepot.daemon.server import daemon as server_side
from kvdepot.daemon.server.daemon import Daemon
from kvdepot.daemon.server.listener import Listener

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What other tests have logged holds nothing back."""
    monkeypatch.setattr(server_side, "_log", RateLimitedLog("kvdepot.server"))
    monkeypatch.setattr(client_side, "_log", RateLimitedLog("kvdepot.client"))
    caplog.set_level(logging.INFO, "kvdepot")


class Served:
    """A daemon in this process."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "s"
        listener = Listener(self.socket)
        self._daemon = Daemon(load(overrides=small(folder / "kv")), listener)
        listener.listen()
        self._loop = threading.Thread(target=self._daemon.run)
        self._loop.start()

    def stop(self) -> None:
        self._daemon.stop()
        self._loop.join()
        assert self._daemon.close(WAIT_S)


def says(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    """Whether a message comes, soon."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if any(text in message for message in caplog.messages):
            return True
        time.sleep(0.01)
    return False


def test_clients_that_come_and_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = Served(tmp_path)
    with kvdepot.open(f"unix:{served.socket}"):
        assert says(caplog, "client attached: process")
    assert says(caplog, "client disconnected: process")
    served.stop()


def test_a_daemon_that_goes_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(tmp_path)
    with kvdepot.open(f"unix:{served.socket}") as depot:
        served.stop()
        assert len(depot.match([])) == 0
        assert says(caplog, "daemon lost, calls are misses until it is back")
        served = Served(tmp_path)
        deadline = time.monotonic() + WAIT_S
        while not depot.stats()["client"]["is_attached"] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert says(caplog, "daemon back, process")
    served.stop()


def test_frames_that_make_no_sense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = Served(tmp_path)
    with RawClient(served.socket) as client:
        client.say(b"\xff" * 20)
        assert says(caplog, "malformed frame from process")
    served.stop()


def test_what_happens_often_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = RateLimitedLog("kvdepot.test", lambda: now[0])
    for number in range(5):
        log.warning("block %d is damaged", number)
    log.warning("something else")
    now[0] = 10.0
    log.warning("block %d is damaged", 7)
    assert caplog.messages == [
        "block 0 is damaged",
        "something else",
        "block 7 is damaged (4 more like this since the last line)",
    ]
