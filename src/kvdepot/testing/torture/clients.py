"""Rounds of a daemon whose clients are stopped and killed while they hold leases and reservations.

Clients are forked processes that compare every byte they see with what was put, also in a view of a
block that they leased before they were stopped. One that is never stopped must be served in time.
"""

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvdepot.core.clock import SystemClock
from kvdepot.core.depot import Reservation
from kvdepot.daemon.client.connections import Reconnector
from kvdepot.daemon.client.remote import RemoteStore
from kvdepot.errors import KVDepotError
from kvdepot.testing.daemons import DaemonProcess
from kvdepot.testing.torture.judge import judge_leaks
from kvdepot.testing.torture.ledger import Ledger
from kvdepot.testing.torture.workload import (
    ALLOWANCE_S,
    FLUSH_S,
    PUT_S,
    Answer,
    StoreCalls,
    descriptors,
    threads,
)
from kvdepot.testing.torture.world import SPACES, Block, World, keys_of

CLIENTS: Final = 4
EVENTS: Final = 30
_CALL_S: Final = 30.0
_PAUSE_S: Final = (0.01, 0.05, 0.3)
_LOOK_S: Final = 0.02


class UntimedCalls(StoreCalls):
    """Calls of a client that may be stopped: it stands still in some of them."""

    def timed(self, label: str, limit_s: float, work: Callable[[], Answer]) -> Answer:
        return work()


class ClientCalls:
    """The calls of one client."""

    def __init__(self, socket: Path, ledger: Ledger, chance: random.Random) -> None:
        self.store = RemoteStore(Reconnector(str(socket), SystemClock(), _CALL_S), {})
        for space in SPACES:
            self.store.namespace(space)
        self._ledger = ledger
        self._chance = chance
        self._calls = UntimedCalls(self.store, ledger, chance)
        self._reserved: list[tuple[Reservation, list[Block]]] = []

    def step(self) -> None:
        calls = self._calls
        choices: list[tuple[Callable[[], None], int]] = [
            (self._put, 20),
            (calls.get, 20),
            (self._look_at_leased, 15),
            (calls.hold_lease, 10),
            (calls.end_lease, 5),
            (self._reserve, 8),
            (self._seal, 6),
            (self._remove, 4),
            (calls.hint, 2),
        ]
        (step,) = self._chance.choices([call for call, _ in choices], [n for _, n in choices])
        step()

    def close(self) -> None:
        self._calls.end_leases()
        for slots, _ in self._reserved:
            slots.close()
        self.store.close()

    def _put(self) -> None:
        blocks = self._calls.prompt()
        payloads = [block.payload for block in blocks]
        put = lambda: self.store.put_many(keys_of(blocks), payloads, timeout_s=PUT_S)  # noqa: E731
        self._calls.timed("put_many", PUT_S, put)

    def _look_at_leased(self) -> None:
        """Read blocks in place, a while after they were leased: a client may be stopped between."""
        blocks = self._calls.prompt()
        with self.store.lease(keys_of(blocks)) as lease:
            views = [lease.view(at) for at in range(len(lease))]
            time.sleep(self._chance.choice((0.0, 0.005)))
            for block, view in zip(blocks, views, strict=False):
                if view is not None and bytes(view) != block.payload:
                    self._ledger.fault("wrong", f"block {block.number} is wrong in a lease")

    def _reserve(self) -> None:
        blocks = self._calls.prompt()
        reserve = lambda: self.store.reserve(keys_of(blocks), timeout_s=PUT_S)  # noqa: E731
        self._reserved.append((self._calls.timed("reserve", PUT_S, reserve), blocks))
        if len(self._reserved) > 2:
            self._seal()

    def _seal(self) -> None:
        if not self._reserved:
            return
        slots, blocks = self._reserved.pop(self._chance.randrange(len(self._reserved)))
        filled = []
        for at, block in enumerate(blocks):
            view = slots.view(at)
            if view is not None and self._chance.random() < 0.8:
                view[:] = block.payload
                filled.append(at)
        slots.seal(filled)
        slots.close()

    def _remove(self) -> None:
        blocks = self._calls.sample(3)
        self._calls.timed("remove", _CALL_S, lambda: self.store.remove(keys_of(blocks)))


class StoppableClient:
    """A client in a process of its own."""

    def __init__(self, socket: Path, ledger: Ledger, seed: int) -> None:
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            ended = threading.Event()
            signal.signal(signal.SIGTERM, lambda *_: ended.set())
            _work(socket, ledger, random.Random(seed), ended)
            code = 0
        finally:
            os._exit(code)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def end(self) -> int:
        """Wait for the end of its last call. Returns its exit status."""
        self.go_on()
        os.kill(self.pid, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _work(socket: Path, ledger: Ledger, chance: random.Random, ended: threading.Event) -> None:
    """Make calls until the end. A daemon may hang up on a client that was stopped too long: then
    the client attaches anew.
    """
    while not ended.is_set():
        try:
            client = ClientCalls(socket, ledger, chance)
            while not ended.is_set():
                client.step()
            client.close()
        except KVDepotError as error:
            ledger.write("refused", text=str(error))
        except Exception as error:
            ledger.fault("error", f"a client: {type(error).__name__}: {error}")
            raise


def play_clients(world: World, ledger: Ledger, chance: random.Random) -> None:
    """Stop, resume and kill clients at random. At the end the daemon must hold nothing of them."""
    before = (descriptors(), threads())
    with (
        # The path of a socket has at most 107 bytes.
        tempfile.TemporaryDirectory(prefix="kvdepot-") as home,
        DaemonProcess(Path(home), world.tree()) as daemon,
    ):
        watcher = RemoteStore(Reconnector(str(daemon.socket), SystemClock(), _CALL_S), {})
        calls = StoreCalls(watcher, ledger, chance)
        for space in SPACES:
            watcher.namespace(space)
        calls.timed("stats", PUT_S, watcher.stats)
        opened = daemon_descriptors(daemon)
        clients = [
            StoppableClient(daemon.socket, ledger, chance.getrandbits(64)) for _ in range(CLIENTS)
        ]
        stopped: set[StoppableClient] = set()
        try:
            for _ in range(EVENTS):
                time.sleep(chance.choice(_PAUSE_S))
                client = chance.choice(clients)
                if chance.random() < 0.15:
                    clients.remove(client)
                    stopped.discard(client)
                    client.kill()
                    seed = chance.getrandbits(64)
                    clients.append(StoppableClient(daemon.socket, ledger, seed))
                    ledger.write("outage", text="a client is killed")
                elif client in stopped:
                    stopped.remove(client)
                    client.go_on()
                else:
                    stopped.add(client)
                    client.stop()
                    ledger.write("outage", text="a client is stopped")
                calls.get()
                calls.timed("flush", FLUSH_S, lambda: watcher.flush(FLUSH_S))
        finally:
            for client in clients:
                if code := client.end():
                    ledger.fault("error", f"a client ended with {code}")
        _judge_daemon(watcher, daemon, opened, ledger)
        watcher.close()
        if status := daemon.stop():
            ledger.fault("error", f"the daemon ended with {status}")
    judge_leaks(ledger, *before)


def daemon_descriptors(daemon: DaemonProcess) -> int:
    """Those of its sockets: segments of the store come and go."""
    links = [f"/proc/{daemon.pid}/fd/{name}" for name in os.listdir(f"/proc/{daemon.pid}/fd")]
    return sum(_points_to(link).startswith("socket:") for link in links)


def _points_to(link: str) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""


def _judge_daemon(watcher: RemoteStore, daemon: DaemonProcess, opened: int, ledger: Ledger) -> None:
    deadline = time.monotonic() + ALLOWANCE_S
    while True:
        stats = watcher.stats()
        sessions = stats["daemon"]["sessions"]
        held = {
            "leased blocks": stats["leased"],
            "reserved slots": sum(one["reserved"] for one in sessions),
            "clients": len(sessions) - 1,
            "sockets": max(0, daemon_descriptors(daemon) - opened),
        }
        if not any(held.values()) or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_S)
    for what, count in held.items():
        if count:
            ledger.fault("leaked", f"{count} {what} are left in the daemon", count=count)
    for finding in watcher.admin.check().findings:
        ledger.fault("unclean", str(finding))
