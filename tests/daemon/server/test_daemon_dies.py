"""The daemon dies, hangs, comes back: clients answer with misses, and go on by themselves."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.support.daemon_clients import StartDaemon
from tests.support.mappings import arenas
from tests.support.store_contract import BLOCK_BYTES, prompt, put, space_of, tiers, touch
from tests.support.waiting import eventually

import kvdepot
from kvdepot.core.block import GetResult, PutResult
from kvdepot.core.clock import SystemClock
from kvdepot.core.depot import Arrival, Durability
from kvdepot.daemon.client.connections import Reconnector
from kvdepot.daemon.client.remote import RemoteStore
from kvdepot.errors import ConfigError, DaemonError
from kvdepot.testing.clocks import ManualClock
from kvdepot.testing.daemons import DaemonProcess
from kvdepot.testing.images import payload_for

AWAY = GetResult(None, "failed")


def check_away(store: kvdepot.Depot, keys: list[kvdepot.BlockKey]) -> None:
    """Every call has an answer, and none of them raises."""
    assert store.get_many(keys, [bytearray(BLOCK_BYTES) for _ in keys]) == [AWAY] * len(keys)
    assert put(store, keys) == [PutResult.THROTTLED] * len(keys)
    assert len(store.match(keys)) == touch(store, keys) == store.remove(keys) == 0
    with store.lease(keys) as lease:
        assert len(lease) == 0
        assert lease.deliver(lambda _: None) == []
    with store.reserve(keys) as slots:
        assert slots.outcomes == [PutResult.THROTTLED] * len(keys)
        assert slots.view(0) is None
        slots.seal()
    assert not store.flush()
    assert not store.admin.check()
    assert store.remove(namespace=space_of(store)) == 0
    assert store.memory == ()
    told = store.stats()["client"]
    assert not told["is_attached"]
    assert told["reason"]
    assert told["away"] >= 10


def test_without_a_daemon_everything_is_a_miss_and_with_one_it_is_not(
    daemon: DaemonProcess,
) -> None:
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 6)
        assert all(put(store, keys))
        assert store.flush()
        daemon.kill()
        check_away(store, keys)
        daemon.start()
        assert eventually(lambda: len(store.match(keys)) == 6)
        assert tiers(store, keys) == ["ssd"] * 6
        assert put(store, prompt(space_of(store), 2, 3)) == [PutResult.STORED] * 3
        client = store.stats()["client"]
        assert (client["attached"], client["lost"], client["is_attached"]) == (2, 1, True)
        assert store.admin.check()


def test_a_restart_in_a_quiet_moment_is_not_noticed(daemon: DaemonProcess) -> None:
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 6)
        assert all(put(store, keys))
        for end in (daemon.stop, daemon.kill):
            store.flush()
            end()
            daemon.start()
            assert tiers(store, keys) == ["ssd"] * 6
        assert store.stats()["client"]["away"] == 0


def test_leases_and_reservations_from_before_are_over_but_their_memory_is_not(
    daemon: DaemonProcess,
) -> None:
    with kvdepot.open(daemon.address) as store:
        space = space_of(store)
        keys = prompt(space, 1, 4)
        assert all(put(store, keys))
        assert store.flush()
        lease, fresh = store.lease(keys), prompt(space, 2, 3)
        slots = store.reserve(fresh)
        view, room = lease.view(2), slots.view(1)
        assert view is not None and room is not None
        daemon.kill()
        daemon.start()
        assert tiers(store, keys) == ["ssd"] * 4, "attached anew"
        assert view == payload_for(keys[2], BLOCK_BYTES)
        room[:] = payload_for(fresh[1], BLOCK_BYTES)
        assert lease.view(2) is None
        assert lease.deliver(lambda _: None) == [AWAY] * 4
        lease.release()
        slots.seal([1])
        assert slots.outcomes[1] is PutResult.THROTTLED
        slots.close()
        assert len(store.match(fresh)) == 0
        assert bytes(room) == payload_for(fresh[1], BLOCK_BYTES)
        stats = store.stats()
        assert stats["leased"] == 0
        assert len(stats["daemon"]["sessions"]) == 1
        view.release()
        room.release()


def test_a_daemon_that_dies_while_blocks_are_delivered(daemon: DaemonProcess) -> None:
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 6)
        assert all(put(store, keys))

        def sink(arrivals: list[Arrival]) -> None:
            daemon.kill()
            for arrival in arrivals:
                assert arrival.view == payload_for(keys[arrival.index], BLOCK_BYTES)

        with store.lease(keys) as lease:
            assert lease.deliver(sink) == [AWAY] * 6


def test_a_daemon_that_hangs_costs_one_deadline_and_then_nothing(daemon: DaemonProcess) -> None:
    reconnector = Reconnector(str(daemon.socket), SystemClock(), 30.0)
    with RemoteStore(reconnector, {}) as store:
        keys = prompt(space_of(store), 1, 6)
        assert all(put(store, keys))
        daemon.pause()
        reconnector.call_s = 0.3
        began = time.monotonic()
        assert len(store.match(keys)) == 0
        assert time.monotonic() - began < 30.0
        assert len(store.match(keys)) == 0  # tries to attach, in vain
        began = time.monotonic()
        for _ in range(100):
            assert len(store.match(keys)) == 0
        assert time.monotonic() - began < 30.0, "it does not try each time"
        daemon.resume()
    with kvdepot.open(daemon.address) as store:
        space_of(store)
        assert tiers(store, keys) == ["dram"] * 6


def test_a_hang_does_not_let_a_slot_be_used_by_two(daemon: DaemonProcess) -> None:
    """A client gives up on a daemon that hangs. What it was filling stays its own."""
    reconnector = Reconnector(str(daemon.socket), SystemClock(), 30.0)
    with RemoteStore(reconnector, {}) as store:
        space = space_of(store)
        keys = prompt(space, 1, 6)
        slots = store.reserve(keys)
        daemon.pause()
        reconnector.call_s = 0.3
        assert len(store.match(keys)) == 0
        daemon.resume()
        with kvdepot.open(daemon.address) as other:
            others = prompt(space_of(other), 2, 20)
            assert all(put(other, others))
            for index in range(6):
                view = slots.view(index)
                assert view is not None
                view[:] = bytes(BLOCK_BYTES)
            assert tiers(other, others) == ["dram"] * 20
            slots.seal()
            assert slots.outcomes == [PutResult.THROTTLED] * 6
            slots.close()
            assert eventually(lambda: len(other.stats()["daemon"]["sessions"]) == 1)
            assert len(other.match(keys)) == 0
            assert other.admin.check()


def test_attempts_to_attach_get_rarer(tmp_path: Path, start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    clock = ManualClock()
    reconnector = Reconnector(str(daemon.socket), clock, 5.0)
    with RemoteStore(reconnector, {}) as store:
        daemon.kill()
        assert len(store.match([])) == 0
        daemon.start()
        assert not reconnector.describe()["is_attached"]
        for pause_s in (0.049, 0.002):
            clock.advance(pause_s)
            store.match([])
        assert reconnector.describe()["is_attached"]


def test_a_new_daemon_with_less_room_refuses_what_does_not_fit(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(folder="a")
    with kvdepot.open(daemon.address) as store:
        big = store.namespace(model="big", layout=kvdepot.KVLayout.opaque(600 << 10, 8))
        (key,) = big.keys(range(8))
        assert store.put_many([key], [bytes(600 << 10)])[0]
        daemon.kill()
        toml = daemon.socket.parent / "daemon.toml"
        text = toml.read_text().replace('capacity = "2MiB"', 'capacity = "512KiB"')
        toml.write_text(text)
        daemon.start()
        assert store.put_many([key], [bytes(600 << 10)])[0] is PutResult.REFUSED
        assert not store.get_many([key], [bytearray(600 << 10)])[0]
        assert "dram.capacity" in store.stats()["client"]["reason"]


def test_a_child_of_fork_attaches_by_itself(daemon: DaemonProcess) -> None:
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 4)
        assert all(put(store, keys))
        lease = store.lease(keys)
        child = os.fork()
        if child == 0:
            # Nothing of pytest may run in here.
            status = 1
            try:
                over = lease.deliver(lambda _: None) == [AWAY] * 4
                status = 0 if over and tiers(store, keys) == ["dram"] * 4 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert all(lease.deliver(lambda _: None)), "the parent's session goes on"
        lease.release()
        assert tiers(store, keys) == ["dram"] * 4


def test_opening_without_a_daemon_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(DaemonError, match="no daemon answers") as caught:
        kvdepot.open(f"unix:{tmp_path / 'none.sock'}")
    assert f"kvdepot serve --socket {tmp_path / 'none.sock'}" in caught.value.hint


def test_settings_of_the_daemon_are_not_the_clients(daemon: DaemonProcess) -> None:
    with pytest.raises(ConfigError, match=r"dram.*kvdepot serve"):
        kvdepot.open(daemon.address, dram="2GiB")
    with pytest.raises(ConfigError, match="call_timeout"):
        kvdepot.open(daemon.address, call_timeout="soon")
    with pytest.raises(ConfigError, match="mode"):
        kvdepot.open(daemon.address, mode="r")
    with pytest.raises(ConfigError, match="no socket"):
        kvdepot.open("unix:")


def test_secrets_stay_in_the_daemon(start_daemon: StartDaemon, tmp_path: Path) -> None:
    secret = tmp_path / "alice.secret"
    secret.write_bytes(b"0123456789abcdef")
    tenants = {"alice": {"secret_file": str(secret)}}
    daemon = start_daemon(tenants=tenants)
    layout = kvdepot.KVLayout.opaque(4096, 8)
    with kvdepot.open(daemon.address) as store:
        with pytest.raises(ConfigError, match=r"tenants\.alice.*does not reveal") as caught:
            store.namespace(model="m", layout=layout, tenant="alice")
        assert "secret=" in caught.value.hint
        given = store.namespace(
            model="m", layout=layout, tenant="alice", secret=secret.read_bytes()
        )
        plain = store.namespace(model="m", layout=layout, tenant="bob")
        assert given.tag != plain.tag
    with kvdepot.open(daemon.address, tenants=tenants) as store:
        assert store.namespace(model="m", layout=layout, tenant="alice").tag == given.tag


def test_calls_of_many_threads_all_end_when_the_daemon_does(daemon: DaemonProcess) -> None:
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 20)
        assert all(put(store, keys))
        ended, wrong = threading.Event(), []

        def work() -> None:
            try:
                while not ended.wait(0.02):
                    tiers(store, keys)
                    put(store, keys)
            except BaseException as error:
                wrong.append(error)
                raise

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            os.kill(daemon.pid, signal.SIGKILL)
            daemon.kill()
            daemon.start()
            assert eventually(lambda: bool(store.stats()["client"]["is_attached"]))
        ended.set()
        for thread in threads:
            thread.join()
        assert not wrong


def test_flush_is_not_true_for_what_died_with_the_daemon(daemon: DaemonProcess) -> None:
    with kvdepot.open(daemon.address) as store:
        space = space_of(store)
        flushed, lost, sealed = prompt(space, 1, 4), prompt(space, 2, 3), prompt(space, 3, 2)
        assert all(put(store, flushed)) and store.flush()
        assert all(put(store, lost))
        with store.reserve(sealed) as slots:
            slots.seal()
        daemon.kill()
        daemon.start()
        assert eventually(lambda: len(store.match(flushed)) == 4)
        report = store.flush()
        assert not report and report.not_durable == {Durability.DAEMON: 5}
        assert store.flush(), "told once"
        assert store.flush(keys=flushed)
        known = store.flush(keys=[*lost, *sealed]).blocks
        there = [bool(len(store.match([key]))) for key in [*lost, *sealed]]
        assert [why is Durability.DURABLE for why in known] == there


def test_flush_is_true_after_the_same_daemon_was_lost_for_a_moment(daemon: DaemonProcess) -> None:
    reconnector = Reconnector(str(daemon.socket), SystemClock(), 5.0)
    with RemoteStore(reconnector, {}) as store:
        keys = prompt(space_of(store), 1, 4)
        assert all(put(store, keys))
        reconnector.connections().end()
        assert eventually(lambda: len(store.match(keys)) == 4)
        assert store.stats()["client"]["lost"] == 1
        report = store.flush()
        assert report and report.durable == 4


def test_after_a_restart_the_old_memory_is_not_mapped(daemon: DaemonProcess) -> None:
    before = arenas()
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 4)
        assert all(put(store, keys))
        assert store.flush()
        old = arenas() - before
        assert len(old) == 2, "arena and staging"
        lease = store.lease(keys)
        view = lease.view(0)
        slots = store.reserve(prompt(space_of(store), 2, 2))
        daemon.kill()
        daemon.start()
        assert tiers(store, keys) == ["ssd"] * 4
        new = arenas() - before - old
        assert len(new) == 2
        slots.seal()
        slots.close()
        lease.release()
        assert view is not None and bytes(view) == payload_for(keys[0], BLOCK_BYTES)
        del view
        assert arenas() - before == new
        assert put(store, prompt(space_of(store), 2, 2)) == [PutResult.STORED] * 2
        assert store.stats()["leased"] == 0
        assert store.stats()["daemon"]["sessions"][0]["reserved"] == 0
    assert arenas() == before


def test_a_client_cannot_take_the_memory_from_under_the_others(daemon: DaemonProcess) -> None:
    shrink = """
import os, sys
from kvdepot.daemon.client.connections import connect
link, descriptors = connect(sys.argv[1], bytes(16), 0)
for fd in descriptors:
    for path in (fd, os.open(f"/proc/self/fd/{fd}", os.O_RDWR)):
        for nbytes in (0, 4096, 1 << 40):
            try:
                os.ftruncate(path, nbytes)
            except PermissionError:
                print("refused")
"""
    with kvdepot.open(daemon.address) as store:
        keys = prompt(space_of(store), 1, 4)
        assert all(put(store, keys))
        command = [sys.executable, "-c", shrink, str(daemon.socket)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["refused"] * 12
        assert tiers(store, keys) == ["dram"] * 4
