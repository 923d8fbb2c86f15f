"""What is known of the speed of a store's drives, for `doctor` and `inspect`; and measuring it."""

import datetime
import time
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from kvdepot.cli import output
from kvdepot.config.settings import Config, FileTierConfig
from kvdepot.core.metadata import MetaKind
from kvdepot.core.units import format_bytes, format_count
from kvdepot.errors import ConfigError, FormatError
from kvdepot.io.speed import Profile
from kvdepot.store.check.offline import opened
from kvdepot.store.open import assemble
from kvdepot.store.store import Store

Tier = TypeVar("Tier", bound=FileTierConfig)
NOT_MEASURED: Final = "not measured"
_MEMORY_BYTES: Final = 64 << 20
_LOOK_S: Final = 0.1
_LIMIT_S: Final = 30.0
"""For one drive; far more than measuring takes."""


def profile_text(profile: Profile) -> str:
    if not profile.is_measured:
        return "emulated, not measured" if profile.emulated else NOT_MEASURED
    day = datetime.datetime.fromtimestamp(profile.measured_at_s, datetime.UTC).date()
    kinds = ["emulated"] if profile.emulated else []
    kinds += [] if profile.direct_io else ["through the page cache"]
    written = (profile.write_bytes_per_s, profile.random_write_bytes_per_s)
    writes = [output.rate(speed) if speed else "?" for speed in written]
    alone = (profile.read_latency_us, profile.write_latency_us)
    latencies = " and ".join(f"{spent:,}" if spent else "?" for spent in alone)
    return (
        f"{', '.join([*kinds, ''])}"
        f"read {output.rate(profile.read_bytes_per_s)}, write {writes[0]}; in pieces of "
        f"{format_bytes(profile.random_bytes)} {output.rate(profile.random_read_bytes_per_s)} and "
        f"{writes[1]}; one page {latencies} µs; measured {day}"
    )


def kept_profile(path: Path) -> Profile | None:
    """What the drive at `path` has kept of its speed; None where there is no store, or nothing."""
    try:
        with opened(path) as volume:
            text = volume.metadata.known.values(MetaKind.PROFILE).get(b"")
            return Profile.parse(text) if text else None
    except FormatError:
        return None


def measure(config: Config) -> None:
    """Measure every drive of a store anew, and keep what comes out with the drive.

    Opens the store for that: StoreBusyError while another process has it.
    """
    if not config.file_tiers:
        raise ConfigError("ssd", "there is no drive to measure", hint="set ssd.path or hdd.path")
    small = replace(config.dram, capacity=_MEMORY_BYTES, prefault=False, lock=False, shared=False)
    again = replace(config, dram=small, ssd=_always(config.ssd), hdd=_always(config.hdd))
    count = sum(len(tier.path) for tier in config.file_tiers)
    started_s = int(time.time())
    with assemble(again) as store, output.Progress("measuring drives", count) as progress:
        deadline_s = time.monotonic() + _LIMIT_S * count
        told = 0
        while told < count and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
            done = _measured_since(store, started_s)
            progress.advance(done - told)
            told = done
    if told < count:
        output.say(f"{format_count(count - told, 'drive')} could not be measured: full, or failing")


def _always(tier: Tier | None) -> Tier | None:
    return None if tier is None else replace(tier, profile="always")


def _measured_since(store: Store, started_s: int) -> int:
    tiers = store.stats()["tiers"]
    profiles = [drive["profile"] for tier in tiers.values() for drive in tier.get("drives", ())]
    return sum(bool(one) and one["measured_at_s"] >= started_s for one in profiles)
