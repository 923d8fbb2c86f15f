"""Counts as people type them on a command line: `128k`, `128Ki`, `1M`, `4000,131072`."""

import argparse
from typing import Final

_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20}


def positive(text: str) -> float:
    """A number above 0. k, M, G are powers of 1000; Ki, Mi of 1024."""
    digits = text.strip().rstrip("kKmMgGiI")
    unit = text.strip()[len(digits) :].lower()
    try:
        number = float(digits) * _UNITS[unit]
    except (ValueError, KeyError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number like 0.5, 4000 or 1M"
        ) from error
    if not 0 < number < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0, or is too much")
    return number


def count(text: str) -> int:
    """A whole number above 0."""
    number = positive(text)
    if number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(number)


def counts(text: str) -> list[int]:
    """Whole numbers above 0 with commas between."""
    return [count(part) for part in text.split(",")]
