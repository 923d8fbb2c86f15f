"""In which order blocks leave a tier: what a policy is told, and what it answers.

The index decides who may leave at all (index/leaves.py: no children in the tier, nobody using it)
and keeps those rows in lines. An `Order` says in which line a row stands, and which end of which
line leaves first. It is told of every block that enters, is used and leaves; it is never told why.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

NOBODY: Final = -1
"""No row: the line is empty, the block has no parent, nothing can leave."""


class Hint(IntEnum):
    """What the engine said about the session of a block. The next use of the block ends it."""

    NONE = 0
    ALIVE = 1
    PENDING = 2
    """A tool call is under way: the session comes back within seconds."""

    CLOSED = 3
    """The session will not come back."""


class Column(Protocol):
    """One value for each row. `view` is the fast way to single values."""

    array: npt.NDArray[Any]
    view: memoryview


class Rows(Protocol):
    """The table whose rows are ordered."""

    def column(self, dtype: npt.DTypeLike, fill: int) -> Column:
        """A new column that grows with the table; freed rows return to `fill`."""
        ...

    def digest(self, row: int) -> int:
        """Eight uniform bytes of the row's key."""
        ...

    def digests(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]: ...


class Family(Protocol):
    """The prefix tree over the rows."""

    now: int
    """Block uses so far: the clock of every order."""

    @property
    def parent(self) -> Column: ...

    @property
    def stamp(self) -> Column:
        """When each row was used last; a head's is newer than its tail's."""
        ...


class Lines(Protocol):
    """Rows in line, coldest first; `group` is a size class."""

    def first(self, group: int, line: int) -> int: ...

    def last(self, group: int, line: int) -> int: ...

    def ends(self, group: int) -> tuple[Sequence[int], Sequence[int]]:
        """The coldest and the warmest row of each line."""
        ...

    def occupied(self, group: int) -> int:
        """The lines of a group that are not empty, as bits."""
        ...

    def to_end(self, row: int, line: int) -> None:
        """Move a row that is in line to the warm end of a line of its group."""
        ...


class Order(Protocol):
    """Which eligible block leaves first. Not thread-safe; the store's lock guards it."""

    lines: int
    """How many lines each size class has."""

    moves_on_use: bool
    """Whether a block that is used goes to the warm end of its line."""

    def bind(self, rows: Rows, tree: Family, lines: Lines) -> None:
        """Called once, before everything else."""
        ...

    @property
    def stamps(self) -> Column:
        """By what rows stand in their line, smallest first."""
        ...

    def line(self, row: int) -> int:
        """The line in which the row belongs now."""
        ...

    def entered(self, row: int) -> None:
        """The block is in the tier now."""
        ...

    def used(self, rows: Sequence[int], *, hit: bool) -> None:
        """Blocks of one prompt were used, head first; some may be in other tiers only."""
        ...

    def left(self, row: int) -> None:
        """The block is no longer in the tier."""
        ...

    def hinted(self, rows: Sequence[int], hint: Hint) -> None: ...

    def victim(self, group: int) -> int:
        """The row that should leave first from a size class, or NOBODY."""
        ...


class Recency:
    """Least recently used first. Hints do not count."""

    lines = 1
    moves_on_use = True

    def bind(self, rows: Rows, tree: Family, lines: Lines) -> None:
        self._stamps = tree.stamp
        self._lines = lines

    @property
    def stamps(self) -> Column:
        return self._stamps

    def line(self, row: int) -> int:
        return 0

    def entered(self, row: int) -> None:
        """Nothing to remember: the tree keeps the stamps."""

    def used(self, rows: Sequence[int], *, hit: bool) -> None:
        """Nothing to remember: the tree keeps the stamps."""

    def left(self, row: int) -> None:
        """Nothing to remember."""

    def hinted(self, rows: Sequence[int], hint: Hint) -> None:
        """Recency alone counts."""

    def victim(self, group: int) -> int:
        return self._lines.first(group, 0)
