"""A folder or bucket that several nodes of a torture round share, and each node's way to it.

`FolderObjects` needs no other package. `BucketLink` passes the requests of one node on, or spoils
them: so the bucket goes away and comes back for one node or for all.
"""

import contextlib
import os
import random
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from kvdepot.config.settings import ObjectConfig
from kvdepot.volumes.object.bucket import (
    Bucket,
    BucketError,
    Listed,
    MissingObjectError,
    ObjectExistsError,
    Requests,
    open_bucket,
)

LinkState = Literal["up", "away", "hangs", "fails some", "cut"]
OUTAGES: Final[tuple[LinkState, ...]] = ("away", "away", "hangs", "fails some")
HANG_S: Final = 1.0
"""A request that hangs fails after this time, as a client's timeout would end it."""
_ANSWERED: Final = 0.7
_CARRIED_OUT: Final = 0.85
"""Shares of the requests while some fail: those without the first fail, also if carried out."""
Answer = TypeVar("Answer")


class FolderObjects(Bucket):
    """The objects of a bucket as files in a folder. Counts no requests."""

    def __init__(self, root: Path) -> None:
        self.label = f"file://{root}"
        self.requests = Requests()
        self._root = root
        self._new = root.with_name(f"{root.name}-new")
        """For files that have no name in the bucket yet."""
        root.mkdir(exist_ok=True)
        self._new.mkdir(exist_ok=True)

    def create(self, path: str, body: bytes | Sequence[memoryview]) -> None:
        with self._written(body) as new:
            try:
                os.link(new, self._place(path))
            except FileExistsError as error:
                raise ObjectExistsError("the object exists already") from error

    def overwrite(self, path: str, body: bytes) -> None:
        with self._written(body) as new:
            os.replace(new, self._place(path))

    def get(self, path: str) -> bytes:
        try:
            return (self._root / path).read_bytes()
        except FileNotFoundError as error:
            raise MissingObjectError("there is no such object") from error

    def get_range(self, path: str, start: int, stop: int) -> memoryview:
        return memoryview(self.get(path)[start:stop])

    def list_all(self, prefix: str) -> list[Listed]:
        found = []
        for path in sorted((self._root / prefix).rglob("*")):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if path.is_file():
                    version = f"{status.st_ino} {status.st_mtime_ns}"
                    name = str(path.relative_to(self._root))
                    found.append(Listed(name, status.st_size, version))
        return found

    def first_path(self, prefix: str | None = None) -> str | None:
        return next((one.path for one in self.list_all(prefix or "")), None)

    def folders(self, prefix: str) -> list[str]:
        found = {one.path.removeprefix(prefix) for one in self.list_all(prefix)}
        return sorted({name.partition("/")[0] for name in found if "/" in name})

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            (self._root / path).unlink(missing_ok=True)

    def _place(self, path: str) -> Path:
        place = self._root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    @contextlib.contextmanager
    def _written(self, body: bytes | Sequence[memoryview]) -> Any:
        new = self._new / secrets.token_hex(8)
        new.write_bytes(body if isinstance(body, bytes) else b"".join(body))
        try:
            yield new
        finally:
            new.unlink(missing_ok=True)


def open_objects(config: ObjectConfig, root: Path | None) -> Bucket:
    """A bucket; `root` is the folder of one without a server. That one does without obstore, whose
    threads would be missing in a forked process.
    """
    return open_bucket(config) if root is None else FolderObjects(root)


class BucketLink(Bucket):
    """One node's way to a bucket."""

    def __init__(self, bucket: Bucket, chance: random.Random) -> None:
        self.label = bucket.label
        self.requests = bucket.requests
        self._bucket = bucket
        self._chance = chance
        self._state: LinkState = "up"
        self._changed = threading.Condition()

    @property
    def state(self) -> LinkState:
        return self._state

    def become(self, state: LinkState) -> None:
        """Requests that hang go on. A cut link stays so."""
        with self._changed:
            if self._state != "cut":
                self._state = state
                self._changed.notify_all()

    def create(self, path: str, body: bytes | Sequence[memoryview]) -> None:
        self._pass(lambda: self._bucket.create(path, body))

    def overwrite(self, path: str, body: bytes) -> None:
        self._pass(lambda: self._bucket.overwrite(path, body))

    def get(self, path: str) -> bytes:
        return self._pass(lambda: self._bucket.get(path))

    def get_range(self, path: str, start: int, stop: int) -> memoryview:
        return self._pass(lambda: self._bucket.get_range(path, start, stop))

    def list_all(self, prefix: str) -> list[Listed]:
        return self._pass(lambda: self._bucket.list_all(prefix))

    def first_path(self, prefix: str | None = None) -> str | None:
        return self._pass(lambda: self._bucket.first_path(prefix))

    def folders(self, prefix: str) -> list[str]:
        return self._pass(lambda: self._bucket.folders(prefix))

    def delete(self, paths: Sequence[str]) -> None:
        self._pass(lambda: self._bucket.delete(paths))

    def _pass(self, request: Callable[[], Answer]) -> Answer:
        """Send a request. One that fails may have been carried out."""
        with self._changed:
            self._changed.wait_for(lambda: self._state != "hangs", HANG_S)
            state = self._state
        if state == "up":
            return request()
        drawn = self._chance.random()
        if state == "fails some" and drawn < _CARRIED_OUT:
            answer = request()
            if drawn < _ANSWERED:
                return answer
        raise BucketError("the request failed")


class ForeignFiles:
    """Files of other programs in a depot's bucket and folders, which no store may touch."""

    NAMES: Final = (
        "data/customers/2026.parquet",
        "data/backups/db/monday.dump",
        "data/0123456789abcdef/000000000001",
        "data/000000000001",
        "meta/alive/others/new",
        "meta/index/customers/1",
        "notes.txt",
    )

    def __init__(self) -> None:
        self._files: dict[Path, tuple[bytes, int]] = {}

    def add(self, root: Path, names: Iterable[str]) -> None:
        for name in names:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name} of another program")
            self._files[path] = path.read_bytes(), path.stat().st_mtime_ns

    def touched(self) -> list[str]:
        """What was changed or deleted, in words."""
        found = []
        for path, (before, time_ns) in self._files.items():
            try:
                same = path.read_bytes() == before and path.stat().st_mtime_ns == time_ns
            except OSError:
                same = False
            if not same:
                found.append(f"{path} of another program was changed or deleted")
        return found
