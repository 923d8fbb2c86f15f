"""Sessions and hints through a daemon: as in a store of one's own, and gone with their client."""

import inspect
from math import inf
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemon_clients import StartDaemon
from tests.support.raw_client import RawClient
from tests.support.store_contract import LAYOUT, MANY, prompt, put, small, space_of, tiers
from tests.support.stores import settings
from tests.support.waiting import eventually

import kvdepot
from kvdepot.core.admin import DepotAdmin, DepotVolumes
from kvdepot.core.audit import DepotAudits
from kvdepot.core.block import BlockKey
from kvdepot.core.first_token import FirstToken, Reason
from kvdepot.core.sessions import DepotSessions
from kvdepot.daemon.client.services import (
    RemoteAdmin,
    RemoteAudits,
    RemoteSessions,
    RemoteVolumes,
)
from kvdepot.daemon.wire.frames import FrameKind, Hinted, Seconds
from kvdepot.depot import Depot
from kvdepot.store.admin import StoreAdmin
from kvdepot.store.audits import AuditService
from kvdepot.store.drives.maintenance import VolumeMaintenance
from kvdepot.store.sessions.service import SessionService
from kvdepot.testing.daemons import DaemonProcess

CRAWLING = {"read_bandwidth": "100kB", "write_bandwidth": "100MB", "seek": "5ms"}
FAST = {"read_bandwidth": "1GB", "write_bandwidth": "1GB"}
BLOCKS = 10


def on_the_hard_drive(folder: Path) -> list[BlockKey]:
    """A prompt that lies on the hard drive only."""
    with kvdepot.open(**settings(folder, hdd={"write_mode": "pass-through"})) as store:
        keys = prompt(space_of(store), 1, BLOCKS)
        assert all(put(store, keys))
    return keys


def emulated(folder: Path, options: dict[str, str], **plugin: Any) -> dict[str, Any]:
    """Settings with an emulated drive in the place of the hard drive."""
    tree = settings(folder, dram={"capacity": "16MiB"})
    del tree["hdd"]
    name = "kvdepot.testing.emulation:emulated_drive"
    path = str(folder / "emulated")
    table = {"name": name, "path": path, "capacity": "32MiB", "options": options}
    return {**tree, "plugin": {**table, **plugin}}


def on_the_emulated_drive(folder: Path) -> list[list[BlockKey]]:
    """Two prompts that lie on the emulated drive only."""
    with kvdepot.open(**emulated(folder, FAST, write_mode="pass-through")) as store:
        found = [prompt(space_of(store), number, BLOCKS) for number in (1, 2)]
        for keys in found:
            assert all(put(store, keys))
    return found


def hinting(store: Depot) -> list[int]:
    return [session["hints"] for session in store.stats()["daemon"]["sessions"]]


@pytest.mark.parametrize(
    ("service", "kinds"),
    [
        (DepotSessions, (SessionService, RemoteSessions)),
        (DepotVolumes, (VolumeMaintenance, RemoteVolumes)),
        (DepotAudits, (AuditService, RemoteAudits)),
        (DepotAdmin, (StoreAdmin, RemoteAdmin)),
    ],
)
def test_both_stores_have_the_calls_of_every_service(
    service: type[object], kinds: tuple[type[object], ...]
) -> None:
    calls = [one for one in inspect.getmembers(service, inspect.isfunction) if one[0][0] != "_"]
    assert 4 <= len(calls) <= 12
    for name, call in calls:
        for kind in kinds:
            mine, its = inspect.signature(call), inspect.signature(getattr(kind, name))
            assert list(mine.parameters.values()) == list(its.parameters.values()), name


def test_first_tokens_are_told_to_the_daemon(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = start_daemon(**settings(tmp_path))
    told = [
        FirstToken(900, 640, 0.25, 0.5, 2.0, Reason.SPLIT),
        FirstToken(10, 0, 0.5, inf, inf, Reason.PREFILL_UNKNOWN),
    ]
    with kvdepot.open(daemon.address) as store:
        for first in told:
            store.admin.report_first_token(first)
        assert eventually(lambda: len(store.stats()["first_tokens"]["latest"]) == 2)
        found = store.stats()["first_tokens"]
    assert found["decisions"] == {"split": 1, "prefill_unknown": 1}
    assert (found["compared"], found["seconds"], found["recompute_seconds"]) == (1, 0.25, 2.0)
    assert found["latest"][1]["why"] == Reason.SPLIT.value


def test_a_session_is_hinted_at_by_another_client(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """The engine names it, the gateway hints at it, by name only."""
    keys = on_the_hard_drive(tmp_path)
    daemon = start_daemon(**settings(tmp_path))
    with kvdepot.open(daemon.address) as engine, kvdepot.open(daemon.address) as gateway:
        space_of(engine)
        space_of(gateway)
        assert engine.sessions.name("chat", keys, "pending") == BLOCKS
        other = gateway.namespace(model="m", layout=LAYOUT, tenant="b", secret=b"2" * 16)
        assert gateway.sessions.prefetch("chat", namespace=other.tag.hex()).wanted == 0
        hint = gateway.sessions.prefetch("chat", 20.0)
        assert hint.wait(60.0) and hint.brought == BLOCKS
        assert tiers(engine, keys) == ["dram"] * BLOCKS
        assert gateway.sessions.name("chat", state="closed") == BLOCKS
        assert engine.sessions.name("chat") == 0


@pytest.mark.slow
def test_a_hint_is_called_off_by_its_client_or_with_it(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """The first is being read; the others wait for their turn."""
    busy, keys = on_the_emulated_drive(tmp_path)
    daemon = start_daemon(**emulated(tmp_path, CRAWLING))
    with kvdepot.open(daemon.address) as store:
        space_of(store)
        store.prefetch(busy[-1:], 60.0)
        hint = store.prefetch(keys, 60.0)
        assert sum(hinting(store)) == 2
        hint.cancel()
        assert hint.wait(60.0)
        assert hint.brought == 0
        with RawClient(daemon.socket) as client:
            client.register(space_of(store))
            answer = client.ask(FrameKind.HINT, Seconds(60.0).body() + b"".join(keys))
            assert answer is not None and Hinted.parse(answer.body).wanted == BLOCKS
            assert max(hinting(store)) == 1
        assert eventually(lambda: hinting(store) == [0])
        assert store.match(keys).tiers == ("plugin",) * BLOCKS
        assert store.admin.check(deep=False)


@pytest.mark.slow
def test_hints_of_a_client_are_limited(start_daemon: StartDaemon, tmp_path: Path) -> None:
    busy, keys = on_the_emulated_drive(tmp_path)
    daemon = start_daemon(**emulated(tmp_path, CRAWLING))
    with kvdepot.open(daemon.address) as store:
        space_of(store)
        hints = [store.prefetch(busy, 60.0), *[store.prefetch(keys[-1:], 60.0) for _ in range(70)]]
        assert [hint.wanted for hint in hints] == [BLOCKS, *[1] * 63, *[0] * 7]
        assert store.stats()["daemon"]["counters"]["limited"] == 7
        for hint in hints:
            hint.cancel()
        assert store.prefetch(keys[:1], 60.0).wanted == 1


def test_a_prompt_of_many_frames(daemon: DaemonProcess) -> None:
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, MANY)
        assert put(store, keys[:20]) and store.flush()
        assert store.sessions.name("chat", keys) == 20
        assert store.sessions.name("chat", state="pending") == 20
        assert store.sessions.name("chat", keys, "closed") == 20
        assert store.sessions.name("chat") == 0
        assert store.prefetch(keys, 20.0).wait(60.0)


def test_without_a_daemon_nothing_is_brought(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = start_daemon()
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 3)
        put(store, keys)
        hint = store.prefetch(keys, 300.0)
        daemon.kill()
        assert hint.wait(60.0) and hint.brought == 0
        hint.cancel()
        assert store.sessions.name("chat", keys) == 0
        assert store.prefetch(keys, 30.0).wait(0.0)
        assert store.sessions.prefetch("chat", 30.0).wanted == 0


class TestChanges:
    """What the person on call does to a daemon's tiers."""

    @pytest.fixture
    def daemon(self, start_daemon: StartDaemon, tmp_path: Path) -> DaemonProcess:
        ssd: dict[str, Any] = small(tmp_path)["ssd"]
        paths = [str(tmp_path / "a"), str(tmp_path / "b")]
        return start_daemon(ssd={**ssd, "path": paths, "promote": False})

    def test_without_a_daemon_they_fail_aloud(self, daemon: DaemonProcess) -> None:
        with kvdepot.open(daemon.address) as store:
            daemon.kill()
            with pytest.raises(kvdepot.errors.DaemonError, match="did not answer"):
                store.volumes.resize("ssd", "24MiB")
