"""kill -9 under load, of the daemon and of its clients: nothing acknowledged is lost, nothing wrong
is served, nothing is left over.
"""

import random
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemon_clients import ClientProcess, StartDaemon
from tests.support.store_contract import prompt, space_of, tiers
from tests.support.waiting import eventually

import kvdepot
from kvdepot.testing.daemons import DaemonProcess

ROOMY = 256 << 20


def check_clean(store: kvdepot.Depot) -> None:
    """Nobody but us is there, nothing is held, and every byte is right."""
    assert eventually(lambda: len(store.stats()["daemon"]["sessions"]) == 1)
    assert store.flush().complete  # blocks of others may have been evicted unwritten
    assert eventually(lambda: not store.stats()["staging_bytes"])
    stats = store.stats()
    (session,) = stats["daemon"]["sessions"]
    assert (stats["leased"], session["leased"], session["reserved"]) == (0, 0, 0)
    counters = stats["counters"]
    assert counters["quarantined"] == counters["read_failed"] == counters["write_failed"] == 0
    assert stats["daemon"]["counters"]["malformed"] == 0
    report = store.admin.check()
    assert report.findings == []


def attached(store: kvdepot.Depot) -> set[int]:
    """Processes that are clients now."""
    return {session["pid"] for session in store.stats()["daemon"]["sessions"]}


def random_clients(
    daemon: DaemonProcess, seed: int, count: int, seconds: float
) -> list[ClientProcess]:
    clients = [ClientProcess("random", daemon.address, seed + n, seconds) for n in range(count)]
    return [client.ready() for client in clients]


def totals(clients: Sequence[ClientProcess]) -> tuple[Counter[str], Counter[str]]:
    """What was done, and how the connection was, over all clients."""
    done: Counter[str] = Counter()
    away: Counter[str] = Counter()
    for client in clients:
        (said,) = client.end()
        done.update(said["done"])
        away.update({name: said["client"][name] for name in ("attached", "lost", "away")})
    return done, away


@pytest.mark.stress
@pytest.mark.slow
def test_four_processes_for_three_seconds(daemon: DaemonProcess, seed: int) -> None:
    with kvdepot.open(daemon.address) as store:
        done, away = totals(random_clients(daemon, seed, 4, 3.0))
        assert all(done[verb] for verb in ("put", "get", "lease", "deliver", "fill", "remove"))
        assert away == {"attached": 4, "lost": 0, "away": 0}
        check_clean(store)
    assert daemon.stop() == 0


@pytest.mark.stress
@pytest.mark.slow(longest=True)
def test_four_processes_for_a_minute(daemon: DaemonProcess, seed: int) -> None:
    with kvdepot.open(daemon.address) as store:
        totals(random_clients(daemon, seed, 4, 60.0))
        check_clean(store)


@pytest.mark.crash
@pytest.mark.slow
def test_clients_killed_under_load(daemon: DaemonProcess, seed: int) -> None:
    rng, pause = random.Random(seed), threading.Event()
    with kvdepot.open(daemon.address) as store:
        (steady,) = random_clients(daemon, seed, 1, 6.0)
        for turn in range(4):
            clients = random_clients(daemon, seed + 10 * turn, 3, 30.0)
            pause.wait(rng.uniform(0.6, 1.2))
            for client in clients:
                client.kill()
        assert sum(totals([steady])[0].values()) > 0
        check_clean(store)


@pytest.mark.crash
@pytest.mark.slow
def test_the_daemon_killed_under_load(start_daemon: StartDaemon, tmp_path: Path, seed: int) -> None:
    rng, pause = random.Random(seed), threading.Event()
    ssd = {"path": str(tmp_path / "roomy"), "capacity": ROOMY, "segment": 4 << 20}
    daemon = start_daemon(ssd=ssd)
    clients = [ClientProcess("diary", daemon.address, number).ready() for number in range(3)]
    others = random_clients(daemon, seed, 1, 10.0)
    for _ in range(3):
        pause.wait(rng.uniform(0.8, 1.6))
        daemon.kill()
        daemon.start()
    with kvdepot.open(daemon.address) as store:
        pids = {client.process.pid for client in clients}
        assert eventually(lambda: pids <= attached(store)), "they came back by themselves"
        pause.wait(0.5)
        said: list[Any] = [line for client in clients for line in client.kill()]
        assert sum(totals(others)[0].values()) > 0, "and it never saw a wrong byte"
        flushed = [line["number"] for line in said if "number" in line]
        assert len(flushed) > 10
        assert not store.stats()["counters"]["evicted_ssd"], "all of it fits"
        space = space_of(store)
        for number in flushed:
            assert None not in tiers(store, prompt(space, number, 4)), "it was acknowledged"
        check_clean(store)
    assert daemon.stop() == 0
