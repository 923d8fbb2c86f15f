"""Sessions of a depot: what can be asked and done about them. docs/sessions.md

Implemented by SessionService (this process) and RemoteSessions (a daemon).
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvdepot.core.block import TAG_BYTES, BlockKey
from kvdepot.core.keys import Keys, as_words
from kvdepot.core.order import SessionState
from kvdepot.errors import ConfigError

NAME_BYTES_MAX: Final = 200
STATES: Final = {
    state.name.lower(): state for state in SessionState if state is not SessionState.NONE
}
KEEP_S: Final = 7 * 86400.0
"""How long a contract lasts where no end is given."""


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


@dataclass(frozen=True, slots=True)
class RetentionReceipt:
    """Answer to `pin`. True: the blocks are on drives, durable, and stay until `until_s`.

    A false one says in `reason` why that cannot be promised; nothing has changed then.
    """

    kept: bool
    session: str
    blocks: int = 0
    nbytes: int = 0
    until_s: float = 0.0
    """By the time of day, in seconds since 1970."""
    through_turn: bool = False
    numbers: tuple[int, ...] = ()
    """Of the contract in each namespace that has the session."""
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
    def known(self, order: str = "recent", limit: int = 100) -> list[dict[str, Any]]:
        """Sessions: `recent` or `cold` by their last use, or `busy` by their turns."""

    @abstractmethod
    def show(self, name: str, *, namespace: str = "") -> list[dict[str, Any]]:
        """All that is known of a session, one entry for each namespace that has it."""

    @abstractmethod
    def shared_prefixes(self, order: str = "busy", limit: int = 100) -> list[dict[str, Any]]:
        """Prefixes that several sessions begin with: `busy` by the blocks that sharing saves, or
        `cold` by their last use. Of a model's shards the first one; not of windows and states.
        """

    @abstractmethod
    def pin(
        self,
        name: str,
        *,
        until_s: float | None = None,
        for_s: float | None = None,
        through_turn: bool = False,
        namespace: str = "",
    ) -> RetentionReceipt:
        """Keep the session's blocks until a moment, or for so long (default a week); with
        `through_turn` until its next turn, if that comes before. Returns when it is durable.
        """

    @abstractmethod
    def unpin(self, name: str, *, namespace: str = "") -> int:
        """End the session's contract. Returns how many namespaces had one."""

    @abstractmethod
    def park(self, name: str, *, namespace: str = "") -> dict[str, Any]:
        """The session pauses: write its blocks to drives, and free the memory that they take."""

    @abstractmethod
    def warm(self, name: str, deadline_s: float = 10.0, *, namespace: str = "") -> dict[str, Any]:
        """The session is about to come back: bring its blocks to memory, in the background."""

    @abstractmethod
    def expire(self, name: str, *, namespace: str = "") -> dict[str, Any]:
        """The session is over: end its contract and forget it. Its blocks make room first."""

    @abstractmethod
    def ledger(self) -> dict[str, Any]:
        """Tokens given back and GPU seconds saved since the depot was opened, by tenant and by
        session, what they are worth, and the speeds and prices used. docs/ledger.md
        """

    @abstractmethod
    def tell_prefill(self, namespace: str, token_s: float, pair_s: float = 0.0) -> bool:
        """An engine has measured its prefill: seconds for each token, and for each pair of tokens
        that attend. From now on the ledger reckons with it. False: the namespace is not registered.
        """

    @abstractmethod
    def export(
        self, name: str, path: str | os.PathLike[str], *, namespace: str = ""
    ) -> dict[str, Any]:
        """Write the session to a new file, which any depot can import."""

    @abstractmethod
    def import_file(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Take in a session from such a file, as far as it is intact."""
