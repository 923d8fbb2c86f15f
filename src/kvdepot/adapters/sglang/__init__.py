"""kvdepot under SGLang: the storage below its hierarchical cache (HiCache).

SGLang loads it as its `dynamic` backend, by `"module_path": "kvdepot.adapters.sglang"` and
`"class_name": "KVDepotStorage"`. Everything but `storage` works without SGLang installed.
"""

from typing import Any

__all__ = ["KVDepotStorage"]


def __getattr__(name: str) -> Any:
    if name != "KVDepotStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvdepot.adapters.sglang.storage import KVDepotStorage

    return KVDepotStorage
