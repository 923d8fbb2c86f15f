"""kvdepot: a tiered store for the KV cache of LLM inference.

store = kvdepot.open(dram="2GiB", ssd={"path": "/mnt/nvme/kv", "capacity": "20GiB"})
space = store.namespace(model="m", layout=kvdepot.KVLayout.gqa(layers=32, kv_heads=8, head_dim=128))
keys = space.keys(token_ids)
store.put(keys[0], buffer)
store.get(keys[0], into)
"""

from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    import os

    from kvdepot.core.block import BlockKey, Got, Put
    from kvdepot.core.config import Config
    from kvdepot.core.depot import Depot
    from kvdepot.core.hf_config import model_layout
    from kvdepot.core.layout import KVLayout, ModelLayout
    from kvdepot.core.namespace import Namespace, fingerprint
    from kvdepot.store.store import Store

__version__ = "0.1.0"
__all__ = [
    "BlockKey",
    "Config",
    "Depot",
    "Got",
    "KVLayout",
    "ModelLayout",
    "Namespace",
    "Put",
    "Store",
    "__version__",
    "fingerprint",
    "model_layout",
    "open",
]

_HOMES = {
    "BlockKey": "core.block",
    "Config": "core.config",
    "Depot": "core.depot",
    "Got": "core.block",
    "KVLayout": "core.layout",
    "ModelLayout": "core.layout",
    "Namespace": "core.namespace",
    "Put": "core.block",
    "Store": "store.store",
    "fingerprint": "core.namespace",
    "model_layout": "core.hf_config",
}


@overload
def open(config: "os.PathLike[str] | Config | None" = None, **settings: Any) -> "Store": ...
@overload
def open(config: str, **settings: Any) -> "Depot": ...
def open(config: "str | os.PathLike[str] | Config | None" = None, **settings: Any) -> "Depot":
    """Open a depot: with `unix:/path/of/socket` that of a daemon, see client.open.open_remote;
    else one of this process, see store.open.open_store.
    """
    if isinstance(config, str) and config.startswith("unix:"):
        from kvdepot.client.open import open_remote

        return open_remote(config, **settings)
    from kvdepot.store.open import open_store

    return open_store(config, **settings)


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `import kvdepot` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvdepot' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"kvdepot.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
