"""kvdepot: a tiered store for the KV cache of LLM inference.

store = kvdepot.open(dram="2GiB", ssd={"path": "/mnt/nvme/kv", "capacity": "20GiB"})
space = store.namespace(model="m", layout=kvdepot.KVLayout.gqa(layers=32, kv_heads=8, head_dim=128))
keys = space.keys(token_ids)
store.put_many(keys, buffers)
store.get_many(keys, targets)
"""

from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    import os

    from kvdepot.config.settings import Config
    from kvdepot.core.block import BlockKey, GetResult, PutResult
    from kvdepot.core.hf_config import model_layout
    from kvdepot.core.layout import KVLayout, ModelLayout
    from kvdepot.core.namespace import Namespace, fingerprint
    from kvdepot.depot import Depot
    from kvdepot.errors import (
        BadBufferError,
        ConfigError,
        DaemonError,
        DriveError,
        ExtraMissingError,
        FormatError,
        KeyFormatError,
        KVDepotError,
        LeaseError,
        ModelError,
        StateError,
        StoreBusyError,
        StoreClosedError,
        TraceError,
        UnsafePathError,
        WireError,
    )
    from kvdepot.store.store import Store

__version__ = "0.3.0.dev1"
__all__ = [
    "BadBufferError",
    "BlockKey",
    "Config",
    "ConfigError",
    "DaemonError",
    "Depot",
    "DriveError",
    "ExtraMissingError",
    "FormatError",
    "GetResult",
    "KVDepotError",
    "KVLayout",
    "KeyFormatError",
    "LeaseError",
    "ModelError",
    "ModelLayout",
    "Namespace",
    "PutResult",
    "StateError",
    "Store",
    "StoreBusyError",
    "StoreClosedError",
    "TraceError",
    "UnsafePathError",
    "WireError",
    "__version__",
    "fingerprint",
    "metrics",
    "model_layout",
    "open",
]

_HOMES = {
    "BlockKey": "core.block",
    "Config": "config.settings",
    "Depot": "depot",
    "GetResult": "core.block",
    "KVLayout": "core.layout",
    "ModelLayout": "core.layout",
    "Namespace": "core.namespace",
    "PutResult": "core.block",
    "Store": "store.store",
    "fingerprint": "core.namespace",
    "model_layout": "core.hf_config",
    "BadBufferError": "errors",
    "ConfigError": "errors",
    "DaemonError": "errors",
    "DriveError": "errors",
    "ExtraMissingError": "errors",
    "FormatError": "errors",
    "KVDepotError": "errors",
    "KeyFormatError": "errors",
    "LeaseError": "errors",
    "ModelError": "errors",
    "StateError": "errors",
    "StoreBusyError": "errors",
    "StoreClosedError": "errors",
    "TraceError": "errors",
    "UnsafePathError": "errors",
    "WireError": "errors",
}


@overload
def open(config: "os.PathLike[str] | Config | None" = None, **settings: Any) -> "Store": ...
@overload
def open(config: str, **settings: Any) -> "Depot": ...
def open(config: "str | os.PathLike[str] | Config | None" = None, **settings: Any) -> "Depot":
    """Open a depot in this process (see store.open.open_store) or, with `unix:/path/of/socket`,
    that of a daemon (see daemon.client.open.open_remote).
    """
    if isinstance(config, str) and config.startswith("unix:"):
        from kvdepot.daemon.client.open import open_remote

        return open_remote(config, **settings)
    from kvdepot.store.open import open_store

    return open_store(config, **settings)


def metrics(store: "Depot") -> str:
    """Return the metrics of a store as Prometheus text (docs/metrics.md).

    ExtraMissingError if the extra `http` is not installed.
    """
    import importlib

    try:
        exposition = importlib.import_module("kvdepot.daemon.http.exposition")
    except ModuleNotFoundError as error:
        from kvdepot.errors import ExtraMissingError

        raise ExtraMissingError("http", str(error.name)) from error
    return str(exposition.render(store.stats()))


if not TYPE_CHECKING:  # with a __getattr__ type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name at its first use, so that `import kvdepot` is fast."""
        import importlib
        import sys

        if name not in _HOMES:
            here = sys.modules[__name__]
            text = f"module 'kvdepot' has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=here)  # Python adds a suggestion
        value = getattr(importlib.import_module(f"kvdepot.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
