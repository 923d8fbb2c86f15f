"""What was learnt of an engine and its tiers, kept for the next start on this machine.

A start that knows nothing has to fetch or compute a first prompt to find out. One file for each
namespace; one that cannot be read or written is no file.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path

from kvdepot.policy.fetching.speed_models import PrefillPace, TierProfile


@dataclass(frozen=True, slots=True)
class Paces:
    """Nothing is known of what is left out."""

    prefill: PrefillPace | None = None
    tiers: Mapping[str, TierProfile] = field(default_factory=dict)


def paces_file(folder: Path, tag: bytes) -> Path:
    """Where the paces of a namespace are kept."""
    return folder.expanduser() / f"{tag.hex()}.json"


def read_paces(path: Path) -> Paces:
    """What the file says; nothing if there is none, or it makes no sense."""
    try:
        found = json.loads(path.read_text())
        prefill = found["prefill"] and PrefillPace(*_numbers(found["prefill"], 3))
        tiers = {name: TierProfile(*_numbers(one, 2)) for name, one in found["tiers"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Paces()
    return Paces(prefill, {name: one for name, one in tiers.items() if one.bandwidth_bytes_s > 0})


def write_paces(path: Path, paces: Paces) -> None:
    """Replace the file, whole or not at all."""
    prefill = paces.prefill and list(asdict(paces.prefill).values())
    tiers = {name: list(asdict(one).values()) for name, one in paces.tiers.items()}
    fresh = path.with_suffix(f".{os.getpid()}")
    # A read-only home costs the next start a guess, nothing else.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps({"prefill": prefill, "tiers": tiers}))
        fresh.replace(path)


def _numbers(values: list[float], count: int) -> list[float]:
    found = [float(value) for value in values]
    if len(found) != count or not all(isfinite(one) and one >= 0.0 for one in found):
        raise ValueError(f"not {count} numbers: {values}")
    return found
