"""Keys, payloads, records, tombstones and reads for tests of volumes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvdepot.core.block import KEY_BYTES, BlockKey
from kvdepot.core.clock import StampClock, WallClock
from kvdepot.core.metadata import MetaEntry, Tombstone
from kvdepot.core.volume import READ_DTYPE, RECORD_DTYPE, Array
from kvdepot.format.record import (
    HEAD_BYTES,
    PAGE,
    TABLE_OFFSET,
    Kind,
    chunk_count,
    record_bytes,
    set_stamp,
    stamp_of,
    write_head,
)
from kvdepot.io.files import aligned
from kvdepot.native import address_of, chunk_checksums

CHUNK_BYTES: Final = PAGE
"""The default chunk of images: small, so that small payloads have several chunks."""


STAMPS: Final = StampClock(WallClock())
"""The clock for stamps of test blocks and tombstones."""


def make_key(number: int) -> BlockKey:
    """The key of test block `number`; distinct numbers have distinct keys."""
    return BlockKey(hashlib.sha256(number.to_bytes(16, "little")).digest()[:KEY_BYTES])


def payload_for(key: BlockKey, nbytes: int) -> bytes:
    """The payload of a key, derived from it, so that a reader can verify every byte."""
    return hashlib.shake_128(key).digest(nbytes)


def make_image(key: BlockKey, payload: bytes, chunk_bytes: int = CHUNK_BYTES) -> memoryview:
    """A record image in new page-aligned memory, padded to whole pages."""
    image = aligned(record_bytes(len(payload)))[: record_bytes(len(payload))]
    image[HEAD_BYTES : HEAD_BYTES + len(payload)] = payload
    table = image[TABLE_OFFSET : TABLE_OFFSET + 8 * chunk_count(len(payload), chunk_bytes)]
    chunk_checksums(payload, chunk_bytes, table)
    write_head(image, Kind.BLOCK, key, len(payload), chunk_bytes)
    set_stamp(image, STAMPS.next())
    return image


@dataclass(frozen=True, slots=True)
class Records:
    """Records to append, and their memory."""

    rows: Array
    images: Sequence[memoryview]


def make_records(
    keys: Sequence[BlockKey], payload_bytes: int | Sequence[int], chunk_bytes: int = CHUNK_BYTES
) -> Records:
    """Records of test blocks with the payloads of `payload_for`."""
    sizes = [payload_bytes] * len(keys) if isinstance(payload_bytes, int) else payload_bytes
    images = [
        make_image(key, payload_for(key, nbytes), chunk_bytes)
        for key, nbytes in zip(keys, sizes, strict=True)
    ]
    return records_of(keys, sizes, images)


def records_of(
    keys: Sequence[BlockKey], sizes: Sequence[int], images: Sequence[memoryview]
) -> Records:
    rows = np.zeros(len(keys), RECORD_DTYPE)
    rows["key"] = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 4)
    rows["payload_bytes"] = sizes
    rows["image"] = [address_of(image)[0] for image in images]
    rows["stamp"] = [stamp_of(image) for image in images]
    return Records(rows, images)


def removal_of(*names: bytes) -> list[MetaEntry]:
    """Tombstones that cover every earlier record of these keys or tags."""
    return [Tombstone(name, STAMPS.next(), STAMPS.next()).entry for name in names]


@dataclass(slots=True)
class Reads:
    """Reads into new memory."""

    rows: Array = field(default_factory=lambda: np.zeros(0, READ_DTYPE))
    images: list[memoryview] = field(default_factory=list)

    def add(
        self,
        key: BlockKey,
        place: int,
        payload_bytes: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        target: int = 0,
        span: tuple[int, int] | None = None,
    ) -> "Reads":
        """Add a read of the whole payload, or of `span` (start and stop in bytes)."""
        start, stop = span if span is not None else (0, payload_bytes)
        image = aligned(record_bytes(payload_bytes))[: record_bytes(payload_bytes)]
        row = np.zeros(1, READ_DTYPE)
        row["key"] = np.frombuffer(key, np.uint64)
        row["place"], row["payload_bytes"], row["chunk_bytes"] = place, payload_bytes, chunk_bytes
        row["image"], row["target"] = address_of(image)[0], target
        row["start"], row["stop"] = start, stop
        self.rows = np.concatenate([self.rows, row])
        self.images.append(image)
        return self

    def payload(self, index: int) -> bytes:
        """The range of the payload that a read returned."""
        row = self.rows[index]
        return bytes(self.images[index][HEAD_BYTES + row["start"] : HEAD_BYTES + row["stop"]])
