"""Audits of a daemon's store: each call is a question in JSON, and its answer."""

from collections.abc import Callable
from typing import Any, Final

from kvdepot.core.audit import AuditFinding, DepotAudits, producer_id
from kvdepot.daemon.client.connections import Reconnector
from kvdepot.daemon.wire.frames import FrameKind
from kvdepot.errors import DaemonError

_ASK_S: Final = 120.0
"""A purge waits for what is being written."""


class RemoteAudits(DepotAudits):
    """Raises DaemonError when no daemon answers: what was not done must be known. `producer` does
    not: an engine starts without.
    """

    def __init__(self, daemon: Reconnector, check_open: Callable[[], None]) -> None:
        self._daemon = daemon
        self._check_open = check_open

    def producer(self, text: str) -> int:
        try:
            return int(self._ask("producer", text=text))
        except DaemonError:
            return producer_id(text)

    def report(self, finding: AuditFinding) -> None:
        self._ask("report", **finding.as_dict())

    def known(self) -> dict[str, Any]:
        found: dict[str, Any] = self._ask("known")
        return found

    def lift(self, namespace: str) -> bool:
        return bool(self._ask("lift", namespace=namespace))

    def purge(self, namespace: str) -> int:
        return int(self._ask("purge", namespace=namespace))

    def _ask(self, call: str, **given: Any) -> Any:
        self._check_open()
        return self._daemon.ask(FrameKind.AUDITS, call, given, _ASK_S)
