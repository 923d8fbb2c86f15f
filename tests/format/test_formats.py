"""docs/formats.md says what the code does: every table is held against its struct."""

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdepot.core.block import KEY_BYTES, LINK_BYTES, TAG_BYTES
from kvdepot.core.metadata import MetaKind
from kvdepot.format import metadata, record, segment

TEXT = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
CODES = {"u64": "Q", "u32": "I", "u16": "H", "u8": "B"}
ROW = re.compile(r"^\| (\d+) \| (\w+) \| (.+) \|$", re.MULTILINE)


def _struct_code(field: np.dtype[Any]) -> str:
    return f"{field.itemsize}s" if field.kind == "V" else {4: "I", 8: "Q"}[field.itemsize]


def _fields(dtype: np.dtype[Any]) -> list[np.dtype[Any]]:
    return [dtype[name] for name in dtype.names or ()]


STRUCTS = {
    "Volume header": metadata._HEADER.format,
    "Segment header": segment._HEADER.format,
    "Trailer": segment._TRAILER.format,
    "Footer entry": "<" + "".join(map(_struct_code, _fields(segment.ENTRY))),
    "Record": record._HEAD.format + 4 * "Q",  # producer, key id, tenant, weight epoch
    "Key": f"<{TAG_BYTES}s{LINK_BYTES}s{KEY_BYTES - TAG_BYTES - LINK_BYTES}s",
    "Frame": metadata._FRAME.format,
}


def chapter(title: str) -> str:
    found = re.search(rf"^#+ {title}\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"no chapter {title}"
    return found[1]


def expanded(layout: str) -> str:
    """`<QII2Q` as `<QIIQQ`; lengths of byte strings stay."""
    return re.sub(r"(\d+)([A-Z])", lambda found: found[2] * int(found[1]), layout)


@pytest.mark.parametrize("title", STRUCTS)
def test_the_table_is_the_struct(title: str) -> None:
    layout = "<"
    for offset, kind, _ in ROW.findall(chapter(title)):
        assert int(offset) == struct.calcsize(layout), f"offset {offset}"
        layout += CODES.get(kind, kind)
    assert layout == expanded(STRUCTS[title])


@pytest.mark.parametrize(
    ("title", "magic"),
    [
        ("Segment header", segment.HEADER_MAGIC),
        ("Trailer", segment.TRAILER_MAGIC),
        ("Record", record.MAGIC),
    ],
)
def test_magic_numbers(title: str, magic: int) -> None:
    letters = magic.to_bytes(4, "little").decode()
    assert f"magic 0x{magic:08X} (`{letters}`)" in chapter(title)


def test_numbers_in_the_text() -> None:
    assert f"A *page* is {record.PAGE} bytes" in TEXT
    assert f"Format {segment.FORMAT}." in TEXT
    assert f"At byte {record.TABLE_OFFSET} follows one checksum" in chapter("Record")
    assert f"checksum of the bytes 8 to {segment._HEADER.size}" in chapter("Segment header")
    assert f"checksum of the bytes 8 to {segment._TRAILER.size}" in chapter("Trailer")
    assert f"version of the record format: {record.VERSION}" in chapter("Record")
    assert f"checksum of the bytes 8 to {metadata._HEADER.size}" in chapter("Volume header")
    assert f"magic `{metadata.MAGIC[:-1].decode()}\\0`" in chapter("Volume header")
    for meta_kind in MetaKind:
        name = meta_kind.name.lower()
        assert f"| {meta_kind.value} | {name} |" in chapter("Metadata log"), name
    for kind in record.Kind:
        assert f"{kind.value} {kind.name.lower()}" in chapter("Record")
    for codec in record.Codec:
        assert f"{codec.value} {codec.name.lower()}" in chapter("Record")
