"""Numbers that must not be negative, or not 0, anywhere in a tree of dataclasses."""

import dataclasses
from collections.abc import Collection

from kvdepot.errors import ConfigError


def check_numbers(value: object, *, may_be_zero: Collection[str], path: str = "") -> None:
    """Raises ConfigError, with the dotted name, for a number below 0; for 0 unless it may be."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    elif isinstance(value, dict):
        items = value
    else:
        _check_number(value, may_be_zero, path)
        return
    for name, item in items.items():
        check_numbers(item, may_be_zero=may_be_zero, path=f"{path}.{name}" if path else name)


def _check_number(value: object, may_be_zero: Collection[str], path: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    zero_is_fine = path.rpartition(".")[2] in may_be_zero
    if value < 0 or (value == 0 and not zero_is_fine):
        least = "at least 0" if zero_is_fine else "more than 0"
        raise ConfigError(path, f"must be {least}, got {value}")
