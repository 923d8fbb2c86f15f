"""Emulated drives: real I/O, delayed to the speed of another drive.

The bytes are read and written; then the caller sleeps until a drive of the given bandwidth, seek
time and latency would be done. Each drive has one head: transfers queue, and one that does not
start at the end of the previous one takes a seek.

Tests and benchmarks open a store on such drives with `open_emulated`. A daemon loads one as a
plug-in volume:

    [plugin]
    name = "kvdepot.testing.emulation:emulated_drive"
    path = "/mnt/nvme0/emulated"
    capacity = "100GiB"
    options = { read_bandwidth = "275MB", write_bandwidth = "275MB", seek = "12.5ms" }
"""

import errno
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvdepot.config.loader import load_settings
from kvdepot.config.settings import Bytes, HddConfig, PluginConfig, Seconds, load
from kvdepot.core.volume import VolumeContext
from kvdepot.errors import ConfigError
from kvdepot.io.files import EngineKind, Files, Ops, Pending
from kvdepot.native import READ
from kvdepot.store.open import assemble
from kvdepot.store.store import Store
from kvdepot.volumes.log.medium import MountSettings
from kvdepot.volumes.log.volume import LogVolume


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveModel:
    """The speed of one emulated drive."""

    read_bandwidth: Bytes
    """Bytes read per second."""

    write_bandwidth: Bytes
    """Bytes written per second."""

    seek: Seconds = 0.0
    """Seek and rotation time before a transfer that does not start where the last one ended."""

    latency: Seconds = 0.0
    """Additional time of each transfer; transfers in flight overlap in it."""

    def __post_init__(self) -> None:
        for name in ("read_bandwidth", "write_bandwidth"):
            if getattr(self, name) < 1:
                raise ConfigError(name, "must be at least 1 byte a second")
        for name in ("seek", "latency"):
            if not getattr(self, name) >= 0:
                raise ConfigError(name, "must not be negative")


def open_emulated(models: Mapping[str, DriveModel], **settings: Any) -> Store:
    """`kvdepot.open(**settings)` with emulated drives in the tiers that `models` names."""
    config = load(overrides=settings)
    drives = {
        str(path): models[tier.TIER]
        for tier in config.file_tiers
        if tier.TIER in models
        for path in tier.path
    }
    return assemble(config, files=EmulatedFiles(drives.get))


def emulated_drive(config: PluginConfig, context: VolumeContext) -> LogVolume:
    """A plug-in volume on one emulated drive. Its options are the fields of `DriveModel`."""
    if config.path is None:
        raise ConfigError("plugin.path", "missing: an emulated drive keeps its blocks in a folder")
    model = load_settings(DriveModel, config.options, "plugin.options")
    drive = HddConfig(path=(config.path,), capacity=config.capacity)
    settings = MountSettings(
        capacity_bytes=config.capacity,
        segment_bytes=drive.segment_bytes,
        write_timeout_s=config.write_timeout,
        tier=config.TIER,
        contiguous_bytes=drive.contiguous_bytes if model.seek else 0,
    )
    return LogVolume(config.path, EmulatedFiles(lambda _: model), settings, context, [])


@dataclass(slots=True)
class EmulatedHead:
    """The position of an emulated drive, and the time until which it is busy."""

    model: DriveModel
    free_at_s: float = 0.0
    at: tuple[int, int] = (-1, 0)
    """Descriptor and offset of the end of the last transfer."""
    slowdown: float = 1.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def move(self, fd: int, offset: int, nbytes: int, *, read: bool, now_s: float) -> float:
        """Queue a transfer. Returns the time at which it will be done."""
        model = self.model
        bandwidth = model.read_bandwidth if read else model.write_bandwidth
        with self.lock:
            seek_s = model.seek if self.at != (fd, offset) else 0.0
            busy_s = (seek_s + nbytes / bandwidth) * self.slowdown
            self.free_at_s = max(now_s, self.free_at_s) + busy_s
            self.at = (fd, offset + nbytes)
            return self.free_at_s + model.latency


@dataclass(frozen=True, slots=True)
class Delayed:
    """Operations that the emulated drive has not finished; the real ones have ended."""

    done_at_s: float
    real: Pending | None

    def wait(self, timeout_s: float) -> bool:
        left_s = self.done_at_s - time.monotonic()
        time.sleep(max(0.0, min(left_s, timeout_s)))
        if left_s > timeout_s:
            return False
        return self.real is None or self.real.wait(max(0.0, timeout_s - left_s))


class EmulatedFiles(Files):
    """Files of emulated drives. `model_of` gives the model of the drive at a path; a drive without
    a model is not delayed.
    """

    def __init__(
        self, model_of: Callable[[str], DriveModel | None], kind: EngineKind = "auto"
    ) -> None:
        super().__init__(kind)
        self._model_of = model_of
        self._heads: dict[str, EmulatedHead] = {}
        self._head_of: dict[int, EmulatedHead] = {}

    def is_emulated(self, drive: str) -> bool:
        return self._model_of(drive) is not None

    def attach(self, fd: int, drive: str) -> None:
        model = self._model_of(drive)
        if model is not None:
            self._head_of[fd] = self._heads.setdefault(drive, EmulatedHead(model))

    def slow_down(self, drive: str, factor: float) -> None:
        """Make all later operations of a drive `factor` times as slow as its model."""
        model = self._model_of(drive)
        assert model is not None, f"{drive} is not emulated"
        self._heads.setdefault(drive, EmulatedHead(model)).slowdown = factor

    def run(self, ops: Ops, timeout_s: float) -> Pending | None:
        started_s = time.monotonic()
        pending = super().run(ops, timeout_s)
        if timeout_s <= 0.0:
            return pending  # nothing has started
        ends_s = [
            self._move(int(op["fd"]), int(op["offset"]), int(op["nbytes"]), started_s, read=read)
            for op, read in zip(ops, (ops["opcode"] == READ).tolist(), strict=True)
        ]
        deadline_s = started_s + timeout_s
        late = [index for index, end_s in enumerate(ends_s) if end_s > deadline_s]
        last_s = max(ends_s, default=started_s)
        time.sleep(max(0.0, min(last_s, deadline_s) - time.monotonic()))
        if not late:
            return pending
        ops["result"][late] = -errno.ETIMEDOUT
        return Delayed(last_s, pending)

    def read(self, fd: int, offset: int, nbytes: int) -> memoryview:
        started_s = time.monotonic()
        found = super().read(fd, offset, nbytes)
        self._sleep(self._move(fd, offset, len(found), started_s, read=True))
        return found

    def write(self, fd: int, offset: int, data: bytes) -> None:
        started_s = time.monotonic()
        super().write(fd, offset, data)
        self._sleep(self._move(fd, offset, len(data), started_s, read=False))

    def _move(self, fd: int, offset: int, nbytes: int, now_s: float, *, read: bool) -> float:
        """The time at which the drive would end a transfer requested at `now_s`."""
        head = self._head_of.get(fd)
        if head is None or not nbytes:
            return now_s
        return head.move(fd, offset, nbytes, read=read, now_s=now_s)

    def _sleep(self, until_s: float) -> None:
        time.sleep(max(0.0, until_s - time.monotonic()))
