"""What one client may register, and what is left of it when the client goes."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.stores import settings

import kvdepot
from kvdepot.core.requests import BlockSize
from kvdepot.daemon.server.client_resources import ClientLimits, ClientResources, ServerCounters
from kvdepot.daemon.wire.frames import Channel
from kvdepot.daemon.wire.versions import PROTOCOL
from kvdepot.errors import ConfigError
from kvdepot.store.store import Store

SIZE = BlockSize(4096, 4096)
LIMITS = ClientLimits(namespaces=3)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    tree = settings(tmp_path, dram={"shared": True})
    del tree["hdd"]
    with kvdepot.open(**tree) as opened:
        assert isinstance(opened, Store)
        yield opened


def tag(number: int) -> bytes:
    return bytes([number] * 8)


def test_a_client_may_register_so_many_namespaces(store: Store) -> None:
    engine, counters = store.engine, ServerCounters()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(ours)
    one, two = (ClientResources(engine, LIMITS, counters, channel, PROTOCOL) for _ in range(2))
    assert one.join(channel)
    for number in (1, 2, 3, 1):
        one.register(tag(number), SIZE, b"{}")
    with pytest.raises(ConfigError, match="may register 3") as refused:
        one.register(tag(4), SIZE, b"{}")
    assert refused.value.hint and counters.as_dict()["limited"] == 1
    two.register(tag(3), SIZE, b"{}")
    with pytest.raises(ConfigError, match="description"):
        two.register(tag(5), SIZE, b" " * 20_000)
    for number in (1, 3):
        with pytest.raises(ConfigError, match="already has blocks of"):
            two.register(tag(number), BlockSize(8192, 4096), b"{}")
    assert one.leave(channel)
    two.register(tag(1), BlockSize(8192, 4096), b"{}")
    with pytest.raises(ConfigError, match="already has blocks of"):
        two.register(tag(3), BlockSize(8192, 4096), b"{}")
    channel.close()
    theirs.close()
