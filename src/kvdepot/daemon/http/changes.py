"""Changes of a store requested over HTTP: one at a time, in a thread of its own.

A drain may take hours. The answer is sent when the change is done, or after a short time while it
is still running; `last` has its state.
"""

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvdepot.errors import KVDepotError, StateError

_WAIT_S: Final = 2.0


class ChangeRunningError(KVDepotError):
    """Another change is running."""


@dataclass(slots=True)
class StoreChange:
    """One change and its result."""

    number: int
    what: str
    state: str = "running"
    """running, done or failed."""
    result: int | None = None
    """The return value of the change; for a drain the number of moved blocks."""
    error: str = ""
    hint: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class ChangeRunner:
    """Runs changes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.last = StoreChange(0, "", "done")
        """The latest change; number 0 before the first."""

    def run(self, what: str, work: Callable[[], int | None]) -> StoreChange:
        """Start a change and wait a short time for its end. ChangeRunningError
        if one is running.
        """
        with self._lock:
            if self.last.state == "running":
                raise ChangeRunningError(
                    f"another change is running: {self.last.what}", hint="GET /api/change"
                )
            change = self.last = StoreChange(self.last.number + 1, what)
        thread = threading.Thread(
            target=_settle, args=(change, work), name="kvdepot-http-change", daemon=True
        )
        thread.start()
        thread.join(_WAIT_S)
        return change


def _settle(change: StoreChange, work: Callable[[], int | None]) -> None:
    try:
        change.result = work()
        change.state = "done"
    except StateError:
        change.error, change.state = "a bug in kvdepot: see the daemon's log", "failed"
        raise
    except (KVDepotError, OSError, ValueError) as error:
        change.error, change.hint = str(error)[:2000], getattr(error, "hint", "")
        change.state = "failed"
