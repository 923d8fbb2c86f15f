"""Manifests: small immutable objects that say what lies in a writer's data objects.

    meta/format                                     what this is, and which version
    meta/alive/WRITER                               written again and again while a writer lives
    meta/writers/WRITER                             there while data objects of a writer may be
    meta/index/WRITER/FIRST-LAST-GENERATION         a manifest
    data/WRITER/NUMBER                              records, one after the other
    data/WRITER/probe                               by which a writer measures the bucket

WRITER is 16 hexadecimal digits, a number 12. Nothing else below `data/` and `meta/` is ours: other
programs, and depots below this one's prefix, may have it, and it is never deleted.

A writer numbers its manifests. One that covers the numbers of others and has a higher generation
replaces them: so manifests are merged and blocks leave them, without anything being overwritten.

A manifest: magic, version, checksum of the rest, bytes of the JSON, rows; the JSON (data objects,
tombstones, descriptions of namespaces, token ids); 56 bytes for each record. All little-endian.
"""

import json
import re
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.core.metadata import Tombstone
from kvdepot.format.record import HEAD_BYTES, PAGE
from kvdepot.native import checksum

VERSION: Final = 2
FORMAT_PATH: Final = "meta/format"
ALIVE: Final = "meta/alive/"
WRITERS: Final = "meta/writers/"
INDEX: Final = "meta/index/"
DATA: Final = "data/"
PROBE: Final = "probe"
_HEADER: Final = struct.Struct("<4sHHQII")
_MAGIC: Final = b"KVDM"
ROW: Final = np.dtype(
    [("key", "<u8", 4), ("page", "<u4"), ("zero", "<u4"), ("payload", "<u8"), ("stamp", "<u8")]
)
_NUMBER_DIGITS: Final = 12
_WRITER_DIGITS: Final = 16
_WRITER: Final = re.compile(f"[0-9a-f]{{{_WRITER_DIGITS}}}")
_NUMBER: Final = re.compile(f"[0-9a-f]{{{_NUMBER_DIGITS}}}")
Records = npt.NDArray[Any]
"""Rows of ROW: the records of one data object."""


def writer_below(folder: str, path: str) -> str | None:
    """The writer that an object directly below `meta/alive/` or `meta/writers/` names."""
    name = path.removeprefix(folder)
    return name if path.startswith(folder) and _WRITER.fullmatch(name) else None


def data_path(writer: str, number: int) -> str:
    return f"{DATA}{writer}/{number:0{_NUMBER_DIGITS}x}"


def writer_of_data(path: str) -> str | None:
    """The writer of a data object or a probe; None: this program cannot have made it."""
    writer, _, name = path.removeprefix(DATA).partition("/")
    known = name == PROBE or _NUMBER.fullmatch(name)
    return writer if path.startswith(DATA) and _WRITER.fullmatch(writer) and known else None


class DamagedManifestError(Exception):
    """Not a manifest, or of a version that this program does not know."""


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
                "removals": [[one.name.hex(), one.below, one.recorded] for one in self.tombstones],
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
            if writer_of_data(str(path)) is None or (ends > int(nbytes)).any():
                raise ValueError(path)
            tokens = {
                int(page): b64decode(ids)
                for page, ids in told.get("tokens", {}).get(path, {}).items()
            }
            entry.objects.append(Listing(str(path), int(nbytes), int(created_s), records, tokens))
        if at != len(rows):
            raise ValueError("rows of no object")
        for name, below, recorded in told["removals"]:
            stone = Tombstone(bytes.fromhex(name), int(below), int(recorded))
            if not stone.is_valid:
                raise ValueError(name)
            entry.tombstones.append(stone)
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
        if not path.startswith(INDEX) or len(parts) != 2 or not _WRITER.fullmatch(parts[0]):
            return None
        numbers = parts[1].split("-")
        if len(numbers) != 3 or not all(map(_NUMBER.fullmatch, numbers)):
            return None
        return cls(parts[0], *(int(one, 16) for one in numbers))

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
