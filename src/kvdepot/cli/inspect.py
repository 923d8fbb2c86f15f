"""`kvdepot inspect PATH`: the content of a store on disk."""

import argparse
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvdepot.cli import output
from kvdepot.cli.command import Answer, Command
from kvdepot.cli.drive_speed import NOT_MEASURED, profile_text
from kvdepot.cli.tables import Column, Table
from kvdepot.core.block import BlockKey
from kvdepot.core.json_object import parse_object
from kvdepot.core.metadata import Metadata, MetaKind
from kvdepot.core.units import format_bytes, format_count
from kvdepot.core.volume import Contents, page_of, segment_of
from kvdepot.format.record import HEAD_BYTES, PAGE, token_ids
from kvdepot.format.segment import FORMAT
from kvdepot.io.files import aligned
from kvdepot.io.speed import Profile
from kvdepot.store.check.offline import OpenedVolume, opened

HIDDEN = ("secret",)
"""Fields of a description that are never printed; descriptions on disk do not have them."""
ROWS_MAX = 40
Row = dict[str, Any]


def run(args: argparse.Namespace) -> Answer:
    with output.Progress(f"reading {args.path}"), opened(args.path) as volume:
        facts = inspect(args.path, volume, args.tokens or 0)
    notes = [f"damage: {text}" for text in facts["damage"]]
    notes += [f"hint: kvdepot check {args.path}"] if notes else []
    return Answer(facts, lines(facts), notes)


def inspect(path: Path, volume: OpenedVolume, tokens: int) -> Row:
    contents, recovered = volume.read()
    entries = [segment.entries["stamp"] for segment in recovered if len(segment.entries)]
    stamps = np.concatenate(entries) if entries else np.zeros(1, np.uint64)
    in_use = volume.segments.by_slot
    measured = volume.metadata.known.values(MetaKind.PROFILE).get(b"")
    return {
        "path": str(path),
        "format": FORMAT,
        "uuid": str(uuid.UUID(bytes=volume.segments.header.store)),
        "segment_bytes": volume.segment_bytes,
        "held_bytes": volume.segments.slot_count() * volume.segment_bytes,
        "free_slots": len(volume.segments.free),
        "blocks": len(contents.places),
        "live_bytes": volume.segments.live_bytes,
        "tombstones": len(volume.metadata.known.tombstones),
        "profile": Profile.parse(measured) if measured else None,
        "oldest_stamp": int(stamps.min()),
        "newest_stamp": int(stamps.max()),
        "segments": [
            {
                "segment_id": segment.segment_id,
                "slot": segment.slot,
                "sealed": segment.sealed,
                "records": len(segment.entries),
                "live_blocks": in_use[segment.slot].live_count,
                "live_bytes": in_use[segment.slot].live_bytes,
            }
            for segment in sorted(recovered, key=lambda segment: segment.segment_id)
        ],
        "namespaces": list(namespace_rows(volume.metadata.known, contents)),
        "damage": list(volume.damage),
        "tokens": list(token_rows(volume, contents, tokens)),
    }


def token_rows(volume: OpenedVolume, contents: Contents, wanted: int) -> Iterator[Row]:
    """Token ids of the first blocks on the drive, read from the heads of their records."""
    head = aligned(HEAD_BYTES)[:HEAD_BYTES]
    for number in np.argsort(contents.places)[:wanted].tolist():
        key, place = BlockKey(contents.words[number].tobytes()), int(contents.places[number])
        fd, base = volume.segments.by_slot[segment_of(place)].extent
        nbytes = os.preadv(fd, [head], base + page_of(place) * PAGE)
        ids = token_ids(head, key) if nbytes == HEAD_BYTES else b""
        yield {"key": key.hex(), "token_ids": np.frombuffer(ids, "<u4").tolist()}


def namespace_rows(metadata: Metadata, contents: Contents) -> Iterator[Row]:
    """Namespaces with a description or with blocks, the largest first."""
    tags = np.ascontiguousarray(contents.words[:, 0]).astype("<u8").tobytes()
    blocks: Counter[bytes] = Counter()
    nbytes: Counter[bytes] = Counter()
    for index, size in enumerate(contents.payload_bytes.tolist()):
        tag = tags[8 * index : 8 * index + 8]
        blocks[tag] += 1
        nbytes[tag] += size
    known = {tag: description(text) for tag, text in metadata.values(MetaKind.NAMESPACE).items()}
    for tag in sorted({*known, *blocks}, key=lambda tag: (-nbytes[tag], tag)):
        facts = known.get(tag, {})
        layout = facts.get("layout", {})
        layout = layout if isinstance(layout, dict) else {}
        tokens = layout.get("block_tokens", 0)
        yield {
            "tag": tag.hex(),
            "model": printable(facts.get("model", "")),
            "tenant": printable(facts.get("tenant", "")),
            "dtype": printable(layout.get("dtype", "")),
            "block_tokens": tokens if isinstance(tokens, int) else 0,
            "blocks": blocks[tag],
            "nbytes": nbytes[tag],
            "description": facts,
        }


def description(text: bytes) -> Row:
    """The description of a namespace; empty if it cannot be parsed."""
    try:
        facts = parse_object(text)
    except ValueError:
        return {}
    return {name: value for name, value in facts.items() if name not in HIDDEN}


def printable(value: object) -> str:
    """The value on one line, without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    yield f"{facts['path']}: store {facts['uuid']}, format {facts['format']}"
    size = format_bytes(facts["segment_bytes"])
    yield (
        f"  segments    {format_bytes(facts['held_bytes'])} in segments of {size}, "
        f"{facts['free_slots']} of them free"
    )
    live = format_bytes(facts["live_bytes"])
    yield f"  live        {format_count(facts['blocks'], 'block')}, {live}"
    yield f"  tombstones  {facts['tombstones']:,}"
    yield f"  speed       {profile_text(facts['profile']) if facts['profile'] else NOT_MEASURED}"
    yield f"  stamps      {facts['oldest_stamp']:,} to {facts['newest_stamp']:,}"
    if facts["namespaces"]:
        yield "\n" + Table.of(facts["namespaces"], NAMESPACES).text()
    if facts["segments"]:
        yield "\n" + Table.of(facts["segments"][:ROWS_MAX], SEGMENTS).text()
        if len(facts["segments"]) > ROWS_MAX:
            yield f"… and {len(facts['segments']) - ROWS_MAX:,} more; --json lists them all"
    for row in facts["tokens"]:
        yield f"{row['key']}: {' '.join(map(str, row['token_ids'])) or 'not known'}"


NAMESPACES: Final[Mapping[str, Column]] = {
    "namespace": "tag",
    "model": lambda row: row["model"] or "?",
    "tenant": lambda row: row["tenant"] or "-",
    "dtype": lambda row: row["dtype"] or "?",
    "tokens/block": lambda row: row["block_tokens"] or "?",
    "blocks": "blocks",
    "bytes": lambda row: format_bytes(row["nbytes"]),
}
SEGMENTS: Final[Mapping[str, Column]] = {
    "segment": lambda row: str(row["segment_id"]),
    "slot": "slot",
    "state": lambda row: "sealed" if row["sealed"] else "open",
    "records": "records",
    "live blocks": "live_blocks",
    "live bytes": lambda row: format_bytes(row["live_bytes"]),
}
COMMAND = Command(
    more="Shows its segments and namespaces. Changes nothing; the store may be in use meanwhile.",
    options="""
    PATH          a directory or block device
    --tokens N    also show the token ids of the first N blocks; they are as private as prompts
    """,
    run=run,
)
