"""How much one client may have of the daemon, and what became of those who asked for more."""

import threading
from dataclasses import dataclass
from typing import Final

HELLO_TIMEOUT_S: Final = 5.0
"""A connection that does not say who it is for this long is closed."""
TAKE_TIMEOUT_S: Final = 10.0
"""A client that does not take what it was lent for this long is given up."""
LINGER_S: Final = 30.0
"""After a client was hung up on, it may have this long to let go of what it holds."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Beyond these, connections are refused, leases are empty, reservations are throttled, and
    hints bring nothing.
    """

    clients: int = 64
    connections: int = 16
    """Of one client."""
    leases: int = 4096
    """Leases of one client at a time."""
    leased: int = 1 << 20
    """Blocks in them."""
    slots: int = 1 << 16
    """Slots reserved by one client at a time."""
    hints: int = 64
    """Hints of one client under way at a time."""


class ServerCounters:
    """What happened so far, counted. Thread-safe."""

    NAMES: Final = ("sessions", "connections", "requests", "refused", "malformed", "limited")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(self.NAMES, 0)

    def count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def as_dict(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
