"""How large the simulated tiers are, as people write it: `dram=3Mtok,ssd=50Mtok`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from kvdepot.errors import ConfigError

TIERS: Final = ("dram", "cxl", "ssd", "hdd")
"""Fastest first."""
_FACTORS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_TOKENS: Final = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)([kmgt]?)tok", re.IGNORECASE)
_HINT: Final = "--capacity dram=3Mtok,ssd=50Mtok (k, M, G, T are powers of 1000), or dram=inf"


@dataclass(frozen=True, slots=True)
class Capacity:
    """Tokens each tier can hold, fastest tier first; None is without end."""

    tokens: Mapping[str, int | None]
    text: str

    @property
    def total_tokens(self) -> int | None:
        """What the largest tier holds: with write-through every block is in every tier."""
        sizes = list(self.tokens.values())
        return None if None in sizes else max(size for size in sizes if size is not None)

    def blocks(self, tier: str, block_tokens: int, unlimited: int) -> int:
        tokens = self.tokens[tier]
        return unlimited if tokens is None else tokens // block_tokens


def parse_capacity(text: str) -> Capacity:
    """Raises ConfigError for anything that is not a list of tiers and tokens."""
    found: dict[str, int | None] = {}
    for part in text.split(","):
        tier, _, size = part.strip().partition("=")
        if tier not in TIERS or tier in found:
            reason = "named twice" if tier in found else f"no tier; they are {', '.join(TIERS)}"
            raise ConfigError("--capacity", f"{tier!r} is {reason}", hint=_HINT)
        found[tier] = _tokens(size)
    return Capacity({tier: found[tier] for tier in TIERS if tier in found}, text)


def _tokens(size: str) -> int | None:
    if size == "inf":
        return None
    match = _TOKENS.fullmatch(size)
    if match is None:
        raise ConfigError("--capacity", f"{size!r} is not a number of tokens", hint=_HINT)
    tokens = int(Decimal(match[1]) * _FACTORS[match[2].lower()])
    if not tokens:
        raise ConfigError("--capacity", "a tier of no tokens", hint=_HINT)
    return tokens
