"""kvdepot under vLLM: its prefix cache reaches through memory and disk, and survives restarts.

vLLM loads the connector by name: `kv_connector="KVDepotConnector"` and
`kv_connector_module_path="kvdepot.adapters.vllm"`. Everything but `connector` works without vLLM.
"""

from typing import Any

__all__ = ["KVDepotConnector"]


def __getattr__(name: str) -> Any:
    if name != "KVDepotConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvdepot.adapters.vllm.releases import missing, missing_hooks, refuse_without

    refuse_without(list(missing()))
    from kvdepot.adapters.vllm.connector import KVDepotConnector

    refuse_without(list(missing_hooks(KVDepotConnector)))
    return KVDepotConnector
