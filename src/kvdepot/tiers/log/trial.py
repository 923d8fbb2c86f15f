"""Trying a drive that was left alone, so that no request has to."""

from typing import Final

import numpy as np

from kvdepot.codec.record import PAGE
from kvdepot.native import READ, address_of
from kvdepot.tiers.device.files import aligned, io_ops
from kvdepot.tiers.log.drive import Drive
from kvdepot.tiers.log.segments import Segment
from kvdepot.tiers.log.tier import SegmentTier, pack_location

_UNIT: Final = 256 << 10
_TRIAL_BYTES: Final = 4 << 20
_TIMEOUT_S: Final = 2.0


def try_out(tier: SegmentTier, index: int) -> bool:
    """Write to and read from a drive whose pause is over; what comes of it closes its breaker, or
    makes the pause longer. False: the drive is still left alone.
    """
    drive = tier.drives[index]
    if not drive.breaker.allows() or (tier.writable and not _writes(drive)):
        return False
    fullest = max(list(drive.segments.values()), key=lambda segment: segment.tail, default=None)
    if fullest is None or fullest.tail <= PAGE:
        _read_superblock(drive)
    else:
        _read(tier, index, fullest)
    return drive.breaker.closed


def _writes(drive: Drive) -> bool:
    """Whether a free segment can be cleared. A drive without one is not asked."""
    errors = drive.breaker.errors
    lent = drive.lend()
    if lent is not None:
        drive.take_back(lent)
    return drive.breaker.errors == errors


def _read_superblock(drive: Drive) -> None:
    try:
        drive.medium.read_superblock()
    except OSError as error:
        drive.breaker.failed(str(error.strerror), at_once=True)
    else:
        drive.breaker.succeeded()


def _read(tier: SegmentTier, index: int, segment: Segment) -> None:
    """Read from a segment's first records on; what they hold does not matter."""
    fd, base = tier.drives[index].medium.extent(segment.slot)
    whole = min(_TRIAL_BYTES, segment.tail - PAGE)
    starts = np.arange(PAGE, PAGE + whole, _UNIT)
    memory = aligned(whole)
    ops = io_ops(len(starts))
    ops["fd"], ops["opcode"] = fd, READ
    ops["offset"] = base + starts
    ops["address"] = address_of(memory)[0] + starts - PAGE
    ops["nbytes"] = np.minimum(_UNIT, PAGE + whole - starts)
    places = [pack_location(index, segment.slot, start // PAGE) for start in starts.tolist()]
    tier.try_reads(index, ops, places, _TIMEOUT_S, memory)
