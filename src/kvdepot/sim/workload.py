"""The requests of a trace or a synthetic workload, and the blocks of their prompts.

Blocks get dense numbers in the order of their first appearance. The blocks of a request are kept
as runs of numbers, so that memory grows with the blocks, and not with their requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
NO_PARENT: Final = -1


class NotAChain(ValueError):
    """A block follows another block than before, so its name does not identify its prefix."""


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt. `blocks` are dense numbers, head first; the last one may be partly filled."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: Ints


@dataclass(slots=True)
class Workload:
    """The requests of a trace in the order of their arrival."""

    block_tokens: int
    parents: list[int] = field(default_factory=list)
    """The previous block of each block, or NO_PARENT."""
    skipped: list[str] = field(default_factory=list)
    """The errors of skipped lines."""
    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    _runs: list[Ints] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.input_tokens)

    @property
    def block_count(self) -> int:
        return len(self.parents)

    @property
    def blocks_asked(self) -> int:
        """Blocks of all prompts; more than `block_count` if blocks are requested again."""
        return sum(int(runs[1].sum()) for runs in self._runs)

    @property
    def tokens_asked(self) -> int:
        return sum(self.input_tokens)

    def new_blocks(self, after: int, count: int) -> Ints:
        """A chain of `count` new blocks, the first one after `after`."""
        start = len(self.parents)
        if count:
            self.parents.append(after)
            self.parents.extend(range(start, start + count - 1))
        return np.arange(start, start + count, dtype=np.int64)

    def add(self, request: PromptRequest) -> None:
        breaks = np.flatnonzero(np.diff(request.blocks) != 1) + 1
        starts = np.concatenate(([0], breaks)) if len(request.blocks) else breaks
        counts = np.diff(np.append(starts, len(request.blocks)))
        self._runs.append(np.stack((request.blocks[starts], counts)).astype(np.int64))
        self.input_tokens.append(request.input_tokens)
        self.output_tokens.append(request.output_tokens)
        self.arrivals_s.append(request.arrival_s)

    def sort(self) -> None:
        """Sort requests by arrival; equal ones keep their order."""
        order = np.argsort(np.array(self.arrivals_s), kind="stable").tolist()
        self._runs = [self._runs[at] for at in order]
        self.input_tokens = [self.input_tokens[at] for at in order]
        self.output_tokens = [self.output_tokens[at] for at in order]
        self.arrivals_s = [self.arrivals_s[at] for at in order]

    def __iter__(self) -> Iterator[PromptRequest]:
        return map(self.request, range(len(self)))

    def backwards(self) -> Iterator[PromptRequest]:
        return map(self.request, range(len(self) - 1, -1, -1))

    def request(self, number: int) -> PromptRequest:
        runs = self._runs[number].T.tolist()
        pieces = [np.arange(start, start + count) for start, count in runs]
        blocks = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
        arrival_s, asked = self.arrivals_s[number], self.input_tokens[number]
        return PromptRequest(arrival_s, asked, self.output_tokens[number], blocks)


class Numbering:
    """Dense numbers for block ids that are valid in the whole trace."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._known: dict[object, int] = {}

    def chain(self, ids: Sequence[object]) -> Ints:
        """Numbers of a prompt's blocks. Adds none if it raises NotAChain."""
        known, parents = self._known, self._workload.parents
        numbers: list[int] = []
        before = NO_PARENT
        for name in ids:
            number = known.get(name)
            if number is None:
                break
            if parents[number] != before:
                raise NotAChain(f"block {name} follows another block than it did before")
            numbers.append(number)
            before = number
        fresh = ids[len(numbers) :]
        if any(name in known for name in fresh) or len(set(fresh)) < len(fresh):
            raise NotAChain(f"a known block follows block {fresh[0]}, which is new")
        added = self._workload.new_blocks(before, len(fresh))
        known.update(zip(fresh, added.tolist(), strict=True))
        return np.concatenate((np.array(numbers, dtype=np.int64), added))
