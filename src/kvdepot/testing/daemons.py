"""Daemons in separate processes that tests can stop, kill and start again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Protocol, TextIO

from kvdepot.config.loader import to_toml
from kvdepot.config.settings import load

_STOP_S: Final = 60.0
_LOOK_S: Final = 0.001


class RunningCommand(Protocol):
    """The members of Popen that DaemonProcess uses."""

    @property
    def pid(self) -> int: ...
    @property
    def stdout(self) -> IO[str] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


def run_command(arguments: Sequence[str], log: TextIO) -> RunningCommand:
    """Start `kvdepot` with these arguments in a new process."""
    command = [sys.executable, "-m", "kvdepot", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)


class DaemonProcess:
    """`kvdepot serve` with a socket in `folder`. As a context manager, kills it at the end."""

    run = staticmethod(run_command)
    """Starts the command; tests replace it with a faster function."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], *options: str) -> None:
        self.socket = folder / "depot.sock"
        self._config = folder / "daemon.toml"
        self._config.write_text(to_toml(load(overrides=settings)))
        self._log = folder / "daemon.log"
        self._options = options
        self._process: RunningCommand | None = None
        self.start()

    @property
    def address(self) -> str:
        """The address for `kvdepot.open`."""
        return f"unix:{self.socket}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the daemon and wait until it is ready."""
        arguments = ["serve", "--json", "--config", str(self._config)]
        arguments += ["--socket", str(self.socket), *self._options]
        with self._log.open("w") as log:
            self._process = self.run(arguments, log)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.ready: dict[str, Any] = json.loads(line) if line else {}
        """The line that the daemon printed when it was ready."""
        if "ready" not in self.ready:
            self._process.wait()
            raise AssertionError(f"the daemon did not start: {line}{self._log.read_text()}")

    def stop(self) -> int:
        """Stop the daemon. Returns its exit status; fails if it logged an error."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(_STOP_S)
        self._check_log()
        return status

    def kill(self) -> None:
        """Kill the daemon with SIGKILL. Fails if it had logged an error."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._check_log()

    def pause(self) -> None:
        """Stop all threads of the daemon until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)
        while not all(map(_is_stopped, Path(f"/proc/{self.pid}/task").iterdir())):
            time.sleep(_LOOK_S)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> "DaemonProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.resume()
            self.kill()

    def _check_log(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        self._process.stdout.close()
        assert "Traceback" not in (errors := self._log.read_text()), errors


def _is_stopped(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
