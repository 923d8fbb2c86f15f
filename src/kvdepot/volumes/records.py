"""Checking records that lie in memory, and handing them over: for tiers that hold them whole."""

import errno
from typing import Any

from kvdepot.core.block import BlockKey
from kvdepot.core.tier import DriveFacts, Health, Load, Outcome, Usage
from kvdepot.format.copy_ops import copy_op, read_op, transfers
from kvdepot.format.record import HEAD_BYTES, Kind, parse_head, payload_intact, record_bytes
from kvdepot.native import COPY, address_of


def deliver(record: bytes | memoryview, load: Load) -> Outcome:
    """Serve a load from a record as it was appended: OK, or CORRUPT where it is not that block.

    The record may be the load's image.
    """
    head = parse_head(memoryview(record))
    if head is None or len(record) < record_bytes(head.payload_bytes):
        return Outcome.CORRUPT
    known = (head.kind, head.key, head.payload_bytes, head.chunk_bytes)
    if known != (Kind.BLOCK, load.key, load.payload_bytes, load.chunk_bytes):
        return Outcome.CORRUPT
    span = (load.start, load.stop, load.chunk_bytes)
    source, image = address_of(record)[0], address_of(load.image, writable=True)[0]
    if source == image:
        rows = [read_op(source, 0, *span)]
    else:
        rows = [
            (0, source, image, HEAD_BYTES, 0, 0, COPY),
            read_op(source, image + HEAD_BYTES + load.start, *span),
        ]
    if load.copy_to:  # of the same bytes, which were verified a moment ago
        rows.append(copy_op(source, load.copy_to, load.start, load.stop))
    return Outcome.CORRUPT if -errno.EBADMSG in transfers(rows).tolist() else Outcome.OK


def is_intact(record: bytes | memoryview, key: BlockKey) -> bool:
    """Whether this is the whole record of a block. Reads every byte."""
    view = memoryview(record)
    head = parse_head(view)
    return head is not None and head.key == key and payload_intact(view, head)


def describe_drive(facts: DriveFacts, usage: Usage, health: Health) -> dict[str, Any]:
    """What `stats` shows at least of a drive."""
    return {
        "path": facts.label,
        "healthy": health.ok,
        "reason": health.reason,
        "errors": health.errors,
        "draining": facts.draining,
        "drained": facts.retired,
        "used_bytes": usage.used_bytes,
        "capacity_bytes": usage.capacity_bytes,
        "segment_bytes": facts.segment_bytes,
        "emulated": False,
        "profile": None,
    }
