"""Requests to a bucket or a shared folder through obstore, counted and with timeouts.

Errors have the server's status code and not the text of its answer, which may contain credentials.
"""

import configparser
import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvdepot.config.settings import ObjectConfig
from kvdepot.errors import ConfigError, DriveError, ExtraMissingError
from kvdepot.io.files import LOST_AND_FOUND

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_RETRIES: Final = 3
_BACKOFF_S: Final = (0.05, 1.0)
_CONNECT_S: Final = 5.0
_NO_FOLDER: Final = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EEXIST, errno.EROFS}
)
"""Errors of a path that cannot be a folder. After others its server may come back."""
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
    """A request failed. `reason` is a short text without secrets."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class MissingObjectError(BucketError):
    """The object does not exist."""


class ObjectExistsError(BucketError):
    """An object with this path exists already."""


@dataclass(slots=True)
class Requests:
    """Requests to a bucket since it was opened, as providers bill them."""

    puts: int = 0
    gets: int = 0
    lists: int = 0
    deletes: int = 0
    failed: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    meta_gets: int = 0
    """The part of `gets` that were for manifests."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, int]:
        names = [one.name for one in fields(self) if one.name != "_lock"]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a listing."""

    path: str
    nbytes: int
    version: str
    """Changes whenever the object is written."""


class Bucket:
    """Objects by path. Thread-safe. Every call blocks, until the timeout of the client at most."""

    def __init__(self, reader: "ObjectStore", writer: "ObjectStore", label: str) -> None:
        import obstore

        self._obstore = obstore
        self._reader = reader
        self._writer = writer
        self.label = label
        self.requests = Requests()

    def create(self, path: str, body: bytes | Sequence[memoryview]) -> None:
        """Write a new object; ObjectExistsError if it exists. Parts of a body are sent in place."""
        self._put(path, body, mode="create")

    def overwrite(self, path: str, body: bytes) -> None:
        self._put(path, body)

    def _put(self, path: str, body: bytes | Sequence[memoryview], **mode: Any) -> None:
        size = len(body) if isinstance(body, bytes) else sum(map(len, body))
        put = partial(self._obstore.put, self._writer, path, body, use_multipart=False, **mode)
        self._ask(put, puts=1, sent_bytes=size)

    def get(self, path: str) -> bytes:
        body = self._ask(
            lambda: bytes(self._obstore.get(self._reader, path).bytes()), gets=1, meta_gets=1
        )
        self.requests.add(received_bytes=len(body))
        return body

    def get_range(self, path: str, start: int, stop: int) -> memoryview:
        """Read a part of an object; shorter if the object ends before `stop`."""
        get = partial(self._obstore.get_range, self._reader, path, start=start, end=stop)
        body = memoryview(self._ask(get, gets=1))
        self.requests.add(received_bytes=len(body))
        return body

    def list_all(self, prefix: str) -> list[Listed]:
        """All objects below a prefix."""
        pages = self._ask(
            lambda: list(self._obstore.list(self._reader, prefix, chunk_size=1000)), lists=1
        )
        self.requests.add(lists=max(0, len(pages) - 1))
        return [
            Listed(one["path"], one["size"], f"{one['e_tag']} {one['last_modified'].timestamp()}")
            for page in pages
            for one in page
        ]

    def first_path(self, prefix: str | None = None) -> str | None:
        """The path of any object; None if there is none."""

        def ask() -> str | None:
            pages = self._obstore.list(self._reader, prefix, chunk_size=1)
            # A prefix that was created as a "folder" has an object with an empty name.
            return next((one["path"] for page in pages for one in page if one["path"]), None)

        return self._ask(ask, lists=1)

    def folders(self, prefix: str) -> list[str]:
        """The names directly below a prefix that have objects below them."""
        found = self._ask(
            lambda: self._obstore.list_with_delimiter(self._reader, prefix)["common_prefixes"],
            lists=1,
        )
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in found]

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects. Missing ones are ignored."""
        with contextlib.suppress(MissingObjectError):
            self._ask(partial(self._obstore.delete, self._writer, list(paths)), deletes=len(paths))

    def _ask(self, work: Callable[[], Answer], **counts: int) -> Answer:
        from obstore.exceptions import AlreadyExistsError, BaseError

        self.requests.add(**counts)
        try:
            return work()
        except FileNotFoundError as error:
            raise MissingObjectError("there is no such object") from error
        except AlreadyExistsError as error:
            self.requests.add(failed=1)
            raise ObjectExistsError("the object exists already") from error
        except (BaseError, OSError, ValueError) as error:
            self.requests.add(failed=1)
            raise BucketError(_reason(error)) from None


class FolderBucket(Bucket):
    """A folder as a bucket: objects are files below `label`."""

    def first_path(self, prefix: str | None = None) -> str | None:
        """Ignores `lost+found`, which only root may read."""
        if prefix is not None:
            return super().first_path(prefix)
        folder = Path(self.label.split("://", 1)[1])
        try:
            names = sorted(set(os.listdir(folder)) - {LOST_AND_FOUND})
        except OSError as error:
            raise BucketError(_reason(error)) from error
        for name in names:
            found = self.first_path(name) if (folder / name).is_dir() else name
            if found:
                return found
        return None


def _reason(error: Exception) -> str:
    """A short text for an error, without secrets."""
    text = str(error)
    for pattern in (_CODE, _STATUS):
        found = pattern.search(text)
        if found:
            return f"the server answered {found.group(1)}"
    lowered = text.lower()
    if "timeout" in lowered or "timed out" in lowered:
        return "the server did not answer in time"
    if "connect" in lowered:
        return "the server cannot be reached"
    if "credential" in lowered or "token" in lowered:
        return "there are no credentials"
    return "the request failed"


def is_folder(path: Path) -> bool:
    """False if there is nothing. Raises OSError for a file, and for a server that is away."""
    try:
        os.scandir(path).close()
    except FileNotFoundError:
        return False
    return True


def open_bucket(config: ObjectConfig) -> Bucket:
    """The bucket of a configuration. Sends no request. Raises DriveError if a folder is away."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, S3Store
    except ImportError as error:
        raise ExtraMissingError("s3", "obstore") from error
    scheme, rest = config.url.split("://", 1)
    if scheme == "file":
        folder = Path(rest)
        try:
            store = LocalStore(folder, mkdir=not is_folder(folder))
        except (BaseError, OSError, ValueError) as error:
            code = error.errno if isinstance(error, OSError) else None
            if code is not None and code not in _NO_FOLDER:
                raise DriveError(config.url, f"cannot be opened: {os.strerror(code)}") from error
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
    """The credentials of a profile, if one is configured or the environment has none."""
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


def refusal(error: BucketError, config: ObjectConfig) -> ConfigError | None:
    """The error for settings that the server refuses; None if the server may answer later."""
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
            "object.url", f"{config.url}: the bucket does not exist", hint="create it, or change it"
        )
    return None
