"""The interface of a depot's sessions. docs/sessions.md

Implemented by SessionService (this process) and RemoteSessions (a daemon).
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Final

from kvdepot.core.block import TAG_BYTES, BlockKey
from kvdepot.core.depot import PrefetchHint
from kvdepot.core.keys import Keys, as_words
from kvdepot.errors import ConfigError


class SessionState(IntEnum):
    """The state of a block's session, as the engine reported it, until the block's next use."""

    NONE = 0
    ALIVE = 1
    PENDING = 2
    """A tool call is under way: the session comes back within seconds."""

    CLOSED = 3
    """The session will not come back."""


NAME_BYTES_MAX: Final = 200
STATES: Final = {
    state.name.lower(): state for state in SessionState if state is not SessionState.NONE
}
KEEP_S: Final = 7 * 86400.0
"""Default duration of a pin, in seconds."""


def state_of(name: str) -> SessionState:
    """The state with this name. Raises ConfigError if there is none."""
    state = STATES.get(name)
    if state is None:
        raise ConfigError("state", f"{name!r} is not one of {', '.join(STATES)}")
    return state


def checked_name(name: object) -> str:
    """The name of a session. Raises ConfigError if it cannot be one."""
    is_text = isinstance(name, str) and name.isprintable()
    if is_text and 0 < len(str(name).encode()) <= NAME_BYTES_MAX:
        return str(name)
    raise ConfigError("session", f"a name is text of 1 to {NAME_BYTES_MAX} bytes, not {name!r:.40}")


def by_tag(keys: Sequence[BlockKey]) -> dict[bytes, Keys]:
    """Group keys by the tag of their namespace, in their order."""
    parts: dict[bytes, list[BlockKey]] = {}
    for key in keys:
        parts.setdefault(key[:TAG_BYTES], []).append(key)
    return {tag: as_words(part) for tag, part in parts.items()}


Facts = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PinReceipt:
    """Result of `pin`. True: the blocks are durable on drives and stay there until `until_s`.

    False: `reason` is why they cannot be pinned, and nothing has changed.
    """

    kept: bool
    session: str
    blocks: int = 0
    nbytes: int = 0
    until_s: float = 0.0
    """End of the pin, in seconds since 1970."""
    numbers: tuple[int, ...] = ()
    """Number of the pin in each namespace that has the session."""
    reason: str = ""
    hint: str = ""

    def __bool__(self) -> bool:
        return self.kept

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class DepotSessions(ABC):
    """Sessions by name. `namespace` is a tag in hexadecimal; by default all that have the session.

    An unknown session is a ConfigError.
    """

    @abstractmethod
    def name(
        self,
        name: str,
        keys: Sequence[BlockKey] | None = None,
        state: str = "alive",
        *,
        tenant: str = "",
    ) -> int:
        """Store the prompt and the state of a session: alive, pending (a tool call is under way) or
        closed (it will not come back). Returns how many of its leading blocks are stored.

        `keys` are those of one prompt, head first; by default the ones that `tenant` has named
        before. Does not count as a use. Written to drives within seconds.
        """

    @abstractmethod
    def list(self, order: str = "recent", limit: int = 100) -> Facts:
        """List sessions: first those named last (`recent`), longest ago (`cold`) or most often
        (`busy`).
        """

    @abstractmethod
    def show(self, name: str, *, namespace: str = "") -> Facts:
        """Return the facts of a session, one entry for each namespace that has it."""

    @abstractmethod
    def pin(
        self,
        name: str,
        *,
        until_s: float | None = None,
        for_s: float | None = None,
        namespace: str = "",
    ) -> PinReceipt:
        """Pin the session's blocks: keep them on drives until a time of day, or for a number of
        seconds (default a week). Blocks until they and the pin are durable.
        """

    @abstractmethod
    def unpin(self, name: str, *, namespace: str = "") -> int:
        """End the session's pins. Returns the number of namespaces that had one."""

    @abstractmethod
    def prefetch(self, name: str, deadline_s: float = 10.0, *, namespace: str = "") -> PrefetchHint:
        """Read the session's blocks into memory in the background. Does not block. Reads nothing if
        the session is unknown.
        """

    @abstractmethod
    def evict_to_disk(self, name: str, *, namespace: str = "") -> dict[str, Any]:
        """Write the session's blocks to drives, then free their memory."""

    @abstractmethod
    def export(
        self, name: str, path: str | os.PathLike[str], *, namespace: str = ""
    ) -> dict[str, Any]:
        """Write the session to a new file, which any depot can import. ConfigError if a block is
        missing.
        """

    @abstractmethod
    def import_file(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Import a session from a file. Blocks before the first damaged one are imported."""
