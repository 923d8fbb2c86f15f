"""The store of a daemon without other clients, as tests of stores use it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kvdepot.core.clock import SystemClock
from kvdepot.core.depot import FlushReport
from kvdepot.daemon.client.connections import Reconnector
from kvdepot.daemon.client.remote import RemoteStore
from kvdepot.testing.daemons import DaemonProcess

_STOP_S: Final = 60.0
_CALL_S: Final = 30.0
"""Long, because on a slow test machine a late answer would look like a lost daemon."""


class DaemonStore(RemoteStore):
    """The store of a daemon without other clients; closing it stops the daemon."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        super().__init__(Reconnector(str(daemon.socket), SystemClock(), _CALL_S), {})
        self._stopped = False

    def close(self, timeout_s: float = _STOP_S) -> FlushReport:
        report = super().close(timeout_s)
        if not self._stopped:
            self._stopped = True
            complete = self.daemon.stop() == 0 and report.complete
            report = replace(report, complete=complete)
        return report


def open_daemon(folder: Path, settings: Mapping[str, Any]) -> DaemonStore:
    """Start a daemon with these settings. Returns its store, which has the usual interface."""
    return DaemonStore(DaemonProcess(folder, settings))
