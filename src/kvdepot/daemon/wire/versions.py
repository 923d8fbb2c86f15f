"""Versions of the protocol between client and daemon, and their negotiation.

HELLO offers a range, and WELCOME names the highest version that both sides speak.
"""

from typing import Final, NamedTuple

from kvdepot.daemon.wire.frames import FrameKind

PROTOCOL: Final = 8
"""The newest supported version. Raised when a frame is added or changes its meaning."""
PROTOCOL_OLDEST: Final = 7
"""The oldest supported version. Raised when no supported release needs it any more
(docs/compatibility.md)."""

LENDS_FROM_ARENA: Final = 8
"""From this protocol on, all blocks of an ARRIVED with LENT are valid until TAKEN only, and a lease
may have blocks without protection."""

SINCE: Final[dict[FrameKind, int]] = {}
"""Requests added after PROTOCOL_OLDEST, with their version. An older daemon would disconnect."""

REFUSED_FOR_VERSIONS: Final = "the client speaks "
"""Prefix of the reason of a REFUSED because of versions. The same in all versions."""


class SpokenVersions(NamedTuple):
    """The versions that one side supports."""

    oldest: int
    newest: int
    format: int
    """Version of keys and payloads (core.namespace.FORMAT_VERSION). Must be equal."""
    record: int
    """Version of the bytes of a slot (format.record.VERSION). Must be equal."""

    def common(self, other: "SpokenVersions") -> int:
        """The highest protocol that both sides support; 0 if there is none."""
        highest = min(self.newest, other.newest)
        same = (self.format, self.record) == (other.format, other.record)
        return highest if same and highest >= max(self.oldest, other.oldest) else 0

    def __str__(self) -> str:
        span = f"{self.oldest}" if self.oldest == self.newest else f"{self.oldest} to {self.newest}"
        return f"protocol {span}, format {self.format}, record {self.record}"
