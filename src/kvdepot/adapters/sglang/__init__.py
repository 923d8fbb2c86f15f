"""kvdepot under SGLang: the storage below its hierarchical cache (HiCache), and its linker.

SGLang loads the storage as its `dynamic` backend ("module_path": "kvdepot.adapters.sglang",
"class_name": "KVDepotStorage"), and the linker as its `dynamic` linker ("linker_module_path":
"kvdepot.adapters.sglang", "linker": "KVDepotLinker"). Only the modules `storage` and `linker` need
SGLang.
"""

import importlib
from typing import Any, Final

__all__ = ["KVDepotLinker", "KVDepotStorage"]
_HOMES: Final = {"KVDepotLinker": "linker", "KVDepotStorage": "storage"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
