"""What a drive must remember besides blocks: removals and the names of namespaces.

Notes are records in the log like any other. When the segment that holds one is reused, the note is
written again, as long as it is needed.
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvdepot.codec.notes import is_page, pack_removals, page_tag, space_key, write_note
from kvdepot.codec.record import PAGE, Kind, record_bytes
from kvdepot.core.block import BlockKey
from kvdepot.core.tier import Purpose, Removal
from kvdepot.tiers.device.files import aligned
from kvdepot.tiers.device.speed import PROFILE_TAG, Profile

if TYPE_CHECKING:
    from kvdepot.tiers.log.drive import Drive

_REMOVAL_KEY: Final = space_key(b"")
_REMOVALS_PER_NOTE: Final = 256
_NOTE_RESERVE_MAX: Final = 64 << 10
_CARRY_RESERVE_MAX: Final = 256 << 10
_SPAN_BYTES_MAX: Final = 1 << 20
NOTE_BYTES_MAX = record_bytes(_REMOVALS_PER_NOTE * 64)
"""Room that a note of removals can take."""


def kept_back(purpose: Purpose, segment_bytes: int, *, last: bool) -> int:
    """Room in a segment that is not for this purpose: in each some for notes alone, so that
    removals can be recorded on a full drive; in the last some for notes that a reclaim must carry.
    """
    notes = 0 if purpose.is_note else min(_NOTE_RESERVE_MAX, segment_bytes // 8)
    carried = min(_CARRY_RESERVE_MAX, segment_bytes // 8)
    return notes + (carried if last and purpose is not Purpose.CARRY else 0)


def is_own(tag: bytes) -> bool:
    """Whether a note under this tag is no description of a namespace."""
    return tag == PROFILE_TAG or is_page(tag)


class Notes:
    """Notes of one drive, by the segment that holds them."""

    def __init__(self, drive: "Drive") -> None:
        self._drive = drive
        self.spaces: dict[bytes, tuple[int, bytes]] = {}
        """Tag to (segment id, description as JSON)."""
        self.described_at: dict[int, list[tuple[int, int]]] = {}
        """Segment id to the places of all descriptions in it, needed or not: offset and length.
        They are overwritten before the segment is used again."""
        self.removals: dict[int, list[Removal]] = {}
        """Segment id to the removals recorded in it."""
        self._lock = threading.RLock()
        """Held from writing a note until it is entered here: `carry` must not miss one."""
        self.keep_all: Callable[[], bool] = bool
        """Whether another drive may need removals that this one does not."""

    def remember(self, tag: bytes, description: bytes, purpose: Purpose = Purpose.NOTE) -> bool:
        """Record what a namespace tag stands for. False: it could not be written."""
        with self._held() as mine:
            if not mine:
                return False
            segment_id = self._append(Kind.SPACE, space_key(tag), description, purpose)
            if segment_id is not None:
                self.spaces[tag] = (segment_id, description)
        return segment_id is not None

    def described_in(self, segment_id: int) -> list[bytes]:
        """Tags whose descriptions are in a segment."""
        spaces = self.spaces.copy()  # others add to it meanwhile
        return [tag for tag, (at, _) in spaces.items() if at == segment_id and not is_own(tag)]

    def description_spans(self, segment_id: int) -> list[tuple[int, int]]:
        """Where in a segment descriptions lie, start and stop; those that touch are one."""
        spans: list[tuple[int, int]] = []
        for start, nbytes in sorted(self.described_at.get(segment_id, [])):
            first, last = spans[-1] if spans else (0, -1)
            if last >= start and start + nbytes - first <= _SPAN_BYTES_MAX:
                spans[-1] = (first, start + nbytes)
            else:
                spans.append((start, start + nbytes))
        return spans

    def forget(self, tags: Collection[bytes]) -> None:
        """Carry these descriptions along no more."""
        with self._held() as mine:
            if mine:
                for tag in tags:
                    self.spaces.pop(tag, None)

    def keep_page(self, number: int, text: bytes) -> bool:
        """Record a page of sessions in the place of the one before. False: it could not be."""
        return self.remember(page_tag(number), text)

    def pages(self) -> list[bytes]:
        """The pages of sessions that are recorded."""
        return [text for tag, (_, text) in self.spaces.copy().items() if is_page(tag)]

    @property
    def profile(self) -> Profile | None:
        """How fast the drive is, if that was measured and kept."""
        found = self.spaces.get(PROFILE_TAG)
        return Profile.parse(found[1]) if found else None

    def keep_profile(self, profile: Profile) -> bool:
        return self.remember(PROFILE_TAG, profile.pack())

    def remove(self, removals: Sequence[Removal], purpose: Purpose = Purpose.NOTE) -> bool:
        """Record that blocks are gone for good. False: it could not be written."""
        done = True
        for start in range(0, len(removals), _REMOVALS_PER_NOTE):
            part = removals[start : start + _REMOVALS_PER_NOTE]
            with self._held() as mine:
                if not mine:
                    return False
                note = pack_removals(part)
                segment_id = self._append(Kind.REMOVAL, _REMOVAL_KEY, note, purpose)
                if segment_id is None:
                    done = False
                else:
                    self.removals.setdefault(segment_id, []).extend(part)
                    self._drive.record_second(part)
        return done

    def carry(self, segment_id: int) -> bool:
        """Write again what only this segment remembers. False: not all of it could be."""
        with self._held() as mine:
            if not mine:
                return False
            oldest = 0 if self.keep_all() else self._drive.oldest_segment(but=segment_id)
            needed = [
                removal
                for removal in self.removals.get(segment_id, [])
                if removal.until_segment >= oldest
            ]
            done = self.remove(needed, Purpose.CARRY) if needed else True
            if done:
                self.removals.pop(segment_id, None)
            for tag, (at, description) in list(self.spaces.items()):
                if at == segment_id:
                    done = self.remember(tag, description, Purpose.CARRY) and done
            return done

    @contextlib.contextmanager
    def _held(self) -> Iterator[bool]:
        """The lock, if it comes in time: it is held over writes, which may stall."""
        mine = self._lock.acquire(timeout=self._drive.settings.write_timeout_s)
        try:
            yield mine
        finally:
            if mine:
                self._lock.release()

    def _append(self, kind: Kind, key: BlockKey, payload: bytes, purpose: Purpose) -> int | None:
        image = aligned(record_bytes(len(payload)))
        write_note(image, kind, key, payload)
        (place,) = self._drive.append([image], purpose)
        if place is None:
            return None
        if kind is Kind.SPACE:
            self.describes(place.segment_id, place.page, len(payload))
        return place.segment_id

    def describes(self, segment_id: int, page: int, payload_bytes: int) -> None:
        """A segment has a description there."""
        place = (page * PAGE, record_bytes(payload_bytes))
        self.described_at.setdefault(segment_id, []).append(place)
