"""The hard-drive tier: the segments of any file tier, read one sweep at a time."""

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.codec.record import PAGE
from kvdepot.core.clock import Clock
from kvdepot.core.tier import Pending
from kvdepot.native import COPY
from kvdepot.tiers.device.files import Files, Ops
from kvdepot.tiers.log.elevator import Elevator, Request
from kvdepot.tiers.log.mount import MountSettings
from kvdepot.tiers.log.tier import SegmentTier
from kvdepot.tiers.memory.copy_ops import transfers

_SEEK_BYTES: Final = 4 << 20
"""What a hard drive could read while it seeks."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of one load that outlived their deadline."""

    parts: list[Request]

    def wait(self, timeout_s: float) -> bool:
        return all(part.wait(timeout_s) for part in self.parts)


class HardDriveTier(SegmentTier):
    """The `hdd` tier. One elevator a drive."""

    def __init__(
        self, paths: Sequence[Path], files: Files, settings: MountSettings, clock: Clock
    ) -> None:
        self._elevators: list[Elevator] = []
        super().__init__(paths, files, settings, clock)

    def close(self) -> None:
        for elevator in self._elevators:
            elevator.close()
        super().close()

    def _read(self, ops: Ops, locations: Sequence[int], timeout_s: float) -> Pending | None:
        places = np.array(locations, dtype=np.int64)
        drives = places >> 56
        deadline_s = self._clock.now() + timeout_s
        parts: list[tuple[int, npt.NDArray[Any], Request]] = []
        for index in np.unique(drives).tolist():
            mine = np.flatnonzero(drives == index)
            request = Request(_uncopied(ops[mine]), places[mine], deadline_s)
            parts.append((index, mine, request))
            self._elevator(index).submit(request)
        late: list[Request] = []
        for index, mine, request in parts:
            if not request.answered.wait(max(0.0, deadline_s - self._clock.now())):
                self._elevator(index).abandon(request)
            results = request.results.copy()
            ops["result"][mine] = results
            _copy(ops[mine[results == 0]])
            if (results == -errno.ETIMEDOUT).any():
                late.append(request)
        return Requests(late) if late else None

    def _work_bytes(self, ops: Ops, locations: npt.NDArray[np.int64]) -> int:
        order = np.argsort(locations)
        pages = -(-ops["nbytes"][order].astype(np.int64) // PAGE)
        ends = locations[order] + pages
        jumps = 1 + int((locations[order][1:] != ends[:-1]).sum()) if len(ops) else 0
        return int(ops["nbytes"].sum()) + jumps * _SEEK_BYTES

    def _elevator(self, index: int) -> Elevator:
        while len(self._elevators) <= index:
            name = f"kvdepot-hdd-head-{len(self._elevators)}"
            self._elevators.append(Elevator(self._files, name, self._clock.now))
        return self._elevators[index]


def _uncopied(ops: Ops) -> Ops:
    """Reads that leave their targets alone: who asked may be gone when a round comes to them."""
    ops["copy_target"] = 0
    return ops


def _copy(ops: Ops) -> None:
    """Copy what was read to where it is wanted."""
    wanted = ops[ops["copy_target"] != 0]
    columns = [
        wanted[name].tolist() for name in ("payload_address", "copy_target", "payload_bytes")
    ]
    if len(wanted):
        transfers([(0, *row, 0, 0, COPY) for row in zip(*columns, strict=True)])
