"""What the drives of a log tier hold when it is opened, as arrays: fast for millions of blocks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdepot.codec.notes import parse_removals
from kvdepot.codec.record import HEAD_BYTES, PAGE, Kind, parse_head, payload_intact, record_bytes
from kvdepot.codec.segment import ENTRY
from kvdepot.core.block import TAG_BYTES, BlockKey
from kvdepot.core.tier import NO_CONTENTS, Contents
from kvdepot.tiers.log.drive import Drive
from kvdepot.tiers.log.recovery import Recovered

Array = npt.NDArray[Any]


def read_contents(
    drives: Sequence[Drive],
    recovered: Sequence[Sequence[Recovered]],
    first_drive: int = 0,
    *,
    others: Sequence[Drive] = (),
    mirrored: bool = False,
) -> Contents:
    """The blocks in the segments that were recovered of drives, numbered from `first_drive`. Fills
    the drives' notes and counts what is alive.

    What `others` say of removals counts too. `mirrored`: of several records of a block the newest
    on a second drive is alive as well.
    """
    parts = [np.zeros(0, ENTRY)]
    places = [np.zeros(0, np.int64)]
    for index, segments in enumerate(recovered):
        for segment in segments:
            blocks = segment.entries[segment.entries["kind"] == Kind.BLOCK]
            parts.append(blocks)
            places.append(
                (first_drive + index << 56 | segment.slot << 32) + blocks["page"].astype(np.int64)
            )
            _read_notes(drives[index], segment)
    entries, locations = np.concatenate(parts), np.concatenate(places)
    words = np.frombuffer(np.ascontiguousarray(entries["key"]).tobytes(), np.uint64).reshape(-1, 4)
    sequences = entries["sequence"].astype(np.int64)
    alive = _not_removed(words, sequences, [*drives, *others])
    alive = alive[np.argsort(sequences[alive], kind="stable")]
    # Of several records with one key the newest counts: the last one in order of sequence.
    last, which = _last_of_each(words[alive])
    newest = alive[last]
    sizes = entries["payload_bytes"][newest].astype(np.int64)
    second_of = seconds = NO_CONTENTS.second_of
    if mirrored:
        second_of, seconds = _seconds(which, locations, alive, newest)
        same = entries["payload_bytes"][seconds] == sizes[second_of]
        second_of, seconds = second_of[same], seconds[same]
    counted = np.concatenate([locations[newest], locations[seconds]])
    _count(drives, counted, np.concatenate([sizes, sizes[second_of]]), first_drive)
    return Contents(words[newest], locations[newest], sizes, second_of, locations[seconds])


def _last_of_each(words: Array) -> tuple[Array, Array]:
    """Where each key comes last, in order; and for every row which of those keys it has."""
    backwards = words[::-1]
    _, first, key = np.unique(backwards[:, 2], return_index=True, return_inverse=True)
    if not np.array_equal(backwards[first[key]], backwards):  # one word of two keys is the same
        _, first, key = np.unique(backwards, axis=0, return_index=True, return_inverse=True)
    last = len(words) - 1 - first
    order = np.argsort(last)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return last[order], rank[key.reshape(-1)[::-1]]


def _seconds(at: Array, locations: Array, alive: Array, newest: Array) -> tuple[Array, Array]:
    """For blocks with a record on another drive than their newest one's: which of `newest` they
    are, and the newest such record. `at`: for each of `alive`, which of `newest` has its key.
    """
    elsewhere = locations[alive] >> 56 != locations[newest[at]] >> 56
    second = np.full(len(newest), -1, np.int64)
    np.maximum.at(second, at[elsewhere], np.flatnonzero(elsewhere))
    found = np.flatnonzero(second >= 0)
    return found, alive[second[found]]


def _not_removed(words: Array, sequences: Array, drives: Sequence[Drive]) -> Array:
    """Indexes of the records that no removal speaks of."""
    dead = np.zeros(len(words), dtype=bool)
    keyed: dict[BlockKey, int] = {}
    for drive in drives:
        for removals in (*drive.notes.removals.values(), drive.removal_file.known):
            for removal in removals:
                if removal.whole_namespace:
                    tag = np.frombuffer(removal.key[:TAG_BYTES], np.uint64)[0]
                    dead |= (words[:, 0] == tag) & (sequences < removal.below_sequence)
                else:
                    keyed[removal.key] = max(keyed.get(removal.key, 0), removal.below_sequence)
    if keyed:
        removed = np.frombuffer(b"".join(keyed), np.uint64).reshape(-1, 4)
        for index in np.flatnonzero(np.isin(words[:, 2], removed[:, 2])).tolist():
            key = BlockKey(words[index].tobytes())
            dead[index] |= sequences[index] < keyed.get(key, 0)
    return np.flatnonzero(~dead)


def _count(drives: Sequence[Drive], locations: Array, sizes: Array, first_drive: int) -> None:
    segments, where = np.unique(locations >> 32, return_inverse=True)
    counts = np.bincount(where, minlength=len(segments))
    records = HEAD_BYTES + -(-sizes // PAGE) * PAGE
    totals = np.bincount(where, weights=records, minlength=len(segments))
    for place, count, total in zip(
        segments.tolist(), counts.tolist(), totals.tolist(), strict=True
    ):
        segment = drives[(place >> 24) - first_drive].segments[place & 0xFFFFFF]
        segment.live_count, segment.live_bytes = count, int(total)


def _read_notes(drive: Drive, segment: Recovered) -> None:
    """Take in the notes of one segment; a damaged one is reported and skipped."""
    for entry in segment.entries[segment.entries["kind"] != Kind.BLOCK]:
        page, nbytes = int(entry["page"]), int(entry["payload_bytes"])
        payload = _read_payload(drive, segment, page, nbytes)
        if entry["kind"] == Kind.SPACE:
            drive.notes.describes(segment.segment_id, page, nbytes)
        if payload is None:
            where = f"{drive.medium.label}: slot {segment.slot}, page {entry['page']}"
            drive.damage.append(f"{where}: note is damaged")
        elif entry["kind"] == Kind.REMOVAL:
            drive.notes.removals.setdefault(segment.segment_id, []).extend(parse_removals(payload))
        elif entry["kind"] == Kind.SPACE:
            tag = bytes(entry["key"])[:TAG_BYTES]
            if drive.notes.spaces.get(tag, (0, b""))[0] <= segment.segment_id:
                drive.notes.spaces[tag] = (segment.segment_id, payload)


def _read_payload(drive: Drive, segment: Recovered, page: int, nbytes: int) -> bytes | None:
    fd, base = drive.medium.extent(segment.slot)
    try:
        image = drive.files.read(fd, base + page * PAGE, record_bytes(nbytes))
    except OSError:
        return None
    head = parse_head(image)
    if head is None or head.segment_id != segment.segment_id or not payload_intact(image, head):
        return None
    return bytes(image[HEAD_BYTES : HEAD_BYTES + head.payload_bytes])
