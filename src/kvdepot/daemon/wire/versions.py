"""Versions of the protocol between client and daemon: how one is agreed on, and how they differ.

HELLO offers a range, and WELCOME names the highest version that both sides speak. A daemon from
before version 6 looks at the low end of the range only, and names none: then it is that one.

    5   the oldest that is spoken
    6   versions are agreed on; SESSIONS, AUDITS, FIRST_TOKEN; blocks in the tier `object`, which
        clients of version 5 are told of as `plugin`
"""

from typing import Final, NamedTuple

from kvdepot.core.block import ANSWERS, GetResult
from kvdepot.core.volume import TIER_NAMES
from kvdepot.daemon.wire.frames import FrameKind

PROTOCOL: Final = 6
"""The newest that is spoken. Raised when a frame comes, or changes its meaning."""
PROTOCOL_OLDEST: Final = 5
"""Raised when no supported release needs the one before (docs/compatibility.md)."""

SINCE: Final = {FrameKind.SESSIONS: 6, FrameKind.AUDITS: 6, FrameKind.FIRST_TOKEN: 6}
"""Requests that came later than PROTOCOL_OLDEST: a daemon that agreed on less hangs up on them."""

REFUSED_FOR_VERSIONS: Final = "the client speaks "
"""Begins the reason of a REFUSED for this. The same in all versions."""


class SpokenVersions(NamedTuple):
    """What one side can do."""

    oldest: int
    newest: int
    format: int
    """How keys and payloads are made: core.namespace.FORMAT_VERSION. Must be equal."""
    record: int
    """What a slot looks like: format.record.VERSION. Must be equal."""

    def common(self, other: "SpokenVersions") -> int:
        """The highest protocol that both speak; 0 if there is none."""
        highest = min(self.newest, other.newest)
        same = (self.format, self.record) == (other.format, other.record)
        return highest if same and highest >= max(self.oldest, other.oldest) else 0

    def __str__(self) -> str:
        span = f"{self.oldest}" if self.oldest == self.newest else f"{self.oldest} to {self.newest}"
        return f"protocol {span}, format {self.format}, record {self.record}"


def tiers_for(protocol: int, codes: bytes) -> bytes:
    """Places in TIER_NAMES, as a client of this protocol knows them."""
    return codes if protocol >= 6 else codes.translate(_TIERS_OF_5)


def answers_for(protocol: int, codes: bytes) -> bytes:
    """Places in ANSWERS, as a client of this protocol knows them."""
    return codes if protocol >= 6 else codes.translate(_ANSWERS_OF_5)


def _one_for_another(before: int, after: int) -> bytes:
    return bytes.maketrans(bytes([before]), bytes([after]))


_TIERS_OF_5: Final = _one_for_another(TIER_NAMES.index("object"), TIER_NAMES.index("plugin"))
_ANSWERS_OF_5: Final = _one_for_another(
    ANSWERS.index(GetResult("object")), ANSWERS.index(GetResult("plugin"))
)
