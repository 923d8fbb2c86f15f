"""A writer's own manifests: published together, merged, and rewritten as blocks leave them.

What was published is durable and seen by every node at its next refresh. A data object is deleted
only a grace period after the manifest that lists it was replaced, so that a reader that has begun
comes to its end.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvdepot.core.clock import Clock
from kvdepot.core.metadata import Tombstone
from kvdepot.volumes.object.bucket import Bucket, BucketError
from kvdepot.volumes.object.contents import BucketContents
from kvdepot.volumes.object.manifest import Entry, ManifestName

_MERGED_ROWS: Final = 4096
"""A manifest with so many rows is not merged with others any more."""
_SMALL_MAX: Final = 4
"""There are never more small ones than this."""


@dataclass(slots=True)
class Submission:
    """Something to publish, and whether it was."""

    entry: Entry
    done: bool = False
    error: BucketError | None = None


@dataclass(slots=True)
class Trash:
    """Objects that nothing refers to any more. Thread-safe."""

    clock: Clock
    grace_s: float
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _due: dict[str, float] = field(default_factory=dict)

    def add(self, paths: Iterable[str]) -> None:
        due_s = self.clock.now() + self.grace_s
        with self._lock:
            for path in paths:
                self._due.setdefault(path, due_s)

    def __contains__(self, path: str) -> bool:
        return path in self._due

    def __len__(self) -> int:
        return len(self._due)

    def empty(self, bucket: Bucket) -> None:
        """Delete what was thrown away a grace period ago."""
        now_s = self.clock.now()
        with self._lock:
            due = [path for path, due_s in self._due.items() if due_s <= now_s]
        if due:
            bucket.delete(due)
        with self._lock:
            for path in due:
                self._due.pop(path, None)


class OwnManifests:
    """What this writer has published. Thread-safe; one request to publish at a time."""

    def __init__(
        self, bucket: Bucket, contents: BucketContents, trash: Trash, tombstone_age_s: float
    ) -> None:
        self._bucket = bucket
        self._contents = contents
        self._trash = trash
        self._tombstone_age_s = tombstone_age_s
        """How long a removal is kept; 0: for good."""
        self._writer = contents.writer
        self._lock = threading.Lock()
        """Held while a manifest is written."""
        self._queue_lock = threading.Lock()
        self._queue: list[Submission] = []
        self._untold: dict[bytes, bytes] = {}
        """Descriptions of namespaces that go out with the next manifest."""
        self._entries: dict[ManifestName, Entry] = {}
        self._number = 0
        self._generation = 0
        self._dirty: set[ManifestName] = set()
        self._dropped: set[str] = set()
        """Data objects that are to leave their manifests, and then the bucket."""
        self.published: Callable[[], object] = bool
        """Called when other nodes can see something new."""

    def names(self) -> tuple[list[ManifestName], int]:
        """All that are in force, and the last generation given out; none is being written."""
        with self._lock:
            return list(self._entries), self._generation

    def publish(self, entry: Entry) -> None:
        """Make an entry known to all, together with what other threads publish now.

        Raises BucketError.
        """
        mine = Submission(entry)
        with self._queue_lock:
            self._queue.append(mine)
        with self._lock:
            if not mine.done:
                with self._queue_lock:
                    batch, self._queue = self._queue, []
                self._write_batch(batch)
        if mine.error is not None:
            raise mine.error

    def describe_namespace(self, tag: bytes, description: bytes) -> None:
        """Tell what a tag stands for with the next manifest: with its first blocks at the latest,
        and no caller waits for the bucket."""
        with self._queue_lock:
            self._untold[tag] = description

    def publish_descriptions(self) -> None:
        """Write down those that wait for a manifest. Raises BucketError."""
        if self._untold:
            self.publish(Entry())

    def _write_batch(self, batch: Sequence[Submission]) -> None:
        error = None
        with self._queue_lock:
            untold = dict(self._untold)
        entries = [submission.entry for submission in batch]
        entry = Entry.joined([Entry(descriptions=untold), *entries])
        try:
            if len(entry):  # else another manifest has taken the descriptions along
                self._write(entry)
        except BucketError as failure:
            error = failure
        for submission in batch:
            submission.done, submission.error = True, error
        if error is None and len(entry):
            self._told(untold)
            self.published()

    def _write(self, entry: Entry) -> None:
        self._number += 1
        small = self._small_tail()
        if len(small) < _SMALL_MAX - 1:
            self._create(self._number, self._number, entry)
        else:  # no request more than without it
            self._replace(small, set(), 0.0, entry)

    def _told(self, descriptions: dict[bytes, bytes]) -> None:
        with self._queue_lock:
            for tag, text in descriptions.items():
                if self._untold.get(tag) == text:
                    del self._untold[tag]

    def _create(self, first: int, last: int, entry: Entry) -> None:
        self._generation += 1
        name = ManifestName(self._writer, first, last, self._generation)
        self._bucket.create(name.path, entry.pack())
        self._entries[name] = entry

    def drop(self, path: str) -> None:
        """A data object is to leave the bucket; `rewrite` does it."""
        with self._queue_lock:
            self._dropped.add(path)

    def forget(self, names: Iterable[ManifestName]) -> list[str]:
        """Manifests that are in the bucket no more. Returns the data objects that they listed."""
        with self._lock:
            gone = [self._entries.pop(name) for name in names if name in self._entries]
            self._dirty &= self._entries.keys()
        return [one.path for entry in gone for one in entry.objects]

    def recheck(self) -> None:
        """Records were removed: manifests that list them are written again."""
        with self._lock:
            for name, entry in self._entries.items():
                if any(not self._contents.standing(one.records).all() for one in entry.objects):
                    self._dirty.add(name)

    def rewrite(self, now_s: float, *, idle: bool) -> None:
        """Bring manifests up to date, and merge small ones. Raises BucketError."""
        with self._lock:
            with self._queue_lock:
                dropped = set(self._dropped)
            stale = {
                name
                for name, entry in self._entries.items()
                if name in self._dirty
                or any(self._is_gone(one.path, dropped) for one in entry.objects)
            }
            small = self._small_tail()
            if len(small) >= (2 if idle else _SMALL_MAX) or stale.intersection(small):
                stale.difference_update(small)
                self._replace(small, dropped, now_s)
            for name in stale:
                self._replace([name], dropped, now_s)
            with self._queue_lock:
                self._dropped -= dropped
        self._trash.add(dropped)

    def _small_tail(self) -> list[ManifestName]:
        found: list[ManifestName] = []
        for name in sorted(self._entries, reverse=True):
            if len(self._entries[name]) >= _MERGED_ROWS:
                break
            found.append(name)
        return found

    def _replace(
        self, names: list[ManifestName], dropped: set[str], now_s: float, more: Entry | None = None
    ) -> None:
        """One manifest, with `more` in it, instead of several."""
        old = Entry.joined([*(self._entries[name] for name in sorted(names)), more or Entry()])
        entry = Entry(descriptions=old.descriptions)
        for one in old.objects:
            standing = self._contents.standing(one.records)
            if not self._is_gone(one.path, dropped) and standing.any():
                entry.objects.append(one.only(standing))
        age_s = self._tombstone_age_s
        newest = {one.name: one for one in sorted(old.tombstones, key=_below)}
        entry.tombstones = [
            one for one in newest.values() if not age_s or one.recorded / 1e6 + age_s > now_s
        ]
        if len(entry):
            first, last = min(name.first for name in names), max(name.last for name in names)
            self._create(first, last if more is None else self._number, entry)
            self._trash.add(name.path for name in names)
        else:
            self._bucket.delete([name.path for name in names])
        for name in names:
            del self._entries[name]
            self._dirty.discard(name)

    def _is_gone(self, path: str, dropped: set[str]) -> bool:
        """Whether a data object is to leave its manifest, or was found to be missing."""
        return path in dropped or path not in self._contents.objects

    def tombstones(self) -> set[bytes]:
        """Names of own tombstones that are still told to others."""
        with self._lock:
            entries = list(self._entries.values())
        return {one.name for entry in entries for one in entry.tombstones}

    def descriptions(self) -> dict[bytes, bytes]:
        """Takes no lock: a manifest that a lost server keeps waiting must not keep callers waiting.

        What is being replaced is there until what replaces it is.
        """
        with self._queue_lock:
            untold = dict(self._untold)  # before the manifests, which they move to
        return Entry.joined(list(self._entries.values())).descriptions | untold


def _below(tombstone: Tombstone) -> int:
    return tombstone.below
