"""The bytes of a block in a memory slot and in a segment: a 4 KiB head, then the payload.

    0    u64   checksum of head[8:used]
    8    u32   magic, u16 version, u16 kind
    16   32s   key
    48   u64   segment id      set by the volume that writes the record; 0 in memory
    56   u64   stamp           given when the block is put, and kept by every copy (core.clock)
    64   u32   used            bytes of the head that are in use
    68   u16   codec, u16 zero
    72   u64   payload bytes
    80   u64   stored bytes    of the payload as it is encoded; the raw codec stores it as it is
    88   u64   chunk bytes     the payload is checksummed in chunks of this size, whole layers each
    96   u32   chunk count
    100  u32   token count     0: the block's token ids are not known
    104  u64   checksum of the token ids
    112  u64   producer        digest of what computed the block (core.audit); 0: not known
    120  u64   key id          of the key that encrypts the payload; 0: it is not encrypted
    128  u64   tenant          digest of the tenant's name; 0: none
    136  u64   weight epoch    0: the weights were not changed while they were loaded
    192  u64[] checksum of each chunk
    used u32[] token ids       behind the checksums, in the same page

The payload starts at 4096 and is padded with zeros to a multiple of 4096. All little-endian.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvdepot.core.block import KEY_BYTES, BlockKey
from kvdepot.core.clock import STAMP_MAX
from kvdepot.errors import ConfigError
from kvdepot.native import (
    COPY,
    FILL,
    KEY_AT,
    TABLE_AT,
    TRANSFER_DTYPE,
    address_of,
    checksum,
    transfer,
)
from kvdepot.native.memory import view_at

Rows = npt.NDArray[np.int64]
PAGE: Final = 4096
HEAD_BYTES: Final = PAGE
MAGIC: Final = 0x3252564B  # "KVR2"
VERSION: Final = 2
TABLE_OFFSET: Final = TABLE_AT
CHUNKS_MAX: Final = (HEAD_BYTES - TABLE_OFFSET) // 8
SIZE_MAX: Final = 1 << 40
"""Largest valid size of a payload and of its chunks, in bytes."""
IDENTITY: Final = slice(8, 56)
"""The part of a head that a reader expects: magic, version, kind, key, segment id."""
IDENTITY_DTYPE: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("kind", "<u2"),
        ("key", "<u8", (4,)),
        ("segment", "<u8"),
    ]
)
"""`head[IDENTITY]` as fields."""

TOKEN_BYTES: Final = 4

_HEAD: Final = struct.Struct("<QIHH32sQQIHHQQQIIQ")
_HEAD_DTYPE: Final = np.dtype(
    {
        "names": [
            "magic", "version", "kind", "key", "used", "payload_bytes", "stored_bytes",
            "chunk_bytes", "chunk_count", "token_count", "token_sum", "producer",
        ],
        "formats": [
            "<u4", "<u2", "<u2", ("<u8", (4,)), "<u4", "<u8", "<u8",
            "<u8", "<u4", "<u4", "<u8", "<u8",
        ],
        "offsets": [8, 12, 14, 16, 64, 72, 80, 88, 96, 100, 104, 112],
        "itemsize": TABLE_OFFSET,
    }
)  # fmt: skip
"""A head up to its checksum table, as fields."""
_U64: Final = struct.Struct("<Q")
KEY_WORD: Final = KEY_AT // 8
"""The offset of the key in a record, in words of 8 bytes."""
_TOKENS: Final = struct.Struct("<IQ")
_SEGMENT_AT: Final = 48
_STAMP_AT: Final = 56
_TOKENS_AT: Final = 100
_PRODUCER_AT: Final = 112
_ZEROS: Final = bytes(HEAD_BYTES)


class Kind(IntEnum):
    """The kind of a record."""

    BLOCK = 1


class Codec(IntEnum):
    """The encoding of a record's payload."""

    RAW = 0


class Head(NamedTuple):
    """A record's head, parsed."""

    kind: Kind
    key: BlockKey
    segment_id: int
    stamp: int
    payload_bytes: int
    chunk_bytes: int
    chunk_count: int
    token_count: int = 0


def round_up(nbytes: int, unit: int = PAGE) -> int:
    """The smallest multiple of `unit` that is not less than `nbytes`."""
    return -(-nbytes // unit) * unit


def record_bytes(payload_bytes: int) -> int:
    """Size of a record with this payload, including head and padding."""
    return HEAD_BYTES + -(-payload_bytes // PAGE) * PAGE


def record_sizes(payload_bytes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """`record_bytes` for an array."""
    sizes: npt.NDArray[np.int64] = HEAD_BYTES + -(-payload_bytes.astype(np.int64) // PAGE) * PAGE
    return sizes


def chunk_count(payload_bytes: int, chunk_bytes: int) -> int:
    """The number of checksums of a payload. Raises ConfigError if a head cannot hold them."""
    count = -(-payload_bytes // chunk_bytes)
    if not 0 < count <= CHUNKS_MAX:
        raise ConfigError(
            "chunk_bytes", f"{payload_bytes} bytes in {count} chunks, at most {CHUNKS_MAX}"
        )
    if max(payload_bytes, chunk_bytes) > SIZE_MAX:
        raise ConfigError(
            "chunk_bytes", f"{payload_bytes} bytes in chunks of {chunk_bytes}, at most {SIZE_MAX}"
        )
    return count


def tokens_max(payload_bytes: int, chunk_bytes: int) -> int:
    """Most token ids that fit into a record's head."""
    used = TABLE_OFFSET + 8 * -(-payload_bytes // chunk_bytes)
    return max(0, (HEAD_BYTES - used) // TOKEN_BYTES)


def write_head(
    image: memoryview,
    kind: Kind,
    key: BlockKey,
    payload_bytes: int,
    chunk_bytes: int,
    tokens: bytes | memoryview = b"",
    producer: int = 0,
) -> None:
    """Write the head of a record whose checksum table is already written. `place` completes it.

    `tokens` are little-endian u32; all are left out if they do not fit. Clears the rest of the
    page, because it may have data of another tenant.
    """
    count = -(-payload_bytes // chunk_bytes)
    used = TABLE_OFFSET + 8 * count
    end = used + len(tokens)
    if end > HEAD_BYTES:
        tokens, end = b"", used
    token_count = len(tokens) // TOKEN_BYTES
    _HEAD.pack_into(
        image, 0, 0, MAGIC, VERSION, kind, key, 0, 0,
        used, Codec.RAW, 0, payload_bytes, payload_bytes, chunk_bytes, count,
        token_count, checksum(tokens) if token_count else 0,
    )  # fmt: skip
    image[_HEAD.size : TABLE_OFFSET] = _ZEROS[: TABLE_OFFSET - _HEAD.size]
    if producer:
        _U64.pack_into(image, _PRODUCER_AT, producer)
    if token_count:
        image[used:end] = tokens
    image[end:HEAD_BYTES] = _ZEROS[: HEAD_BYTES - end]


def write_heads(
    images: Rows, blocks: npt.NDArray[Any], tokens: Sequence[bytes | memoryview]
) -> None:
    """`write_head` for blocks, rows of core.requests.BLOCK_DTYPE, with records at these addresses.
    Writes zeros after their payloads. `tokens` are those of each block, if known.
    """
    sizes, chunks = blocks["payload_bytes"], blocks["chunk_bytes"]
    heads = np.zeros(len(blocks), _HEAD_DTYPE)
    heads["magic"], heads["version"], heads["kind"] = MAGIC, VERSION, Kind.BLOCK
    heads["key"], heads["producer"] = blocks["key"], blocks["producer"]
    heads["payload_bytes"] = heads["stored_bytes"] = sizes
    heads["chunk_bytes"], heads["chunk_count"] = chunks, -(-sizes // chunks)
    heads["used"] = used = TABLE_OFFSET + 8 * heads["chunk_count"].astype(np.int64)
    ends = used.copy()
    for index, some in enumerate(tokens):
        if some and used[index] + len(some) <= HEAD_BYTES:
            view_at(int(images[index] + used[index]), len(some))[:] = np.frombuffer(some, np.uint8)
            heads[index]["token_count"] = len(some) // TOKEN_BYTES
            heads[index]["token_sum"] = checksum(some)
            ends[index] += len(some)
    copies = np.zeros((3, len(blocks)), TRANSFER_DTYPE)
    copies["mode"], copies["source"] = COPY, address_of(_ZEROS)[0]
    written, cleared, padded = copies
    written["source"] = address_of(heads)[0] + TABLE_OFFSET * np.arange(len(blocks))
    written["target"], written["nbytes"] = images, TABLE_OFFSET
    cleared["target"], cleared["nbytes"] = images + ends, HEAD_BYTES - ends
    padded["target"], padded["nbytes"] = images + HEAD_BYTES + sizes, -sizes % PAGE
    transfer(copies.reshape(-1))


def fill_tokens(
    image: memoryview, payload_bytes: int, chunk_bytes: int, tokens: bytes | memoryview
) -> None:
    """Write token ids to a head that another process will complete."""
    if len(tokens) > TOKEN_BYTES * tokens_max(payload_bytes, chunk_bytes):
        tokens = tokens[:0]
    used = TABLE_OFFSET + 8 * -(-payload_bytes // chunk_bytes)
    _TOKENS.pack_into(image, _TOKENS_AT, len(tokens) // TOKEN_BYTES, 0)
    image[used : used + len(tokens)] = tokens


def filled_tokens(image: memoryview, payload_bytes: int, chunk_bytes: int) -> bytes:
    """Read the token ids of `fill_tokens`; empty if their number is invalid."""
    count, _ = _TOKENS.unpack_from(image, _TOKENS_AT)
    if count > tokens_max(payload_bytes, chunk_bytes):
        return b""
    used = TABLE_OFFSET + 8 * -(-payload_bytes // chunk_bytes)
    return bytes(image[used : used + TOKEN_BYTES * count])


def fill_producer(image: memoryview, producer: int) -> None:
    """Write a producer to a head that another process will complete."""
    _U64.pack_into(image, _PRODUCER_AT, producer)


def filled_producer(image: memoryview) -> int:
    """Read the producer of `fill_producer`."""
    return int(_U64.unpack_from(image, _PRODUCER_AT)[0])


def producer_of(image: memoryview, key: BlockKey) -> int:
    """The producer of a block; 0 if it is unknown, or the head is not that block's."""
    if len(image) < HEAD_BYTES:
        return 0
    fields = _HEAD.unpack_from(image, 0)
    known = (fields[1], fields[3], fields[4]) == (MAGIC, Kind.BLOCK, key)
    return filled_producer(image) if known else 0


def token_ids(image: memoryview, key: BlockKey) -> bytes:
    """The token ids of a block, little-endian u32; empty if the head is not that block's, has none,
    or they do not match their checksum.
    """
    if len(image) < HEAD_BYTES:
        return b""
    fields = _HEAD.unpack_from(image, 0)
    used, count, digest = fields[7], fields[14], fields[15]
    if (fields[1], fields[3], fields[4]) != (MAGIC, Kind.BLOCK, key) or not count:
        return b""
    end = used + TOKEN_BYTES * count
    if not TABLE_OFFSET <= used <= end <= HEAD_BYTES:
        return b""
    found = bytes(image[used:end])
    return found if checksum(found) == digest else b""


def set_stamp(image: memoryview, stamp: int) -> None:
    """Write the stamp of a record that is not placed yet."""
    _U64.pack_into(image, _STAMP_AT, stamp)


def place(image: memoryview, segment_id: int) -> None:
    """Write the segment id of a record, and the checksum of its head."""
    _U64.pack_into(image, _SEGMENT_AT, segment_id)
    (used,) = struct.unpack_from("<I", image, 64)
    _U64.pack_into(image, 0, checksum(image[8:used]))


def heads_at(images: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint64], Rows]:
    """Memory as words of 8 bytes, and the first word of each record at these page-aligned
    addresses. Only the pages of the records may be used.
    """
    first = int(images.min())
    words = view_at(first, int(images.max()) - first + HEAD_BYTES).view("<u8")
    return words, (images - first) >> 3


def place_records(images: npt.NDArray[np.int64], segment_id: int) -> None:
    """`place` for records at these addresses."""
    words, heads = heads_at(images)
    words[heads + _SEGMENT_AT // 8] = segment_id
    sums = np.zeros(len(images), TRANSFER_DTYPE)
    sums["source"], sums["table"], sums["mode"] = images + 8, images, FILL
    used = (words[heads + 8] & 0xFFFFFFFF).astype(np.int64)  # a damaged head may name any number
    sums["nbytes"], sums["chunk_bytes"] = np.clip(used, 8, HEAD_BYTES) - 8, HEAD_BYTES
    transfer(sums)


def stamps_of(images: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """`stamp_of` for records at these addresses."""
    words, heads = heads_at(images)
    return words[heads + _STAMP_AT // 8]


def set_stamps(images: npt.NDArray[np.int64], stamp: int) -> None:
    """`set_stamp` for records at these addresses."""
    words, heads = heads_at(images)
    words[heads + _STAMP_AT // 8] = stamp


def parse_head(image: memoryview) -> Head | None:
    """Parse the head at the start of `image`; None if it is not intact."""
    if len(image) < HEAD_BYTES:
        return None
    (
        digest, magic, version, kind, key, segment_id, stamp,
        used, codec, _, payload_bytes, stored_bytes, chunk_bytes, count, token_count, _,
    ) = _HEAD.unpack_from(image, 0)  # fmt: skip
    if magic != MAGIC or version != VERSION or codec != Codec.RAW:
        return None
    if not TABLE_OFFSET <= used <= HEAD_BYTES or checksum(image[8:used]) != digest:
        return None
    if kind not in Kind.__members__.values() or used != TABLE_OFFSET + 8 * count:
        return None
    if not _sizes_agree(payload_bytes, chunk_bytes, count) or stored_bytes != payload_bytes:
        return None
    if stamp > STAMP_MAX:
        return None
    where = (segment_id, stamp, payload_bytes, chunk_bytes)
    return Head(Kind(kind), BlockKey(key), *where, count, token_count)


def _sizes_agree(payload_bytes: int, chunk_bytes: int, count: int) -> bool:
    in_range = payload_bytes <= SIZE_MAX and 0 < chunk_bytes <= SIZE_MAX
    return in_range and -(-payload_bytes // chunk_bytes) == count


def stamp_of(image: memoryview) -> int:
    """The stamp of a record that this process wrote itself. No checks."""
    return int(_U64.unpack_from(image, _STAMP_AT)[0])


def holds_key(memory: memoryview, at: int, key: BlockKey) -> bool:
    """True if the record at `at` names this key. Does not verify the record."""
    return bytes(memory[at + KEY_AT : at + KEY_AT + KEY_BYTES]) == key


def own_chunk_bytes(image: memoryview, key: BlockKey, payload_bytes: int) -> int:
    """The chunk size of a block in our own memory; 0 if the head is not that of the block."""
    fields = _HEAD.unpack_from(image, 0)
    chunk_bytes, count = fields[12], fields[13]
    known = (fields[1], fields[3], fields[4], fields[10]) == (MAGIC, Kind.BLOCK, key, payload_bytes)
    if not known or not 0 < count <= CHUNKS_MAX:
        return 0
    return int(chunk_bytes) if _sizes_agree(payload_bytes, chunk_bytes, count) else 0


def payload_intact(image: memoryview, head: Head) -> bool:
    """True if the payload in `image` matches the checksums in its head. Reads every byte."""
    if len(image) < record_bytes(head.payload_bytes):
        return False
    table = image[TABLE_OFFSET : TABLE_OFFSET + 8 * head.chunk_count].cast("Q")
    for index, expected in enumerate(table):
        start = HEAD_BYTES + index * head.chunk_bytes
        stop = min(start + head.chunk_bytes, HEAD_BYTES + head.payload_bytes)
        if checksum(image[start:stop]) != expected:
            return False
    return True


def identities(keys: npt.NDArray[np.uint64], segments: npt.NDArray[Any]) -> npt.NDArray[np.void]:
    """The expected `head[IDENTITY]` of blocks with these keys in segments with these ids."""
    expected = np.zeros(len(keys), IDENTITY_DTYPE)
    expected["magic"], expected["version"], expected["kind"] = MAGIC, VERSION, Kind.BLOCK
    expected["key"], expected["segment"] = keys, segments
    return expected


assert IDENTITY_DTYPE.itemsize == IDENTITY.stop - IDENTITY.start
assert _HEAD.size <= _PRODUCER_AT < TABLE_OFFSET and KEY_BYTES == 32
