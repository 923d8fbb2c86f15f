"""Parses and formats sizes and durations: "64GiB", "250ms".

`format_*` rounds, for people; `exact_*` can be parsed to the same value, for files.
"""

import math
import re
from decimal import Decimal
from typing import Final

_BYTE_UNITS: Final = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1 << (10 * power) for power, letter in enumerate("kmgtpe", 1)},
    **{letter: 1 << (10 * power) for power, letter in enumerate("kmgtpe", 1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtpe", 1)},
}
_TIME_UNITS: Final = {
    "": Decimal(1),
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_NUMBER: Final = re.compile(r"\s*(\d{1,400}(?:\.\d{1,400})?)\s*([a-zµ]*)\s*", re.IGNORECASE)
_BYTE_FORMS: Final = 'a whole number of bytes or a text like "64GiB", "2GB" or "512M"'
_TIME_FORMS: Final = 'a number of seconds or a text like "250ms", "2s" or "5min"'


def parse_bytes(value: str | int) -> int:
    """Parse a size in bytes.

    KiB, MiB, GiB, TiB, PiB, EiB and the bare letters K, M, G, T, P, E are powers of 1024; KB, MB,
    GB, ... are powers of 1000; case does not matter. A fraction ("1.5GiB") is rounded down to a
    whole byte. Raises ValueError for anything else and for negative numbers.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{value} is negative; a size is {_BYTE_FORMS}")
        return value
    number, unit = _split(value, _BYTE_UNITS, f"a size ({_BYTE_FORMS})")
    return int(number * _BYTE_UNITS[unit])


def parse_duration(value: str | float) -> float:
    """Parse a duration in seconds. Units: ns, us, ms, s, m or min, h, d.

    Raises ValueError for anything else, for negative, infinite and undefined numbers.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{value} is not a duration; a duration is {_TIME_FORMS}")
        return float(value)
    number, unit = _split(value, _TIME_UNITS, f"a duration ({_TIME_FORMS})")
    return float(number * _TIME_UNITS[unit])


def _split(
    value: object, units: dict[str, int] | dict[str, Decimal], noun: str
) -> tuple[Decimal, str]:
    found = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if found is None or found[2].lower() not in units:
        raise ValueError(f"{value!r} is not {noun}")
    return Decimal(found[1]), found[2].lower()


def format_bytes(count: int) -> str:
    """Format about three digits, in powers of 1024: "1.5GiB", "300B", "-2KiB"."""
    sign, size = ("-" if count < 0 else ""), float(abs(count))
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1023.95:
            return f"{sign}{_digits(size)}{unit}"
        size /= 1024
    return f"{sign}{_digits(size)}EiB"


def format_decimal_bytes(count: float) -> str:
    """Format three digits, in powers of 1000 like sizes of drives: "3.28GB"."""
    sign, size = ("-" if count < 0 else ""), float(abs(count))
    for unit in ("B", "KB", "MB", "GB", "TB", "PB"):
        if size < 999.5:
            return f"{sign}{float(f'{size:.3g}'):g}{unit}"
        size /= 1000
    return f"{sign}{float(f'{size:.3g}'):g}EB"


def format_duration(seconds: float) -> str:
    """Format a duration: "250ms", "2s", "1.5min", "3.2h", "12d"."""
    sign, span = ("-" if seconds < 0 else ""), abs(seconds)
    short = (("us", 1e-6, 1e-3 * 0.99995), ("ms", 1e-3, 0.99995), ("s", 1.0, 120.0 * 0.99995))
    for unit, size, limit in (*short, ("min", 60.0, 7200.0), ("h", 3600.0, 259_200.0)):
        if span < limit:
            return f"{sign}{_digits(span / size)}{unit}"
    return f"{sign}{_digits(span / 86400)}d"


def _digits(number: float) -> str:
    text = f"{number:.0f}" if number >= 99.95 else f"{number:.1f}"
    return text.removesuffix(".0")


def format_count(count: int, noun: str) -> str:
    """Format a number of things: "1 block", "2 blocks", "12,031 requests"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def exact_bytes(count: int) -> str:
    """Format in the largest binary unit that divides `count`; the inverse of `parse_bytes`."""
    for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if count and count % (1 << (10 * power)) == 0:
            return f"{count >> (10 * power)}{letter}iB"
    return f"{count}B"


def exact_duration(seconds: float) -> str:
    """Format in whole s, ms or us if that is exact; the inverse of `parse_duration`."""
    for unit, size in (("s", 1), ("ms", 1_000), ("us", 1_000_000)):
        text = f"{round(seconds * size)}{unit}"
        if parse_duration(text) == seconds:
            return text
    return f"{Decimal(repr(seconds)):f}s"
