"""Audits of a depot: an engine computes blocks again and compares them. docs/audit.md

A checksum proves that bytes were not changed since they were put. An audit detects blocks that the
present engine would compute differently. Implemented by AuditService (this process) and
RemoteAudits (a daemon).
"""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvdepot.core.block import BlockKey

PRODUCER_TEXT_MAX: Final = 500


def producer_id(text: str) -> int:
    """The number of a producer in the head of a record; never 0, which means unknown."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"kvdepot-producer").digest()
    return int.from_bytes(digest, "little") or 1


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """The comparison of a stored block with the same block computed again."""

    key: BlockKey
    matches: bool
    error: float
    """Error of the worst layer: 25 % of its parts have a larger relative difference."""
    tolerance: float
    layer: int
    """Index of the worst layer in the block."""
    producer: str
    """The software that computed the block again."""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "key": self.key.hex()}


class DepotAudits(ABC):
    """Audits and quarantines. `namespace` is a tag in hexadecimal."""

    @abstractmethod
    def producer(self, text: str) -> int:
        """Record the description of a producer. Returns its number, for
        `NamespaceHandle.made_by`.
        """

    @abstractmethod
    def report(self, finding: AuditFinding) -> None:
        """Count a comparison. A mismatch puts the namespace into quarantine: until `lift` or
        `purge`, also after a restart, its blocks are not served and new ones are refused.
        """

    @abstractmethod
    def list(self) -> dict[str, Any]:
        """Return the counts of comparisons, namespaces in quarantine, and producers."""

    @abstractmethod
    def lift(self, namespace: str) -> bool:
        """End a quarantine, so that its blocks are served again. Returns False
        if there was none.
        """

    @abstractmethod
    def purge(self, namespace: str) -> int:
        """Remove all blocks of a namespace and end its quarantine. Returns the number of blocks.
        ConfigError if it is not in quarantine.
        """
