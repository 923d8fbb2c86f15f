"""What a check found, for people and for scripts."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(slots=True)
class CheckReport:
    """Answer to `check`. True when nothing was found."""

    blocks: int = 0
    nbytes: int = 0
    findings: list[Finding] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.findings

    @property
    def ok(self) -> bool:
        return not self.findings

    def add(self, where: str, what: str) -> None:
        self.findings.append(Finding(where, what))

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "blocks": self.blocks,
            "bytes": self.nbytes,
            "findings": [{"where": f.where, "what": f.what} for f in self.findings],
        }
