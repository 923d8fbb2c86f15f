"""The manifests of this writer: published, merged, and rewritten without dropped objects.

A published manifest is durable, and every node reads it at its next refresh. A data object is
deleted a grace period after it left its manifest, so that running reads can end.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvdepot.core.clock import Clock
from kvdepot.core.metadata import MetaEntry, MetaKind
from kvdepot.volumes.object.bucket import Bucket, BucketError
from kvdepot.volumes.object.contents import BucketContents
from kvdepot.volumes.object.manifest import Manifest, ManifestName

_MERGED_ROWS: Final = 4096
"""Rows from which a manifest is not merged any more."""
_SMALL_MAX: Final = 4
"""Most small manifests; more are merged."""


@dataclass(slots=True)
class Submission:
    """A manifest that waits to be published, and the result of that."""

    manifest: Manifest
    done: bool = False
    error: BucketError | None = None


@dataclass(slots=True)
class Trash:
    """Objects that are deleted after a grace period. Thread-safe."""

    clock: Clock
    grace_s: float
    nbytes: int = 0
    """Bytes of the data objects whose sizes are known."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _due: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, paths: Iterable[str], sizes: Mapping[str, int] | None = None) -> None:
        """`sizes`: bytes of data objects."""
        due_s = self.clock.now() + self.grace_s
        with self._lock:
            for path in paths:
                if path not in self._due:
                    nbytes = sizes[path] if sizes else 0
                    self._due[path] = due_s, nbytes
                    self.nbytes += nbytes

    def keep(self, paths: Iterable[str]) -> None:
        """Remove objects from the trash."""
        with self._lock:
            for path in paths:
                self.nbytes -= self._due.pop(path, (0.0, 0))[1]

    def __contains__(self, path: str) -> bool:
        return path in self._due

    def paths(self) -> list[str]:
        return list(self._due)

    def empty(self, bucket: Bucket, early_bytes: int = 0) -> None:
        """Delete the objects whose grace period is over, and the oldest others of known size until
        `early_bytes` are deleted. Raises BucketError.
        """
        now_s = self.clock.now()
        due: list[str] = []
        with self._lock:
            for path, (due_s, nbytes) in self._due.items():
                if due_s <= now_s or (nbytes and early_bytes > 0):
                    due.append(path)
                    early_bytes -= nbytes
        if due:
            bucket.delete(due)
            self.keep(due)


class OwnManifests:
    """The manifests of this writer. Thread-safe; one manifest is written at a time."""

    def __init__(
        self, bucket: Bucket, contents: BucketContents, trash: Trash, tombstone_age_s: float
    ) -> None:
        self._bucket = bucket
        self._contents = contents
        self.trash = trash
        self._tombstone_age_s = tombstone_age_s
        """Age at which tombstones are dropped; 0: never."""
        self._lock = threading.Lock()
        """Held while a manifest is written."""
        self._queue_lock = threading.Lock()
        """Guards the three fields below; held briefly."""
        self._queue: list[Submission] = []
        self._described: dict[bytes, MetaEntry] = {}
        """Descriptions of namespaces to publish with the next manifest, by tag."""
        self._dropped: dict[str, int] = {}
        """Data objects to remove from their manifests, and then from the bucket; their bytes."""
        self.in_force: dict[ManifestName, Manifest] = {}
        """The manifests in force. Changed only with `_lock`. A new manifest is added before those
        that it replaces are removed."""
        self._number = 0
        self._generation = 0
        self._dirty: set[ManifestName] = set()
        self.on_published: Callable[[], object] = bool
        """Called after each written manifest."""

    def names(self) -> tuple[list[ManifestName], int]:
        """The manifests in force, and the last generation. Waits for one that is being written."""
        with self._lock:
            return list(self.in_force), self._generation

    def metadata(self) -> Manifest:
        """Metadata that is published or waits to be. Does not block."""
        with self._queue_lock:
            waiting = list(self._described.values())  # first, because they move to the manifests
        return Manifest.joined([*list(self.in_force.values()), Manifest(metadata=waiting)])

    def publish(self, manifest: Manifest) -> None:
        """Write a manifest, merged with those of other threads. Blocks. Raises BucketError."""
        submission = Submission(manifest)
        with self._queue_lock:
            self._queue.append(submission)
        with self._lock:
            if not submission.done:
                with self._queue_lock:
                    batch, self._queue = self._queue, []
                self._write_batch(batch)
        if submission.error is not None:
            raise submission.error

    def describe_namespace(self, entry: MetaEntry) -> None:
        """Publish a description with the next manifest: with the first blocks of the namespace at
        the latest. Does not block.
        """
        with self._queue_lock:
            self._described[entry.name] = entry

    def publish_descriptions(self) -> None:
        """Publish descriptions that wait for a manifest. Raises BucketError."""
        if self._described:
            self.publish(Manifest())

    def drop(self, path: str, nbytes: int = 0) -> None:
        """Remove a data object of `nbytes` from its manifest and the bucket, at the next
        `rewrite`.
        """
        with self._queue_lock:
            self._dropped[path] = nbytes

    @property
    def dropped_bytes(self) -> int:
        """Bytes of dropped data objects that are still in the bucket."""
        with self._queue_lock:
            return sum(self._dropped.values()) + self.trash.nbytes

    def forget(self, names: Iterable[ManifestName]) -> list[str]:
        """Remove manifests that others have deleted. Returns the paths of their data objects."""
        with self._lock:
            gone = [self.in_force.pop(name) for name in names if name in self.in_force]
            self._dirty &= self.in_force.keys()
        return [path for manifest in gone for path in manifest.paths]

    def recheck(self) -> None:
        """Mark manifests with removed records for the next `rewrite`."""
        with self._lock:
            for name, manifest in self.in_force.items():
                if any(not self._contents.standing(one.records).all() for one in manifest.objects):
                    self._dirty.add(name)

    def rewrite(self, now_s: float) -> None:
        """Write changed manifests again, and merge small ones. Raises BucketError."""
        with self._lock:
            with self._queue_lock:
                dropped = dict(self._dropped)
            stale = {
                name
                for name, manifest in self.in_force.items()
                if name in self._dirty or any(self._is_gone(one, dropped) for one in manifest.paths)
            }
            small = self._small_tail()
            if len(small) >= 2 or stale.intersection(small):
                stale.difference_update(small)
                self._replace(small, dropped.keys(), now_s)
            for name in stale:
                self._replace([name], dropped.keys(), now_s)
            self.trash.add(dropped, dropped)
            with self._queue_lock:
                for path in dropped:
                    del self._dropped[path]

    def _write_batch(self, batch: Sequence[Submission]) -> None:
        with self._queue_lock:
            described = dict(self._described)
        parts = [Manifest(metadata=list(described.values())), *(one.manifest for one in batch)]
        manifest, error = Manifest.joined(parts), None
        try:
            if len(manifest):  # else the descriptions were published already
                self._write(manifest)
        except BucketError as failure:
            error = failure
        for submission in batch:
            submission.done, submission.error = True, error
        if error is None and len(manifest):
            with self._queue_lock:
                for tag, entry in described.items():
                    if self._described.get(tag) is entry:
                        del self._described[tag]
            self.on_published()

    def _write(self, manifest: Manifest) -> None:
        self._number += 1
        small = self._small_tail()
        if len(small) < _SMALL_MAX - 1:
            self._create(self._number, self._number, manifest)
        else:  # merging costs no further request
            self._replace(small, set(), 0.0, manifest)

    def _small_tail(self) -> list[ManifestName]:
        small: list[ManifestName] = []
        for name in sorted(self.in_force, reverse=True):
            if len(self.in_force[name]) >= _MERGED_ROWS:
                break
            small.append(name)
        return small

    def _replace(
        self,
        names: list[ManifestName],
        dropped: Collection[str],
        now_s: float,
        more: Manifest | None = None,
    ) -> None:
        """Replace several manifests by one, which also contains `more`."""
        old = Manifest.joined(
            [*(self.in_force[name] for name in sorted(names)), more or Manifest()]
        )
        oldest = (now_s - self._tombstone_age_s) * 1e6 if self._tombstone_age_s else 0.0
        kept = [
            one
            for one in old.metadata
            if one.stamp > oldest or (one.kind is not MetaKind.TOMBSTONE and one.value is not None)
        ]
        manifest = Manifest(metadata=kept)
        for one in old.objects:
            standing = self._contents.standing(one.records)
            if not self._is_gone(one.path, dropped) and standing.any():
                manifest.objects.append(one.only(standing))
        if len(manifest):
            first, last = min(name.first for name in names), max(name.last for name in names)
            self._create(first, last if more is None else self._number, manifest)
            self.trash.add(name.path for name in names)
        else:
            self._bucket.delete([name.path for name in names])
        for name in names:
            del self.in_force[name]
            self._dirty.discard(name)

    def _create(self, first: int, last: int, manifest: Manifest) -> None:
        self._generation += 1
        name = ManifestName(self._contents.writer, first, last, self._generation)
        self._bucket.create(name.path, manifest.pack())
        self.in_force[name] = manifest

    def _is_gone(self, path: str, dropped: Collection[str]) -> bool:
        """True if a data object is to leave its manifest, or is missing in the bucket."""
        return path in dropped or path not in self._contents.objects
