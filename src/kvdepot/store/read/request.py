"""One call that reads blocks: what it wants, until when, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvdepot.codec.record import HEAD_BYTES
from kvdepot.core.block import BlockKey, Got
from kvdepot.core.depot import Arrival, Sink
from kvdepot.core.tier import Load
from kvdepot.index.table import NONE


@dataclass(slots=True)
class BlockRead:
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
        size, chunk, start, stop = self.payload_bytes, self.chunk_bytes, self.start, self.stop
        if not start and stop == size:
            return Load(self.key, location, size, chunk, image, self.target, 0, size)
        first = start // chunk * chunk
        last = min(-(-stop // chunk) * chunk, size)
        target = self.target if first == start and last == stop else 0
        return Load(self.key, location, size, chunk, image, target, first, last)

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop == self.payload_bytes


@dataclass(slots=True)
class ReadCall:
    """One call: what is wanted, and the sink for blocks that have no target of their own."""

    reads: Sequence[BlockRead]
    results: list[Got]
    deadline: float
    verify: bool
    sink: Sink | None = None
    is_prefetch: bool = False
    """No caller waits for it."""
    tried: dict[int, set[int]] = field(default_factory=dict)
    """Locations where a block could not be read, by index."""
    rescued: set[int] = field(default_factory=set)
    """Blocks read from one of two drives since the other one fails."""
    waits_for_others: bool = True
    """What another call is reading into memory is left to it, for a while."""
    left_to_others: set[int] = field(default_factory=set)

    def hand_over(self, images: list[tuple[int, memoryview, bool]]) -> None:
        """Give the sink records that can be read in place: index, image, and whether the image is
        good until the lease ends.
        """
        if self.sink is None or not images:
            return
        arrivals = []
        for index, image, lasting in images:
            end = HEAD_BYTES + self.reads[index].payload_bytes
            arrivals.append(Arrival(index, image[HEAD_BYTES:end].toreadonly(), lasting))
        self.sink(arrivals)
