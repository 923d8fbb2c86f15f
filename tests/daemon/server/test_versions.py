"""Clients and daemons of several versions meet. The real old ones: tests/e2e/upgrade.py."""

from collections.abc import Iterator

import pytest
from tests.support.raw_client import RawClient, hello
from tests.support.store_contract import prompt, put, small, space_of

import kvdepot
from kvdepot.core.namespace import FORMAT_VERSION
from kvdepot.daemon.client import connections
from kvdepot.daemon.wire import frames
from kvdepot.daemon.wire.frames import FrameKind
from kvdepot.daemon.wire.versions import PROTOCOL, PROTOCOL_OLDEST, SpokenVersions
from kvdepot.errors import DaemonError
from kvdepot.format.record import VERSION as RECORD_VERSION
from kvdepot.testing.daemons import DaemonProcess

OLD = SpokenVersions(PROTOCOL_OLDEST, PROTOCOL_OLDEST, FORMAT_VERSION, RECORD_VERSION)


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("daemon")
    with DaemonProcess(folder, small(folder / "kv")) as daemon:
        yield daemon


@pytest.mark.parametrize(
    ("oldest", "newest", "agreed"),
    [
        (PROTOCOL_OLDEST, 0, PROTOCOL_OLDEST),
        (PROTOCOL, 0, PROTOCOL),
        (PROTOCOL_OLDEST, PROTOCOL, PROTOCOL),
        (1, PROTOCOL + 9, PROTOCOL),
        (PROTOCOL, PROTOCOL + 1, PROTOCOL),
        (PROTOCOL + 1, PROTOCOL + 9, 0),
        (PROTOCOL_OLDEST - 1, 0, 0),
        (PROTOCOL, PROTOCOL - 1, 0),
    ],
)
def test_a_daemon_names_the_highest_common_protocol(
    shared_daemon: DaemonProcess, oldest: int, newest: int, agreed: int
) -> None:
    with RawClient(shared_daemon.socket, greeted=False) as client:
        answer = client.ask(FrameKind.HELLO, hello(protocol=oldest, newest=newest))
        assert answer is not None
        if agreed:
            assert answer.kind is FrameKind.WELCOME
            assert frames.Welcome.parse(answer.body).protocol == agreed
        else:
            assert answer.kind is FrameKind.REFUSED
            assert client.heard_out() == []


def test_a_call_that_an_old_daemon_does_not_know_is_one_error_and_costs_nothing(
    shared_daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = {FrameKind.SERVICE: PROTOCOL + 1}
    monkeypatch.setattr(connections, "SINCE", later)
    with kvdepot.open(shared_daemon.address) as store:
        keys = prompt(space_of(store), 71, 2)
        assert all(put(store, keys))
        with store.lease(keys) as lease:
            with pytest.raises(DaemonError, match=f"SERVICE came with {PROTOCOL + 1}") as caught:
                store.sessions.list()
            assert "upgrade the daemon" in caught.value.hint
            assert len(lease) == 2
        assert len(store.match(keys)) == 2
        facts = store.stats()
        assert facts["client"]["lost"] == 0
        mine = [one for one in facts["daemon"]["sessions"] if one["protocol"] == PROTOCOL]
        assert len(mine) == 1, "the daemon tells what its clients speak"


def test_a_refusal_for_another_reason_is_not_taken_for_the_versions(
    shared_daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_SPOKEN", OLD)
    monkeypatch.setattr(frames, "NO_TOKEN", b"?" * 16)
    with pytest.raises(DaemonError, match="too many clients"):
        kvdepot.open(shared_daemon.address)
