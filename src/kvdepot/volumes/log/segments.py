"""The segments of a log volume: which exist, how one is opened, and how its room is freed.

Locks, in this order: `append_lock` (places in the log, new and released segments; held over writes
of single pages and over the sync that makes a released segment unreadable for good), `state_lock`
(all fields; held for an instant).
"""

import threading
from dataclasses import dataclass, field
from typing import Final

from kvdepot.core.clock import StampClock
from kvdepot.core.volume import Purpose
from kvdepot.format.record import PAGE
from kvdepot.format.segment import Entries, SegmentHeader, footer_bytes
from kvdepot.io.files import Files
from kvdepot.volumes.log.health import LogHealth
from kvdepot.volumes.log.medium import Medium, MountSettings

_FOR_MOVES: Final = 2
"""Segments that a volume which was made smaller may have beside those in use, for blocks that are
moved: one that is written to, and one that can be reclaimed."""


@dataclass(slots=True, eq=False)
class Segment:
    """One extent in use."""

    segment_id: int
    slot: int
    tail: int = PAGE
    sealed: bool = False
    live_bytes: int = 0
    live_count: int = 0
    entries: list[Entries] = field(default_factory=list)
    """Parts of the footer; emptied when the segment is sealed."""
    count: int = 0
    writes: int = 0
    """Writes under way; a segment is sealed when it is full and they have ended."""
    extent: tuple[int, int] = (-1, 0)
    """Descriptor of its file, and where the segment begins in it."""


class SegmentSet:
    """The segments of one volume."""

    def __init__(
        self,
        medium: Medium,
        files: Files,
        settings: MountSettings,
        store: bytes,
        slots_max: int,
        stamps: StampClock,
        health: LogHealth,
    ) -> None:
        self.medium = medium
        self.files = files
        self.settings = settings
        self.store = store
        self.slots_max = slots_max
        self.stamps = stamps
        self.health = health
        self.by_slot: dict[int, Segment] = {}
        self.free: list[int] = []
        self.releasing: dict[int, int] = {}
        """Slots whose segment (its id) was released and may still be on disk: the page that makes
        it unreadable is not durable yet, or the kernel may still write to the slot."""
        self.active: Segment | None = None
        self.live_bytes = 0
        self.append_lock = threading.RLock()
        self.state_lock = threading.RLock()
        self.writes_done = threading.Condition(self.state_lock)
        """A write has ended: a volume that is to be given back looks again."""
        self._slots_for_moves = 0
        """While there are too many segments, this many are allowed: those in use and _FOR_MOVES."""

    @property
    def record_bytes_max(self) -> int:
        return self.settings.segment_bytes - PAGE - footer_bytes(1)

    def add_found(self, segment: Segment) -> None:
        """Know a segment that was found when the volume was opened."""
        segment.extent = self.medium.extent(segment.slot)
        self.by_slot[segment.slot] = segment

    def oldest(self) -> int:
        """The lowest id of a segment that is in use or may still be on disk; 0: there is none."""
        with self.state_lock:
            ids = [segment.segment_id for segment in self.by_slot.values()]
            return min([*ids, *self.releasing.values()], default=0)

    def slot_count(self) -> int:
        """Slots that exist, used or not."""
        return len(self.by_slot) + len(self.free) + len(self.releasing)

    def spare_slots(self) -> int:
        """Segments that can be opened without releasing one; a full disk has only free ones."""
        with self.state_lock:
            creatable = max(self.slots_max, self._slots_for_moves) - self.slot_count()
            return len(self.free) + (max(0, creatable) if self.health.growth.closed else 0)

    def surplus(self) -> int:
        """Segments above the limit."""
        with self.state_lock:
            return max(0, self.slot_count() - self.slots_max)

    def room_bytes(self) -> int:
        """The largest record for which there is room without releasing a segment."""
        with self.state_lock:
            spare, kept_back = self.spare_slots(), self._kept_back(Purpose.BLOCK)
            if spare > kept_back:
                return self.record_bytes_max
            if spare < kept_back or self.active is None:
                return 0
            end = self.settings.segment_bytes - footer_bytes(self.active.count + 1)
            return max(0, end - self.active.tail)

    def has_room(self, segment: Segment, nbytes: int) -> bool:
        end = self.settings.segment_bytes - footer_bytes(segment.count + 1)
        return segment.tail + nbytes <= end

    def segment_for(self, nbytes: int, purpose: Purpose, full: list[Segment]) -> Segment | None:
        """A segment with room for `nbytes` more, or None; `full` gets what is to be sealed.

        `append_lock` held.
        """
        kept_back = self._kept_back(purpose)
        if self.spare_slots() < kept_back:
            return None
        if self.active is not None and self.has_room(self.active, nbytes):
            return self.active
        slot = self._take_slot(kept_back)
        if slot is None:
            return None
        with self.state_lock:
            before, self.active = self.active, None
            if before is not None and self.begin_sealing(before):
                full.append(before)
        segment = Segment(self.stamps.next(), slot)
        segment.extent = fd, base = self.medium.extent(slot)
        header = SegmentHeader(segment.segment_id, slot, self.settings.segment_bytes, self.store)
        try:
            self.files.write(fd, base, header.pack())
        except OSError as error:
            self.health.write_failed(error)
            with self.state_lock:
                if self._is_held(slot):
                    self.releasing[slot] = segment.segment_id
                else:
                    self.free.append(slot)
            return None
        with self.state_lock:
            self.by_slot[slot] = self.active = segment
        return segment

    def begin_sealing(self, segment: Segment) -> bool:
        """Whether a segment is full and its last write has ended; it counts as busy then."""
        if segment is self.active or segment.writes or segment.sealed:
            return False
        segment.writes += 1
        return True

    def count(self, slot: int, nbytes: int, records: int) -> None:
        """Records of a segment came into use, or with negative numbers went out of it."""
        segment = self.by_slot.get(slot)
        if segment is not None:
            segment.live_bytes += nbytes
            segment.live_count += records
            self.live_bytes += nbytes

    def release(self, slot: int) -> Segment | None:
        """Free a segment's extent; its records are gone, also after a restart. None: there is no
        such segment.
        """
        with self.append_lock, self.files.descriptors.use():
            with self.state_lock:
                segment = self.by_slot.pop(slot, None)
                if segment is None:
                    return None
                if segment is self.active:
                    self.active = None
                self.live_bytes -= segment.live_bytes
                self.releasing[slot] = segment.segment_id
            self._wipe_released()
            if self._slots_for_moves:
                self.trim()
            return segment

    def wipe(self, slot: int) -> None:
        """Make a segment unreadable, so that dropped records do not come back. Durable before the
        slot is used again: else its old footer could describe what is written there next.
        """
        fd, base = self.medium.extent(slot)
        self.files.write(fd, base, bytes(PAGE))
        if self.settings.fsync != "never":
            self.files.sync(fd)

    def borrow_free_segment(self) -> Segment | None:
        """A free segment for the caller alone until `return_segment`; None: there is no spare."""
        with self.append_lock:
            kept_back = self._kept_back(Purpose.BLOCK)
            slot = None if self.health.lost else self._take_slot(kept_back)
            if slot is None:
                return None
            borrowed = Segment(self.stamps.next(), slot, extent=self.medium.extent(slot))
            with self.state_lock:
                self.by_slot[slot] = borrowed
            return borrowed

    def return_segment(self, borrowed: Segment) -> None:
        if self.by_slot.get(borrowed.slot) is borrowed:
            self.release(borrowed.slot)

    def is_stuck(self) -> bool:
        """Whether the kernel may still write to a slot that was released."""
        return any(map(self._is_held, list(self.releasing)))

    def set_slots_max(self, slots_max: int) -> None:
        """Have room for this many segments; surplus ones go with `trim`."""
        with self.append_lock, self.state_lock:
            self.slots_max = min(slots_max, self.medium.slots_max(self.settings.segment_bytes))
            self._slots_for_moves = len(self.by_slot) + _FOR_MOVES

    def trim(self) -> None:
        """Give surplus free segments back, but for those that moves may need meanwhile."""
        with self.append_lock:
            self._wipe_released()
            self._slots_for_moves = min(self._slots_for_moves, len(self.by_slot) + _FOR_MOVES)
            if self._slots_for_moves <= self.slots_max or not self.slots_max:
                self._slots_for_moves = 0
            while self.free and self.slot_count() > max(self.slots_max, self._slots_for_moves):
                try:
                    self.medium.remove(self.free[-1])
                except OSError as error:
                    self.health.write_failed(error)
                    return
                with self.state_lock:
                    self.free.pop()

    def _kept_back(self, purpose: Purpose) -> int:
        """Spare segments that blocks may not take. A volume of two has none to keep back."""
        if purpose is Purpose.MOVE:
            return 0
        return 1 if len(self.by_slot) + self.spare_slots() > 2 else 0

    def _take_slot(self, kept_back: int) -> int | None:
        """A free slot, or a new one. A disk that was full is asked again now and then. While the
        kernel has not ended a write to a released slot, no other slot is given to stall on.
        """
        slot = None
        self._wipe_released()
        if self.is_stuck():
            return None
        if not self.health.growth.closed or (not self.free and self.spare_slots() > kept_back):
            slot = self._new_slot()
        with self.state_lock:
            if slot is None and self.free and self.spare_slots() > kept_back:
                return self.free.pop()
        return slot

    def _new_slot(self) -> int | None:
        taken = {*self.by_slot, *self.free, *self.releasing}
        limit = max(self.slots_max, self._slots_for_moves)
        if len(taken) >= limit or not self.health.growth.allows():
            return None
        slot = next(number for number in range(len(taken) + 1) if number not in taken)
        try:
            self.medium.create(slot, self.settings.segment_bytes)
        except OSError as error:
            self.health.no_segment(error, has_others=len(taken) >= 2)
            return None
        self.health.growth.succeeded()
        return slot

    def _wipe_released(self) -> None:
        """Make released segments unreadable for good, oldest first; then their slots are free.

        `append_lock` held. One that the kernel may still write to, or that cannot be written,
        waits.
        """
        for slot in sorted(self.releasing, key=self.releasing.__getitem__):
            if self._is_held(slot):
                continue
            try:
                self.wipe(slot)
            except OSError as error:
                self.health.write_failed(error)
                return
            with self.state_lock:
                del self.releasing[slot]
                self.free.append(slot)

    def _is_held(self, slot: int) -> bool:
        """Whether the kernel may still write to a slot what has missed its deadline."""
        fd, base = self.medium.extent(slot)
        return self.files.may_still_write(fd, base, base + self.settings.segment_bytes)
