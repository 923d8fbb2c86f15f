"""What a caller wants of the tiers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvdepot.core.block import BlockKey, Got
from kvdepot.core.depot import Sink
from kvdepot.core.tier import Load
from kvdepot.index.table import NONE


@dataclass(slots=True)
class Want:
    """One block wanted by a caller: where to put it and which part of it."""

    key: BlockKey
    target: int
    """Address; 0: the caller looks at the block where it is."""
    payload_bytes: int
    chunk_bytes: int
    start: int
    """Of the payload, in bytes; need not be at a chunk's border."""
    stop: int
    row: int = NONE

    def load(self, image: memoryview, location: int) -> Load:
        """The load that covers the wanted range with whole chunks."""
        chunk = self.chunk_bytes
        start = self.start // chunk * chunk
        stop = min(-(-self.stop // chunk) * chunk, self.payload_bytes)
        whole = start == self.start and stop == self.stop
        return Load(
            self.key,
            location,
            self.payload_bytes,
            chunk,
            image,
            self.target if whole else 0,
            start,
            stop,
        )

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop == self.payload_bytes


@dataclass(frozen=True, slots=True)
class Errand:
    """One call: what is wanted, and who gets what has no target of its own."""

    wants: Sequence[Want]
    results: list[Got]
    deadline: float
    verify: bool
    sink: Sink | None = None
    ahead: bool = False
    """Nobody waits for it."""
    tried: dict[int, set[int]] = field(default_factory=dict)
    """Places where a want was not to be had."""
    rescued: set[int] = field(default_factory=set)
    """Wants that are read from one of two places since the other drive fails."""
    patient: bool = True
    """What somebody else is reading is left to them, for a while."""
    later: set[int] = field(default_factory=set)
    """Wants that were left to somebody else."""
