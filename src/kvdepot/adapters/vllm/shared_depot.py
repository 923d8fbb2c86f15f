"""Opening the depot: in this process, shared by its users, or through a daemon.

If vLLM is one process, its scheduler and its worker share one depot in it. Otherwise a daemon owns
the depot; one that answers is used, else one is started. It stays when vLLM ends, so the next start
finds the memory tier warm.
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
from kvdepot.core.private import (
    make_private_folder,
    open_private_file,
    runtime_folder,
    write_private_file,
)
from kvdepot.daemon.client.connections import DaemonAwayError, is_served
from kvdepot.depot import Depot
from kvdepot.errors import ConfigError, DaemonError

START_S: Final = 120.0
"""The longest start of a daemon: it touches its memory tier and reads its disk tiers."""
_LOOK_S: Final = 0.05
_SHOWN_BYTES: Final = 2000
_PINNING: Final = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""Variables that are removed for a daemon. On a CPU, vLLM sets one of them and preloads OpenMP,
which pins each process: the daemon would wait for a core on which the engine computes."""

_lock = threading.Lock()
_open: dict[str, Depot] = {}
_users: Counter[str] = Counter()
"""The number of users of each depot in `_open`; both are guarded by `_lock`."""
_daemons: "list[subprocess.Popen[bytes]]" = []
"""Daemons started here; held so that Python does not warn that they outlive this process."""


class SharedDepot:
    """One user's part in a depot. The last user to close it closes the store."""

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
    """The depot that `config` names. Raises what kvdepot.open raises, or a DaemonError."""
    if config.socket is None and one_process:
        return hold(embedded_name(config), lambda: kvdepot.open(config.depot))
    path = config.socket or default_socket(config)
    return hold(f"unix:{path}", lambda: _attach_or_start(path, config))


def embedded_name(config: ConnectorConfig) -> str:
    """The name of a depot of this process: equal settings, one depot."""
    return f"embedded {to_toml(config.depot)}"


def default_socket(config: ConnectorConfig) -> Path:
    """The default socket of a depot's daemon: one for each set of drives. It is in this user's
    runtime folder as the system sets it. The environment is not read, since all processes must find
    the same socket."""
    tiers = config.depot.file_tiers
    if not tiers:
        raise ConfigError(
            f"{SETTING}.socket",
            "missing: several processes share a depot through a daemon, and a depot without drives "
            "has no default socket",
            hint='add "socket": "/run/kvdepot.sock", or ssd or hdd',
        )
    paths = "\n".join(str(path.resolve()) for tier in tiers for path in tier.path)
    digest = hashlib.blake2b(paths.encode(), digest_size=8).hexdigest()
    return runtime_folder({}) / f"{digest}.sock"


def hold(name: str, opener: Callable[[], Depot]) -> SharedDepot:
    """The depot of that name in this process; opened if it is not open."""
    with _lock:
        if name not in _open:
            _open[name] = opener()
        _users[name] += 1
        return SharedDepot(name, _open[name])


def _attach_or_start(path: Path, config: ConnectorConfig) -> Depot:
    """Attach to the daemon on a socket; start one if there is none and that is allowed. A daemon is
    started only in a folder of this user alone, in which no other user can put a daemon or settings
    of their own."""
    if config.daemon == "never":
        return _attach(path, config)
    with contextlib.suppress(DaemonError):
        return _attach(path, config, wait_s=0.0)
    make_private_folder(path.parent)
    lock = open_private_file(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process at a time starts a daemon
        with contextlib.suppress(DaemonError):
            return _attach(path, config)
        start_daemon(path, config)
        return _attach(path, config)
    finally:
        os.close(lock)


def _attach(path: Path, config: ConnectorConfig, wait_s: float = START_S) -> Depot:
    """Attach to the daemon on a socket. `wait_s`: how long to wait for one that is there and does
    not answer: it has just begun, or the machine is busy with engines that start."""
    until_s = time.monotonic() + wait_s
    while True:
        try:
            address = f"unix:{path}"
            return kvdepot.open(address, tenants=config.tenants, daemon_user=config.daemon_user)
        except DaemonError as error:
            is_away = isinstance(error.__cause__, DaemonAwayError)
            if not is_away or not is_served(path) or time.monotonic() >= until_s:
                raise
        time.sleep(_LOOK_S)


def start_daemon(path: Path, config: ConnectorConfig, timeout_s: float = START_S) -> int:
    """Start `kvdepot serve` on a socket. Returns its process id once it is ready; DaemonError if it
    ends, or is not ready after `timeout_s`."""
    settings, log = path.with_suffix(".toml"), path.with_suffix(".log")
    write_private_file(settings, to_toml(config.depot).encode())
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
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector, process.stdout as stdout:
        selector.register(stdout, selectors.EVENT_READ)
        is_ready = bool(selector.select(timeout_s) and stdout.readline())
    if not is_ready:
        process.kill()
        process.wait()
        reason = log.read_text(errors="replace").strip()[-_SHOWN_BYTES:] or "it printed no error"
        raise DaemonError(str(path), f"the daemon did not start: {reason}", hint=f"see {log}")
    _daemons.append(process)
    return process.pid


def use_all_cores(task: int = 0) -> None:
    """Let a thread or process (0: the caller's thread) run on every core. An engine on the CPU pins
    its threads to cores that it keeps busy. Threads and processes that a pinned thread starts
    inherit that, and would compete with it while other cores idle."""
    # On a machine that does not allow this, the task stays on its cores.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(task, range(os.cpu_count() or 1))
