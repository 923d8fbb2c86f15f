"""Tiers by name: the built-in ones, and those that installed packages bring by entry point.

A package offers a tier in its pyproject.toml:

    [project.entry-points."kvdepot.tiers"]
    tape = "kvdepot_tape:TapeTier"

Nothing is imported before it is asked for by name.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from kvdepot.errors import ConfigError

GROUP: Final = "kvdepot.tiers"
BUILT_IN: Final = {
    "dram": "kvdepot.tiers.memory.copy_ops:DramTier",
    "ssd": "kvdepot.tiers.log.tier:SegmentTier",
    "hdd": "kvdepot.tiers.log.hdd:HardDriveTier",
}


def tier_names() -> list[str]:
    """Every tier that can be had here, sorted. Imports none of them."""
    return sorted(BUILT_IN.keys() | {entry.name for entry in entry_points(group=GROUP)})


def find_tier(name: str) -> Any:
    """What makes the tier called `name`: a class or function whose result is a core.tier.Tier.

    A built-in name always means the built-in tier. Raises ConfigError for an unknown name, one that
    two packages claim, and a plug-in that cannot be imported.
    """
    if name in BUILT_IN:
        return EntryPoint(name, BUILT_IN[name], GROUP).load()
    targets = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if not targets:
        known = ", ".join(tier_names())
        raise ConfigError("tier", f"there is no tier {name!r}", hint=f"known tiers: {known}")
    if len(targets) > 1:
        claims = ", ".join(sorted(targets))
        raise ConfigError("tier", f"{name!r} is claimed by several packages: {claims}")
    (entry,) = targets.values()
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError("tier", f"plug-in {entry.value} cannot be loaded: {error}") from error
    if not callable(found):
        raise ConfigError("tier", f"plug-in {entry.value} is not callable")
    return found
