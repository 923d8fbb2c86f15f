"""`kvdepot size` against the figures that the seed papers print.

A paper's cell is text; it is right when it is the exact number rounded or cut off at its last
digit. The papers mix 4,000 with 4,096 tokens and GB with GiB, so each row says which it must be.
Files are those of the papers beside the design: 000 hybrid storage, 002 Dell 2025, 003 Dell 2026,
004 the data-center guide.
"""

import json
from typing import Any

import pytest

from kvdepot.cli.main import main

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Seen = pytest.CaptureFixture[str]


def size(capsys: Seen, *arguments: str) -> dict[str, Any]:
    assert main(["size", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def last_digit(cell: str) -> float:
    """What one more in the last digit that counts is worth: 150 -> 10, 3.28 -> 0.01."""
    plain = cell.replace(",", "")
    if "." in plain:
        return float(10.0 ** -len(plain.partition(".")[2]))
    return float(10.0 ** (len(plain) - len(plain.rstrip("0"))))


def agrees(cell: str, exact: float) -> bool:
    return abs(float(cell.replace(",", "")) - exact) < last_digit(cell)


@pytest.mark.parametrize(
    ("where", "model", "cell", "unit"),
    [
        ("002 line 129", "Qwen3-8B", "150", KB),
        ("002 line 130", "LLaMA-3.3-70B-Instruct", "330", KB),
        ("002 line 131", "LLaMA-3.1-405B", "516", KB),
        ("002 line 179", "LLaMA3-70B", "320", KIB),
        ("003 line 49", "Llama3-8B", "128", KIB),
        ("003 line 50", "Llama3-70B", "327", KB),
        ("003 line 51", "Llama3-405B", "516", KB),
        ("003 line 52", "GPT-OSS-20B", "48", KIB),
        ("003 line 53", "GPT-OSS-120B", "72", KIB),
        ("003 line 54", "DeepSeek-R1-685B", "70", KB),
        ("000 line 78", "Qwen2.5-7B", "56", KIB),
        ("000 line 78", "Qwen2.5-72B", "320", KIB),
        ("004 line 71", "Qwen-2.5-72B", "327", KB),
    ],
)
def test_bytes_of_a_token(capsys: Seen, where: str, model: str, cell: str, unit: int) -> None:
    assert agrees(cell, size(capsys, "--model", model)["bytes_per_token"] / unit), where


@pytest.mark.parametrize(
    ("where", "model", "tokens", "cell", "unit"),
    [
        ("002 line 129", "Qwen3-8B", "1k", "0.15", GB),
        ("002 line 129", "Qwen3-8B", "10k", "1.47", GB),
        ("002 line 129", "Qwen3-8B", "100k", "14.75", GB),
        ("002 line 129", "Qwen3-8B", "1M", "147", GB),
        ("002 line 130", "LLaMA-3.3-70B", "1k", "0.33", GB),
        ("002 line 130", "LLaMA-3.3-70B", "10k", "3.28", GB),
        ("002 line 130", "LLaMA-3.3-70B", "100k", "32.77", GB),
        ("002 line 130", "LLaMA-3.3-70B", "1M", "327", GB),
        ("002 line 131", "LLaMA-3.1-405B", "1k", "0.516", GB),
        ("002 line 131", "LLaMA-3.1-405B", "10k", "5.16", GB),
        ("002 line 131", "LLaMA-3.1-405B", "100k", "51.6", GB),
        ("002 line 131", "LLaMA-3.1-405B", "1M", "516", GB),
        ("003 line 49", "Llama3-8B", "4k", "500", MIB),
        ("003 line 49", "Llama3-8B", "128k", "15.6", GIB),
        ("003 line 50", "Llama3-70B", "128Ki", "40", GIB),
        ("003 line 51", "Llama3-405B", "4Ki", "2,114", MB),
        ("003 line 51", "Llama3-405B", "128k", "62", GIB),
        ("003 line 52", "GPT-OSS-20B", "4k", "196", MB),
        ("003 line 52", "GPT-OSS-20B", "128k", "6.2", GB),
        ("003 line 53", "GPT-OSS-120B", "4k", "295", MB),
        ("003 line 54", "DeepSeek-R1-685B", "128k", "9", GB),
        ("004 line 67", "Llama 3 70B", "128k", "42", GB),
    ],
)
def test_a_context(capsys: Seen, where: str, model: str, tokens: str, cell: str, unit: int) -> None:
    (row,) = size(capsys, "--model", model, "--context", tokens)["contexts"]
    assert agrees(cell, row["all_layers_bytes"] / unit), where


@pytest.mark.parametrize(
    ("where", "model", "tokens", "cell", "unit", "rounded_first"),
    [
        # The paper multiplied its own rounded KB; the exact numbers are 1,311 MB (4,000 tokens)
        # or 1,280 MiB (4,096), 9.44 GB and 287.8 MB.
        ("003 line 50", "Llama3-70B", 4096, "1,282", MIB, 320.5 * KIB),
        ("003 line 53", "GPT-OSS-120B", 128_000, "9.2", GB, 72 * KB),
        ("003 line 54", "DeepSeek-R1", 4096, "286", MB, 70 * KB),
    ],
)
def test_cells_that_no_exact_reading_gives(
    capsys: Seen,
    where: str,
    model: str,
    tokens: int,
    cell: str,
    unit: int,
    rounded_first: float,
) -> None:
    for count in (4_000, 4_096) if tokens < 10_000 else (128_000, 131_072):
        (row,) = size(capsys, "--model", model, "--context", str(count))["contexts"]
        for units in ((MB, MIB), (GB, GIB))[unit in (GB, GIB)]:
            assert not agrees(cell, row["all_layers_bytes"] / units), where
    assert agrees(cell, rounded_first * tokens / unit), where


def test_million_sessions_is_the_long_context_times_a_million(capsys: Seen) -> None:
    """003 line 49: 15.6 GB and 15.6 PB, both in the same unit."""
    found = size(capsys, "--model", "llama3-8b", "--context", "128k", "--users", "1M")
    (users,) = found["users"]
    assert users["bytes"] == found["contexts"][0]["bytes"] * 10**6
    assert agrees("15.6", users["bytes"] / (GIB * 10**6))


def test_users_table_of_dell_2025(capsys: Seen) -> None:
    """002 lines 152 and 153: right in GB; the TB cells are GB cut off, divided by 1024."""
    found = size(capsys, "--model", "llama-3.3-70b", "--context", "10k,100k")
    nbytes = {(row["tokens"], row["users"]): row["bytes"] for row in found["users"]}
    quoted = {(10_000, 1): "3.28", (10_000, 10): "32.7", (10_000, 100): "327"}
    quoted |= {(100_000, 1): "32.77", (100_000, 10): "327"}
    for key, cell in quoted.items():
        assert agrees(cell, nbytes[key] / GB), key
    assert nbytes[10_000, 10_000] == nbytes[100_000, 1_000]  # the paper: 31.9 TB and 32 TB
    assert not agrees("3.19", nbytes[10_000, 1_000] / TB)
    assert agrees("3.19", 327 * 10 / 1024)


def test_a_terabyte_of_dram_holds_three_million_tokens(capsys: Seen) -> None:
    """002 lines 180 and 183: 50 M tokens are 16.4 TB: 17 such memories, not 20."""
    found = size(capsys, "--model", "llama-3-70b", "--tier", "dram=1TB", "--context", "50M")
    assert agrees("3", found["retention"][0]["tokens"] / 10**6)
    assert found["contexts"][0]["bytes"] / TB == pytest.approx(16.4, abs=0.05)


def test_a_day_of_one_gpu(capsys: Seen) -> None:
    """000 line 20: 92 TB a GPU and day; 80 GB hold 1.2 minutes, 1 TB 16: KV of 70 KB a token."""
    found = size(capsys, "--model", "deepseek-r1")
    assert found["tokens_per_second"] == pytest.approx(1.1e6 / 72)
    assert agrees("92", found["bytes_per_day"] / TB)
    minutes = {row["tier"]: row["minutes"] for row in found["retention"]}
    assert agrees("1.2", minutes["hbm"])
    assert agrees("16", minutes["dram"])


def test_that_day_was_not_the_model_of_the_record(capsys: Seen) -> None:
    """1.1 M tokens/s were reached with Llama 2 70B: 4.7 times as much KV in 16 bits."""
    found = size(capsys, "--model", "llama-2-70b")
    assert found["bytes_per_day"] / TB == pytest.approx(432.5, abs=0.1)
