"""kvdepot under SGLang: the storage below its hierarchical cache (HiCache), and its linker.

SGLang loads the first as its `dynamic` storage backend, by `"module_path":
"kvdepot.adapters.sglang"` and `"class_name": "KVDepotStorage"`, the second as its `dynamic` linker,
by `"linker_module_path"` and `"linker": "KVDepotLinker"`. Everything but `storage` and `linker`
works without SGLang installed.
"""

from typing import Any

__all__ = ["KVDepotLinker", "KVDepotStorage"]


def __getattr__(name: str) -> Any:
    if name == "KVDepotStorage":
        from kvdepot.adapters.sglang.storage import KVDepotStorage

        return KVDepotStorage
    if name == "KVDepotLinker":
        from kvdepot.adapters.sglang.linker import KVDepotLinker

        return KVDepotLinker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
