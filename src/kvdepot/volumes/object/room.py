"""The room that one node may use in a bucket, so that all together keep its capacity.

A node knows the others as of its last refresh.
"""

import threading
from typing import Final

from kvdepot.config.settings import ObjectConfig
from kvdepot.core.clock import Clock
from kvdepot.volumes.object.contents import BucketContents
from kvdepot.volumes.object.upkeep import BucketUpkeep

_UNSEEN_S: Final = 5.0


class BucketRoom:
    """The room for records of one node. Thread-safe."""

    def __init__(
        self, config: ObjectConfig, contents: BucketContents, upkeep: BucketUpkeep, clock: Clock
    ) -> None:
        self.reserved_bytes = 0
        """Bytes of records that are being uploaded."""
        self._contents = contents
        self._upkeep = upkeep
        self._clock = clock
        self._refresh_s = config.refresh_s
        self._lock = threading.Lock()
        """Guards the fields below; held briefly."""
        self._ahead_bytes = config.parallel * config.object_bytes
        """Most bytes by which this node may exceed the capacity for a short time."""
        self._refreshes = self._used_before = 0
        """The number of an earlier refresh, and the bytes that this node used then."""
        self._unseen_s = min(2 * config.refresh_s, _UNSEEN_S)
        """Time after which the other nodes have seen what this one has written."""
        self._known_s = self._seen_s = clock.now() + self._unseen_s
        """Times from which others know this node, and have seen what it used at that refresh."""

    @property
    def nbytes(self) -> int:
        """Bytes that this node may write: the free capacity, or the rest of its share, for which
        nodes above their shares make room.
        """
        with self._lock:
            return self._whole()

    def reserve(self, nbytes: int, *, waits: bool) -> bool:
        """Reserve room for a record. `waits`: wait until the other nodes have seen earlier ones.
        False: there is no room.
        """
        deadline_s = self._clock.now() + 2 * self._unseen_s
        while True:
            known = self._upkeep.refreshes
            with self._lock:
                if nbytes <= self._now():
                    self.reserved_bytes += nbytes
                    return True
                if not waits or nbytes > self._whole():
                    return False
            left_s = deadline_s - self._clock.now()
            if left_s <= 0 or not self._upkeep.wait_for_refresh(known, left_s):
                return False

    def release(self, nbytes: int) -> None:
        """End a reservation: the records are in the bucket, or could not be uploaded."""
        with self._lock:
            self.reserved_bytes -= nbytes

    def _whole(self) -> int:
        contents, nodes = self._contents, len(self._upkeep.writers.living())
        left = contents.capacity_bytes - contents.held_bytes - self.reserved_bytes
        share = contents.capacity_bytes // nodes - contents.own_bytes - self.reserved_bytes
        return max(0, left, min(share, left + nodes * self._ahead_bytes))

    def _now(self) -> int:
        """The part that this node may use before the others have seen its use: its part of what
        was free, and below its share `parallel` objects more. A node that has just opened, and
        that the others do not know, takes only the latter.
        """
        contents, now_s = self._contents, self._clock.now()
        nodes, used = len(self._upkeep.writers.living()), contents.own_bytes + self.reserved_bytes
        is_new = nodes > 1 and now_s < self._known_s
        if self._refreshes != self._upkeep.refreshes and now_s >= self._seen_s and not is_new:
            self._refreshes, self._used_before = self._upkeep.refreshes, used
            self._seen_s = now_s + self._refresh_s
        grown = used - self._used_before
        free = contents.capacity_bytes - contents.held_bytes - self.reserved_bytes + grown
        part = (min(free, 0) if is_new else free) // nodes - grown
        share = contents.capacity_bytes // nodes - used
        return max(0, part, min(share, part + self._ahead_bytes))
