"""Opens, numbers and watches the volumes of a store.

The tombstones of all volumes are applied to the records of each before these are entered.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvdepot.config.settings import ObjectConfig
from kvdepot.core.metadata import OWN_KINDS, surviving
from kvdepot.core.volume import (
    SEGMENT_SHIFT,
    VOLUME_SHIFT,
    VOLUMES_MAX,
    Array,
    Change,
    Contents,
    Ints,
    OpenVolume,
    Volume,
    VolumeContext,
    VolumeFacts,
    volume_of,
)
from kvdepot.errors import ConfigError, DriveError, FormatError, KVDepotError, UnsafePathError
from kvdepot.store.shared_metadata import SharedMetadata
from kvdepot.store.volume_entry import VolumeEntry
from kvdepot.volumes.absent import AbsentVolume

_log = logging.getLogger("kvdepot.volumes")


@dataclass(frozen=True, slots=True)
class Blocks:
    """Recovered blocks as arrays, each key once."""

    words: Array
    """Keys, four u64 each."""
    locations: Ints
    payload_bytes: Ints
    stamps: Ints
    removals: int = 0
    """`SharedMetadata.removals` before the tombstones were applied."""

    def only(self, kept: Array, removals: int) -> "Blocks":
        words, sizes = self.words[kept], self.payload_bytes[kept]
        return Blocks(words, self.locations[kept], sizes, self.stamps[kept], removals)


class VolumeSet:
    """The volumes of a store. Thread-safe. Only `open_all` and `add` raise for a medium's fault."""

    def __init__(self, context: VolumeContext) -> None:
        """`context` is passed to every volume with an `on_change` for it."""
        self._context = context
        self.entries: list[VolumeEntry] = []
        self.down: set[int] = set()
        """Numbers of volumes that are known to be down."""
        self.woken = threading.Event()
        """Set when the state or contents of a volume have changed."""
        self.on_published: Callable[[], None] = nothing
        """Called when changes of this node were published."""
        self._lock = threading.Lock()
        """Guards the news of all volumes; held briefly."""
        self.metadata = SharedMetadata(
            lambda: self.entries, context.stamps, writable=context.writable
        )

    def __getitem__(self, number: int) -> Volume:
        return self.entries[number].volume

    @property
    def are_shared(self) -> bool:
        """True if a volume is shared with other nodes."""
        return any(entry.is_remote for entry in self.entries)

    @property
    def are_shared_down(self) -> bool:
        """True if there are volumes shared with other nodes, and all of them are down."""
        shared = [entry.number for entry in self.entries if entry.is_remote]
        return bool(shared) and self.down.issuperset(shared)

    def facts(self, number: int) -> VolumeFacts:
        return self.entries[number].volume.facts()

    def is_up(self, location: int) -> bool:
        """True unless the volume of this location is known to be down."""
        return volume_of(location) not in self.down

    def open_all(self, wanted: Sequence[tuple[str, str, OpenVolume]]) -> list[Blocks]:
        """Open volumes, given as tier, path and factory. Returns the blocks of each.

        A volume that cannot be used is left out and retried later. Raises if the settings are
        invalid, object.url names another format or objects of other programs, another process has
        a volume open, or no volume can be used; then all are closed.
        """
        for number, (tier, path, open_volume) in enumerate(wanted):
            absent = AbsentVolume(path, "not opened yet")
            self.entries.append(VolumeEntry(number, tier, path, open_volume, absent))
        fatal: KVDepotError | None = None
        with ThreadPoolExecutor(max(1, len(wanted)), "kvdepot-recovery") as threads:
            opening = [threads.submit(self._open, entry) for entry in self.entries]
        for entry, future in zip(self.entries, opening, strict=True):
            try:
                future.result()
                self.entered(entry)
            except FormatError as error:
                self._leave_out(entry, error)
                if entry.tier == ObjectConfig.TIER:
                    fatal = fatal or error  # no fault of a server: the setting names other data
            except (DriveError, UnsafePathError) as error:
                self._leave_out(entry, error)
            except KVDepotError as error:
                fatal = fatal or error
        fatal = fatal or self._none_works()
        if fatal is not None:
            for entry in self.entries:
                entry.volume.close()
            raise fatal
        contents = [self._learnt(entry, entry.volume.contents(None)) for entry in self.entries]
        self.metadata.compare()
        if self._context.writable:
            self.metadata.share()
        return [
            self._alive(entry, held) for entry, held in zip(self.entries, contents, strict=True)
        ]

    def reopen(self, entry: VolumeEntry) -> Blocks | None:
        """Open a lost volume again. Returns its blocks, which the caller enters into the index
        before it calls `entered`. None if it could not be opened.
        """
        before = entry.identity
        entry.volume.close()
        try:
            self._open(entry)
        except (KVDepotError, OSError) as error:
            self.down.add(entry.number)  # the closed volume has the time of the next try
            _log.debug("%s cannot be opened: %s", entry.path, error)
            return None
        entry.error = None
        contents = self._learnt(entry, entry.volume.contents(None))
        if entry.draining:
            entry.volume.set_limits(None, may_write=False)
        if self._context.writable:
            self.metadata.share(gone=before if before != entry.identity else b"")
        blocks = self._alive(entry, contents)
        _log.info("%s: opened again, %d blocks", entry.path, len(blocks.words))
        return blocks

    def entered(self, entry: VolumeEntry) -> None:
        """Called when the blocks of a reopened volume are in the index: lookups may use them."""
        (self.down.discard if entry.volume.facts().up else self.down.add)(entry.number)

    def add(self, tier: str, path: str, open_volume: OpenVolume) -> VolumeEntry:
        """Open one more volume. ConfigError if it is not empty."""
        free = next((one.number for one in self.entries if one.retired), len(self.entries))
        if free >= VOLUMES_MAX:
            raise ConfigError(f"{tier}.path", f"the store has {VOLUMES_MAX} volumes, the limit")
        absent = AbsentVolume(path, "not opened yet")
        entry = VolumeEntry(free, tier, path, open_volume, absent)
        self._open(entry)
        contents = entry.volume.contents(None)
        if len(contents.words) or any(one.kind not in OWN_KINDS for one in contents.metadata):
            entry.volume.close()
            raise ConfigError(f"{tier}.path", f"{path} holds a store", hint="empty it first")
        self.entries[free : free + 1] = [entry]
        self.entered(entry)
        self.metadata.share()
        return entry

    def retire(self, entry: VolumeEntry) -> bool:
        """Delete the data of an empty volume and close it. False: its metadata could not be copied
        to another volume, and nothing has changed.
        """
        self.metadata.share(gone=entry.identity)
        others = [one for one in self.metadata.local() if one is not entry]
        if all(one in self.metadata.behind() for one in others):
            return False
        entry.volume.set_limits(0, may_write=False)
        entry.volume.close()
        entry.retired = True
        self.down.discard(entry.number)
        self.metadata.forget(entry)
        return True

    def close(self) -> None:
        self.metadata.raise_floor()
        for entry in self.entries:
            entry.volume.close()

    def look(self) -> None:
        """Request a refresh of the volumes shared with other nodes. Does not block."""
        for entry in self.entries:
            if entry.is_remote:
                news = entry.volume.contents(entry.token, look=True)
                with self._lock:
                    entry.news.append(news)
                    entry.has_news = True

    def take_news(self, entry: VolumeEntry) -> list[tuple[Contents, Blocks]]:
        """Take the changes of other nodes on a volume: contents, and the blocks to enter."""
        with self._lock:
            parts, entry.news, entry.has_news = entry.news, [], False
        parts.append(entry.volume.contents(entry.token))
        return [(self._learnt(entry, part), self._alive(entry, part)) for part in parts]

    def describe(self, entry: VolumeEntry) -> dict[str, Any]:
        """The values for `stats`."""
        facts = entry.volume.facts(details=True)
        return {
            "path": facts.label,
            "healthy": facts.up,
            "reason": facts.reason,
            "errors": facts.errors,
            "full": facts.full,
            "draining": entry.draining,
            "drained": entry.retired,
            "used_bytes": facts.used_bytes,
            "capacity_bytes": facts.capacity_bytes,
            "retry_in_s": round(facts.retry_in_s, 3),
            "segment_bytes": facts.segment_bytes,
            "emulated": False,
            "profile": None,
            **facts.details,
        }

    def _open(self, entry: VolumeEntry) -> None:
        context = replace(
            self._context,
            capacity_bytes=entry.capacity_bytes,
            on_change=lambda change: self._changed(entry, change),
        )
        entry.volume = entry.open(context)
        facts = entry.volume.facts()
        entry.is_remote, entry.identity = facts.is_remote, facts.identity

    def _leave_out(self, entry: VolumeEntry, error: KVDepotError) -> None:
        hint = f" ({error.hint})" if error.hint else ""
        entry.error, entry.volume = error, AbsentVolume(entry.path, f"{error}{hint}")
        self.down.add(entry.number)
        _log.warning("%s: the volume cannot be used: %s", entry.path, error)

    def _none_works(self) -> KVDepotError | None:
        """The error if no volume could be opened, else None."""
        errors = [entry.error for entry in self.entries if entry.error is not None]
        if not errors or len(errors) < len(self.entries):
            return None
        if len(errors) == 1:
            return errors[0]
        reasons = "; ".join(map(str, errors))
        setting = f"{self.entries[0].tier}.path"
        return DriveError(setting, f"no drive works: {reasons}", hint=errors[0].hint)

    def _changed(self, entry: VolumeEntry, change: Change) -> None:
        if change is Change.PUBLISHED:
            self.on_published()
            return
        if change is Change.CONTENTS:
            entry.has_news = True
        elif entry.volume.facts().up:
            self.down.discard(entry.number)
        elif not entry.retired:
            self.down.add(entry.number)
        self.woken.set()

    def _learnt(self, entry: VolumeEntry, contents: Contents) -> Contents:
        entry.token = contents.token
        return replace(contents, metadata=self.metadata.learn(entry, contents))

    def _alive(self, entry: VolumeEntry, contents: Contents) -> Blocks:
        """The records that no tombstone deletes and whose segments are above the floor. Discards
        the others.
        """
        volume = entry.volume
        removals = self.metadata.removals
        stones, floor = self.metadata.tombstones()
        is_alive = np.zeros(len(contents.words), bool)
        is_alive[surviving(contents.words, contents.stamps, stones)] = True
        if not entry.is_remote:
            is_alive &= ~self._drop_below(entry, floor, contents.places)
        if not is_alive.all():
            volume.discard(contents.places[~is_alive], contents.payload_bytes[~is_alive])
        locations = (entry.number << VOLUME_SHIFT) + contents.places
        found = Blocks(contents.words, locations, contents.payload_bytes, contents.stamps)
        return found.only(is_alive, removals)

    def without_removed(self, entry: VolumeEntry, blocks: Blocks) -> Blocks:
        """Apply the removals that came since the blocks were looked at. With the store's lock, in
        the section that enters the blocks.
        """
        if self.metadata.removals == blocks.removals:
            return blocks
        stones, _ = self.metadata.tombstones()
        is_alive = np.zeros(len(blocks.words), bool)
        is_alive[surviving(blocks.words, blocks.stamps, stones)] = True
        places = blocks.locations[~is_alive] & ((1 << VOLUME_SHIFT) - 1)
        entry.volume.discard(places, blocks.payload_bytes[~is_alive])
        return blocks.only(is_alive, self.metadata.removals)

    def _drop_below(self, entry: VolumeEntry, floor: int, places: Ints) -> Array:
        """Release segments whose tombstones may have been dropped while the volume was detached.
        Returns True for the places in them.
        """
        table = entry.volume.segments()
        old = table.segments[table.ids <= floor]
        if not len(old):
            return np.zeros(len(places), bool)
        _log.warning("%s: was detached too long: %d segments were dropped", entry.path, len(old))
        for segment in old.tolist() if self._context.writable else ():
            entry.volume.release(segment)
        return np.isin(places >> SEGMENT_SHIFT, old)


def nothing() -> None:
    """Does nothing: no other node uses these volumes."""
