"""Sizes and durations as people write them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.core.units import (
    exact_bytes,
    exact_duration,
    format_bytes,
    format_decimal_bytes,
    format_duration,
    parse_bytes,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64GiB", 64 * 1024**3),
        ("2GB", 2_000_000_000),
        ("512M", 512 * 1024**2),
        ("512m", 512 * 1024**2),
        (" 1.5 gib ", 3 * 1024**3 // 2),
        ("0.1KiB", 102),
        ("4096", 4096),
        ("4096B", 4096),
        ("1EiB", 1024**6),
        (0, 0),
        (7, 7),
    ],
)
def test_parse_bytes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "bad", ["", "GiB", "-1GiB", "1 GiBs", "1e9", "½GiB", "1.GiB", -1, True, 1.5, None]
)
def test_parse_bytes_names_the_accepted_forms(bad: Any) -> None:
    with pytest.raises(ValueError, match="64GiB"):
        parse_bytes(bad)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("250ms", 0.25),
        ("2s", 2.0),
        ("1.5s", 1.5),
        ("10us", 1e-5),
        ("10µs", 1e-5),
        ("5m", 300.0),
        ("5min", 300.0),
        ("1h", 3600.0),
        ("2d", 172800.0),
        ("3", 3.0),
        (0.5, 0.5),
        (2, 2.0),
    ],
)
def test_parse_duration(text: str | float, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    "bad", ["", "ms", "-1s", "1 fortnight", -0.1, float("nan"), float("inf"), True, None]
)
def test_parse_duration_names_the_accepted_forms(bad: Any) -> None:
    with pytest.raises(ValueError, match="250ms"):
        parse_duration(bad)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0B"),
        (300, "300B"),
        (1024, "1KiB"),
        (1536, "1.5KiB"),
        (1024**2 - 1, "1MiB"),
        (123 * 1024**3, "123GiB"),
        (5 * 1024**6, "5EiB"),
        (-2048, "-2KiB"),
    ],
)
def test_format_bytes(count: int, expected: str) -> None:
    assert format_bytes(count) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0B"),
        (999, "999B"),
        (999.6, "1KB"),
        (327_680, "328KB"),
        (3_276_800_000, "3.28GB"),
        (30 * 10**12, "30TB"),
        (-1500, "-1.5KB"),
    ],
)
def test_format_decimal_bytes(count: float, expected: str) -> None:
    assert format_decimal_bytes(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "0us"),
        (2.5e-6, "2.5us"),
        (0.25, "250ms"),
        (0.99999, "1s"),
        (2.0, "2s"),
        (90.0, "90s"),
        (150.0, "2.5min"),
        (9000.0, "2.5h"),
        (7 * 86400.0, "7d"),
        (-0.25, "-250ms"),
    ],
)
def test_format_duration(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected


def test_exact_forms_are_short_where_they_can_be() -> None:
    assert [exact_bytes(n) for n in (0, 1, 1 << 30, 3 << 20, 1025)] == [
        "0B",
        "1B",
        "1GiB",
        "3MiB",
        "1025B",
    ]
    assert [exact_duration(t) for t in (0.0, 2.0, 0.25, 1e-5)] == ["0s", "2s", "250ms", "10us"]


@given(st.integers(0, 1 << 70))
def test_exact_bytes_parses_back(count: int) -> None:
    assert parse_bytes(exact_bytes(count)) == count


@given(st.floats(0, 1e15))
def test_exact_duration_parses_back(seconds: float) -> None:
    assert parse_duration(exact_duration(seconds)) == seconds
