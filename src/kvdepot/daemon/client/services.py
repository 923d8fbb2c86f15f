"""Sessions, volumes, audits and admin of a daemon's store. Each call is one request in JSON.

Calls raise DaemonError if no daemon answers, unless their docstring says otherwise.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvdepot.core.admin import DepotAdmin, DepotVolumes
from kvdepot.core.audit import AuditFinding, DepotAudits, producer_id
from kvdepot.core.block import BlockKey
from kvdepot.core.depot import CheckReport
from kvdepot.core.first_token import FirstToken
from kvdepot.core.sessions import DepotSessions, Facts, PinReceipt, by_tag, checked_name, state_of
from kvdepot.daemon.client.connections import Connections, DaemonAwayError, Link, Reconnector
from kvdepot.daemon.client.hints import RemoteHint, hint_session, tell_session
from kvdepot.daemon.wire import frames
from kvdepot.daemon.wire.frames import FrameKind
from kvdepot.depot import Namespaces, checked
from kvdepot.errors import DaemonError

_ASK_S: Final = 120.0
"""Timeout of calls. A pin returns when it is durable; a purge waits for writes under way."""
_LONG_S: Final = 30 * 86400.0
"""Timeout of a drain, which may take days. A daemon that ends closes the connection."""
_REPORT_S: Final = 5.0


class RemoteService:
    """One service of a daemon's store."""

    service = ""

    def __init__(self, daemon: Reconnector, check_open: Callable[[], None]) -> None:
        self._daemon = daemon
        self._check_open = check_open

    def _call(self, call: str, limit_s: float = _ASK_S, /, **given: Any) -> Any:
        self._check_open()
        return self._daemon.call_service(self.service, call, given, limit_s)


class RemoteSessions(RemoteService, DepotSessions):
    """The daemon keeps the names for all clients of the same namespaces."""

    service = "sessions"

    def __init__(
        self, daemon: Reconnector, check_open: Callable[[], None], namespaces: Namespaces
    ) -> None:
        super().__init__(daemon, check_open)
        self._namespaces = namespaces

    def name(
        self,
        name: str,
        keys: Sequence[BlockKey] | None = None,
        state: str = "alive",
        *,
        tenant: str = "",
    ) -> int:
        """Returns 0 without a daemon."""
        self._check_open()
        session_state, name = state_of(state), checked_name(name)
        self._namespaces.check(checked(keys or ()))
        parts = by_tag(keys) if keys else dict.fromkeys(self._namespaces.tags_of(tenant))

        def ask(_: Connections, link: Link) -> int:
            call_s = self._daemon.call_s
            return sum(
                tell_session(link, tag, words, name, session_state, call_s)
                for tag, words in parts.items()
            )

        return self._daemon.ask(ask, 0)

    def list(self, order: str = "recent", limit: int = 100) -> Facts:
        found: Facts = self._call("list", order=order, limit=limit)
        return found

    def show(self, name: str, *, namespace: str = "") -> Facts:
        found: Facts = self._call("show", name=name, namespace=namespace)
        return found

    def pin(
        self,
        name: str,
        *,
        until_s: float | None = None,
        for_s: float | None = None,
        namespace: str = "",
    ) -> PinReceipt:
        terms = {"until_s": until_s, "for_s": for_s}
        given = {term: value for term, value in terms.items() if value is not None}
        answer = self._call("pin", name=name, namespace=namespace, **given)
        return PinReceipt(**{**answer, "numbers": tuple(answer["numbers"])})

    def unpin(self, name: str, *, namespace: str = "") -> int:
        return int(self._call("unpin", name=name, namespace=namespace))

    def prefetch(self, name: str, deadline_s: float = 10.0, *, namespace: str = "") -> RemoteHint:
        """Prefetches nothing without a daemon. The hint ends with this client."""
        self._check_open()
        limit_s = min(deadline_s, frames.TIMEOUT_S_MAX)

        def ask(connections: Connections, link: Link) -> RemoteHint:
            call_s = self._daemon.call_s
            hinted = hint_session(link, namespace, checked_name(name), limit_s, call_s)
            return RemoteHint(connections, [hinted])

        return self._daemon.ask(ask, RemoteHint(None, []))

    def evict_to_disk(self, name: str, *, namespace: str = "") -> dict[str, Any]:
        found: dict[str, Any] = self._call("evict_to_disk", name=name, namespace=namespace)
        return found

    def export(
        self, name: str, path: str | os.PathLike[str], *, namespace: str = ""
    ) -> dict[str, Any]:
        """The daemon writes the file. Only its user and root may call this."""
        given = {"name": name, "path": os.path.abspath(path), "namespace": namespace}
        found: dict[str, Any] = self._call("export", _LONG_S, **given)
        return found

    def import_file(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """The daemon reads the file. Only its user and root may call this."""
        found: dict[str, Any] = self._call("import_file", _LONG_S, path=os.path.abspath(path))
        return found


class RemoteVolumes(RemoteService, DepotVolumes):
    """Only the daemon's user and root may change volumes. Paths are relative to this process."""

    service = "volumes"

    def set_write_mode(self, tier: str, mode: str) -> None:
        self._call("set_write_mode", tier=tier, mode=mode)

    def add(self, tier: str, path: str | os.PathLike[str]) -> None:
        self._call("add", tier=tier, path=os.path.abspath(path))

    def drain(self, tier: str, path: str | os.PathLike[str]) -> int:
        """Continues in the daemon if this client ends."""
        return int(self._call("drain", _LONG_S, tier=tier, path=os.path.abspath(path)))

    def resize(self, tier: str, capacity: int | str) -> None:
        self._call("resize", _LONG_S, tier=tier, capacity=str(capacity))


class RemoteAudits(RemoteService, DepotAudits):
    """`producer` does not raise, so that an engine can start without a daemon."""

    service = "audits"

    def producer(self, text: str) -> int:
        try:
            return int(self._call("producer", text=text))
        except DaemonError:
            return producer_id(text)

    def report(self, finding: AuditFinding) -> None:
        self._call("report", **finding.as_dict())

    def list(self) -> dict[str, Any]:
        found: dict[str, Any] = self._call("list")
        return found

    def lift(self, namespace: str) -> bool:
        return bool(self._call("lift", namespace=namespace))

    def purge(self, namespace: str) -> int:
        return int(self._call("purge", namespace=namespace))


class RemoteAdmin(RemoteService, DepotAdmin):
    """See core.admin.DepotAdmin."""

    service = "admin"

    def check(self, *, deep: bool = True) -> CheckReport:
        """Without a daemon the report has one finding, which says so."""
        report = CheckReport()
        try:
            answer = self._call("check", _LONG_S, deep=deep)
        except DaemonError as error:
            report.add(self._daemon.path, str(error.reason))
            return report
        report.blocks, report.nbytes = answer["blocks"], answer["bytes"]
        for finding in answer["findings"]:
            report.add(finding["where"], finding["what"])
        return report

    def record(self, path: str | os.PathLike[str]) -> None:
        """The daemon writes the file. Only its user and root may call this."""
        self._call("record", path=os.path.abspath(path))

    def stop_recording(self) -> int:
        return int(self._call("stop_recording"))

    def ledger(self) -> dict[str, Any]:
        found: dict[str, Any] = self._call("ledger")
        return found

    def report_prefill_speed(self, namespace: str, token_s: float, pair_s: float = 0.0) -> bool:
        given = {"namespace": namespace, "token_s": token_s, "pair_s": pair_s}
        return bool(self._call("report_prefill_speed", _REPORT_S, **given))

    def report_first_token(self, first: FirstToken) -> None:
        """Does not block. The report is lost without a daemon."""
        self._check_open()
        first.check()
        try:
            connections = self._daemon.connections()
        except DaemonAwayError:
            self._daemon.count_away()
            return
        connections.tell(FrameKind.FIRST_TOKEN, frames.FirstTokenReport.of(first).body())
