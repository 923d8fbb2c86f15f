"""Manifests: small immutable objects that list the contents of a writer's data objects.

    meta/format                                     kind of depot and version
    meta/alive/WRITER                               written periodically while a writer lives
    meta/writers/WRITER                             exists while a writer may have data objects
    meta/index/WRITER/FIRST-LAST-GENERATION         a manifest
    data/WRITER/NUMBER                              records, one after the other
    data/WRITER/probe                               used to measure the bucket

WRITER has 16 hexadecimal digits, a number 12. All other objects below `data/` and `meta/` belong to
other programs, or to depots with a longer prefix. They are never deleted.

A writer numbers its manifests. One that covers the numbers of others and has a higher generation
replaces them. So manifests are merged and records removed without overwriting an object.

A manifest: magic, version, checksum of the rest, bytes of the JSON, rows; the JSON (data objects,
metadata, token ids); 56 bytes for each record. All little-endian.
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

from kvdepot.core.clock import STAMP_MAX
from kvdepot.core.json_object import parse_object
from kvdepot.core.metadata import Metadata, MetaEntry, MetaKind, Tombstone
from kvdepot.core.volume import SEGMENT_SHIFT
from kvdepot.format.record import HEAD_BYTES, PAGE, SIZE_MAX
from kvdepot.native import checksum

VERSION: Final = 2
FORMAT_PATH: Final = "meta/format"
ALIVE: Final = "meta/alive/"
WRITERS: Final = "meta/writers/"
INDEX: Final = "meta/index/"
DATA: Final = "data/"
PROBE: Final = "probe"
KINDS: Final = frozenset({MetaKind.NAMESPACE, MetaKind.TOMBSTONE})
"""Kinds of metadata that a bucket stores. Other kinds belong to one node."""
_HEADER: Final = struct.Struct("<4sHHQII")
_MAGIC: Final = b"KVDM"
ROW: Final = np.dtype(
    [("key", "<u8", 4), ("page", "<u4"), ("zero", "<u4"), ("payload", "<u8"), ("stamp", "<u8")]
)
_NUMBER_DIGITS: Final = 12
_WRITER: Final = re.compile("[0-9a-f]{16}")
_NUMBER: Final = re.compile(f"[0-9a-f]{{{_NUMBER_DIGITS}}}")
_NAME: Final = re.compile(f"{INDEX}({_WRITER.pattern})/" + "-".join([f"({_NUMBER.pattern})"] * 3))
MANIFEST_BYTES_MAX: Final = 256 << 20
"""Longest manifest that is read."""
OBJECT_BYTES_MAX: Final = PAGE << SEGMENT_SHIFT
"""Longest data object: its pages are counted in 24 bits."""
_CREATED_MAX: Final = STAMP_MAX // 10**6
_INVALID: Final = (ValueError, TypeError, KeyError, AttributeError, OverflowError)
"""Exceptions of parsing a malformed manifest."""
Records = npt.NDArray[Any]
"""Rows of ROW: the records of one data object."""


def writer_below(folder: str, path: str) -> str | None:
    """The writer in the path of an object directly below `meta/alive/` or `meta/writers/`."""
    name = path.removeprefix(folder)
    return name if path.startswith(folder) and _WRITER.fullmatch(name) else None


def data_path(writer: str, number: int) -> str:
    return f"{DATA}{writer}/{number:0{_NUMBER_DIGITS}x}"


def writer_of_data(path: str) -> str | None:
    """The writer of a data object or a probe; None for objects of other programs."""
    writer, _, name = path.removeprefix(DATA).partition("/")
    known = name == PROBE or _NUMBER.fullmatch(name)
    return writer if path.startswith(DATA) and _WRITER.fullmatch(writer) and known else None


class DamagedManifestError(Exception):
    """The manifest is damaged, or of a version that this program does not know."""


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """One data object in a manifest."""

    path: str
    nbytes: int
    created_s: int
    records: Records
    tokens: Mapping[int, bytes] = field(default_factory=dict)
    """Known token ids of records, by page."""

    def only(self, kept: npt.NDArray[np.bool_]) -> "Listing":
        """The same object with only these records."""
        pages = set(self.records["page"][kept].tolist())
        tokens = {page: ids for page, ids in self.tokens.items() if page in pages}
        return replace(self, records=self.records[kept], tokens=tokens)


@dataclass(slots=True)
class Manifest:
    """The content of one manifest."""

    objects: list[Listing] = field(default_factory=list)
    metadata: list[MetaEntry] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(one.records) for one in self.objects) + len(self.metadata)

    @property
    def paths(self) -> list[str]:
        return [one.path for one in self.objects]

    @classmethod
    def joined(cls, parts: Iterable["Manifest"]) -> "Manifest":
        """Merge manifests, oldest first: each object once, as the last one lists it, and the newest
        metadata of each name. A writer lists an object twice if it adopts it again.
        """
        known, objects = Metadata(), dict[str, Listing]()
        for part in parts:
            objects |= {one.path: one for one in part.objects}
            for entry in part.metadata:
                known.add(entry)
        return cls(list(objects.values()), known.all())

    @property
    def last_stamp(self) -> int:
        """The greatest stamp in it."""
        stones = [Tombstone.parse(one) for one in self.metadata if one.kind is MetaKind.TOMBSTONE]
        records = [one.records["stamp"] for one in self.objects if len(one.records)]
        stamps = [int(one.max()) for one in records] + [one.stamp for one in self.metadata]
        return max([0, *stamps, *(one.below for one in stones if one is not None)])

    def pack(self) -> bytes:
        text = json.dumps(
            {
                "objects": [
                    [one.path, one.nbytes, one.created_s, len(one.records)] for one in self.objects
                ],
                "metadata": [
                    [one.kind, one.name.hex(), one.stamp, _hex(one.value)] for one in self.metadata
                ],
                "tokens": {
                    one.path: {str(page): b64encode(ids).decode() for page, ids in known}
                    for one in self.objects
                    if (known := sorted(one.tokens.items()))
                },
            },
            separators=(",", ":"),
        ).encode()
        rows = b"".join(one.records.tobytes() for one in self.objects)
        count = len(rows) // ROW.itemsize
        header = _HEADER.pack(_MAGIC, VERSION, 0, checksum(text + rows), len(text), count)
        return header + text + rows

    @classmethod
    def parse(cls, image: bytes) -> "Manifest":
        """Parse a manifest. DamagedManifestError if it is damaged or has invalid fields."""
        if len(image) < _HEADER.size:
            raise DamagedManifestError("it is too short")
        magic, version, _, digest, text_bytes, count = _HEADER.unpack_from(image)
        body = image[_HEADER.size :]
        if magic != _MAGIC or version != VERSION:
            raise DamagedManifestError(f"it has version {version}, this program reads {VERSION}")
        if len(body) != text_bytes + count * ROW.itemsize or checksum(body) != digest:
            raise DamagedManifestError("it does not match its checksum")
        try:
            return cls._of(parse_object(body[:text_bytes]), np.frombuffer(body[text_bytes:], ROW))
        except _INVALID as error:
            raise DamagedManifestError("its fields are invalid") from error

    @classmethod
    def _of(cls, fields: dict[str, Any], rows: Records) -> "Manifest":
        manifest, start = cls(), 0
        if (rows["stamp"] > STAMP_MAX).any() or (rows["payload"] > SIZE_MAX).any():
            raise ValueError("a record is out of range")
        for path, nbytes, created_s, count in fields["objects"]:
            records = rows[start : start + _whole(count, len(rows) - start)]
            start += len(records)
            ends = records["page"].astype(np.int64) * PAGE + HEAD_BYTES
            if writer_of_data(path) is None or (ends > _whole(nbytes, OBJECT_BYTES_MAX)).any():
                raise ValueError(path)
            pages = set(records["page"].tolist())
            known = {int(page): ids for page, ids in fields["tokens"].get(path, {}).items()}
            if not pages.issuperset(known):
                raise ValueError("token ids of no record")
            tokens = {page: b64decode(ids, validate=True) for page, ids in known.items()}
            created_s = _whole(created_s, _CREATED_MAX)
            manifest.objects.append(Listing(path, nbytes, created_s, records, tokens))
        if len(set(manifest.paths)) != len(manifest.objects):
            raise ValueError("an object is listed twice")
        if start != len(rows):
            raise ValueError("rows of no object")
        for kind, name, stamp, text in fields["metadata"]:
            value = None if text is None else bytes.fromhex(text)
            known_kind = MetaKind(_whole(kind, max(MetaKind)))
            stamp = _whole(stamp, STAMP_MAX)
            entry = MetaEntry(known_kind, bytes.fromhex(name), stamp, value)
            is_stone = entry.kind is MetaKind.TOMBSTONE
            if not entry.is_valid or (is_stone and Tombstone.parse(entry) is None):
                raise ValueError(name)
            if entry.kind in KINDS:
                manifest.metadata.append(entry)
        return manifest


def _whole(value: object, most: int) -> int:
    """A number of a manifest. ValueError if it is none, or not between 0 and `most`."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40} is not a number up to {most}")
    return value


def _hex(value: bytes | None) -> str | None:
    return None if value is None else value.hex()


@dataclass(frozen=True, slots=True, order=True)
class ManifestName:
    """The path of a manifest, which determines the manifests that it replaces."""

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
        """Parse a path; None if it is not that of a manifest."""
        found = _NAME.fullmatch(path)
        if found is None:
            return None
        writer, first, last, generation = found.groups()
        return cls(writer, int(first, 16), int(last, 16), int(generation, 16))

    def replaces(self, other: "ManifestName") -> bool:
        return (
            self.writer == other.writer
            and self.generation > other.generation
            and self.first <= other.first
            and self.last >= other.last
        )


def in_force(names: Sequence[ManifestName]) -> list[ManifestName]:
    """The manifests that are not replaced by another one."""
    by_writer: dict[str, list[ManifestName]] = {}
    for name in sorted(names, key=lambda one: -one.generation):
        kept = by_writer.setdefault(name.writer, [])
        if not any(other.replaces(name) for other in kept):
            kept.append(name)
    return [name for kept in by_writer.values() for name in kept]
