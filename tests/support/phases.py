"""What a child is doing when it touches a disk: promotion, demotion, reclaim or drain.

The methods that do these are wrapped, in the child alone, so that a thread knows which of them it
is in. A fault then meets the nth write of a phase, and says so in the diary before it kills.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from kvdepot.store.move.demote import Demoter
from kvdepot.store.move.drain import MoveAway
from kvdepot.store.move.mover import BlockMover, CopyBatch, CopyJob
from kvdepot.store.move.reclaim import Reclaimer
from kvdepot.store.state.state import PendingWrites
from kvdepot.store.write.write_back import WriteDown

Phase = Literal["promotion", "demotion", "reclaim", "drain"]


class Phases:
    """Which phases the calling thread is in."""

    def __init__(self) -> None:
        self._here = threading.local()
        self._promoted: set[int] = set()
        """Rows that came up from a slower tier and are still to be written to a faster one."""

    def contains(self, phase: Phase) -> bool:
        return phase in self._now()

    def install(self) -> None:
        """Wrap the methods. For a process that ends afterwards."""
        self._wrap(Demoter, "_copy_run", "demotion")
        self._wrap(Reclaimer, "reclaim", "reclaim")
        promote, copy = PendingWrites.promote, BlockMover.copy

        @functools.wraps(promote)
        def promoted(writes: PendingWrites, row: int, *rest: Any) -> None:
            self._promoted.add(row)
            promote(writes, row, *rest)

        @functools.wraps(copy)
        def copied(mover: BlockMover, job: CopyJob, piece: CopyBatch, *rest: Any) -> bool:
            phase: Phase | None = "drain" if isinstance(job, MoveAway) else None
            rows = self._promoted.intersection(piece.rows)
            if rows and isinstance(job, WriteDown) and job.target.name == "ssd":
                self._promoted.difference_update(rows)
                phase = "promotion"
            if phase is None:
                return copy(mover, job, piece, *rest)
            with self._in(phase):
                return copy(mover, job, piece, *rest)

        setattr(PendingWrites, "promote", promoted)  # noqa: B010
        setattr(BlockMover, "copy", copied)  # noqa: B010

    def _wrap(self, owner: type, name: str, phase: Phase) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(inner)
        def wrapped(*args: Any, **named: Any) -> Any:
            with self._in(phase):
                return inner(*args, **named)

        setattr(owner, name, wrapped)

    @contextmanager
    def _in(self, phase: Phase) -> Iterator[None]:
        self._now().append(phase)
        try:
            yield
        finally:
            self._now().pop()

    def _now(self) -> list[Phase]:
        if not hasattr(self._here, "phases"):
            self._here.phases = []
        found: list[Phase] = self._here.phases
        return found
