"""The promised speeds. Benchmarks print them next to their measurements; no test checks them."""

from typing import Final

MIB: Final = 1 << 20

MATCH_LEASE_US: Final = 1000.0
"""Matching and leasing a hit of 512 blocks."""
KEYS_US: Final = 10_000.0
"""Computing the keys of 131,072 tokens."""
DEGRADATION: Final = 0.90
"""Lookup speed with 10^6 blocks in the index, relative to 10^3 blocks."""
TTFT_SSD: Final = 1 / 20
"""Time to first token of a long prompt from disk, relative to computing it."""
TTFT_MISS: Final = 1.03
"""The same for a prompt without any block in the depot."""
DAEMON_MATCH_P99_US: Final = 1000.0
"""Matching 512 blocks through the daemon while four clients are busy."""

OBJECT: Final = 0.90
"""Speed of put and get through a bucket, relative to obstore alone."""
OBJECT_PROMPT: Final = 1.06
"""Time to read the KV of a prompt from a bucket, relative to obstore alone."""
METADATA_REQUESTS: Final = 8.0
"""Requests to find a prefix of 512 blocks that another machine has uploaded."""


def daemon_bar(op: str, block_bytes: int) -> float | None:
    """The least speed of a batch, relative to a store in the same process."""
    return 0.90 if op == "get_many" and block_bytes >= MIB else None


def disk_bar(op: str, block_bytes: int) -> float | None:
    """The least speed relative to the raw device, measured with registered huge pages."""
    if op == "get":
        return 0.80 if block_bytes >= 4 * MIB else 0.75 if block_bytes >= 128 << 10 else None
    if op == "deliver":
        return 0.90 if block_bytes >= 4 * MIB else None
    return 0.85 if block_bytes >= 4 * MIB else None


def memory_bar(block_bytes: int) -> float | None:
    """The least speed relative to memcpy in one thread."""
    return 0.85 if block_bytes >= MIB else None


def fastest_copy_bar(op: str, block_bytes: int) -> float | None:
    """The least speed relative to the fastest copy: streaming, on all cores."""
    return 0.80 if op == "get_many" and block_bytes >= 4 * MIB else None
