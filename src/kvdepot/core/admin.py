"""Services for operators and engines: the depot's volumes, checks and reports."""

import os
from abc import ABC, abstractmethod
from typing import Any

from kvdepot.core.depot import CheckReport
from kvdepot.core.first_token import FirstToken


class DepotVolumes(ABC):
    """The drives of a depot. Through a daemon the changes are for its user and root, and raise
    DaemonError if no daemon answers.
    """

    @abstractmethod
    def set_write_mode(self, tier: str, mode: str) -> None:
        """Change the `write_mode` of a file tier until the store is closed."""

    @abstractmethod
    def add(self, tier: str, path: str | os.PathLike[str]) -> None:
        """Add an empty drive to a tier. It gets the same capacity as the others."""

    @abstractmethod
    def drain(self, tier: str, path: str | os.PathLike[str]) -> int:
        """Move a drive's blocks to the others and remove it from the tier. Returns how many were
        moved. Blocks until the drive is empty.
        """

    @abstractmethod
    def resize(self, tier: str, capacity: int | str) -> None:
        """Change the `capacity` of a file tier until the store is closed. Blocks are evicted if it
        shrinks.
        """


class DepotAdmin(ABC):
    """Checks, recordings, and what engines report."""

    @abstractmethod
    def check(self, *, deep: bool = True) -> CheckReport:
        """Verify the index and the tiers against each other and, if `deep`, every byte in memory
        and on disk.
        """

    @abstractmethod
    def record(self, path: str | os.PathLike[str]) -> None:
        """Start to record lookups to a new file, a trace for `kvdepot sim`."""

    @abstractmethod
    def stop_recording(self) -> int:
        """End the recording. Returns the number of recorded requests; 0 if none was running."""

    @abstractmethod
    def ledger(self) -> dict[str, Any]:
        """Return tokens served and GPU seconds saved since the depot was opened, by tenant and
        session, their value, and the speeds and prices used. docs/ledger.md
        """

    @abstractmethod
    def report_prefill_speed(self, namespace: str, token_s: float, pair_s: float = 0.0) -> bool:
        """Set the measured prefill speed of a namespace for the ledger: seconds for each token, and
        for each pair of attending tokens. `namespace` is a tag in hexadecimal. Returns False if it
        is not registered.
        """

    @abstractmethod
    def report_first_token(self, first: FirstToken) -> None:
        """Report the time to the first token of a request, for `stats`, metrics and dashboard."""
