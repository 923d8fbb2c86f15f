"""A volume that stores records in append-only segments, in a directory or on a block device.

Segments, appending and durability: segments.py. Reading: reader.py. Metadata: metadata.py. Opening
after a crash: recovery.py.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from kvdepot.core.keys import Keys
from kvdepot.core.metadata import OWN_KINDS, MetaEntry, MetaKind
from kvdepot.core.volume import (
    Bools,
    Contents,
    Ints,
    SegmentTable,
    VolumeContext,
    VolumeFacts,
    WriteBudget,
    no_contents,
    segment_of,
    segment_table,
)
from kvdepot.errors import FormatError, KVDepotError
from kvdepot.format.record import PAGE, record_sizes
from kvdepot.format.segment import parse_slots
from kvdepot.io.breaker import Health
from kvdepot.io.files import Files
from kvdepot.volumes.log.health import LogHealth
from kvdepot.volumes.log.measuring import Measuring
from kvdepot.volumes.log.medium import MountSettings, cannot_use, mount
from kvdepot.volumes.log.reader import LogReader, ThroughputMeter
from kvdepot.volumes.log.recovery import Recovered, contents_of, recover
from kvdepot.volumes.log.segments import Appender, SegmentSet, Syncer
from kvdepot.volumes.log.wear import Wear

_LOOK_S: Final = 1.0
_DAMAGE_LOGGED_MAX: Final = 8
_log: Final = logging.getLogger("kvdepot.volumes")


class LogVolume:
    """One directory or block device. Implements core.volume.Volume."""

    def __init__(
        self,
        path: Path,
        files: Files,
        settings: MountSettings,
        context: VolumeContext,
        meters: list[ThroughputMeter],
    ) -> None:
        """Open the volume and read its contents. The caller owns `files`. `meters` are those of
        comparable volumes.

        Raises ConfigError, FormatError, StoreBusyError or UnsafePathError, and then leaves nothing
        open.
        """
        settings = replace(settings, writable=settings.writable and context.writable)
        if context.capacity_bytes is not None:
            settings = replace(settings, capacity_bytes=context.capacity_bytes)
        mounted = mount(path, files, settings)
        self._settings = mounted.settings
        self._medium = mounted.medium
        self._closed = False
        label, started_s = mounted.medium.label, context.clock.now()
        self.health = LogHealth(label, context.clock, settings.pauses, context.on_change)
        self.damage = list(mounted.damage)
        """Descriptions of damage."""
        self.metadata = mounted.open_metadata(context.stamps)
        self.damage += [f"{label}: {text}" for text in self.metadata.damage]
        self.segment_set = SegmentSet(mounted, self.metadata, files, self.health)
        try:
            if not self.metadata.is_whole:
                raise FormatError(
                    label,
                    "the metadata is damaged in both copies, so that removals may be lost",
                    hint=f"kvdepot check --repair {label}",
                )
            found = recover(self.segment_set, self.damage)
        except OSError as error:
            self._close_files()
            raise cannot_use(label, settings, error) from error
        except KVDepotError:
            self._close_files()
            raise
        self._contents: Contents | None = contents_of(self.segment_set, found)
        self._log_opening(found, context.clock.now() - started_s)
        daily_bytes = settings.daily_bytes if settings.writable else 0
        self.wear = Wear(self.metadata, self.health.breaker, daily_bytes, context.wall)
        self._syncer = Syncer(self.segment_set)
        self._appender = Appender(self.segment_set, self._syncer, self.wear)
        if settings.writable:
            self._begin_writing(found)
        self.reader = LogReader(
            self.segment_set, context.clock, meters,
            name=f"kvdepot-{path.name}", has_head=settings.contiguous_bytes > 0,
        )  # fmt: skip
        self.append, self.read = self._appender.append, self.reader.read
        self._measuring = Measuring(self.segment_set, self.reader, self.wear, context.clock)

    def facts(self, *, details: bool = False) -> VolumeFacts:
        segments, health, settings = self.segment_set, self.health, self._settings
        breaker, meter, wear = health.breaker, self.reader.meter, self.wear
        state = Health(True, "", breaker.errors) if breaker.closed else breaker.health()
        full = not health.room.closed
        usable = state.ok and self._appender.may_write and not health.lost
        asked_lately = full and health.room.health().retry_in_s > 0
        segment_bytes = settings.segment_bytes
        profile, usage = meter.profile, segments.usage()
        return VolumeFacts(
            label=self._medium.label,
            up=state.ok,
            takes_blocks=usable and not asked_lately and not (wear.limited and wear.spent),
            may_write=self._appender.may_write,
            full=full,
            lost=health.lost,
            may_reopen=health.lost and self._medium.restorable(segments.header.store),
            reason=state.reason,
            errors=state.errors,
            retry_in_s=state.retry_in_s,
            capacity_bytes=segments.slots_max * segment_bytes,
            used_bytes=segments.live_bytes,
            held_bytes=usage.slots * segment_bytes,
            segment_bytes=segment_bytes,
            segments_max=segments.slots_max,
            spare_segments=usage.spare,
            surplus_segments=usage.surplus,
            room_bytes=usage.room_bytes,
            record_bytes_max=segments.record_bytes_max,
            writes=usage.writes,
            read_bytes_per_s=profile.read_bytes_per_s if profile and profile.direct_io else 0.0,
            queued_bytes=meter.queued_bytes,
            contiguous_bytes=settings.contiguous_bytes,
            writers=1 if settings.contiguous_bytes else 2,
            is_durable=settings.writable and settings.fsync != "never",
            identity=segments.header.store,
            oldest_segment=usage.oldest,
            may_hold=self._may_hold,
            budget=WriteBudget(int(wear.bucket_bytes), int(wear.level_bytes))
            if wear.limited
            else None,
            details=self._details() if details else {},
        )

    def _may_hold(self, keys: Keys) -> Bools:
        """See core.volume.VolumeFacts.may_hold."""
        with self.segment_set.state_lock:
            search = self.segment_set.held.search()
        return search.may_hold(keys)

    def discard(self, places: Ints, payload_bytes: Ints) -> None:
        sizes = record_sizes(payload_bytes)
        with self.segment_set.state_lock:
            for place, nbytes in zip(places.tolist(), sizes.tolist(), strict=True):
                self.segment_set.count(segment_of(place), -nbytes, -1)

    def segments(self) -> SegmentTable:
        with self.segment_set.state_lock:
            return segment_table(
                (one.segment_id, one.slot, one.live_count, one.live_bytes, one.sealed)
                for one in self.segment_set.by_slot.values()
            )

    def release(self, segment: int) -> bool:
        if not self._syncer.sync(self._settings.write_timeout_s):
            return False
        if self.segment_set.release(segment):
            self._syncer.forget(segment)
        return True

    def put_meta(self, entries: Sequence[MetaEntry]) -> bool:
        if not self.health.works or self._closed:
            return False
        try:
            self.metadata.put(entries)
        except OSError as error:
            self.health.write_failed(error)
            return False
        return True

    def sync(self, timeout_s: float) -> bool:
        if not self._syncer.sync(timeout_s):
            return False
        with self.segment_set.files.descriptors.use():
            if not self._medium.intact(every_slot=True):  # durable data was lost with it
                self.health.lose()
                return False
        return self._syncer.is_proven

    def contents(self, since: int | None, *, look: bool = False) -> Contents:
        del look  # no other node writes here
        found, self._contents = self._contents, None
        if since is not None:
            return no_contents(since)
        known = self.metadata.snapshot().all()
        entries = [entry for entry in known if entry.kind not in OWN_KINDS]
        return no_contents(0, entries) if found is None else replace(found, metadata=entries)

    def set_limits(self, capacity_bytes: int | None, *, may_write: bool) -> None:
        segments = self.segment_set
        with segments.append_lock:
            self._appender.may_write = may_write and self._settings.writable
        if capacity_bytes is None:
            return
        segments.set_slots_max(capacity_bytes // self._settings.segment_bytes)
        if not segments.slots_max:
            self._give_back()
        else:
            segments.trim()

    def maintain(self, is_quiet: Callable[[], bool]) -> float:
        health, settings = self.health, self._settings
        if health.lost or self._closed:
            return _LOOK_S
        with self.segment_set.files.descriptors.use():
            if not self._medium.intact(every_slot=True):
                health.lose()
            elif not health.breaker.closed:
                self._try_out()
            elif settings.writable:
                self._try_for_room()
                if self.segment_set.surplus():
                    self.segment_set.trim()
        if not self._appender.may_write and settings.writable:
            self._measuring.stop()
            return _LOOK_S
        retry_s = health.breaker.health().retry_in_s or _LOOK_S
        return min(retry_s, _LOOK_S, self._measuring.work(is_quiet))

    def close(self) -> None:
        if self._closed:
            return
        self._measuring.stop()
        self._closed = True
        self.reader.close()
        with self.segment_set.append_lock:
            with self.segment_set.state_lock:
                active, self.segment_set.active = self.segment_set.active, None
            if active is not None and self.health.works:
                self._appender.finish(active, sealed=False)  # so that the next start need not scan
            if self.segment_set.slots_max and not self.health.lost:
                self.wear.keep()
            if self.health.lost:
                self.segment_set.by_slot.clear()  # reads fail from now on
            self._close_files()

    def _log_opening(self, found: Sequence[Recovered], seconds: float) -> None:
        label, damage = self._medium.label, self.damage
        scanned = sum(segment.scanned for segment in found)
        _log.log(
            logging.WARNING if scanned and self._settings.writable else logging.INFO,
            "%s: %d blocks in %d segments found in %.1f s; %d were scanned after a crash",
            label,
            len(self._contents.words) if self._contents else 0,
            len(found),
            seconds,
            scanned,
        )
        for text in damage[:_DAMAGE_LOGGED_MAX]:
            _log.warning("damage: %s", text)
        if len(damage) > _DAMAGE_LOGGED_MAX:
            _log.warning("damage: %s: %d in all", label, len(damage))

    def _begin_writing(self, found: Sequence[Recovered]) -> None:
        """Record the stamp at which writing begins, before the first use of a stamp. Then continue
        the newest open segment, and seal all others.
        """
        segments, metadata = self.segment_set, self.metadata
        before = metadata.own(MetaKind.OPENED)
        stamp = segments.metadata.stamps.open(before.stamp if before is not None else 0)
        try:
            metadata.put([MetaEntry(MetaKind.OPENED, b"", stamp, b"")])
            there = {*segments.by_slot, *segments.free}
            slots = metadata.own(MetaKind.SLOTS)
            if slots is not None:  # a missing file may be put back
                segments.held.unknown |= parse_slots(slots.value or b"") - there
            metadata.release(set(segments.free) - segments.held.unknown)
            segments.note_slots(there)
            metadata.sync()
        except OSError as error:
            segments.held.unknown |= set(segments.free)
            self.health.breaker.failed(str(error.strerror), at_once=True)
        still_open = [recovered for recovered in found if not recovered.sealed]
        newest = max(still_open, key=lambda one: one.segment_id, default=None)
        for recovered in still_open:
            segment = segments.by_slot[recovered.slot]
            self._syncer.written({recovered.slot})  # a killed process may not have synced it
            segment.entries = [recovered.entries]
            if recovered is newest and segments.has_room(segment, PAGE):
                segments.active = segment
            else:
                self._appender.finish(segment, sealed=True)

    def _details(self) -> dict[str, Any]:
        meter, segments = self.reader.meter, self.segment_set
        return {
            "segments": len(segments.by_slot),
            "free_segments": len(segments.free),
            "direct_io": self._medium.direct,
            "emulated": self._measuring.is_emulated,
            "read_bytes_per_s": round(meter.bytes_per_s),
            "profile": asdict(meter.profile) if meter.profile else None,
            "of_profile": meter.of_profile,
            "damage": list(self.damage),
            "written": self.wear.describe(),
        }

    def _give_back(self) -> None:
        """Delete all segments and the metadata. Waits for running writes until they end or time
        out.
        """
        segments = self.segment_set
        with segments.state_lock:
            segments.state_lock.wait_for(
                lambda: not any(one.writes for one in segments.by_slot.values()),
                self._settings.write_timeout_s,
            )
        for segment in list(segments.by_slot):
            segments.release(segment)
            self._syncer.forget(segment)
        segments.trim()
        try:
            if not self.health.lost:
                self.metadata.clear()
        except OSError as error:
            self.health.write_failed(error)

    def _try_out(self) -> None:
        """Test a failed volume after its pause by a write and a read."""
        breaker, segments = self.health.breaker, self.segment_set
        if not breaker.allows():
            return
        if self._settings.writable:
            errors = breaker.errors
            borrowed = segments.borrow_free_segment()
            if borrowed is not None:
                segments.return_segment(borrowed)
            if breaker.errors != errors or segments.is_stuck():
                return
        if self.reader.try_to_read():
            return
        try:
            self._medium.read_headers()
        except (OSError, FormatError) as error:
            breaker.failed(str(error), at_once=True)
        else:
            breaker.succeeded()

    def _try_for_room(self) -> None:
        """Test after pauses if a full disk has room again. Until then nothing is reclaimed."""
        room = self.health.room
        if room.closed or not room.allows():
            return
        try:
            self._medium.write_superblock(self.segment_set.header)
        except OSError as error:
            self.health.write_failed(error)
        else:
            room.succeeded()

    def _close_files(self) -> None:
        self.metadata.close()
        self._medium.close()
