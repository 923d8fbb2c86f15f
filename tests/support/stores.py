"""Stores of tests: their settings, and what they count."""

from pathlib import Path
from typing import Any

from kvdepot.io.speed import Profile
from kvdepot.store.store import Store

PROFILE = Profile(
    read_bytes_per_s=200_000_000,
    write_bytes_per_s=100_000_000,
    random_read_bytes_per_s=20_000_000,
    random_write_bytes_per_s=10_000_000,
    random_bytes=1 << 18,
    read_latency_us=10_000,
    write_latency_us=11_000,
    direct_io=True,
    emulated=False,
    measured_at_s=1_790_000_000,
)


def settings(path: Path, **changes: Any) -> dict[str, Any]:
    """Three tiers in `path`; `changes` are added to the tables of the same name."""
    tree: dict[str, Any] = {
        "dram": {"capacity": "2MiB", "prefault": False, "huge_pages": "never"},
        "ssd": {"path": str(path / "ssd"), "capacity": "4MiB", "segment": "256KiB"},
        "hdd": {"path": str(path / "hdd"), "capacity": "32MiB", "segment": "1MiB"},
        "writeback": {"staging": "2MiB"},
    }
    for name, value in changes.items():
        tree[name] = {**tree[name], **value}
    return tree


def blocks_in(store: Store, tier: str) -> int:
    return int(store.stats()["tiers"][tier]["blocks"])


def counter(store: Store, name: str) -> int:
    return int(store.stats()["counters"][name])
