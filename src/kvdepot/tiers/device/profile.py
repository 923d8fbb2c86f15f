"""How fast a drive is, as it was measured once; kept with the drive as a note in its log."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Final

PROFILE_TAG: Final = b"\0profile"
"""In the place of a namespace's tag: the note describes the drive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Speeds of one drive with nothing else to do. 0: not known, for it had no free place."""

    read_bytes_per_s: int
    """One stretch after the other."""
    write_bytes_per_s: int
    random_read_bytes_per_s: int
    """Pieces of `random_bytes` all over one segment."""
    random_write_bytes_per_s: int
    random_bytes: int
    read_latency_us: int
    """Of one page, alone; the median."""
    write_latency_us: int
    direct_io: bool
    emulated: bool
    """The drive does not exist: these are the speeds it is made to have."""
    measured_at_s: int
    """Of the calendar, since 1970."""

    def pack(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def parse(cls, text: bytes) -> "Profile | None":
        """None: it is of another version, and the drive is measured anew."""
        try:
            found: dict[str, Any] = json.loads(text)
            return cls(**found)
        except (TypeError, ValueError):
            return None

    @classmethod
    def unmeasured(cls, *, emulated: bool) -> "Profile":
        """Says no more of a drive than whether it is emulated."""
        return cls(
            read_bytes_per_s=0, write_bytes_per_s=0,
            random_read_bytes_per_s=0, random_write_bytes_per_s=0, random_bytes=0,
            read_latency_us=0, write_latency_us=0,
            direct_io=True, emulated=emulated, measured_at_s=0,
        )  # fmt: skip

    @property
    def is_measured(self) -> bool:
        return self.read_bytes_per_s > 0
