"""What the drives of a log tier hold when it is opened, as arrays: fast for millions of blocks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdepot.core.metadata import Tombstone, surviving
from kvdepot.core.tier import Contents
from kvdepot.format.record import HEAD_BYTES, PAGE, Kind
from kvdepot.format.segment import ENTRY
from kvdepot.volumes.log.drive import Drive
from kvdepot.volumes.log.recovery import Recovered

Array = npt.NDArray[Any]


def read_contents(
    drives: Sequence[Drive],
    recovered: Sequence[Sequence[Recovered]],
    tombstones: Mapping[bytes, Tombstone],
    first_drive: int = 0,
) -> Contents:
    """The blocks in the segments that were recovered of drives, numbered from `first_drive`, but
    for those that are removed. Counts what is alive.
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
    entries, locations = np.concatenate(parts), np.concatenate(places)
    words = np.frombuffer(np.ascontiguousarray(entries["key"]).tobytes(), np.uint64).reshape(-1, 4)
    stamps = entries["stamp"].astype(np.int64)
    alive = surviving(words, stamps, tombstones)
    alive = alive[np.argsort(stamps[alive], kind="stable")]
    # Of several records with one key the newest counts: the last one in order of stamps.
    newest = alive[_last_of_each(words[alive])]
    sizes = entries["payload_bytes"][newest].astype(np.int64)
    _count(drives, locations[newest], sizes, first_drive)
    return Contents(words[newest], locations[newest], sizes, stamps[newest])


def _last_of_each(words: Array) -> Array:
    """Where each key comes last, in order."""
    backwards = words[::-1]
    _, first, key = np.unique(backwards[:, 2], return_index=True, return_inverse=True)
    if not np.array_equal(backwards[first[key]], backwards):  # one word of two keys is the same
        _, first = np.unique(backwards, axis=0, return_index=True)
    last: Array = np.sort(len(words) - 1 - first)
    return last


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
