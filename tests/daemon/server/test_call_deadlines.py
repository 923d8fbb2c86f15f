"""A call that takes several requests has one deadline: each request is given what is left."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from tests.support.store_contract import BLOCK_BYTES, prompt, put, space_of

import kvdepot
from kvdepot.core.block import BlockKey
from kvdepot.daemon.client import connections, lease, remote
from kvdepot.daemon.client.connections import Link
from kvdepot.daemon.wire import frames
from kvdepot.daemon.wire.frames import FrameKind
from kvdepot.depot import Depot
from kvdepot.testing.daemons import DaemonProcess

BLOCKS, A_FRAME = 12, 4
TIME_S = 60.0


@pytest.fixture
def store(daemon: DaemonProcess) -> Iterator[Depot]:
    with kvdepot.open(daemon.address) as attached:
        yield attached


@pytest.fixture
def keys(store: Depot) -> list[BlockKey]:
    found = prompt(space_of(store), 1, BLOCKS)
    assert all(put(store, found))
    return found


@pytest.fixture
def times(keys: list[BlockKey], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What requests are given, while every look at the clock costs half of the time."""
    given: list[float] = []
    send = Link.send

    def spy(link: Link, kind: FrameKind, body: bytes = b"", flags: int = 0) -> int:
        if kind is FrameKind.FETCH:
            given.append(frames.split(frames.Fetch, memoryview(body))[0].timeout_s)
        if kind is FrameKind.DELIVER:
            given.append(frames.Deliver.parse(memoryview(body)).timeout_s)
        return send(link, kind, body, flags)

    ticks = itertools.count(0.0, TIME_S / 2)
    clock = SimpleNamespace(monotonic=lambda: next(ticks))
    monkeypatch.setattr(Link, "send", spy)
    monkeypatch.setattr(connections, "KEYS_MAX", A_FRAME)
    monkeypatch.setattr(remote, "time", clock)
    monkeypatch.setattr(lease, "time", clock)
    return given


def test_a_get(store: Depot, keys: list[BlockKey], times: list[float]) -> None:
    targets = [bytearray(BLOCK_BYTES) for _ in keys]
    assert all(store.get_many(keys, targets, timeout_s=TIME_S)), "memory answers without time too"
    assert times == [TIME_S / 2, 0.0, 0.0]


def test_a_delivery(store: Depot, keys: list[BlockKey], times: list[float]) -> None:
    with store.lease(keys) as held:
        assert all(held.deliver(lambda _: None, timeout_s=TIME_S))
    assert times == [TIME_S / 2, 0.0, 0.0]
