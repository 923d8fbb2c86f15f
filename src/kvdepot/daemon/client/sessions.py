"""Sessions of a daemon's store: each call is a question in JSON, and its answer."""

import os
from collections.abc import Callable
from typing import Any, Final

from kvdepot.core.sessions import DepotSessions, RetentionReceipt
from kvdepot.daemon.client.connections import Reconnector
from kvdepot.daemon.wire.frames import FrameKind

_ASK_S: Final = 120.0
"""A contract is granted when it is durable, which may take a while."""
_FILE_S: Final = 86400.0
_TELL_S: Final = 5.0


class RemoteSessions(DepotSessions):
    """Raises DaemonError when no daemon answers: what was not done must be known."""

    def __init__(self, daemon: Reconnector, check_open: Callable[[], None]) -> None:
        self._daemon = daemon
        self._check_open = check_open

    def known(self, order: str = "recent", limit: int = 100) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("known", order=order, limit=limit)
        return found

    def show(self, name: str, *, namespace: str = "") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("show", name=name, namespace=namespace)
        return found

    def shared_prefixes(self, order: str = "busy", limit: int = 100) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("shared_prefixes", order=order, limit=limit)
        return found

    def pin(
        self,
        name: str,
        *,
        until_s: float | None = None,
        for_s: float | None = None,
        through_turn: bool = False,
        namespace: str = "",
    ) -> RetentionReceipt:
        terms = {"until_s": until_s, "for_s": for_s}
        given = {what: value for what, value in terms.items() if value is not None}
        said = self._ask("pin", name=name, through_turn=through_turn, namespace=namespace, **given)
        return RetentionReceipt(**{**said, "numbers": tuple(said["numbers"])})

    def unpin(self, name: str, *, namespace: str = "") -> int:
        return int(self._ask("unpin", name=name, namespace=namespace))

    def park(self, name: str, *, namespace: str = "") -> dict[str, Any]:
        return self._facts("park", name=name, namespace=namespace)

    def warm(self, name: str, deadline_s: float = 10.0, *, namespace: str = "") -> dict[str, Any]:
        return self._facts("warm", name=name, deadline_s=deadline_s, namespace=namespace)

    def expire(self, name: str, *, namespace: str = "") -> dict[str, Any]:
        return self._facts("expire", name=name, namespace=namespace)

    def ledger(self) -> dict[str, Any]:
        return self._facts("ledger")

    def tell_prefill(self, namespace: str, token_s: float, pair_s: float = 0.0) -> bool:
        given = {"namespace": namespace, "token_s": token_s, "pair_s": pair_s}
        return bool(self._ask("tell_prefill", **given))

    def export(
        self, name: str, path: str | os.PathLike[str], *, namespace: str = ""
    ) -> dict[str, Any]:
        """The daemon writes the file. For its user and root."""
        return self._facts("export", name=name, path=os.path.abspath(path), namespace=namespace)

    def import_file(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """The daemon reads the file. For its user and root."""
        return self._facts("import_file", path=os.path.abspath(path))

    def _facts(self, call: str, **given: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._ask(call, **given)
        return found

    def _ask(self, call: str, **given: Any) -> Any:
        self._check_open()
        limit_s = _FILE_S if "path" in given else _TELL_S if call == "tell_prefill" else _ASK_S
        return self._daemon.ask(FrameKind.SESSIONS, call, given, limit_s)
