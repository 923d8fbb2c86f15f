"""Clients that die, hang or want too much: what they held is given back, others go on."""

import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.daemon_clients import ClientProcess, StartDaemon
from tests.support.raw_client import RawClient
from tests.support.store_contract import BLOCK_BYTES, prompt, put, space_of, tiers
from tests.support.waiting import eventually

import kvdepot
from kvdepot.core.block import ANSWERS, PutResult
from kvdepot.daemon.wire.frames import Fetch, Flag, FrameKind, Number, Seconds, pack
from kvdepot.errors import DaemonError
from kvdepot.testing.daemons import DaemonProcess


def held(store: kvdepot.Depot) -> tuple[int, int, int]:
    """Leased blocks, reserved slots and sessions, this one's included."""
    sessions = store.stats()["daemon"]["sessions"]
    reserved = sum(session["reserved"] for session in sessions)
    return store.stats()["leased"], reserved, len(sessions)


def test_a_killed_client_leaves_nothing(daemon: DaemonProcess) -> None:
    with kvdepot.open(daemon.address) as store:
        clients = [ClientProcess("hold", daemon.address, seed) for seed in range(3)]
        for client in clients:
            assert client.ready().line() == {"leased": 12, "reserved": 5}
        assert held(store) == (36, 15, 4)
        assert store.stats()["tiers"]["dram"]["blocks"] == 12
        for client in clients:
            client.kill()
        assert eventually(lambda: held(store) == (0, 0, 1))
        assert store.flush()
        record = BLOCK_BYTES // 4096 * 4096 + 8192
        assert store.stats()["tiers"]["dram"]["used_bytes"] == 12 * record
        assert store.admin.check()
        space = space_of(store)
        keys = prompt(space, 1000, 5)
        assert put(store, keys) == [PutResult.STORED] * 5, "the slots were not sealed"


def test_a_client_may_vanish_at_any_instant(daemon: DaemonProcess, seed: int) -> None:
    """Connections that end after any request, answered or not."""
    rng = random.Random(seed)
    with kvdepot.open(daemon.address) as store:
        space = space_of(store)
        keys = prompt(space, 1, 30)
        for start in range(0, 30, 10):
            assert all(put(store, keys[start : start + 10]))
        assert store.flush()
        for turn in range(150):
            fresh = prompt(space, 100 + turn, 8)
            asked = [
                (FrameKind.LEASE, b"".join(keys)),
                (FrameKind.FETCH, Fetch(0, 0, False, 2.0).body() + b"".join(keys)),
                (FrameKind.FETCH, Fetch(0, 8200, True, 2.0).body() + b"".join(keys[20:])),
                (FrameKind.RESERVE, Seconds(0.01).body() + b"".join(fresh)),
                (FrameKind.LEASE, b"".join(keys)),
            ]
            with RawClient(daemon.socket) as client:
                client.register(space)
                for kind, body in rng.choices(asked, k=rng.randrange(1, 4)):
                    client.send(kind, body)
                    if rng.random() < 0.5:
                        client.hear()
        assert eventually(lambda: held(store) == (0, 0, 1))
        assert eventually(lambda: not store.stats()["staging_bytes"])
        assert None not in tiers(store, keys)
        assert store.admin.check()


def test_a_stalled_client_keeps_nobody_waiting(daemon: DaemonProcess) -> None:
    """One that reads no answers, one that does not take what it was lent."""
    with kvdepot.open(daemon.address) as store:
        space = space_of(store)
        keys = prompt(space, 1, 80)
        for start in range(0, 80, 10):
            assert all(put(store, keys[start : start + 10]))
        assert store.flush()
        with RawClient(daemon.socket) as deaf, RawClient(daemon.socket) as slow:
            deaf.socket.setblocking(False)
            request = pack(FrameKind.MATCH, 1, b"".join(keys))
            assert fill_pipe(deaf, request) > 0
            part = Fetch(0, 8200, True, 10.0).body()
            slow.register(space)
            slow.send(FrameKind.FETCH, part + b"".join(keys[:20]))
            while (frame := slow.hear()) is not None and not frame.flags & Flag.LENT:
                assert frame.kind is FrameKind.ARRIVED
            assert frame is not None
            for start in range(0, 80, 20):
                assert len(store.match(keys)) == 80
                assert None not in tiers(store, keys[start : start + 20])
            more = prompt(space, 2, 5)
            assert all(put(store, more))
        assert eventually(lambda: held(store) == (0, 0, 1))
        assert store.admin.check()


def fill_pipe(client: RawClient, data: bytes) -> int:
    sent = 0
    try:
        while True:
            client.socket.send(data)
            sent += 1
    except BlockingIOError:
        return sent


def test_who_breaks_the_rules_loses_all_its_connections(daemon: DaemonProcess) -> None:
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 4)
        put(store, keys)
        with kvdepot.open(daemon.address) as other:
            space_of(other)
            lease = other.lease(keys)
            assert len(lease) == 4
            assert held(store) == (4, 0, 2)
            break_rules(other)
            assert lease.deliver(lambda _: None) == [kvdepot.GetResult(None, "failed")] * 4
            lease.release()
            assert eventually(lambda: held(store) == (0, 0, 1))
            assert tiers(other, keys) == ["dram"] * 4, "it has attached anew"
            assert other.stats()["client"]["lost"] == 1


def break_rules(store: kvdepot.Depot) -> None:
    """Send nonsense over one of a store's connections."""
    reconnector = store._daemon  # type: ignore[attr-defined]
    with reconnector.connections().link() as link:
        link._channel.send(FrameKind.TAKEN, 1)


def test_clients_are_limited(start_daemon: StartDaemon) -> None:
    daemon = start_daemon("--clients", "2")
    with kvdepot.open(daemon.address) as first, kvdepot.open(daemon.address) as second:
        with pytest.raises(DaemonError, match="too many clients"):
            kvdepot.open(daemon.address)
        assert second.stats()["daemon"]["counters"]["refused"] == 1
        second.close()
        assert eventually(lambda: len(first.stats()["daemon"]["sessions"]) == 1)
        with kvdepot.open(daemon.address) as third:
            assert len(third.match([])) == 0


def test_silent_connections_keep_nobody_out(start_daemon: StartDaemon) -> None:
    """They have no threads, and the oldest gives its place to a new one."""
    daemon = start_daemon("--clients", "2")
    threads = Path(f"/proc/{daemon.pid}/task")
    with kvdepot.open(daemon.address) as store, ExitStack() as opened:
        before = len(list(threads.iterdir()))
        silent = [opened.enter_context(RawClient(daemon.socket, greeted=False)) for _ in range(100)]
        keys = prompt(space_of(store), 1, 3)
        assert all(put(store, keys))
        with kvdepot.open(daemon.address) as second:
            space_of(second)
            assert tiers(second, keys) == ["dram"] * 3
        assert len(list(threads.iterdir())) < before + 10
        assert silent[0].heard_out() == []
        assert store.stats()["daemon"]["counters"]["refused"] == 0


def test_leases_and_slots_of_a_client_are_limited(daemon: DaemonProcess) -> None:
    with kvdepot.open(daemon.address) as store:
        (key,) = prompt(space_of(store), 1, 1)
        put(store, [key])
        leases = [store.lease([key]) for _ in range(4100)]
        lengths = [len(lease) for lease in leases]
        assert lengths == [1] * 4096 + [0] * 4
        assert store.stats()["daemon"]["counters"]["limited"] == 4
        with kvdepot.open(daemon.address) as other:
            space_of(other)
            with other.lease([key]) as lease:
                assert len(lease) == 1
        for lease in leases:
            lease.release()
        assert held(store) == (0, 0, 1)


def test_connections_of_a_client_are_limited_and_shared(daemon: DaemonProcess) -> None:
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 3)
        put(store, keys)
        ready = threading.Barrier(30)
        wrong: list[object] = []

        def work() -> None:
            ready.wait()
            for _ in range(20):
                wrong.extend(tier for tier in tiers(store, keys) if tier != "dram")

        threads = [threading.Thread(target=work) for _ in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        (session,) = store.stats()["daemon"]["sessions"]
        assert 1 <= session["connections"] <= 8


def test_a_lease_number_of_another_client_is_worth_nothing(daemon: DaemonProcess) -> None:
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 2)
        put(store, keys)
        with store.lease(keys):
            for number in range(1, 20):
                with RawClient(daemon.socket) as thief:
                    thief.send(FrameKind.RELEASE, Number(number).body())
                    assert thief.heard_out() == []
            assert held(store)[0] == 2


def test_a_release_with_a_number_that_is_none_ends_the_others_too(daemon: DaemonProcess) -> None:
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 3)
        put(store, keys)
        with RawClient(daemon.socket) as client:
            for number in (1, 2, 3):
                frame = client.ask(FrameKind.LEASE, b"".join(keys))
                assert frame is not None and frame.kind is FrameKind.LEASED
                assert Number.parse(frame.body[:8]).value == number
            assert held(store)[0] == 9
            numbers = [Number(number).body() for number in (1, 77, 2)]
            client.send(FrameKind.RELEASE, b"".join(numbers))
            assert client.heard_out() == []
        assert eventually(lambda: held(store) == (0, 0, 1))
        assert store.remove(keys) == 3
        assert store.stats()["tiers"]["dram"]["used_bytes"] == 0, "still leased by a lease"


def test_what_is_fetched_and_not_released_is_limited(daemon: DaemonProcess) -> None:
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 1)
        put(store, keys)
        body = Fetch(0, 0, False, 1.0).body() + b"".join(keys)
        with RawClient(daemon.socket) as client:
            client.register(space_of(store))
            for _ in range(4096):
                frame = client.ask(FrameKind.FETCH, body)
                assert frame is not None and frame.kind is FrameKind.ARRIVED
            frame = client.ask(FrameKind.FETCH, body)
            assert frame is not None and frame.kind is FrameKind.DONE
            assert frame.body[:8] == Number(0).body()
            assert ANSWERS[frame.body[8]] == kvdepot.GetResult(None, "busy")
            sessions = store.stats()["daemon"]["sessions"]
            assert sorted(session["leases"] for session in sessions) == [0, 4096]


FORKER = """
import ctypes, os, signal, sys, kvdepot
from tests.support.store_contract import prompt, space_of
from tests.support.mappings import arenas

store = kvdepot.open(sys.argv[1])
lease = store.lease(prompt(space_of(store), 1, 3))
child = os.fork() if sys.argv[2] == "python" else ctypes.CDLL(None).fork()
left = []
if child == 0 and sys.argv[2] == "python":
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    opened = [os.readlink(link) for link in links if os.path.lexists(link)]
    left = [name for name in opened if "socket:" in name or "kvdepot-arena" in name]
    left += arenas()
who = "child" if child == 0 else "parent"
os.write(1, f"{who} {left}\\n".encode())
signal.pause()
"""


@pytest.mark.parametrize("how", ["python", "raw"])
def test_a_child_of_a_dead_client_keeps_nothing(daemon: DaemonProcess, how: str) -> None:
    with kvdepot.open(daemon.address) as store:
        put(store, prompt(space_of(store), 1, 3))
        command = [sys.executable, "-c", FORKER, daemon.address, how]
        client = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert client.stdout is not None
        try:
            said = {client.stdout.readline().strip() for _ in range(2)}
            assert said == {"child []", "parent []"}, "a copy of the parent's"
            assert held(store) == (3, 0, 2)
            client.kill()
            client.wait()
            assert eventually(lambda: held(store) == (0, 0, 1), 20.0)
        finally:
            os.killpg(client.pid, signal.SIGKILL)
            client.communicate()
