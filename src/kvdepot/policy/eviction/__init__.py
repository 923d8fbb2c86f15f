"""The orders in which blocks leave a tier, by name."""

from collections.abc import Callable
from typing import Final

from kvdepot.core.order import Order, Recency
from kvdepot.errors import ConfigError
from kvdepot.policy.eviction.density import ReuseDensity
from kvdepot.policy.eviction.fifo import Fifo
from kvdepot.policy.eviction.lfu import Lfu
from kvdepot.policy.eviction.s3fifo import S3Fifo

ORDERS: Final[dict[str, Callable[[], Order]]] = {
    "lru": Recency,
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
