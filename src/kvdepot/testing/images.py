"""Keys, payloads, record images, tombstones and loads to feed a tier with."""

import hashlib
from typing import Final

from kvdepot.core.block import KEY_BYTES, BlockKey
from kvdepot.core.clock import StampClock, WallClock
from kvdepot.core.metadata import MetaEntry, Tombstone
from kvdepot.core.tier import Load
from kvdepot.format.record import (
    HEAD_BYTES,
    PAGE,
    TABLE_OFFSET,
    Kind,
    chunk_count,
    record_bytes,
    set_stamp,
    write_head,
)
from kvdepot.io.files import aligned
from kvdepot.native import chunk_checksums

CHUNK_BYTES: Final = PAGE
"""The chunk that images have unless told otherwise: small, so that small payloads have several."""


STAMPS: Final = StampClock(WallClock())
"""Gives out the stamps of test blocks and tombstones."""


def make_key(number: int) -> BlockKey:
    """The key of test block `number`; distinct numbers have distinct keys."""
    return BlockKey(hashlib.sha256(number.to_bytes(16, "little")).digest()[:KEY_BYTES])


def payload_for(key: BlockKey, nbytes: int) -> bytes:
    """The one right payload of a key, so that a reader can tell a wrong byte without a copy."""
    return hashlib.shake_128(key).digest(nbytes)


def make_image(key: BlockKey, payload: bytes, chunk_bytes: int = CHUNK_BYTES) -> memoryview:
    """A record image in fresh page-aligned memory, whole pages long, as a tier wants it."""
    image = aligned(record_bytes(len(payload)))[: record_bytes(len(payload))]
    image[HEAD_BYTES : HEAD_BYTES + len(payload)] = payload
    table = image[TABLE_OFFSET : TABLE_OFFSET + 8 * chunk_count(len(payload), chunk_bytes)]
    chunk_checksums(payload, chunk_bytes, table)
    write_head(image, Kind.BLOCK, key, len(payload), chunk_bytes)
    set_stamp(image, STAMPS.next())
    return image


def removal_of(*names: bytes) -> list[MetaEntry]:
    """Tombstones that cover every record of these keys, or tags, that was made before."""
    return [Tombstone(name, STAMPS.next(), STAMPS.next()).entry for name in names]


def make_load(
    key: BlockKey,
    location: int,
    payload_bytes: int,
    chunk_bytes: int = CHUNK_BYTES,
    *,
    copy_to: int = 0,
    span: tuple[int, int] | None = None,
) -> Load:
    """A load into fresh memory: of the whole payload, or of `span` (start and stop in bytes)."""
    start, stop = span if span is not None else (0, payload_bytes)
    image = aligned(record_bytes(payload_bytes))[: record_bytes(payload_bytes)]
    return Load(key, location, payload_bytes, chunk_bytes, image, copy_to, start, stop)


def loaded(load: Load) -> bytes:
    """The payload range that a load has put into its image."""
    return bytes(load.image[HEAD_BYTES + load.start : HEAD_BYTES + load.stop])
