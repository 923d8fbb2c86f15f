"""Records that are not blocks: what was removed, and what a namespace tag stands for.

A removal says: no record of this key (or of this whole namespace) with a lower sequence counts. It
must outlive the records it speaks of, and older copies of a block may lie anywhere: so every drive
has it, and carries it along while a segment up to `until_segment`, the newest of its time, is used.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from kvdepot.codec.record import HEAD_BYTES, TABLE_OFFSET, Kind, write_head
from kvdepot.core.block import KEY_BYTES, TAG_BYTES, BlockKey
from kvdepot.core.tier import Removal
from kvdepot.native import chunk_checksums

_REMOVAL: Final = struct.Struct("<32sQQQ")
_CHUNK: Final = 64 << 10
_PAGE_PREFIX: Final = b"\0sess"
_NUMBER_MAX: Final = (1 << 63) - 1


def space_key(tag: bytes) -> BlockKey:
    """The key under which a namespace's description is recorded."""
    return BlockKey(tag.ljust(KEY_BYTES, b"\0"))


def page_tag(number: int) -> bytes:
    """Under which a page of sessions is recorded, in the place of a namespace's tag."""
    return _PAGE_PREFIX + number.to_bytes(TAG_BYTES - len(_PAGE_PREFIX), "big")


def is_page(tag: bytes) -> bool:
    """Whether a note is a page of sessions, not the description of a namespace."""
    return tag.startswith(_PAGE_PREFIX)


def pack_removals(removals: Sequence[Removal]) -> bytes:
    return b"".join(
        _REMOVAL.pack(r.key, int(r.whole_namespace), r.below_sequence, r.until_segment)
        for r in removals
    )


def parse_removals(payload: bytes) -> list[Removal]:
    """What a note says; what is left over at its end says nothing."""
    entire = payload[: len(payload) // _REMOVAL.size * _REMOVAL.size]
    return [
        Removal(BlockKey(key), bool(whole), min(below, _NUMBER_MAX), min(until, _NUMBER_MAX))
        for key, whole, below, until in _REMOVAL.iter_unpack(entire)
    ]


def parse_object(text: bytes) -> dict[str, Any]:
    """A JSON object, as descriptions and superblocks are. ValueError where it is none."""
    try:
        found = json.loads(text.decode(), parse_constant=_no_number)
        json.dumps(found, allow_nan=False)  # 1e999 is none either
    except RecursionError as error:
        raise ValueError("is nested too deep") from error
    if isinstance(found, dict):
        return found
    raise ValueError("is no JSON object")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def write_note(image: memoryview, kind: Kind, key: BlockKey, payload: bytes) -> None:
    """Fill `image` with an unplaced record that holds `payload`."""
    image[HEAD_BYTES : HEAD_BYTES + len(payload)] = payload
    count = -(-len(payload) // _CHUNK)
    chunk_checksums(
        image[HEAD_BYTES : HEAD_BYTES + len(payload)],
        _CHUNK,
        image[TABLE_OFFSET : TABLE_OFFSET + 8 * count],
    )
    write_head(image, kind, key, len(payload), _CHUNK)


assert TAG_BYTES < KEY_BYTES
