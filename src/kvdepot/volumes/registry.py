"""Tiers of other packages, found by entry point or by module.

A package offers a tier in its pyproject.toml:

    [project.entry-points."kvdepot.volumes"]
    tape = "kvdepot_tape:TapeTier"

The configuration names it: `plugin = { name = "tape", capacity = "1TiB" }`. Nothing is imported
before that. `name = "kvdepot_tape:TapeTier"` works without an entry point.
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from kvdepot.config.settings import PluginConfig
from kvdepot.core.tier import Tier
from kvdepot.errors import ConfigError

GROUP: Final = "kvdepot.volumes"
TierFactory = Callable[[PluginConfig, bool], Tier]
"""What a plug-in offers: makes the tier that a configuration describes; False: only to be read."""
_METHODS: Final = sorted(name for name in vars(Tier) if not name.startswith("_"))


def tier_names() -> list[str]:
    """Every plug-in tier that is installed, sorted. Imports none of them."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def find_tier(name: str) -> TierFactory:
    """What makes the tier called `name`: an entry point's name, or "module:factory".

    Raises ConfigError for an unknown name, one that two packages claim, and a plug-in that cannot
    be imported.
    """
    if ":" in name:
        targets = {name: EntryPoint(name, name, GROUP)}
    else:
        targets = {entry.value: entry for entry in entry_points(group=GROUP, name=name)}
    if not targets:
        known = ", ".join(tier_names()) or "none is installed"
        raise _error(f"there is no tier {name!r}", hint=f"known tiers: {known}")
    if len(targets) > 1:
        raise _error(f"{name!r} is claimed by several packages: {', '.join(sorted(targets))}")
    (entry,) = targets.values()
    try:
        found: TierFactory = entry.load()
    except (ImportError, AttributeError) as error:
        raise _error(f"plug-in {entry.value} cannot be loaded: {error}") from error
    if not callable(found):
        raise _error(f"plug-in {entry.value} is not callable")
    return found


def open_plugin(config: PluginConfig, writable: bool) -> Tier:
    """The tier that the configuration names, opened. Its name becomes "plugin".

    Raises ConfigError where it cannot be opened or is no tier; errors of the store's own kinds that
    the plug-in raises are passed on.
    """
    try:
        tier = find_tier(config.name)(config, writable)
    except OSError as error:
        raise _error(f"{config.name} cannot be opened: {error}") from error
    missing = [name for name in _METHODS if not callable(getattr(tier, name, None))]
    if missing:
        raise _error(f"{config.name} is no tier: it lacks {', '.join(missing)}")
    tier.name, tier.writable = config.TIER, writable
    return tier


def _error(reason: str, hint: str = "") -> ConfigError:
    return ConfigError("plugin.name", reason, hint=hint)
