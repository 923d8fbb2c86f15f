"""Sessions of a depot: what can be asked and done about them. docs/sessions.md

Implemented by SessionService (this process) and RemoteSessions (a daemon).
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvdepot.core.block import TAG_BYTES, BlockKey
from kvdepot.core.depot import PrefetchHint
from kvdepot.core.keys import Keys, as_words
from kvdepot.core.order import SessionState
from kvdepot.errors import ConfigError

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
    """The keys of each namespace, in their order, by its tag."""
    parts: dict[bytes, list[BlockKey]] = {}
    for key in keys:
        parts.setdefault(key[:TAG_BYTES], []).append(key)
    return {tag: as_words(part) for tag, part in parts.items()}


Facts = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PinReceipt:
    """Answer to `pin`. True: the blocks are on drives, durable, and stay until `until_s`.

    A false one says in `reason` why they cannot be kept; nothing has changed then.
    """

    kept: bool
    session: str
    blocks: int = 0
    nbytes: int = 0
    until_s: float = 0.0
    """The time of day, in seconds since 1970."""
    numbers: tuple[int, ...] = ()
    """The number of the pin in each namespace that has the session."""
    reason: str = ""
    hint: str = ""

    def __bool__(self) -> bool:
        return self.kept

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class DepotSessions(ABC):
    """Sessions by name. `namespace` is a tag in hexadecimal; left out, all that have the name.

    A session that is not known is a ConfigError.
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
        """Remember the prompt of a session, and what becomes of it: alive, pending (a tool call is
        under way) or closed (it will not come back). Returns how many of its blocks are here.

        `keys` of one prompt, head first; left out, those that `tenant` has given that name before.
        Not a use. The drives have it some seconds later at most.
        """

    @abstractmethod
    def list(self, order: str = "recent", limit: int = 100) -> Facts:
        """Sessions: `recent` or `cold` by their last use, or `busy` by their turns."""

    @abstractmethod
    def show(self, name: str, *, namespace: str = "") -> Facts:
        """All that is known of a session, one entry for each namespace that has it."""

    @abstractmethod
    def pin(
        self,
        name: str,
        *,
        until_s: float | None = None,
        for_s: float | None = None,
        namespace: str = "",
    ) -> PinReceipt:
        """Keep the session's blocks until a time of day, or for a number of seconds (default a
        week). Returns when that is durable.
        """

    @abstractmethod
    def unpin(self, name: str, *, namespace: str = "") -> int:
        """End the session's pin. Returns how many namespaces had one."""

    @abstractmethod
    def prefetch(self, name: str, deadline_s: float = 10.0, *, namespace: str = "") -> PrefetchHint:
        """Bring the session's blocks to memory in the background. Does not block. Brings nothing if
        the session is not known.
        """

    @abstractmethod
    def evict_to_disk(self, name: str, *, namespace: str = "") -> dict[str, Any]:
        """Write the session's blocks to drives, and free the memory that they take."""

    @abstractmethod
    def export(
        self, name: str, path: str | os.PathLike[str], *, namespace: str = ""
    ) -> dict[str, Any]:
        """Write the session to a new file, which any depot can import."""

    @abstractmethod
    def import_file(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Import a session from such a file. Blocks before the first damage are imported."""
