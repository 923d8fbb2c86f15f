"""Eviction orders by name."""

from collections.abc import Callable
from typing import Final

from kvdepot.errors import ConfigError
from kvdepot.index.order import Lru, Order
from kvdepot.policy.eviction.fifo_lfu_s3fifo import Fifo, Lfu, S3Fifo
from kvdepot.policy.eviction.prefill_value import PrefillValue
from kvdepot.policy.eviction.reuse_density import ReuseDensity

ORDERS: Final[dict[str, Callable[[int], Order]]] = {
    "lru": lambda _: Lru(),
    "fifo": lambda _: Fifo(),
    "lfu": lambda _: Lfu(),
    "s3fifo": lambda _: S3Fifo(),
    "default": lambda _: ReuseDensity(),
    "value": PrefillValue,
}
"""Constructors, which take the number of tokens of a block."""


def order_named(name: str, block_tokens: int = 256) -> Order:
    """A new order for one memory tier. ConfigError if no order has this name."""
    if name not in ORDERS:
        raise ConfigError("policy", f"{name!r} is not an eviction order", hint=" | ".join(ORDERS))
    return ORDERS[name](block_tokens)
