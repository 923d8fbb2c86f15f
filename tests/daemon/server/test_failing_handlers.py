"""A handler that raises what nobody expected costs its own client the session, and no one else."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from tests.support.raw_client import RawClient
from tests.support.store_contract import prompt, put, small, space_of, tiers
from tests.support.waiting import until

import kvdepot
from kvdepot.config.settings import load
from kvdepot.core.log import RateLimitedLog
from kvdepot.daemon.server import daemon as server_side
from kvdepot.daemon.server.daemon import Daemon
from kvdepot.daemon.server.listener import Listener
from kvdepot.daemon.server.requests import RequestHandler
from kvdepot.daemon.wire.frames import FrameKind, Number, Seconds

ERRORS = [OverflowError, KeyError, MemoryError]
VERBS = [
    ("_match", FrameKind.MATCH, b""),
    ("_where", FrameKind.WHERE, Number(1).body()),
    ("_stats", FrameKind.STATS, b""),
    ("_service", FrameKind.SERVICE, b"{}"),
    ("_flush", FrameKind.FLUSH, Seconds(1.0).body()),
]
"""Some that the loop serves itself, and some that worker threads serve."""
SAID = "failed by a bug in kvdepot"


class LocalDaemon:
    """A daemon in this process, whose handlers a test can make to fail."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "d.sock"
        listener = Listener(self.socket)
        self.daemon = Daemon(load(overrides=small(folder / "kv")), listener)
        listener.listen()
        self._thread = threading.Thread(target=self.daemon.run)
        self._thread.start()

    def __enter__(self) -> "LocalDaemon":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.daemon.stop()
        self._thread.join()
        assert self.daemon.close().complete
        assert not self.daemon._connections, "it did not have to wait for a connection in vain"

    def sessions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.daemon.describe()["sessions"]
        return found


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have logged holds nothing back."""
    monkeypatch.setattr(server_side, "_log", RateLimitedLog("kvdepot.server"))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[LocalDaemon]:
    with LocalDaemon(tmp_path) as one:
        yield one


def make_fail(
    monkeypatch: pytest.MonkeyPatch, target: object, name: str, error: type[Exception]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error("made to fail by a test")

    monkeypatch.setattr(target, name, fails)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(("verb", "kind", "body"), VERBS)
def test_the_client_is_hung_up_on_and_what_it_held_is_released(
    daemon: LocalDaemon,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    verb: str,
    kind: FrameKind,
    body: bytes,
    error: type[Exception],
) -> None:
    caplog.set_level(logging.WARNING, "kvdepot.server")
    with kvdepot.open(f"unix:{daemon.socket}") as other:
        keys = prompt(space_of(other), 1, 4)
        assert all(put(other, keys))
        make_fail(monkeypatch, RequestHandler, verb, error)
        client = RawClient(daemon.socket)
        client.register(space_of(other))
        answer = client.ask(FrameKind.LEASE, b"".join(keys))
        assert answer is not None and answer.kind is FrameKind.LEASED
        fresh = prompt(space_of(other), 2, 2)
        reserved = client.ask(FrameKind.RESERVE, Seconds(1.0).body() + b"".join(fresh))
        assert reserved is not None and reserved.kind is FrameKind.RESERVED
        until(lambda: sum(one["reserved"] for one in daemon.sessions()) == 2)
        assert client.ask(kind, body) is None, "it is hung up on"
        client.socket.close()
        until(lambda: len(daemon.sessions()) == 1)
        (left,) = daemon.sessions()
        assert left["leases"] == left["reserved"] == 0
        assert all(put(other, fresh)), "nobody has them reserved any more"
        assert None not in tiers(other, [*keys, *fresh])
        assert daemon.daemon.counters.as_dict()["failed"] == 1
    told = [record for record in caplog.records if SAID in record.message]
    assert len(told) == 1 and told[0].exc_info is not None and told[0].exc_info[0] is error


@pytest.mark.parametrize("error", ERRORS)
def test_a_store_of_a_failing_daemon_answers_misses_and_finds_it_again(
    daemon: LocalDaemon, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    with kvdepot.open(f"unix:{daemon.socket}") as store:
        keys = prompt(space_of(store), 1, 4)
        assert all(put(store, keys))
        with monkeypatch.context() as failing:
            for name in ("match", "lease", "read"):
                make_fail(failing, daemon.daemon.store.engine, name, error)
            assert set(tiers(store, keys)) == {None}
        until(lambda: None not in tiers(store, keys))


def test_a_release_that_fails_does_not_keep_the_daemon_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalDaemon(tmp_path) as daemon:
        client = RawClient(daemon.socket)
        until(lambda: len(daemon.sessions()) == 1)
        make_fail(monkeypatch, daemon.daemon.store.engine, "unregister", KeyError)
        client.socket.close()
        until(lambda: not daemon.daemon._connections and not daemon.sessions())
        monkeypatch.undo()
