"""A volume that keeps records in append-only segments: in a directory or on a block device.

Segments, their room and their locks: segments.py. Writing and durability: appender.py. Reading:
reader.py. What a volume knows beside blocks: metadata.py. After a crash: recovery.py.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvdepot.core.metadata import MetaEntry, MetaKind
from kvdepot.core.volume import (
    Contents,
    Ints,
    SegmentTable,
    VolumeContext,
    VolumeFacts,
    WriteBudget,
    no_contents,
    segment_of,
)
from kvdepot.errors import FormatError, KVDepotError
from kvdepot.format.record import HEAD_BYTES, PAGE, record_sizes
from kvdepot.io.breaker import Health
from kvdepot.io.files import Files
from kvdepot.io.speed import Profile, ThroughputMeter
from kvdepot.volumes.log.appender import Appender, Syncer
from kvdepot.volumes.log.health import LogHealth
from kvdepot.volumes.log.measuring import Measuring
from kvdepot.volumes.log.medium import MountSettings, known_superblock
from kvdepot.volumes.log.metadata import MetadataLog
from kvdepot.volumes.log.mount import Mounted, cannot_use, mount
from kvdepot.volumes.log.reader import LogReader
from kvdepot.volumes.log.recovery import Recovered, contents_of, recover
from kvdepot.volumes.log.segments import SegmentSet
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
        """Open the volume and read what it holds. `files` stay the caller's. `meters` are those of
        the volumes that are compared with this one.

        Raises ConfigError, FormatError, StoreBusyError or UnsafePathError; then nothing is held.
        """
        if context.capacity_bytes is not None:
            settings = replace(settings, capacity_bytes=context.capacity_bytes)
        mounted = mount(path, files, settings)
        self._settings = mounted.settings
        self._context = context
        self._medium = mounted.medium
        self.health = LogHealth(
            mounted.medium.label, context.clock, settings.pauses, context.on_change
        )
        self.damage = list(mounted.damage)
        """What was found damaged, for people."""
        copies = mounted.medium.metadata_copies(mounted.settings.segment_bytes, mounted.slots_max)
        self.metadata = MetadataLog(
            copies, mounted.store, fsync=settings.fsync, timeout_s=settings.write_timeout_s
        )
        self.segment_set = SegmentSet(
            mounted.medium, files, mounted.settings, mounted.store, mounted.slots_max,
            context.stamps, self.health,
        )  # fmt: skip
        self._closed = False
        started_s = context.clock.now()
        try:
            self._open_metadata(mounted)
            found = recover(self.segment_set, self.metadata.known.floor, self.damage)
        except OSError as error:
            self._close_files()
            raise cannot_use(path, settings, error) from error
        except KVDepotError:
            self._close_files()
            raise
        self._contents: Contents | None = contents_of(self.segment_set, found)
        self._log_opening(found, context.clock.now() - started_s)
        daily_bytes = settings.daily_bytes if settings.writable else 0
        self.wear = Wear(mounted.medium, self.health.breaker, daily_bytes, settings.wall)
        self._syncer = Syncer(self.segment_set, self.metadata)
        self._appender = Appender(self.segment_set, self._syncer, self.wear)
        if settings.writable:
            self._begin_writing(mounted, found)
        self.reader = LogReader(
            self.segment_set, context.clock, meters,
            name=f"kvdepot-{path.name}", has_head=settings.contiguous_bytes > 0,
        )  # fmt: skip
        self.append, self.read = self._appender.append, self.reader.read
        self._measuring = Measuring(
            self.segment_set, self.reader, self.wear, context.clock, self._profile(), self._keep
        )

    def facts(self, *, details: bool = False) -> VolumeFacts:
        segments, health, settings = self.segment_set, self.health, self._settings
        breaker, meter, wear = health.breaker, self.reader.meter, self.wear
        state = Health(True, "", breaker.errors) if breaker.closed else breaker.health()
        full = not health.room.closed
        usable = state.ok and self._appender.may_write and not health.lost
        asked_lately = full and health.room.health().retry_in_s > 0
        segment_bytes = settings.segment_bytes
        profile = meter.profile
        return VolumeFacts(
            label=self._medium.label,
            up=state.ok,
            takes_blocks=usable and not asked_lately and not (wear.limited and wear.spent),
            may_write=self._appender.may_write,
            full=full,
            lost=health.lost,
            may_reopen=health.lost and self._medium.restorable(),
            reason=state.reason,
            errors=state.errors,
            retry_in_s=state.retry_in_s,
            capacity_bytes=segments.slots_max * segment_bytes,
            used_bytes=segments.live_bytes,
            held_bytes=segments.slot_count() * segment_bytes,
            segment_bytes=segment_bytes,
            segments_max=segments.slots_max,
            spare_segments=segments.spare_slots(),
            surplus_segments=segments.surplus(),
            room_bytes=segments.room_bytes(),
            record_bytes_max=segments.record_bytes_max,
            writes=sum(segment.writes for segment in list(segments.by_slot.values())),
            read_bytes_per_s=profile.read_bytes_per_s if profile and profile.direct_io else 0.0,
            queued_bytes=meter.queued_bytes,
            contiguous_bytes=settings.contiguous_bytes,
            writers=1 if settings.contiguous_bytes else 2,
            is_durable=settings.writable and settings.fsync != "never",
            identity=segments.store,
            oldest_segment=segments.oldest(),
            budget=self._budget() if wear.limited else None,
            details=self._details() if details else {},
        )

    def discard(self, places: Ints, payload_bytes: Ints) -> None:
        sizes = record_sizes(payload_bytes)
        with self.segment_set.state_lock:
            for place, nbytes in zip(places.tolist(), sizes.tolist(), strict=True):
                self.segment_set.count(segment_of(place), -nbytes, -1)

    def segments(self) -> SegmentTable:
        with self.segment_set.state_lock:
            found = sorted(self.segment_set.by_slot.values(), key=lambda one: one.segment_id)
            return SegmentTable(
                np.array([one.slot for one in found], np.int64),
                np.array([one.segment_id for one in found], np.int64),
                np.array([one.live_count for one in found], np.int64),
                np.array([one.live_bytes for one in found], np.int64),
                np.array([one.sealed for one in found], bool),
            )

    def release(self, segment: int) -> bool:
        if not self._syncer.sync(self._settings.write_timeout_s):
            return False
        if self.segment_set.release(segment) is not None:
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
            if not self._medium.complete():  # what was durable is not any more
                self.health.lose()
                return False
        return self._syncer.is_proven

    def contents(self, since: int | None, *, look: bool = False) -> Contents:
        del look  # no other node writes to it
        found, self._contents = self._contents, None
        if since is not None:
            return no_contents(since)
        entries = self.metadata.snapshot().all()
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
        segments.trim()

    def maintain(self, is_quiet: Callable[[], bool]) -> float:
        health, settings = self.health, self._settings
        if health.lost or self._closed:
            return _LOOK_S
        with self.segment_set.files.descriptors.use():
            if not (self._medium.intact() and self._medium.complete()):
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

    def _open_metadata(self, mounted: Mounted) -> None:
        """Read the metadata log, or make it before the superblock that says that there is one."""
        log, label = self.metadata, mounted.medium.label
        if mounted.is_new and mounted.settings.writable:
            log.create()
        elif not mounted.is_new:
            log.load()
            self.damage += [f"{label}: {text}" for text in log.damage]
        if mounted.settings.writable and (mounted.is_new or self.damage):
            mounted.medium.write_superblock(mounted.superblock)
        if not log.is_whole:
            raise FormatError(
                label,
                "the metadata is damaged in both copies: removed blocks may look alive",
                hint=f"kvdepot check --repair {label}",
            )
        known = (entry.stamp for entry in log.known.all())
        self._context.stamps.observe(max(mounted.superblock.opened, *known, 0))

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

    def _begin_writing(self, mounted: Mounted, found: Sequence[Recovered]) -> None:
        """Keep the stamp at which writing begins, before any is given out; then go on with the
        newest open segment, and seal every other one.
        """
        try:
            known = known_superblock(self._medium)
            if known is not None:
                opened = self._context.stamps.open(known.opened)
                self._medium.write_superblock(replace(known, opened=opened))
        except OSError as error:
            self.health.breaker.failed(str(error.strerror), at_once=True)
        still_open = [recovered for recovered in found if not recovered.sealed]
        newest = max(still_open, key=lambda one: one.segment_id, default=None)
        for recovered in still_open:
            segment = self.segment_set.by_slot[recovered.slot]
            self._syncer.written({recovered.slot})  # a killed process may not have synced it
            segment.entries = [recovered.entries]
            if recovered is newest and self.segment_set.has_room(segment, PAGE):
                self.segment_set.active = segment
            else:
                self._appender.finish(segment, sealed=True)

    def _profile(self) -> Profile | None:
        """How fast the volume is, if that was measured and kept."""
        text = self.metadata.known.values(MetaKind.PROFILE).get(b"")
        return Profile.parse(text) if text else None

    def _keep(self, profile: Profile) -> None:
        stamp = self._context.stamps.next()
        self.put_meta([MetaEntry(MetaKind.PROFILE, b"", stamp, profile.pack())])

    def _budget(self) -> WriteBudget:
        return WriteBudget(int(self.wear.bucket_bytes), int(self.wear.level_bytes))

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
        """Release all segments, and forget the metadata. Writes under way have their files until
        they end, or until the time is over.
        """
        segments = self.segment_set
        with segments.writes_done:
            segments.writes_done.wait_for(
                lambda: not any(one.writes for one in segments.by_slot.values()),
                self._settings.write_timeout_s,
            )
        for segment in self.segments().segments.tolist():
            segments.release(segment)
            self._syncer.forget(segment)
        try:
            if not self.health.lost:
                self.metadata.clear()
        except OSError as error:
            self.health.write_failed(error)

    def _try_out(self) -> None:
        """Write to and read from a volume whose pause is over, so that no request has to."""
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
            self._medium.read_superblock()
        except OSError as error:
            breaker.failed(str(error.strerror), at_once=True)
        else:
            breaker.succeeded()

    def _try_for_room(self) -> None:
        """Ask a disk that had no room now and then. Nothing is reclaimed before it has some."""
        room = self.health.room
        if room.closed or not room.allows():
            return
        try:
            known = known_superblock(self._medium)
            if known is not None:
                self._medium.write_superblock(known)
        except OSError as error:
            self.health.write_failed(error)
        else:
            room.succeeded()

    def _close_files(self) -> None:
        self.metadata.close()
        self._medium.close()


assert HEAD_BYTES == PAGE
