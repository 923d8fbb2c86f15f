"""Clients that stop while they hold memory: others have room, and no byte is wrong afterwards."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemon_clients import StartDaemon
from tests.support.failures import check_data
from tests.support.raw_client import RawClient
from tests.support.store_contract import BLOCK_BYTES, prompt, put, small, space_of, tiers
from tests.support.stores import settings
from tests.support.waiting import until

import kvdepot
from kvdepot.core.block import BlockKey, PutResult
from kvdepot.core.depot import Arrival
from kvdepot.core.keys import as_words
from kvdepot.core.requests import BlockSize
from kvdepot.daemon.server.client_resources import ClientLimits, ClientResources, ServerCounters
from kvdepot.daemon.wire.frames import Channel, Fetch, Flag, FrameKind, Seconds
from kvdepot.daemon.wire.versions import PROTOCOL
from kvdepot.store.store import Store
from kvdepot.testing.daemons import DaemonProcess
from kvdepot.testing.images import payload_for

CLIENT = """
import json, os, signal, sys
import kvdepot
from kvdepot.daemon.client import put as putting, remote
from kvdepot.testing.images import payload_for
from tests.support.store_contract import BLOCK_BYTES, prompt, put, space_of

store = kvdepot.open(sys.argv[1])
space = space_of(store)
here = prompt(space, 1, 40)
new = prompt(space, 900, 5)

def stop():
    print("stops", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

def stopping(call):
    def stopped(*given, **more):
        stop()
        return call(*given, **more)
    return stopped

def leases():
    held = [store.lease(here), store.reserve(new, timeout_s=0)]
    stop()
    views = [held[0].view(index) for index in range(len(held[0]))]
    found = [view is None or bytes(view) == payload_for(key, BLOCK_BYTES)
             for key, view in zip(here, views)]
    return [found, list(map(bool, held[0].deliver(lambda _: None)))]

def get():
    remote.copy_out = stopping(remote.copy_out)
    intos = [bytearray(BLOCK_BYTES) for _ in here]
    answers = store.get_many(here, intos)
    return [not answer or into == payload_for(key, BLOCK_BYTES)
            for key, into, answer in zip(here, intos, answers)]

def put_blocks():
    putting.copy_in = stopping(putting.copy_in)
    return list(map(bool, put(store, new)))

print(json.dumps({"leases": leases, "get": get, "put": put_blocks}[sys.argv[2]]()), flush=True)
store.close()
"""
BLOCKS = 40


class StoppedClient:
    """A client that stops itself in the middle of something, until `wake`. A scope."""

    def __init__(self, daemon: DaemonProcess, what: str) -> None:
        command = [sys.executable, "-c", CLIENT, daemon.address, what]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "StoppedClient":
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "stops\n"
        stat = Path(f"/proc/{self.process.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        return self

    def wake(self) -> Any:
        """Let it go on. Returns what it says at its end."""
        assert self.process.stdout is not None
        while True:
            os.kill(self.process.pid, signal.SIGCONT)
            line = self.process.stdout.readline()
            assert line, "the client has ended"
            if line != "stops\n":
                return json.loads(line)

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def with_a_quarter(start_daemon: StartDaemon, time: str) -> DaemonProcess:
    """A daemon of which a client may hold a quarter of the memory, for this time."""
    dram = {**small(Path())["dram"], "client_share": 0.25, "client_time": time}
    return start_daemon(dram=dram)


@pytest.fixture
def hurried(start_daemon: StartDaemon) -> DaemonProcess:
    return with_a_quarter(start_daemon, "0.5s")


@pytest.fixture
def patient(start_daemon: StartDaemon) -> DaemonProcess:
    return with_a_quarter(start_daemon, "1h")


def filled(store: kvdepot.Depot) -> list[BlockKey]:
    """Most of the memory holds these blocks, which are on disk too."""
    keys = prompt(space_of(store), 1, BLOCKS)
    for start in range(0, BLOCKS, 10):
        assert all(put(store, keys[start : start + 10]))
    assert store.flush()
    assert store.match(keys).tiers == ("dram",) * BLOCKS
    return keys


def overdue(store: kvdepot.Depot) -> int:
    count: int = store.stats()["daemon"]["counters"]["overdue"]
    return count


def check_room(store: kvdepot.Depot, first: int) -> None:
    """A third of the memory takes new blocks, again and again, and every byte is right."""
    for number in range(first, first + 6):
        keys = prompt(space_of(store), number, 16)
        assert put(store, keys) == [PutResult.STORED] * 16
        assert store.flush()
        with store.lease(keys) as lease:
            found: dict[int, bytes] = {}

            def sink(arrivals: list[Arrival], found: dict[int, bytes] = found) -> None:
                found.update({one.index: bytes(one.view) for one in arrivals})

            assert all(lease.deliver(sink))
        for index, key in enumerate(keys):
            check_data(found[index] == payload_for(key, BLOCK_BYTES), "wrong bytes")


def sessions(store: kvdepot.Depot) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = store.stats()["daemon"]["sessions"]
    return found


@pytest.mark.parametrize("what", ["leases", "get", "put"])
def test_a_stopped_client_leaves_room_and_wakes_to_no_wrong_byte(
    hurried: DaemonProcess, what: str
) -> None:
    with kvdepot.open(hurried.address) as store:
        keys = filled(store)
        with StoppedClient(hurried, what) as client:
            assert all(one["held_bytes"] <= (2 << 20) // 4 for one in sessions(store))
            check_room(store, 10)
            if what != "get":  # its blocks were lent: it is waited for, and holds no lease
                until(lambda: overdue(store) > 0)
                (stopped,) = [one for one in sessions(store) if one["pid"] == client.process.pid]
                assert stopped["is_over"] and stopped["held_bytes"], "kept until it has ended"
            check_room(store, 20)
            said = client.wake()
            if what == "leases":
                right, delivered = said
                check_data(all(right), "a view has another block's bytes")
                assert len(right) == BLOCKS and not any(delivered), "its lease is over"
            elif what == "get":
                check_data(all(said), "another block's bytes")
            else:
                assert said == [False] * 5
            check_room(store, 30)
            for number in range(10, 36):
                tiers(store, prompt(space_of(store), number, 16))
            tiers(store, keys)
        until(lambda: len(sessions(store)) == 1)
        assert (store.stats()["leased"], sessions(store)[0]["held_bytes"]) == (0, 0)
        assert store.admin.check()


def test_a_stopped_client_that_is_killed_leaves_nothing(hurried: DaemonProcess) -> None:
    with kvdepot.open(hurried.address) as store:
        filled(store)
        with StoppedClient(hurried, "leases") as client:
            until(lambda: overdue(store) == 1)
            assert store.stats()["leased"] > 0
            client.process.kill()
            until(lambda: len(sessions(store)) == 1)
        assert store.stats()["leased"] == 0
        check_room(store, 10)


def test_a_client_that_never_answers_leaves_room(patient: DaemonProcess) -> None:
    """It leases and fetches everything over two connections, and releases and takes nothing."""
    with kvdepot.open(patient.address) as store:
        keys = b"".join(filled(store))
        with RawClient(patient.socket) as one, RawClient(patient.socket) as two:
            for client in (one, two):
                client.register(space_of(store))
                for _ in range(20):
                    answer = client.ask(FrameKind.LEASE, keys)
                    assert answer is not None and answer.kind is FrameKind.LEASED
            assert max(one["held_bytes"] for one in sessions(store)) <= (2 << 20) // 4
            fresh = b"".join(prompt(space_of(store), 7, 30))
            answer = one.ask(FrameKind.RESERVE, Seconds(0.0).body() + fresh)
            assert answer is not None and answer.kind is FrameKind.RESERVED
            check_room(store, 10)
            answer = two.ask(FrameKind.FETCH, Fetch(0, 0, False, 30.0).body() + keys)
            while answer is not None and not answer.flags & Flag.LENT:
                assert answer.kind is FrameKind.ARRIVED and not answer.flags & Flag.LAST
                answer = two.hear()
            assert answer is not None, "it is waited for"
            until(lambda: len([one for one in sessions(store) if one["is_over"]]) == 1)
            check_room(store, 20)
        until(lambda: len(sessions(store)) == 1)


def test_blocks_beyond_a_clients_share_are_delivered(patient: DaemonProcess) -> None:
    """A lease of more than it may hold is as long as without the limit; nothing is missing."""
    with kvdepot.open(patient.address) as store:
        keys = filled(store)
        for _ in range(3):
            assert tiers(store, keys) == ["dram"] * BLOCKS
        with store.lease(keys) as lease:
            assert len(lease) == BLOCKS
            lasting: set[int] = set()
            found: dict[int, bytes] = {}

            def sink(arrivals: list[Arrival]) -> None:
                lasting.update(one.index for one in arrivals if one.lasting)
                found.update({one.index: bytes(one.view) for one in arrivals})

            assert all(lease.deliver(sink))
            assert all(found[at] == payload_for(key, BLOCK_BYTES) for at, key in enumerate(keys))
            views = [lease.view(at) is not None for at in range(BLOCKS)]
            assert 0 < sum(views) < BLOCKS // 2
            assert all(views[at] for at in lasting)
        assert sessions(store)[0]["held_bytes"] == 0
        more = prompt(space_of(store), 3, BLOCKS)
        assert all(put(store, more)), "in waves of what it may hold"
        with store.reserve(prompt(space_of(store), 4, BLOCKS), timeout_s=1.0) as slots:
            count = slots.outcomes.count(PutResult.STORED)
            assert 0 < count < BLOCKS // 2
            assert slots.outcomes[count:] == [PutResult.THROTTLED] * (BLOCKS - count)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    tree = settings(tmp_path, dram={"shared": True})
    del tree["hdd"]
    with kvdepot.open(**tree) as opened:
        assert isinstance(opened, Store)
        yield opened


def test_two_connections_share_the_limit_of_slots(
    store: Store, monkeypatch: pytest.MonkeyPatch, a_channel: Channel
) -> None:
    limits = ClientLimits(slots=4)
    client = ClientResources(store.engine, limits, ServerCounters(), a_channel, PROTOCOL)
    space = space_of(store)
    size = BlockSize(space.block_bytes, space.chunk_bytes)
    client.register(space.tag, size, space.namespace.describe())
    both, reserve = threading.Barrier(2), store.engine.reserve

    def slow(*given: Any, **more: Any) -> Any:
        both.wait()
        return reserve(*given, **more)

    monkeypatch.setattr(store.engine, "reserve", slow)
    answers: list[PutResult] = []

    def ask(number: int) -> None:
        keys = as_words(prompt(space, number, 3))
        answers.extend(client.reserve(keys, 0.0, pad=True)[2])

    threads = [threading.Thread(target=ask, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers.count(PutResult.STORED) == 4
    assert client.describe()["reserved"] == 4
    client.abandon(1)
    client.abandon(2)
    assert client.describe()["held_bytes"] == 0 == client.describe()["reserved"]


@pytest.fixture
def a_channel() -> Iterator[Channel]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield Channel(ours)
