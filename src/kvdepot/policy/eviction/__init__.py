"""The orders in which blocks leave a tier, by name."""

from collections.abc import Callable
from typing import Final

from kvdepot.core.order import Lru, Order
from kvdepot.errors import ConfigError
from kvdepot.policy.eviction.fifo_lfu_s3fifo import Fifo, Lfu, S3Fifo
from kvdepot.policy.eviction.reuse_density import ReuseDensity

ORDERS: Final[dict[str, Callable[[], Order]]] = {
    "lru": Lru,
    "fifo": Fifo,
    "lfu": Lfu,
    "s3fifo": S3Fifo,
    "default": ReuseDensity,
}


def order_named(name: str) -> Order:
    """A fresh order for one tier. Raises ConfigError for a name that is none."""
    if name not in ORDERS:
        raise ConfigError("policy", f"{name!r} is not an eviction order", hint=" | ".join(ORDERS))
    return ORDERS[name]()
