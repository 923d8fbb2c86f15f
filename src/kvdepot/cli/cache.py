"""Where things that are slow to make are kept between commands."""

from collections.abc import Mapping
from pathlib import Path


def models_folder(env: Mapping[str, str]) -> Path:
    """For the weights of models, by the rules of the XDG base directories."""
    given = Path(env.get("XDG_CACHE_HOME", ""))
    base = given if given.is_absolute() else Path(env.get("HOME", "/root")) / ".cache"
    return base / "kvdepot" / "models"
