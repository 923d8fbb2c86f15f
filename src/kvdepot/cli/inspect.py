"""`kvdepot inspect PATH`: what is inside a store on disk."""

import argparse
import os
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvdepot.cli import output
from kvdepot.cli.arguments import count
from kvdepot.cli.doctor.drives import NOT_MEASURED, profile_text
from kvdepot.cli.report.tables import Table
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
"""Never printed, wherever it may come from; descriptions on disk do not have it."""
ROWS_MAX = 40


@dataclass(frozen=True, slots=True)
class SegmentRow:
    segment_id: int
    slot: int
    sealed: bool
    records: int
    live_blocks: int
    live_bytes: int


@dataclass(frozen=True, slots=True)
class SpaceRow:
    """One namespace; fields are empty where its description is not on this drive."""

    tag: str
    model: str
    tenant: str
    dtype: str
    block_tokens: int
    blocks: int
    nbytes: int
    description: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One block, and the token ids that it was put with; none where they are not known."""

    key: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Inspection:
    path: str
    format: int
    uuid: str
    segment_bytes: int
    held_bytes: int
    free_slots: int
    blocks: int
    live_bytes: int
    tombstones: int
    profile: Profile | None
    oldest_stamp: int
    newest_stamp: int
    segments: list[SegmentRow]
    namespaces: list[SpaceRow]
    damage: list[str]
    tokens: list[TokenRow]
    """Of blocks in the order in which they lie, as many as were asked for."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "inspect",
        description="Show what is inside a store on disk: its segments and its namespaces. "
        "Changes nothing, and may run while the store is in use.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a directory or block device")
    parser.add_argument(
        "--tokens",
        type=count,
        default=0,
        metavar="N",
        help="show the token ids of the first N blocks too; they are as private as the prompts",
    )
    output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    with output.Progress(f"reading {args.path}"), opened(args.path) as volume:
        found = inspect(args.path, volume, args.tokens)
    if args.json:
        output.document(found)
    else:
        show(found)
    return 0


def inspect(path: Path, volume: OpenedVolume, tokens: int = 0) -> Inspection:
    contents, recovered = volume.read()
    entries = [segment.entries["stamp"] for segment in recovered if len(segment.entries)]
    stamps = np.concatenate(entries) if entries else np.zeros(1, np.uint64)
    in_use = volume.segments.by_slot
    measured = volume.metadata.known.values(MetaKind.PROFILE).get(b"")
    return Inspection(
        path=str(path),
        format=FORMAT,
        uuid=str(uuid.UUID(bytes=volume.segments.store)),
        segment_bytes=volume.segment_bytes,
        held_bytes=volume.segments.slot_count() * volume.segment_bytes,
        free_slots=len(volume.segments.free),
        blocks=len(contents.places),
        live_bytes=volume.segments.live_bytes,
        tombstones=len(volume.metadata.known.tombstones),
        profile=Profile.parse(measured) if measured else None,
        oldest_stamp=int(stamps.min()),
        newest_stamp=int(stamps.max()),
        segments=[
            SegmentRow(
                segment_id=found.segment_id,
                slot=found.slot,
                sealed=found.sealed,
                records=len(found.entries),
                live_blocks=in_use[found.slot].live_count,
                live_bytes=in_use[found.slot].live_bytes,
            )
            for found in sorted(recovered, key=lambda segment: segment.segment_id)
        ],
        namespaces=list(spaces(volume.metadata.known, contents)),
        damage=list(volume.damage),
        tokens=token_rows(volume, contents, tokens),
    )


def token_rows(volume: OpenedVolume, contents: Contents, wanted: int) -> list[TokenRow]:
    """Token ids of the first blocks, read from the heads of their records."""
    head, found = aligned(HEAD_BYTES)[:HEAD_BYTES], []
    for at in np.argsort(contents.places)[:wanted].tolist():
        key, place = BlockKey(contents.words[at].tobytes()), int(contents.places[at])
        fd, base = volume.segments.by_slot[segment_of(place)].extent
        nbytes = os.preadv(fd, [head], base + page_of(place) * PAGE)
        ids = token_ids(head, key) if nbytes == HEAD_BYTES else b""
        found.append(TokenRow(key.hex(), np.frombuffer(ids, "<u4").tolist()))
    return found


def spaces(found: Metadata, contents: Contents) -> Iterator[SpaceRow]:
    """Namespaces with a description or with blocks, the largest first."""
    tags = np.ascontiguousarray(contents.words[:, 0]).astype("<u8").tobytes()
    blocks: Counter[bytes] = Counter()
    nbytes: Counter[bytes] = Counter()
    for index, size in enumerate(contents.payload_bytes.tolist()):
        tag = tags[8 * index : 8 * index + 8]
        blocks[tag] += 1
        nbytes[tag] += size
    known = {tag: described(text) for tag, text in found.values(MetaKind.NAMESPACE).items()}
    for tag in sorted({*known, *blocks}, key=lambda tag: (-nbytes[tag], tag)):
        facts = known.get(tag, {})
        layout = facts.get("layout", {})
        layout = layout if isinstance(layout, dict) else {}
        tokens = layout.get("block_tokens", 0)
        yield SpaceRow(
            tag=tag.hex(),
            model=printable(facts.get("model", "")),
            tenant=printable(facts.get("tenant", "")),
            dtype=printable(layout.get("dtype", "")),
            block_tokens=tokens if isinstance(tokens, int) else 0,
            blocks=blocks[tag],
            nbytes=nbytes[tag],
            description=facts,
        )


def described(text: bytes) -> dict[str, Any]:
    """What a namespace's description says; nothing where it makes no sense."""
    try:
        facts = parse_object(text)
    except ValueError:
        return {}
    return {name: value for name, value in facts.items() if name not in HIDDEN}


def printable(value: object) -> str:
    """On one line, without what a terminal would act on."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))


def show(found: Inspection) -> None:
    output.data(f"{found.path}: store {found.uuid}, format {found.format}")
    held = f"{format_bytes(found.held_bytes)} in segments of {format_bytes(found.segment_bytes)}"
    output.data(f"  holds     {held}, {found.free_slots} of them free")
    output.data(
        f"  live      {format_count(found.blocks, 'block')}, {format_bytes(found.live_bytes)}"
    )
    output.data(f"  tombstones {found.tombstones:,}")
    speed = profile_text(found.profile) if found.profile else NOT_MEASURED
    output.data(f"  speed     {speed}")
    output.data(f"  stamps    {found.oldest_stamp:,} to {found.newest_stamp:,}")
    if found.namespaces:
        output.data("\n" + spaces_table(found))
    if found.segments:
        output.data("\n" + segments_table(found))
        if len(found.segments) > ROWS_MAX:
            output.data(f"… and {len(found.segments) - ROWS_MAX:,} more; --json lists them all")
    for row in found.tokens:
        known = " ".join(map(str, row.token_ids)) or "not known"
        output.data(f"{row.key}: {known}")
    for text in found.damage:
        output.say(f"damage: {text}")
    if found.damage:
        output.say(f"hint: kvdepot check {found.path}")


def spaces_table(found: Inspection) -> str:
    headings = ("namespace", "model", "tenant", "dtype", "tokens/block", "blocks", "bytes")
    rows = [
        (
            space.tag,
            space.model or "?",
            space.tenant or "-",
            space.dtype or "?",
            space.block_tokens or "?",
            f"{space.blocks:,}",
            format_bytes(space.nbytes),
        )
        for space in found.namespaces
    ]
    return Table(headings, rows).text()


def segments_table(found: Inspection) -> str:
    headings = ("segment", "slot", "state", "records", "live blocks", "live bytes")
    rows = [
        (
            row.segment_id,
            row.slot,
            "sealed" if row.sealed else "open",
            f"{row.records:,}",
            f"{row.live_blocks:,}",
            format_bytes(row.live_bytes),
        )
        for row in found.segments[:ROWS_MAX]
    ]
    return Table(headings, rows).text()
