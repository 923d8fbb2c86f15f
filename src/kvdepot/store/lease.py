"""Protection of blocks while they are in use, as a scope."""

from collections.abc import Callable, Iterator
from types import TracebackType

from kvdepot.core.block import BlockKey
from kvdepot.errors import LeaseError


class Lease:
    """The leading blocks of a prompt, protected from eviction until `release` or the end of `with`.

    `len(lease)` is how many blocks were resident; `keys` are theirs; `view(i)` is the payload of
    block i in place, read-only, if it is in memory. Views must not be used after release.
    """

    def __init__(
        self,
        keys: list[BlockKey],
        rows: list[int],
        release: Callable[[list[int]], None],
        view: Callable[[int], memoryview | None],
    ) -> None:
        self.keys = keys
        self._rows = rows
        self._release = release
        self._view = view
        self._over = False

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self.keys)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._over:
            self.release()

    def view(self, index: int) -> memoryview | None:
        """Payload of one leased block where it lies in memory; None if it is on disk only."""
        if self._over:
            raise LeaseError("the lease was released")
        return self._view(self._rows[index])

    def release(self) -> None:
        """Give up the protection. A second call is an error."""
        if self._over:
            raise LeaseError("the lease was released already")
        self._over = True
        self._release(self._rows)
