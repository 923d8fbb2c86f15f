"""Ghosts: keys of evicted blocks, each with its last use and a note.

A direct-mapped table of 18 bytes per place: a key has one place, and replaces the key there.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

_FIRST_PLACES: Final = 1024
_EMPTY: Final = -1


class Ghost(NamedTuple):
    """The record of an evicted block."""

    stamp: int
    note: int


class Ghosts:
    """A bounded table of keys, identified by eight bytes of their digest."""

    def __init__(self, per_block: float) -> None:
        """Keep `per_block` to twice as many places for each block of the tier."""
        self._per_block = per_block
        self._make(_FIRST_PLACES)

    def fit(self, blocks: int) -> None:
        """Grow to enough places for a tier of `blocks`."""
        if blocks * self._per_block <= self.places:
            return
        tags, slots, stamps, notes = self._tag, self._slot, self.stamps, self.notes
        known = np.flatnonzero(stamps != _EMPTY)
        known = known[np.argsort(stamps[known], kind="stable")]
        places = self.places
        while blocks * self._per_block > places:
            places *= 2
        self._make(places)
        at = slots[known].astype(np.int64) & (places - 1)
        self._tag[at], self._slot[at] = tags[known], slots[known]
        self.stamps[at], self.notes[at] = stamps[known], notes[known]

    def remember(self, digest: int, stamp: int, note: int) -> None:
        at = digest & self._mask
        self._tags[at] = digest >> 32
        self._slots[at] = digest & 0xFFFFFFFF
        self._stamps[at] = stamp
        self._notes[at] = note

    def recall(self, digest: int) -> Ghost | None:
        """Remove and return the record of the key."""
        at = digest & self._mask
        stamp = self._stamps[at]
        if stamp == _EMPTY or self._tags[at] != digest >> 32:
            return None
        if self._slots[at] != digest & 0xFFFFFFFF:
            return None
        self._stamps[at] = _EMPTY
        return Ghost(stamp, self._notes[at])

    def sample(self, count_max: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
        """Stamps and notes of a sample of ghosts, and the number of places each represents."""
        step = max(1, self.places // count_max)
        stamps = self.stamps[::step]
        known = stamps != _EMPTY
        return stamps[known], self.notes[::step][known].astype(np.int64), step

    def _make(self, places: int) -> None:
        self.places = places
        self._mask = places - 1
        self._tag = np.zeros(places, dtype=np.uint32)
        self._slot = np.zeros(places, dtype=np.uint32)
        self.stamps = np.full(places, _EMPTY, dtype=np.int64)
        self.notes = np.zeros(places, dtype=np.uint16)
        self._tags, self._slots = self._tag.data, self._slot.data
        self._stamps, self._notes = self.stamps.data, self.notes.data
