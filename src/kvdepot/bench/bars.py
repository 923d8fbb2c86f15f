"""What we promise, as numbers. Benchmarks show them beside what they measure; tests do not."""

from typing import Final

MIB: Final = 1 << 20

MATCH_LEASE_US: Final = 1000.0
"""A hit of 512 blocks, matched and leased."""
KEYS_US: Final = 10_000.0
"""Keys of 131,072 tokens."""
DEGRADATION: Final = 0.90
"""Speed with 10^6 blocks in the index, of that with 10^3."""
TTFT_SSD: Final = 1 / 20
"""Time to the first token of a long prompt that comes from disk, of that computed."""
TTFT_MISS: Final = 1.03
"""The same of a prompt that the depot has nothing of."""
DAEMON_MATCH_P99_US: Final = 1000.0
"""A match of 512 blocks through the daemon, while four clients are busy."""

OBJECT: Final = 0.90
"""Put and get through a bucket, of what obstore alone moves."""
OBJECT_PROMPT: Final = 1.06
"""Time until the KV of a prompt is there from a bucket, of what obstore takes for its bytes."""
METADATA_REQUESTS: Final = 8.0
"""To know a prefix of 512 blocks that another machine has uploaded."""


def daemon_bar(op: str, block_bytes: int) -> float | None:
    """The least share of the speed of a store in the same process, for batches."""
    return 0.90 if op == "get_many" and block_bytes >= MIB else None


def disk_bar(op: str, block_bytes: int) -> float | None:
    """The least share of the raw device's speed, which is measured in registered huge pages."""
    if op == "get":
        return 0.80 if block_bytes >= 4 * MIB else 0.75 if block_bytes >= 128 << 10 else None
    if op == "deliver":
        return 0.90 if block_bytes >= 4 * MIB else None
    return 0.85 if block_bytes >= 4 * MIB else None


def memory_bar(block_bytes: int) -> float | None:
    """The least share of memcpy's speed in one thread."""
    return 0.85 if block_bytes >= MIB else None


def fastest_copy_bar(op: str, block_bytes: int) -> float | None:
    """The least share of the fastest copy there is: streaming, on all cores."""
    return 0.80 if op == "get_many" and block_bytes >= 4 * MIB else None
