"""A bucket, or a shared folder, through obstore: bounded in time, counted, with errors as one kind.

No text of an answer goes into an error: it may repeat what was sent. Only the server's error code.
"""

import configparser
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvdepot.config.settings import ObjectConfig
from kvdepot.errors import ConfigError, ExtraMissingError
from kvdepot.io.files import LOST_AND_FOUND

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_RETRIES: Final = 3
_BACKOFF_S: Final = (0.05, 1.0)
_CONNECT_S: Final = 5.0
_COALESCE_BYTES: Final = 1 << 20
_CODE: Final = re.compile(r"<Code>(\w{1,60})</Code>")
_STATUS: Final = re.compile(r"status code: (\d{3})")
_DENIED: Final = {
    "401", "403", "AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken",
    "SignatureDoesNotMatch",
}  # fmt: skip
_CREDENTIALS: Final = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
Answer = TypeVar("Answer")


class BucketError(Exception):
    """A request failed. `reason` is short and holds nothing secret."""

    def __init__(self, reason: str, *, missing: bool = False, exists: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.missing = missing
        """There is no such object."""
        self.exists = exists
        """It was to be created, and is there already."""


@dataclass(slots=True)
class Requests:
    """What was asked of a bucket since it was opened, as providers bill it."""

    puts: int = 0
    gets: int = 0
    lists: int = 0
    deletes: int = 0
    failed: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    meta_gets: int = 0
    """Of `gets`: those of manifests, not of blocks."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, int]:
        names = ("puts", "gets", "lists", "deletes", "failed", "sent_bytes", "received_bytes")
        return {name: getattr(self, name) for name in (*names, "meta_gets")}


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as a listing tells of it."""

    path: str
    nbytes: int
    version: str
    """Changes whenever the object is written."""


class Bucket:
    """Objects by path. Thread-safe; every call blocks, for the time the client was given."""

    def __init__(self, reader: "ObjectStore", writer: "ObjectStore", label: str) -> None:
        self._reader = reader
        self._writer = writer
        self.label = label
        self.requests = Requests()

    def create(self, path: str, body: bytes | Sequence[memoryview]) -> None:
        """Write an object that is not there yet. Parts of a body are sent from where they are."""
        import obstore

        size = len(body) if isinstance(body, bytes) else sum(map(len, body))
        self._ask(
            lambda: obstore.put(self._writer, path, body, mode="create", use_multipart=False),
            puts=1,
            sent_bytes=size,
        )

    def overwrite(self, path: str, body: bytes) -> None:
        import obstore

        self._ask(
            lambda: obstore.put(self._writer, path, body, use_multipart=False),
            puts=1,
            sent_bytes=len(body),
        )

    def get(self, path: str) -> bytes:
        import obstore

        body = self._ask(
            lambda: bytes(obstore.get(self._reader, path).bytes()), gets=1, meta_gets=1
        )
        self.requests.add(received_bytes=len(body))
        return body

    def get_range(self, path: str, start: int, stop: int) -> memoryview:
        """A part of an object; shorter where the object ends."""
        import obstore

        body = self._ask(
            lambda: memoryview(obstore.get_range(self._reader, path, start=start, end=stop)), gets=1
        )
        self.requests.add(received_bytes=len(body))
        return body

    def get_ranges(self, path: str, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Several parts of an object; those that lie near each other come in one request."""
        import obstore

        starts, ends = [start for start, _ in spans], [stop for _, stop in spans]
        parts = self._ask(
            lambda: obstore.get_ranges(
                self._reader, path, starts=starts, ends=ends, coalesce=_COALESCE_BYTES
            ),
            gets=_runs(spans),
        )
        views = [memoryview(part) for part in parts]
        self.requests.add(received_bytes=sum(map(len, views)))
        return views

    def list_all(self, prefix: str) -> list[Listed]:
        """All objects below a prefix."""
        import obstore

        def ask() -> list[Listed]:
            found = []
            for page in obstore.list(self._reader, prefix, chunk_size=1000):
                for one in page:
                    version = f"{one['e_tag']} {one['last_modified'].timestamp()}"
                    found.append(Listed(one["path"], one["size"], version))
            return found

        found = self._ask(ask, lists=1)
        self.requests.add(lists=max(0, len(found) - 1) // 1000)
        return found

    def first_path(self) -> str | None:
        """Any one of the objects; None: there is none."""
        return self._first_below(None)

    def _first_below(self, prefix: str | None) -> str | None:
        import obstore

        def ask() -> str | None:
            pages = obstore.list(self._reader, prefix, chunk_size=1)
            # A prefix that was made as a "folder" has an object without a name.
            return next((one["path"] for page in pages for one in page if one["path"]), None)

        return self._ask(ask, lists=1)

    def folders(self, prefix: str) -> list[str]:
        """The names directly below a prefix that have objects below them."""
        import obstore

        found = self._ask(
            lambda: obstore.list_with_delimiter(self._reader, prefix)["common_prefixes"], lists=1
        )
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in found]

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; those that are gone already are no error."""
        import obstore

        try:
            self._ask(lambda: obstore.delete(self._writer, list(paths)), deletes=len(paths))
        except BucketError as error:
            if not error.missing:
                raise

    def _ask(self, work: Callable[[], Answer], **counts: int) -> Answer:
        from obstore.exceptions import AlreadyExistsError, BaseError

        self.requests.add(**counts)
        try:
            return work()
        except FileNotFoundError as error:
            raise BucketError("there is no such object", missing=True) from error
        except AlreadyExistsError as error:
            self.requests.add(failed=1)
            raise BucketError("the object exists already", exists=True) from error
        except (BaseError, OSError, ValueError) as error:
            self.requests.add(failed=1)
            raise BucketError(_reason(error)) from None


class FolderBucket(Bucket):
    """Objects are files below a folder, which `label` names."""

    def first_path(self) -> str | None:
        """A new filesystem is empty: only root may look into its `lost+found`."""
        folder = Path(self.label.split("://", 1)[1])
        try:
            names = sorted(set(os.listdir(folder)) - {LOST_AND_FOUND})
        except OSError as error:
            raise BucketError(_reason(error)) from error
        for name in names:
            is_folder = (folder / name).is_dir()
            if found := self._first_below(name) if is_folder else name:
                return found
        return None


def _runs(spans: Sequence[tuple[int, int]]) -> int:
    """How many requests ranges come in."""
    count, end = 0, -_COALESCE_BYTES - 1
    for start, stop in sorted(spans):
        count += start - end > _COALESCE_BYTES
        end = max(end, stop)
    return count


def _reason(error: Exception) -> str:
    """What went wrong, in a few words that cannot hold a secret."""
    text = str(error)
    for pattern in (_CODE, _STATUS):
        found = pattern.search(text)
        if found:
            return f"the server answers {found.group(1)}"
    lowered = text.lower()
    if "timeout" in lowered or "timed out" in lowered:
        return "the server does not answer in time"
    if "connect" in lowered:
        return "the server cannot be reached"
    if "credential" in lowered or "token" in lowered:
        return "there are no credentials"
    return "the request failed"


def open_bucket(config: ObjectConfig) -> Bucket:
    """The bucket that a configuration names. Asks nothing of it yet."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, S3Store
    except ImportError as error:
        raise ExtraMissingError("s3", "obstore") from error
    scheme, rest = config.url.split("://", 1)
    if scheme == "file":
        folder = Path(rest)
        try:
            store = LocalStore(folder, mkdir=True)
        except (BaseError, OSError, ValueError) as error:
            raise ConfigError("object.url", f"{folder} cannot be used as a folder") from error
        return FolderBucket(store, store, config.url)
    name, _, prefix = rest.partition("/")
    settings: dict[str, Any] = {}
    if config.region:
        settings["region"] = config.region
    if config.endpoint:
        settings["endpoint"] = config.endpoint
    plain = S3Store(name, config=settings)  # type: ignore[arg-type]
    settings |= _credentials(config, needed="access_key_id" not in plain.config)

    def make(timeout_s: float) -> S3Store:
        return S3Store(
            name,
            prefix=prefix.strip("/") or None,
            config=settings,  # type: ignore[arg-type]
            client_options={
                "allow_http": config.endpoint.startswith("http://"),
                "timeout": timedelta(seconds=timeout_s),
                "connect_timeout": timedelta(seconds=min(_CONNECT_S, timeout_s)),
            },
            retry_config={
                "max_retries": _RETRIES,
                "backoff": {
                    "init_backoff": timedelta(seconds=_BACKOFF_S[0]),
                    "max_backoff": timedelta(seconds=_BACKOFF_S[1]),
                    "base": 2,
                },
                "retry_timeout": timedelta(seconds=timeout_s),
            },
        )

    return Bucket(make(config.read_timeout), make(config.write_timeout), config.url)


def _credentials(config: ObjectConfig, *, needed: bool) -> dict[str, str]:
    """Credentials of a profile, where one is named or the environment has none."""
    if not (needed or config.profile or config.credentials_file):
        return {}
    file = config.credentials_file or Path.home() / ".aws" / "credentials"
    profile = config.profile or "default"
    named = bool(config.profile or config.credentials_file)
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(file.read_text())
    except (OSError, UnicodeDecodeError, configparser.Error) as error:
        if named:
            why = getattr(error, "strerror", None) or "it is no credentials file"
            raise ConfigError("object.credentials_file", f"{file}: {why}") from None
        return {}
    if not parser.has_section(profile):
        if named:
            raise ConfigError("object.profile", f"{file} has no profile {profile!r}")
        return {}
    known = dict(parser.items(profile))
    return {ours: known[theirs] for theirs, ours in _CREDENTIALS.items() if known.get(theirs)}


def explain(error: BucketError, config: ObjectConfig) -> ConfigError:
    """Why a bucket could not be opened, and what to do about it."""
    code = error.reason.rsplit(" ", 1)[-1]
    if code in _DENIED or "credentials" in error.reason:
        return ConfigError(
            "object.url",
            f"{config.url}: access is denied ({error.reason})",
            hint="check the credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the "
            "environment, object.profile or object.credentials_file",
        )
    if code in ("NoSuchBucket", "InvalidBucketName", "404"):
        return ConfigError(
            "object.url", f"{config.url}: there is no such bucket", hint="create it, or correct it"
        )
    return ConfigError(
        "object.url", f"{config.url}: {error.reason}", hint="check object.endpoint and the network"
    )
