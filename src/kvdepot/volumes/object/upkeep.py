"""The background work on a bucket: read new manifests, write signs of life, adopt objects of dead
writers, drop old objects, delete garbage.

Clocks of nodes are not compared: a writer is dead if its sign of life has not changed for a grace
period of this node's clock.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final

from kvdepot.config.settings import ObjectConfig
from kvdepot.core.log import RateLimitedLog
from kvdepot.core.metadata import MetaEntry, MetaKind
from kvdepot.core.volume import Change, VolumeContext
from kvdepot.errors import FormatError, KVDepotError
from kvdepot.io.breaker import Breaker
from kvdepot.volumes.object.bucket import (
    Bucket,
    BucketError,
    Listed,
    MissingObjectError,
    ObjectExistsError,
    refusal,
)
from kvdepot.volumes.object.contents import BucketContents
from kvdepot.volumes.object.manifest import (
    ALIVE,
    DATA,
    FORMAT_PATH,
    MANIFEST_BYTES_MAX,
    VERSION,
    WRITERS,
    DamagedManifestError,
    Manifest,
    ManifestName,
    in_force,
    writer_below,
    writer_of_data,
)
from kvdepot.volumes.object.publishing import OwnManifests, Trash

_DOUBTS: Final = 2
"""Rounds in which missing own data objects are looked for: an object that was being written in the
first one is not in its listing."""
_SIGNS: Final = 3
"""Signs of life per grace period."""
_START_S: Final = 10.0
"""A store that opens waits this long for the first answer."""
_START_AGAIN_S: Final = 2.0
"""The longest pause between attempts to read the bucket for the first time."""
_LOOK_S: Final = 0.25
"""The least time between two requested refreshes."""
_log = RateLimitedLog("kvdepot.store")
_events = logging.getLogger("kvdepot.store")


class Writers:
    """Tracks the living writers of a bucket. Used by one thread; any may call `living`."""

    def __init__(self, bucket: Bucket, name: str, context: VolumeContext, grace_s: float) -> None:
        """`name` is that of this writer."""
        self.name = name
        self._bucket = bucket
        self._clock = context.clock
        self._wall = context.wall
        self._grace_s = grace_s
        self._signs: dict[str, tuple[str, float]] = {}
        """The sign of life of each writer, and the time of its last change."""
        self.marked: set[str] = set()
        """Writers that may have data objects, from the last listing."""
        self._signed_s = float("-inf")

    @property
    def seen(self) -> set[str]:
        """Writers with a sign of life of any age."""
        return set(self._signs)

    def watch(self, listed: Iterable[Listed]) -> set[str]:
        """Read the signs of life in a listing. Returns the writers whose sign is new."""
        signs = {writer: one.version for one in listed if (writer := writer_below(ALIVE, one.path))}
        self.marked = {writer for one in listed if (writer := writer_below(WRITERS, one.path))}
        if self.name not in signs:  # others have declared this node dead
            self._signed_s = float("-inf")
        before, now_s = self._signs, self._clock.now()
        fresh = {name for name, version in signs.items() if before.get(name, ("",))[0] != version}
        self._signs = {
            name: (version, now_s) if name in fresh else before[name]
            for name, version in signs.items()
        }
        return fresh

    def living(self) -> set[str]:
        """The living writers, including this one."""
        oldest_s = self._clock.now() - self._grace_s
        return {self.name} | {one for one, (_, since) in self._signs.items() if since > oldest_s}

    def sign(self) -> None:
        """Write a sign of life, if it is due. Raises BucketError."""
        now_s = self._clock.now()
        if now_s - self._signed_s >= self._grace_s / _SIGNS:
            self._bucket.overwrite(ALIVE + self.name, f"{now_s} {self._wall.now()}".encode())
            self._signed_s = now_s

    def mark(self) -> None:
        """Mark this writer as one that may have data objects. Others only delete objects of marked
        writers. Raises BucketError.
        """
        if self.name not in self.marked:
            self._bucket.overwrite(WRITERS + self.name, b"")
            self.marked.add(self.name)


@dataclass(slots=True, eq=False)
class OtherManifests:
    """Reads the manifests of other writers, and adopts those of dead writers. Used by one thread;
    any thread may read `known`.
    """

    bucket: Bucket
    contents: BucketContents
    own: OwnManifests
    trash: Trash
    pool: Executor
    known: dict[ManifestName, Manifest] = field(default_factory=dict)
    listed: list[ManifestName] = field(default_factory=list)
    _adopted: set[str] = field(default_factory=set)
    _refused: set[ManifestName] = field(default_factory=set)
    """Listed manifests that are damaged or not credible. They replace no other ones."""
    refused_total: int = 0
    """Number of manifests that were refused since the bucket was opened."""

    def read(self, names: Mapping[ManifestName, int], living: set[str]) -> None:
        """Fetch new manifests, add their objects, and drop objects that are not listed any more.
        `names`: the listed manifests and their bytes. Those of `living` writers are not adopted.
        Raises BucketError.
        """
        self._adopted -= living
        self.listed = list(names)
        self._refused &= names.keys()
        manifests: dict[ManifestName, Manifest | None] = {}
        while new := [
            name for name in self._wanted() if name not in self.known and name not in manifests
        ]:
            sizes = [names[name] for name in new]
            manifests |= zip(new, self.pool.map(self._get, new, sizes), strict=True)
        self._take_in({name: one for name, one in manifests.items() if one is not None})
        self.refused_total += len(self._refused & manifests.keys())
        unread = {
            name.writer
            for name, one in manifests.items()
            if one is None and name not in self._refused
        }
        for name in self.known.keys() - set(self._wanted()):
            if name.writer not in unread:
                del self.known[name]
        paths = {path for manifest in self.known.values() for path in manifest.paths}
        for known in self.contents.owned_by(others=True):
            if known.path not in paths:
                self.contents.drop(known.path)
        self.contents.forget_tombstones(self._stones)

    def _wanted(self) -> list[ManifestName]:
        """The listed manifests in force."""
        return in_force(
            [
                name
                for name in self.listed
                if name.writer not in self._adopted and name not in self._refused
            ]
        )

    def _take_in(self, manifests: Mapping[ManifestName, Manifest]) -> None:
        self.known |= manifests
        if self.contents.learn(
            [one for m in manifests.values() for one in m.metadata], report=True
        ):
            self.own.recheck()
        for name, manifest in manifests.items():
            for listing in manifest.objects:
                if listing.path not in self.trash:
                    self.contents.add(listing, name.writer)

    def _stones(self) -> set[bytes]:
        entries = [*self.own.metadata().metadata, *self.metadata()]
        return {one.name for one in entries if one.kind is MetaKind.TOMBSTONE}

    def metadata(self) -> list[MetaEntry]:
        return [one for manifest in list(self.known.values()) for one in manifest.metadata]

    def _get(self, name: ManifestName, nbytes: int) -> Manifest | None:
        """Fetch a manifest; None if it was replaced meanwhile, or is refused."""
        try:
            return self._fetch(name, nbytes)
        except DamagedManifestError as error:
            self._refused.add(name)
            _log.warning("object: manifest %s is ignored: %s", name.path, error)
        except MissingObjectError:
            pass
        return None

    def _fetch(self, name: ManifestName, nbytes: int) -> Manifest:
        if nbytes > MANIFEST_BYTES_MAX:
            raise DamagedManifestError(f"it has {nbytes} bytes, limit {MANIFEST_BYTES_MAX}")
        manifest = Manifest.parse(self.bucket.get(name.path))
        if not self.contents.is_credible(manifest):
            raise DamagedManifestError("it has a stamp far in the future")
        return manifest

    def adopt(self, writers: Writers) -> bool:
        """Adopt the objects of dead writers, if this node is their heir. True if there were any.
        Raises BucketError.
        """
        living = writers.living()
        left = {name.writer for name in self.listed} | writers.seen
        dead = [one for one in left - living - self._adopted if _heir(one, living) == writers.name]
        for writer in sorted(dead):
            names = [name for name in self.known if name.writer == writer]
            manifest = Manifest.joined(self.known[name] for name in names)
            paths = manifest.paths
            manifest.objects = [
                one for one in manifest.objects if one.path in self.contents.objects
            ]
            if len(manifest):
                self.own.publish(manifest)
            for path in paths:
                self.contents.own(path, writers.name)
            for name in names:
                del self.known[name]
            self._adopted.add(writer)
            self.trash.add(name.path for name in self.listed if name.writer == writer)
            if writer in writers.seen:
                self.bucket.delete([ALIVE + writer])
            _events.info("object: adopted %d objects of a dead writer", len(paths))
        return bool(dead)


@dataclass(slots=True, eq=False)
class LostObjects:
    """Finds own manifests and objects that others have deleted. Used by one thread."""

    bucket: Bucket
    contents: BucketContents
    own: OwnManifests
    others: OtherManifests
    _missing: set[ManifestName] = field(default_factory=set)
    """Own manifests that were missing in the last listing."""
    _doubts: int = 0
    """Further rounds in which own data objects are looked for."""

    def notice(self, paths: set[str], own: Collection[ManifestName]) -> None:
        """Look for `own` manifests in a listing made while they were in force. Those missing in two
        listings in a row were deleted by others.
        """
        expected = {FORMAT_PATH, ALIVE + self.contents.writer, *(name.path for name in own)}
        if not expected <= paths:
            self._doubts = _DOUBTS
        missing = {name for name in own if name.path not in paths}
        lost, self._missing = missing & self._missing, missing
        known = self.others.known.items()
        heirs = {path: name.writer for name, manifest in known for path in manifest.paths}
        for path in self.own.forget(lost):
            if path in heirs:  # this node was taken for dead
                self.contents.own(path, heirs[path])
            else:
                self.contents.drop(path)
        if lost:
            _events.warning("object: others have deleted %d manifests of this node", len(lost))

    def look_for_objects(self) -> None:
        """Drop own data objects that are no longer in the bucket. Raises BucketError.

        Manifests do not show it: after the bucket was emptied a merged one may have been written.
        """
        if not self._doubts:
            return
        own = self.contents.owned_by()
        folders = {one.path.rpartition("/")[0] for one in own}
        there = {one.path for folder in folders for one in self.bucket.list_all(f"{folder}/")}
        for path in [one.path for one in own if one.path not in there]:
            self.contents.drop(path)
            self.own.drop(path)
        self._doubts -= 1


@dataclass(slots=True, eq=False)
class Garbage:
    """Deletes data objects of dead writers that no manifest lists. Used by one thread."""

    bucket: Bucket
    contents: BucketContents
    writers: Writers
    trash: Trash
    """Garbage that waits to be deleted."""
    is_due: bool = True
    """True if a writer has died since the last check."""

    def collect(self, listed: Iterable[ManifestName]) -> None:
        """Look for garbage if that is due, and delete garbage that is older than a grace period.
        `listed`: the manifests of others. Raises BucketError.
        """
        if self.is_due:
            self.is_due = False
            self._look(listed)
        self.trash.keep(path for path in self.trash.paths() if path in self.contents.objects)
        self.trash.empty(self.bucket)

    def _look(self, listed: Iterable[ManifestName]) -> None:
        """Find objects of dead writers that are known by manifests, marks or signs of life. Objects
        of other programs are ignored.
        """
        with self.contents.lock:
            named = {writer_of_data(path) for path in self.contents.objects}
        marked = self.writers.marked
        named |= marked | self.writers.seen | {name.writer for name in listed}
        dead = {one for one in named if one is not None} - self.writers.living()
        there = dead.intersection(self.bucket.folders(DATA))
        empty = dead - there
        for writer in there:
            found = [one.path for one in self.bucket.list_all(f"{DATA}{writer}/")]
            paths = [path for path in found if writer_of_data(path) == writer]
            self.trash.add(paths)
            if not paths:
                empty.add(writer)
        if unneeded := [WRITERS + writer for writer in sorted(empty & marked)]:
            self.bucket.delete(unneeded)


@dataclass(slots=True, eq=False)
class UpkeepState:
    """The first time that the bucket is read, how often since, and the end of the thread."""

    tried: threading.Event = field(default_factory=threading.Event)
    refusal: KVDepotError | None = None
    is_done: bool = False
    """True if the bucket is a depot and was read."""
    has_ended: bool = False
    """True if the thread has ended on an unexpected error."""
    refreshes: int = 0
    refreshed: threading.Condition = field(default_factory=threading.Condition)
    """Guards `refreshes`; notified after a refresh."""


class BucketUpkeep:
    """The background thread of one node, which runs all parts in turn."""

    def __init__(
        self,
        config: ObjectConfig,
        bucket: Bucket,
        contents: BucketContents,
        breaker: Breaker,
        pool: Executor,
        context: VolumeContext,
    ) -> None:
        self._config = config
        self._bucket = bucket
        self._contents = contents
        self._breaker = breaker
        self._context = context
        clock, grace_s = context.clock, config.grace
        trash = Trash(clock, grace_s)
        self.manifests = OwnManifests(bucket, contents, trash, 2 * config.max_age)
        self.writers = Writers(bucket, contents.writer, context, grace_s)
        self.others = OtherManifests(bucket, contents, self.manifests, trash, pool)
        self._lost = LostObjects(bucket, contents, self.manifests, self.others)
        self._garbage = Garbage(bucket, contents, self.writers, Trash(clock, grace_s))
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._looked_s = float("-inf")
        self._round_lock = threading.Lock()
        self._state = UpkeepState()
        self._thread = threading.Thread(target=self._run, name="kvdepot-object", daemon=True)

    @property
    def trash(self) -> Trash:
        return self.manifests.trash

    @property
    def begun(self) -> bool:
        """True if the bucket is a depot and was read once: it may be written to."""
        return self._state.is_done and not self._state.has_ended

    @property
    def refreshes(self) -> int:
        """Number of times that the changes of other nodes were read."""
        return self._state.refreshes

    @property
    def has_ended(self) -> bool:
        """True if the thread has ended on an error: the volume must be opened again."""
        return self._state.has_ended

    def start(self) -> None:
        """Start the thread, and wait until it has read the bucket for the first time. If the server
        does not answer within _START_S, the volume is down and the thread tries again.

        Raises ConfigError if the server refuses the settings, and FormatError if the bucket has
        another format or is not a depot.
        """
        self._thread.start()
        answered = self._state.tried.wait(_START_S)
        if self._state.refusal is not None:
            self._thread.join()
            raise self._state.refusal
        if not answered:
            self._breaker.failed("the server does not answer", at_once=True)

    def _begin(self) -> bool:
        """Read the bucket for the first time, as often as it takes. False: closed, or refused."""
        while not self._stop.is_set():
            self._breaker.allows()  # a pause that is over becomes an attempt; none is waited for
            try:
                self._look_first()
            except (BucketError, FormatError) as error:
                fatal: KVDepotError | None = (
                    refusal(error, self._config) if isinstance(error, BucketError) else error
                )
                if fatal is not None and not self._state.tried.is_set():
                    self._state.refusal = fatal
                    self._state.tried.set()
                    return False
                self._breaker.failed(str(error), at_once=True)
            else:
                self._state.is_done = True
                self._breaker.succeeded()
                if self._state.tried.is_set():
                    self._context.on_change(Change.CONTENTS)
                self._state.tried.set()
                return True
            self._state.tried.set()
            self._stop.wait(min(_START_AGAIN_S, self._breaker.health().retry_in_s))
        return False

    def _look_first(self) -> None:
        listed = self._bucket.list_all("meta/")
        paths = {one.path for one in listed}
        if FORMAT_PATH not in paths:
            refuse_others(self._bucket)
        check_format(self._bucket, paths, writable=self._context.writable)
        if self._context.writable:
            self.writers.sign()
        self.refresh(listed)
        if self._context.writable:
            self.writers.mark()
            self.others.adopt(self.writers)

    def wait_for_refresh(self, known: int, timeout_s: float) -> bool:
        """Request a refresh, and wait until one after number `known` has ended. False: none has."""
        self.request_refresh()
        with self._state.refreshed:
            self._state.refreshed.wait_for(
                lambda: self.refreshes != known or self._stop.is_set(), timeout_s
            )
        return self.refreshes != known and not self._stop.is_set()

    def request_refresh(self) -> None:
        """Read the bucket soon, because another node may have changed it. Does not block."""
        self._wake.set()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        with self._state.refreshed:
            self._state.refreshed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        if self._context.writable and self.begun and self._breaker.closed:
            try:
                self.manifests.publish_descriptions()
                self.manifests.rewrite(self._context.wall.now())
                self._bucket.delete([ALIVE + self._contents.writer])
            except BucketError as error:
                _log.warning("object: could not write the last manifests: %s", error.reason)

    def metadata(self) -> list[MetaEntry]:
        """Tombstones and descriptions of namespaces that are published or will be."""
        others = Manifest(metadata=self.others.metadata())
        return Manifest.joined([self.manifests.metadata(), others]).metadata

    def step(self) -> None:
        """Run one round of all background work. Raises BucketError."""
        with self._round_lock:
            self.refresh()
            if not self._context.writable:
                return
            self._lost.look_for_objects()
            self.writers.mark()
            self.writers.sign()
            self._garbage.is_due |= self.others.adopt(self.writers)
            self._expire()
            self.manifests.publish_descriptions()
            self.delete_dropped()
            self._garbage.collect(self.others.listed)

    def delete_dropped(self, reserved_bytes: int = 0) -> None:
        """Delete dropped objects whose grace period is over, and earlier if their room is needed:
        they count in this node's share, because the other nodes do not know them. A node that still
        reads them gets a miss. `reserved_bytes`: of records being uploaded. Raises BucketError.
        """
        self.manifests.rewrite(self._context.wall.now())
        self.trash.empty(self._bucket, self.excess_bytes(reserved_bytes))

    def excess_bytes(self, reserved_bytes: int) -> int:
        """Bytes by which dropped objects exceed the room for them; 0 or less: they do not."""
        contents, nodes = self._contents, len(self.writers.living())
        dropped_bytes = self.manifests.dropped_bytes
        more, capacity = reserved_bytes + dropped_bytes, contents.capacity_bytes
        return dropped_bytes and max(
            contents.held_bytes + more - capacity, contents.own_bytes + more - capacity // nodes
        )

    def refresh(self, listed: list[Listed] | None = None) -> None:
        """Read the changes of other nodes. Raises BucketError."""
        self._wake.clear()
        self._looked_s = self._context.clock.now()
        own, generation = self.manifests.names()
        if listed is None:
            listed = self._bucket.list_all("meta/")
        paths = {one.path for one in listed}
        if FORMAT_PATH not in paths and self._context.writable and self.begun:
            check_format(self._bucket, paths, writable=True)
        fresh = self.writers.watch(listed)
        self._lost.notice(paths, own)
        sizes = {
            name: one.nbytes for one in listed if (name := ManifestName.parse(one.path)) is not None
        }
        mine = {name for name in sizes if name.writer == self.writers.name}
        last = self.manifests.names()[1] if mine.difference(own) else generation
        # The server stored these although it reported an error, or this node did not write them.
        strays = [one for one in mine.difference(own) if not generation < one.generation <= last]
        self.trash.add(name.path for name in strays)
        self.others.read({name: sizes[name] for name in sorted(sizes.keys() - mine)}, fresh)
        with self._state.refreshed:
            self._state.refreshes += 1
            self._state.refreshed.notify_all()
        if self.begun:
            self._context.on_change(Change.CONTENTS)

    def _expire(self) -> None:
        """Drop own objects that are too old, or exceed this writer's share of the capacity."""
        now_s, config, capacity = (
            self._context.wall.now(), self._config, self._contents.capacity_bytes
        )  # fmt: skip
        share = capacity // len(self.writers.living())
        for one in self._contents.owned_by():
            old = config.max_age and one.listing.created_s + config.max_age < now_s
            crowded = self._contents.held_bytes > capacity and self._contents.own_bytes > share
            if old or crowded:
                self._contents.drop(one.path)
                self.manifests.drop(one.path, one.listing.nbytes)

    def _run(self) -> None:
        try:
            if self._begin():
                self._repeat()
        finally:
            if not self._stop.is_set() and self._state.refusal is None:
                _events.error("object: the upkeep has ended and begins again", exc_info=True)
                self._state.has_ended = True
                self._breaker.failed("the upkeep has ended on an error", at_once=True)
                self._state.tried.set()
                self._context.on_change(Change.STATE)

    def _repeat(self) -> None:
        pause_s = self._config.refresh_s
        due_s = self._context.clock.now() + pause_s
        while self._pause(pause_s):
            pause_s = self._config.refresh_s
            if not self._breaker.allows():
                self._wake.clear()
                pause_s = max(0.01, min(pause_s, self._breaker.health().retry_in_s))
                continue
            try:
                now_s = self._context.clock.now()
                if self._wake.is_set() and now_s < due_s:
                    with self._round_lock:
                        self.refresh()
                    pause_s = due_s - now_s
                else:
                    self.step()
                    due_s = now_s + pause_s
            except (BucketError, FormatError) as error:
                self._breaker.failed(str(error), at_once=True)
                pause_s = max(0.01, min(pause_s, self._breaker.health().retry_in_s))
            else:
                self._breaker.succeeded()

    def _pause(self, pause_s: float) -> bool:
        """Wait for the next round or a requested refresh. False: the volume was closed."""
        if not self._stop.is_set() and self._wake.wait(pause_s):
            since_s = self._context.clock.now() - self._looked_s
            self._stop.wait(max(0.0, min(_LOOK_S, self._config.refresh_s) - max(0.0, since_s)))
        return not self._stop.is_set()


def refuse_others(bucket: Bucket) -> None:
    """Raise FormatError if there is no depot and other programs have objects here."""
    found = bucket.first_path()
    if found is None:
        return
    try:
        bucket.get(FORMAT_PATH)  # another node may have created it since
    except MissingObjectError:
        raise FormatError(
            bucket.label,
            f"is not empty and not a depot: it has {found}, and no {FORMAT_PATH}",
            hint="use an empty prefix or folder in object.url, for example "
            f"{bucket.label.rstrip('/')}/kvdepot",
        ) from None


def check_format(bucket: Bucket, paths: set[str], *, writable: bool) -> None:
    """Check the format of a depot, or create a depot. Raises FormatError.

    `paths`: the listed objects. The bucket must be listed first, which fails if it does not exist:
    some servers create a missing bucket when an object is written.
    """
    if FORMAT_PATH not in paths:
        if not writable:
            return
        try:
            known = json.dumps({"kvdepot": "object", "version": VERSION}).encode()
            bucket.create(FORMAT_PATH, known)
        except ObjectExistsError:
            pass
        else:
            return
    try:
        fields = json.loads(bucket.get(FORMAT_PATH))
        kind, version = fields["kvdepot"], int(fields["version"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        kind, version = None, 0
    if kind != "object":
        raise FormatError(
            bucket.label,
            f"is not a depot: its {FORMAT_PATH} is of another program, or damaged",
            hint="use an empty prefix or folder in object.url",
        )
    if version != VERSION:
        raise FormatError(
            bucket.label,
            f"a depot of format {version}, this kvdepot reads format {VERSION}",
            hint="use another prefix, or the kvdepot version that made it",
        )


def _heir(writer: str, living: Iterable[str]) -> str:
    """The writer that adopts the objects of a dead one. All nodes with the same view agree."""
    return max(living, key=lambda one: hashlib.blake2b(f"{writer} {one}".encode()).digest())
