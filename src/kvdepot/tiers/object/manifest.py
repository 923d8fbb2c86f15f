"""Manifests: small immutable objects that say what lies in a writer's data objects.

    meta/format                                     what this is, and which version
    meta/alive/WRITER                               written again and again while a writer lives
    meta/index/WRITER/FIRST-LAST-GENERATION         a manifest
    data/WRITER/NUMBER                              records, one after the other

A writer numbers its manifests. One that covers the numbers of others and has a higher generation
replaces them: so manifests are merged and blocks leave them, without anything being overwritten.

A manifest: magic, version, checksum of the rest, bytes of the JSON, rows; the JSON (data objects,
removals, descriptions, and token ids, which older readers do not look at); 56 bytes for each
record. All little-endian.
"""

import json
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.codec.record import HEAD_BYTES, PAGE
from kvdepot.core.block import KEY_BYTES, TAG_BYTES
from kvdepot.native import checksum

VERSION: Final = 1
FORMAT_PATH: Final = "meta/format"
ALIVE: Final = "meta/alive/"
INDEX: Final = "meta/index/"
DATA: Final = "data/"
_HEADER: Final = struct.Struct("<4sHHQII")
_MAGIC: Final = b"KVDM"
ROW: Final = np.dtype(
    [("key", "<u8", 4), ("page", "<u4"), ("zero", "<u4"), ("payload", "<u8"), ("sequence", "<u8")]
)
_NUMBER_DIGITS: Final = 12
_WRITER_DIGITS: Final = 16
Records = npt.NDArray[Any]
"""Rows of ROW: the records of one data object."""


class DamagedManifestError(Exception):
    """Not a manifest, or of a version that this program does not know."""


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A removal as all writers see it."""

    prefix: bytes
    """A whole key, or the tag of a namespace."""
    below_sequence: int
    created_s: int
    """Of the calendar of the writer that removed."""

    def covers(self, records: Records) -> npt.NDArray[np.bool_]:
        """Which records it removes."""
        words = np.frombuffer(self.prefix, "<u8")
        same = (records["key"][:, : len(words)] == words).all(axis=1)
        found: npt.NDArray[np.bool_] = same & (records["sequence"] < self.below_sequence)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """What a manifest says of one data object."""

    path: str
    nbytes: int
    created_s: int
    records: Records
    tokens: Mapping[int, bytes] = field(default_factory=dict)
    """Token ids of records, by page, as far as they are known."""

    def only(self, kept: npt.NDArray[np.bool_]) -> "Listing":
        """The same object with these of its records."""
        pages = set(self.records["page"][kept].tolist())
        tokens = {page: ids for page, ids in self.tokens.items() if page in pages}
        return replace(self, records=self.records[kept], tokens=tokens)


@dataclass(slots=True)
class Entry:
    """What one manifest holds."""

    objects: list[Listing] = field(default_factory=list)
    tombstones: list[Tombstone] = field(default_factory=list)
    descriptions: dict[bytes, bytes] = field(default_factory=dict)

    def __len__(self) -> int:
        records = sum(len(one.records) for one in self.objects)
        return records + len(self.tombstones) + len(self.descriptions)

    @classmethod
    def joined(cls, parts: Iterable["Entry"]) -> "Entry":
        whole = cls()
        for part in parts:
            whole.objects += part.objects
            whole.tombstones += part.tombstones
            whole.descriptions |= part.descriptions
        return whole

    def pack(self) -> bytes:
        told = json.dumps(
            {
                "objects": [
                    [one.path, one.nbytes, one.created_s, len(one.records)] for one in self.objects
                ],
                "removals": [
                    [one.prefix.hex(), one.below_sequence, one.created_s] for one in self.tombstones
                ],
                "namespaces": {
                    tag.hex(): text.hex() for tag, text in sorted(self.descriptions.items())
                },
                "tokens": {
                    one.path: {str(page): b64encode(ids).decode() for page, ids in told}
                    for one in self.objects
                    if (told := sorted(one.tokens.items()))
                },
            },
            separators=(",", ":"),
        ).encode()
        rows = b"".join(one.records.tobytes() for one in self.objects)
        body = told + rows
        count = len(rows) // ROW.itemsize
        return _HEADER.pack(_MAGIC, VERSION, 0, checksum(body), len(told), count) + body

    @classmethod
    def parse(cls, image: bytes) -> "Entry":
        if len(image) < _HEADER.size:
            raise DamagedManifestError("too short")
        magic, version, _, digest, told_bytes, count = _HEADER.unpack_from(image)
        body = image[_HEADER.size :]
        if magic != _MAGIC or version != VERSION:
            raise DamagedManifestError(f"of version {version}, which this program does not know")
        if len(body) != told_bytes + count * ROW.itemsize or checksum(body) != digest:
            raise DamagedManifestError("damaged")
        try:
            return cls._of(json.loads(body[:told_bytes]), np.frombuffer(body[told_bytes:], ROW))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise DamagedManifestError("makes no sense") from error

    @classmethod
    def _of(cls, told: dict[str, Any], rows: Records) -> "Entry":
        entry, at = cls(), 0
        for path, nbytes, created_s, count in told["objects"]:
            records = rows[at : at + int(count)]
            at += int(count)
            ends = records["page"].astype(np.int64) * PAGE + HEAD_BYTES
            if not str(path).startswith(DATA) or ".." in path or (ends > int(nbytes)).any():
                raise ValueError(path)
            tokens = {
                int(page): b64decode(ids)
                for page, ids in told.get("tokens", {}).get(path, {}).items()
            }
            entry.objects.append(Listing(str(path), int(nbytes), int(created_s), records, tokens))
        if at != len(rows):
            raise ValueError("rows of no object")
        for prefix, below, created_s in told["removals"]:
            key = bytes.fromhex(prefix)
            if len(key) not in (KEY_BYTES, TAG_BYTES):
                raise ValueError(prefix)
            entry.tombstones.append(Tombstone(key, int(below), int(created_s)))
        for tag, text in told["namespaces"].items():
            entry.descriptions[bytes.fromhex(tag)] = bytes.fromhex(text)
        return entry


@dataclass(frozen=True, slots=True, order=True)
class ManifestName:
    """Where a manifest lies, and which ones it replaces."""

    writer: str
    first: int
    last: int
    generation: int

    @property
    def path(self) -> str:
        numbers = (self.first, self.last, self.generation)
        return INDEX + self.writer + "/" + "-".join(f"{one:0{_NUMBER_DIGITS}x}" for one in numbers)

    @classmethod
    def parse(cls, path: str) -> "ManifestName | None":
        """None: it is no manifest."""
        parts = path.removeprefix(INDEX).split("/")
        if not path.startswith(INDEX) or len(parts) != 2 or len(parts[0]) != _WRITER_DIGITS:
            return None
        numbers = parts[1].split("-")
        if len(numbers) != 3 or any(len(one) != _NUMBER_DIGITS for one in numbers):
            return None
        try:
            int(parts[0], 16)
            first, last, generation = (int(one, 16) for one in numbers)
        except ValueError:
            return None
        return cls(parts[0], first, last, generation)

    def replaces(self, other: "ManifestName") -> bool:
        return (
            self.writer == other.writer
            and self.generation > other.generation
            and self.first <= other.first
            and self.last >= other.last
        )


def in_force(names: Sequence[ManifestName]) -> list[ManifestName]:
    """Those that no other one replaces. Of one writer each with its own."""
    by_writer: dict[str, list[ManifestName]] = {}
    for name in names:
        by_writer.setdefault(name.writer, []).append(name)
    found: list[ManifestName] = []
    for some in by_writer.values():
        some.sort(key=lambda name: -name.generation)
        kept: list[ManifestName] = []
        for name in some:
            if not any(other.replaces(name) for other in kept):
                kept.append(name)
        found += kept
    return found
