"""What a node does with a bucket in the background: look what others did, show that it lives,
take over from writers that died, let old objects go, collect garbage.

No clock is compared with another node's: a writer is dead when its sign of life has not changed
for a grace period of this node's own clock.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from kvdepot.config.settings import ObjectConfig
from kvdepot.core.clock import Clock
from kvdepot.core.log import RateLimitedLog
from kvdepot.core.metadata import Tombstone
from kvdepot.core.volume import Change
from kvdepot.errors import FormatError
from kvdepot.io.breaker import Breaker
from kvdepot.volumes.object.bucket import Bucket, BucketError, Listed
from kvdepot.volumes.object.contents import BucketContents
from kvdepot.volumes.object.manifest import (
    ALIVE,
    DATA,
    FORMAT_PATH,
    VERSION,
    WRITERS,
    DamagedManifestError,
    Entry,
    ManifestName,
    in_force,
    writer_below,
    writer_of_data,
)
from kvdepot.volumes.object.publishing import OwnManifests, Trash
from kvdepot.volumes.object.reading import RangeReader

_DOUBTS: Final = 2
"""Rounds, since a block that was being written at the first is not looked for."""
_SIGNS: Final = 3
"""Signs of life in a grace period."""
_LOOK_S: Final = 0.25
"""A node that is told to look does so not more often than this."""
_log = RateLimitedLog("kvdepot.store")
_events = logging.getLogger("kvdepot.store")


@dataclass(slots=True)
class Clocks:
    """Time for pauses, and time of day."""

    steady: Clock
    wall: Clock


@dataclass(slots=True)
class ForeignManifest:
    """What another writer's manifest told."""

    paths: list[str]
    tombstones: list[Tombstone]
    descriptions: dict[bytes, bytes] = field(default_factory=dict)


class BucketUpkeep:
    """The background thread of one node, and its view of the other writers."""

    def __init__(
        self,
        config: ObjectConfig,
        bucket: Bucket,
        contents: BucketContents,
        reader: RangeReader,
        breaker: Breaker,
        clocks: Clocks,
        *,
        writable: bool,
        on_change: Callable[[Change], None],
    ) -> None:
        self._config = config
        self._bucket = bucket
        self._contents = contents
        self._pool = reader.pool
        self._breaker = breaker
        self._clock = clocks.steady
        self._wall = clocks.wall
        self._writable = writable
        self._on_change = on_change
        self.trash = Trash(self._clock, config.grace)
        self.manifests = OwnManifests(bucket, contents, self.trash, 2 * config.max_age)
        self._known: dict[ManifestName, ForeignManifest] = {}
        self._listed: list[ManifestName] = []
        self._missing: set[ManifestName] = set()
        """Own manifests that the last listing did not have."""
        self._doubts = 0
        """In how many rounds own data objects are still to be looked for."""
        self._signs: dict[str, tuple[str, float]] = {}
        """Sign of life of each writer, and since when it is the same."""
        self._adopted: set[str] = set()
        self._marked: set[str] = set()
        """Writers of which the last listing says that they may have data objects."""
        self._garbage: dict[str, float] = {}
        """Data objects of dead writers that no manifest lists, and since when."""
        self._collect = writable
        self._signed_s = -1e9
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._looked_s = -1e9
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvdepot-object", daemon=True)

    def start(self) -> None:
        """Look at the bucket for the first time, and go on in the background.

        Raises BucketError, and FormatError where it is of a newer format, or not a depot.
        """
        listed = self._bucket.list_all("meta/")
        paths = {one.path for one in listed}
        if FORMAT_PATH not in paths:
            self._refuse_others()
        self._check_format(paths)
        if self._writable:
            self._sign(self._clock.now())
        self.refresh(listed)
        if self._writable:
            self._mark()
            self._adopt()
        self._thread.start()

    def request_refresh(self) -> None:
        """Another node may have changed something. Does not block; often said, it is done once."""
        self._wake.set()

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._writable and self._breaker.closed:
            try:
                self.manifests.publish_descriptions()
                self.manifests.rewrite(self._wall.now(), idle=True)
                self._bucket.delete([ALIVE + self._contents.writer])
            except BucketError as error:
                _log.warning("object: not left in order: %s", error.reason)

    @property
    def writers(self) -> int:
        """How many writers live, with this one."""
        return len(self._living() | {self._contents.writer})

    def descriptions(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        for foreign in list(self._known.values()):
            found |= foreign.descriptions
        return found | self.manifests.descriptions()

    def _run(self) -> None:
        pause_s = self._config.refresh_s
        due_s = self._clock.now() + pause_s
        while self._pause(pause_s):
            pause_s = self._config.refresh_s
            if not self._breaker.allows():
                self._wake.clear()
                pause_s = max(0.01, min(pause_s, self._breaker.health().retry_in_s))
                continue
            try:
                now_s = self._clock.now()
                if self._wake.is_set() and now_s < due_s:
                    self._look()
                    pause_s = due_s - now_s
                else:
                    self.step()
                    due_s = now_s + pause_s
            except BucketError as error:
                self._breaker.failed(error.reason, at_once=True)
                pause_s = max(0.01, min(pause_s, self._breaker.health().retry_in_s))
            else:
                self._breaker.succeeded()

    def _pause(self, pause_s: float) -> bool:
        """Wait for the next turn, or until told to look. False: it is over."""
        if not self._stop.is_set() and self._wake.wait(pause_s):
            since_s = self._clock.now() - self._looked_s
            self._stop.wait(max(0.0, min(_LOOK_S, self._config.refresh_s) - max(0.0, since_s)))
        return not self._stop.is_set()

    def _look(self) -> None:
        """Learn what has changed, between two turns. Raises BucketError."""
        with self._turn:
            self.refresh()

    def step(self) -> None:
        """One round. Raises BucketError."""
        with self._turn:
            self.refresh()
            if not self._writable:
                return
            now_s = self._clock.now()
            if self._doubts:
                self._look_for_own()
            self._mark()
            if now_s - self._signed_s >= self._config.grace / _SIGNS:
                self._sign(now_s)
            self._adopt()
            self._expire()
            self.manifests.publish_descriptions()
            self.manifests.rewrite(self._wall.now(), idle=True)
            self.trash.empty(self._bucket)
            self._collect_garbage(now_s)

    def refresh(self, listed: list[Listed] | None = None) -> None:
        """Learn what has changed in the bucket. Raises BucketError."""
        self._wake.clear()
        self._looked_s = self._clock.now()
        own, generation = self.manifests.names()
        if listed is None:
            listed = self._bucket.list_all("meta/")
        paths = {one.path for one in listed}
        if FORMAT_PATH not in paths and self._writable and self._thread.is_alive():
            self._check_format(paths)
        self._watch(listed)
        if ALIVE + self._contents.writer not in paths:  # taken for dead
            self._signed_s = -1e9
        if not {FORMAT_PATH, ALIVE + self._contents.writer, *(name.path for name in own)} <= paths:
            self._doubts = _DOUBTS
        names = [name for name in map(ManifestName.parse, sorted(paths)) if name is not None]
        self._listed = [name for name in names if name.writer != self._contents.writer]
        self._notice_lost([name for name in own if name.path not in paths])
        # Written although the server had seemed to refuse it: what it lists was given up.
        mine = [name for name in names if name.writer == self._contents.writer and name not in own]
        self.trash.add(name.path for name in mine if name.generation <= generation)
        self._read(in_force([name for name in self._listed if name.writer not in self._adopted]))
        if self._thread.is_alive():
            self._on_change(Change.CONTENTS)

    def _read(self, names: list[ManifestName]) -> None:
        """Fetch manifests that are new, and settle what has come and gone."""
        new = [name for name in names if name not in self._known]
        entries = dict(zip(new, self._pool.map(self._get, new), strict=True))
        unread = {name.writer for name, entry in entries.items() if entry is None}
        tombstones: list[Tombstone] = []
        for name, entry in entries.items():
            if entry is None:
                continue
            tombstones += entry.tombstones
            self._contents.learn(entry.descriptions)
            self._known[name] = ForeignManifest(
                [one.path for one in entry.objects], entry.tombstones, entry.descriptions
            )
        told = bool(self._known) and self._thread.is_alive()
        if self._contents.bury(tombstones, told=told):
            self.manifests.recheck()
        for name, entry in entries.items():
            for listing in entry.objects if entry is not None else ():
                if listing.path not in self.trash:
                    self._contents.add(listing, name.writer)
        current = set(names)
        for name in [name for name in self._known if name not in current]:
            if name.writer not in unread:
                del self._known[name]
        self._drop_unlisted()

    def _drop_unlisted(self) -> None:
        listed = {path for foreign in self._known.values() for path in foreign.paths}
        with self._contents.lock:
            foreign_paths = [
                one.path
                for one in self._contents.objects.values()
                if one.owner != self._contents.writer
            ]
        for path in foreign_paths:
            if path not in listed:
                self._contents.drop(path)
        kept = self.manifests.tombstones()
        for foreign in self._known.values():
            kept |= {one.name for one in foreign.tombstones}
        self._contents.forget_tombstones(kept)

    def _get(self, name: ManifestName) -> Entry | None:
        """A manifest; None: it was replaced meanwhile. One that is damaged counts as empty."""
        try:
            return Entry.parse(self._bucket.get(name.path))
        except DamagedManifestError as error:
            _log.warning("object: a manifest is left out: %s", error)
            return Entry()
        except BucketError as error:
            if error.missing:
                return None
            raise

    def _notice_lost(self, missing: list[ManifestName]) -> None:
        """Own manifests that two listings in a row do not have were deleted by others."""
        lost = [name for name in missing if name in self._missing]
        self._missing = set(missing)
        heirs = {
            path: name.writer for name, foreign in self._known.items() for path in foreign.paths
        }
        for path in self.manifests.forget(lost):
            if path in heirs:  # this node was taken for dead
                self._contents.own(path, heirs[path])
            else:
                self._contents.drop(path)
        if lost:
            _events.warning("object: %d manifests of this node are gone from the bucket", len(lost))

    def _look_for_own(self) -> None:
        """Give up own data objects that are in the bucket no more.

        Manifests alone do not tell: one that was merged since the bucket was emptied is there.
        """
        own = self._contents.own_objects()
        folders = {one.path.rpartition("/")[0] for one in own}
        there = {one.path for folder in folders for one in self._bucket.list_all(f"{folder}/")}
        for path in [one.path for one in own if one.path not in there]:
            self._contents.drop(path)
            self.manifests.drop(path)
        self._doubts -= 1

    def _watch(self, listed: Iterable[Listed]) -> None:
        signs = {writer: one.version for one in listed if (writer := writer_below(ALIVE, one.path))}
        self._marked = {writer for one in listed if (writer := writer_below(WRITERS, one.path))}
        now_s = self._clock.now()
        before, self._signs = self._signs, {}
        for writer, version in signs.items():
            known = before.get(writer)
            same = known is not None and known[0] == version
            self._signs[writer] = known if known is not None and same else (version, now_s)
            if not same:
                self._adopted.discard(writer)

    def _living(self) -> set[str]:
        oldest_s = self._clock.now() - self._config.grace
        return {writer for writer, (_, since_s) in self._signs.items() if since_s > oldest_s}

    def _sign(self, now_s: float) -> None:
        self._bucket.overwrite(
            ALIVE + self._contents.writer, f"{now_s} {self._wall.now()}".encode()
        )
        self._signed_s = now_s

    def _mark(self) -> None:
        """Say that data objects of this writer may be there: those of others are never deleted."""
        if self._contents.writer not in self._marked:
            self._bucket.overwrite(WRITERS + self._contents.writer, b"")
            self._marked.add(self._contents.writer)

    def _refuse_others(self) -> None:
        """Raises FormatError where there is no depot and other programs have objects here."""
        found = self._bucket.first_path()
        if found is None:
            return
        try:
            self._bucket.get(FORMAT_PATH)  # another node may have made it since
        except BucketError as error:
            if not error.missing:
                raise
            raise FormatError(
                self._bucket.label,
                f"is not empty and not a depot: it has {found}, and no {FORMAT_PATH}",
                hint="use an empty prefix or folder in object.url, for example "
                f"{self._bucket.label.rstrip('/')}/kvdepot",
            ) from None

    def _check_format(self, paths: set[str]) -> None:
        """Find a format that this program knows, or make the bucket one of ours.

        `paths`: what was listed. Some servers make a bucket of what is written to one that is not
        there; a listing of it fails with all.
        """
        if FORMAT_PATH not in paths:
            if not self._writable:
                return
            try:
                known = json.dumps({"kvdepot": "object", "version": VERSION}).encode()
                self._bucket.create(FORMAT_PATH, known)
            except BucketError as error:
                if not error.exists:
                    raise
            else:
                return
        try:
            told = json.loads(self._bucket.get(FORMAT_PATH))
            kind, version = told["kvdepot"], int(told["version"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            kind, version = None, 0
        if kind != "object":
            raise FormatError(
                self._bucket.label,
                f"is not a depot: its {FORMAT_PATH} is of another program, or damaged",
                hint="use an empty prefix or folder in object.url",
            )
        if version != VERSION:
            raise FormatError(
                self._bucket.label,
                f"a depot of format {version}, this kvdepot reads format {VERSION}",
                hint="use another prefix, or the kvdepot version that made it",
            )

    def _adopt(self) -> None:
        """Take over what writers that live no more have left, where it falls to this node."""
        living = self._living() | {self._contents.writer}
        left = {name.writer for name in self._listed} | self._signs.keys()
        for writer in sorted(left - living - self._adopted):
            if _heir(writer, living) != self._contents.writer:
                continue
            names = [name for name in self._known if name.writer == writer]
            known = [self._known[name] for name in names]
            paths = [path for foreign in known for path in foreign.paths]
            with self._contents.lock:
                objects = [self._contents.objects.get(path) for path in paths]
            entry = Entry(
                [one.listing for one in objects if one is not None],
                [one for foreign in known for one in foreign.tombstones],
                {tag: text for foreign in known for tag, text in foreign.descriptions.items()},
            )
            if len(entry):
                self.manifests.publish(entry)
            for path in paths:
                self._contents.own(path, self._contents.writer)
            for name in names:
                del self._known[name]
            self._adopted.add(writer)
            self.trash.add(name.path for name in self._listed if name.writer == writer)
            if writer in self._signs:
                self._bucket.delete([ALIVE + writer])
            self._collect = True
            _events.info("object: %d objects of a writer that ended are taken over", len(paths))

    def _expire(self) -> None:
        """Let objects go that are too old, or too many for this writer's share."""
        now_s, config, capacity = self._wall.now(), self._config, self._contents.capacity_bytes
        share = capacity // self.writers
        for one in self._contents.own_objects():
            old = config.max_age and one.listing.created_s + config.max_age < now_s
            crowded = self._contents.held_bytes > capacity and self._contents.own_bytes > share
            if old or crowded:
                self._contents.drop(one.path)
                self.manifests.drop(one.path)

    def _collect_garbage(self, now_s: float) -> None:
        """Delete data objects of dead writers that no manifest has listed for a grace period."""
        if self._collect:
            self._collect = False
            self._look_for_garbage(now_s)
        with self._contents.lock:
            known = self._contents.objects.keys() & self._garbage.keys()
        for path in known:
            del self._garbage[path]
        due = [path for path, at in self._garbage.items() if now_s - at >= self._config.grace]
        if due:
            self._bucket.delete(due)
            for path in due:
                del self._garbage[path]

    def _look_for_garbage(self, now_s: float) -> None:
        """Only what a writer can have made that this bucket's own objects name; others' stays."""
        dead = self._named() - self._living() - {self._contents.writer}
        there = dead.intersection(self._bucket.folders(DATA))
        empty = dead - there
        for writer in there:
            listed = [one.path for one in self._bucket.list_all(f"{DATA}{writer}/")]
            paths = [path for path in listed if writer_of_data(path) == writer]
            self._garbage |= {path: now_s for path in paths if path not in self._garbage}
            if not paths:
                empty.add(writer)
        if unneeded := [WRITERS + writer for writer in sorted(empty & self._marked)]:
            self._bucket.delete(unneeded)

    def _named(self) -> set[str]:
        """Writers by their marks, signs of life and manifests, and by what manifests list."""
        with self._contents.lock:
            listed = {writer_of_data(path) for path in self._contents.objects}
        named = self._marked | self._signs.keys() | {name.writer for name in self._listed}
        return named | {writer for writer in listed if writer is not None}


def _heir(writer: str, living: Iterable[str]) -> str:
    """Which of the living takes over: all nodes that see the same writers choose the same one."""
    return max(living, key=lambda one: hashlib.blake2b(f"{writer} {one}".encode()).digest())
