"""Audits of a depot: blocks that an engine has computed again, and what came of it. docs/audit.md

A checksum proves that bytes are as they were put. That they still mean what the engine takes them
for, only computing them again can show. Implemented by AuditService (this process) and RemoteAudits
(a daemon).
"""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvdepot.core.block import BlockKey

PRODUCER_TEXT_MAX: Final = 500


def producer_id(text: str) -> int:
    """A producer as it stands in the head of a record; never 0, which is an unknown one."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"kvdepot-producer").digest()
    return int.from_bytes(digest, "little") or 1


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One block, computed again and compared with what the depot has under its key."""

    key: BlockKey
    matches: bool
    error: float
    """Of the worst layer: the relative distance that a quarter of its parts are beyond."""
    tolerance: float
    layer: int
    """The worst one, as counted in the block."""
    producer: str
    """What has computed it again."""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "key": self.key.hex()}


class DepotAudits(ABC):
    """Namespaces are named by their tags, in hexadecimal."""

    @abstractmethod
    def producer(self, text: str) -> int:
        """Know what a producer is. Returns what `NamespaceHandle.made_by` takes."""

    @abstractmethod
    def report(self, finding: AuditFinding) -> None:
        """Count a comparison; one that does not match puts its namespace into quarantine: from now
        on, also after a restart, nothing of it is served, and nothing is taken.
        """

    @abstractmethod
    def known(self) -> dict[str, Any]:
        """What was compared since the start, the namespaces in quarantine, and the producers."""

    @abstractmethod
    def lift(self, namespace: str) -> bool:
        """End a quarantine: its blocks are served again. False: there was none."""

    @abstractmethod
    def purge(self, namespace: str) -> int:
        """End a quarantine, and remove all blocks of the namespace. Returns how many there were.
        ConfigError where there is none.
        """
