"""What leases and reservations have in common: things to be had for the time of a `with`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from kvdepot.core.block import BlockKey, Put


class Scope(ABC):
    """Ends with its `with`, at the latest."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @abstractmethod
    def _end(self) -> None:
        """Give everything back, unless that was done already."""


class LeaseScope(Scope):
    """The leading blocks of a prompt."""

    keys: list[BlockKey]
    _over = False

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self.keys)

    @abstractmethod
    def release(self) -> None:
        """Give up the protection. A second call is an error."""

    def _end(self) -> None:
        if not self._over:
            self.release()


class ReservationScope(Scope):
    """Slots for new blocks."""

    outcomes: list[Put]

    def __len__(self) -> int:
        return len(self.outcomes)

    @abstractmethod
    def close(self) -> None:
        """Give back the slots that were not sealed. May be called twice."""

    def _end(self) -> None:
        self.close()
