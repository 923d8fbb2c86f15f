"""Opening the depot: in this process, shared by its users, or through a daemon.

vLLM in one process has its scheduler and its worker open the same depot: they share it. Otherwise
a daemon owns it; one that answers is used, else one is started. It stays when vLLM ends, so that
the next start finds the memory tier warm.
"""

import contextlib
import fcntl
import hashlib
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import kvdepot
from kvdepot.adapters.vllm.config import SETTING, ConnectorConfig
from kvdepot.config.loader import to_toml
from kvdepot.core.depot import Depot
from kvdepot.core.private import (
    make_private_folder,
    open_private_file,
    runtime_folder,
    write_private_file,
)
from kvdepot.daemon.client.connections import DaemonAwayError, is_served
from kvdepot.errors import ConfigError, DaemonError

START_S: Final = 120.0
"""A large memory tier takes this long to be touched, a large disk tier to be read."""
_LOOK_S: Final = 0.05
_SHOWN_BYTES: Final = 2000
_PINNING: Final = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""vLLM sets one of these on a CPU and preloads OpenMP, which pins every process that it is loaded
into: a daemon with them would wait for the core on which the engine computes."""

_lock = threading.Lock()
_open: dict[str, Depot] = {}
_users: Counter[str] = Counter()
"""How many hold each depot of `_open`; both guarded by `_lock`."""
_daemons: "list[subprocess.Popen[bytes]]" = []
"""Started here; held so that Python does not warn that they outlive this process."""


class SharedDepot:
    """One user's hold on a depot. Closing gives it up; the last one closes the store."""

    def __init__(self, name: str, store: Depot) -> None:
        self._name = name
        self.store = store
        self._closed = False

    def close(self) -> None:
        """May be called twice."""
        with _lock:
            if self._closed:
                return
            self._closed = True
            _users[self._name] -= 1
            if _users[self._name]:
                return
            del _open[self._name]
        self.store.close()


def open_depot(config: ConnectorConfig, *, one_process: bool) -> SharedDepot:
    """The depot that `config` names. Errors are those of kvdepot.open, or a DaemonError."""
    if config.socket is None and one_process:
        return hold(embedded_name(config), lambda: kvdepot.open(config.depot))
    path = config.socket or default_socket(config)
    return hold(f"unix:{path}", lambda: _attach(path, config))


def embedded_name(config: ConnectorConfig) -> str:
    """The name of a depot of this process: equal settings, one depot."""
    return f"embedded {to_toml(config.depot)}"


def default_socket(config: ConnectorConfig) -> Path:
    """Where the daemon of a depot is found by default: one place for each set of disks.

    In this user's runtime folder as the system makes it; the environment is not asked, since all
    processes must find the same place.
    """
    disks = config.depot.file_tiers
    if not disks:
        raise ConfigError(
            f"{SETTING}.socket",
            "missing: several processes need a daemon, and a depot without disks has no place",
            hint='"socket": "/run/kvdepot.sock", or set ssd or hdd',
        )
    paths = "\n".join(str(path.resolve()) for disk in disks for path in disk.path)
    digest = hashlib.blake2b(paths.encode(), digest_size=8).hexdigest()
    return runtime_folder({}) / f"{digest}.sock"


def hold(name: str, opener: Callable[[], Depot]) -> SharedDepot:
    """The depot of that name in this process; opened if it is not open."""
    with _lock:
        if name not in _open:
            _open[name] = opener()
        _users[name] += 1
        return SharedDepot(name, _open[name])


def _attach(path: Path, config: ConnectorConfig) -> Depot:
    """Attach to the daemon on a socket; start one if none is there and that is allowed.

    One is started only in a folder of this user alone, where no other user can put a daemon or its
    settings in place of ours.
    """

    if config.daemon == "never":
        return _attach_to_busy(path, config)
    with contextlib.suppress(DaemonError):
        return _attach_once(path, config)
    make_private_folder(path.parent)
    lock = open_private_file(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
    try:
        # Of the processes that want to start a daemon, one at a time.
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return _attach_to_busy(path, config)
        except DaemonError:
            start_daemon(path, config)
        return _attach_to_busy(path, config)
    finally:
        os.close(lock)


def _attach_once(path: Path, config: ConnectorConfig) -> Depot:
    return kvdepot.open(f"unix:{path}", tenants=config.tenants, daemon_user=config.daemon_user)


def _attach_to_busy(path: Path, config: ConnectorConfig) -> Depot:
    """Attach to the daemon on a socket. One that is there but does not answer is given time: it
    has just begun, or the machine is busy with engines that start.
    """
    until_s = time.monotonic() + START_S
    while True:
        try:
            return _attach_once(path, config)
        except DaemonError as error:
            away = isinstance(error.__cause__, DaemonAwayError)
            if not away or not is_served(path) or time.monotonic() >= until_s:
                raise
        time.sleep(_LOOK_S)


def start_daemon(path: Path, config: ConnectorConfig, timeout_s: float = START_S) -> int:
    """Start `kvdepot serve` on a socket; its process id when it is ready, else a DaemonError."""
    settings = path.with_suffix(".toml")
    write_private_file(settings, to_toml(config.depot).encode())
    log = path.with_suffix(".log")
    command = [sys.executable, "-m", "kvdepot", "serve"]
    with os.fdopen(open_private_file(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as errors:
        process = subprocess.Popen(
            [*command, "--config", str(settings), "--socket", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name not in _PINNING},
        )
    use_all_cores(process.pid)
    said = _first_line(process, timeout_s)
    if not said:
        process.kill()
        process.wait()
        reason = log.read_text(errors="replace").strip()[-_SHOWN_BYTES:] or "it said nothing"
        raise DaemonError(str(path), f"the daemon did not start: {reason}", hint=f"see {log}")
    _daemons.append(process)
    return process.pid


def use_all_cores(task: int = 0) -> None:
    """Let a thread or process (0: the caller's thread) run on every core there is.

    An engine on the CPU pins its threads to cores that it keeps busy. Threads and processes started
    from a pinned thread inherit that, and would compete with it while other cores idle.
    """
    # A machine that does not allow this leaves the task where it is.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(task, range(os.cpu_count() or 1))


def _first_line(process: "subprocess.Popen[bytes]", timeout_s: float) -> bytes:
    """What the daemon says when it is ready; empty if it ended or time ran out."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector, process.stdout as stdout:
        selector.register(stdout, selectors.EVENT_READ)
        return stdout.readline() if selector.select(timeout_s) else b""
