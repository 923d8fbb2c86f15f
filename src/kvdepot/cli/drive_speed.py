"""The speed of drives: measured now, or as a store has kept it. For `doctor` and `inspect`."""

import datetime
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from kvdepot.bench.raw import nameless
from kvdepot.cli import output
from kvdepot.cli.machine import PathFacts
from kvdepot.config.settings import Config, FileTierConfig
from kvdepot.core.metadata import MetaKind
from kvdepot.core.units import format_bytes, format_count
from kvdepot.errors import ConfigError, FormatError
from kvdepot.io.files import Files, aligned
from kvdepot.io.speed import FLASH, Profile, VolumeBenchmark
from kvdepot.store.check.offline import opened
from kvdepot.store.open import assemble

Tier = TypeVar("Tier", bound=FileTierConfig)
NOT_MEASURED: Final = "not measured"
MEASURED_BYTES: Final = 256 << 20
_MEMORY_BYTES: Final = 64 << 20
_CHUNK_BYTES: Final = 4 << 20
_FILL_S: Final = 2.0
_POLL_S: Final = 0.1
_LIMIT_S: Final = 30.0
"""The time limit for one drive, far more than measuring takes."""


def profile_text(profile: Profile) -> str:
    if not profile.is_measured:
        return "emulated, not measured" if profile.emulated else NOT_MEASURED
    day = datetime.datetime.fromtimestamp(profile.measured_at_s, datetime.UTC).date()
    kinds = ["emulated, "] if profile.emulated else []
    kinds += [] if profile.direct_io else ["through the page cache, "]
    written = (profile.write_bytes_per_s, profile.random_write_bytes_per_s)
    writes = [output.rate(speed) if speed else "?" for speed in written]
    alone = (profile.read_latency_us, profile.write_latency_us)
    latencies = " and ".join(f"{spent:,}" if spent else "?" for spent in alone)
    return (
        f"{''.join(kinds)}read {output.rate(profile.read_bytes_per_s)}, write {writes[0]}; at "
        f"random in pieces of {format_bytes(profile.random_bytes)} "
        f"{output.rate(profile.random_read_bytes_per_s)} and {writes[1]}; one page {latencies} µs; "
        f"measured {day}"
    )


def kept_profile(path: Path) -> Profile | None:
    """The profile that the store at `path` has kept; None without a store or a profile."""
    try:
        with opened(path) as volume:
            text = volume.metadata.known.values(MetaKind.PROFILE).get(b"")
            return Profile.parse(text) if text else None
    except FormatError:
        return None


def measure_path(facts: PathFacts, nbytes: int = MEASURED_BYTES) -> Profile:
    """Measure a directory, in a file that has no name, or a device, which is only read.

    Takes a few seconds. Raises OSError if the disk fails. Leaves nothing behind.
    """
    if not facts.is_device:
        with nameless(Path(facts.path)) as (fd, direct):
            return _measure(fd, _fill(fd, nbytes), direct=direct, writes=True)
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if facts.direct_io else 0)
    fd = os.open(facts.path, flags)
    try:
        size = min(nbytes, facts.total_bytes)
        return _measure(fd, size, direct=facts.direct_io, writes=False)
    finally:
        os.close(fd)


def _fill(fd: int, nbytes: int) -> int:
    """Write up to `nbytes` for two seconds, and return how many: a read of what was never written
    does not reach the disk.
    """
    chunk, done, started_s = aligned(_CHUNK_BYTES), 0, time.monotonic()
    chunk[:] = os.urandom(_CHUNK_BYTES)
    while done < nbytes and time.monotonic() - started_s < _FILL_S:
        done += os.pwritev(fd, [chunk], done)
    os.fdatasync(fd)
    return done // _CHUNK_BYTES * _CHUNK_BYTES


def _measure(fd: int, nbytes: int, *, direct: bool, writes: bool) -> Profile:
    files = Files()
    try:
        benchmark = VolumeBenchmark(files, (fd, 0, nbytes), FLASH, writes=writes)
        while not benchmark.done:
            benchmark.step()
        return benchmark.profile(direct_io=direct, emulated=False)
    finally:
        files.close()


def measure_store(config: Config) -> None:
    """Measure every drive of a store again, and keep the results with the drives.

    Opens the store: StoreBusyError while another process has it.
    """
    if not config.file_tiers:
        raise ConfigError("ssd", "there is no drive to measure", hint="set ssd.path or hdd.path")
    small = replace(config.dram, capacity=_MEMORY_BYTES, prefault=False, lock=False, shared=False)
    again = replace(config, dram=small, ssd=_always(config.ssd), hdd=_always(config.hdd))
    count = sum(len(tier.path) for tier in config.file_tiers)
    started_s = int(time.time())
    with assemble(again) as store, output.Progress("measuring drives", count) as progress:
        deadline_s = time.monotonic() + _LIMIT_S * count
        while progress.done < count and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            drives = [d for tier in store.stats()["tiers"].values() for d in tier.get("drives", ())]
            profiles = [drive["profile"] for drive in drives if drive["profile"]]
            progress.reach(sum(profile["measured_at_s"] >= started_s for profile in profiles))
    if progress.done < count:
        missing = format_count(count - progress.done, "drive")
        output.say(f"{missing} could not be measured: full, or failing")


def _always(tier: Tier | None) -> Tier | None:
    return None if tier is None else replace(tier, profile="always")
