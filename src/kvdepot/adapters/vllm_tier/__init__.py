"""kvdepot as a tier below vLLM's own CPU offloading: SSDs, hard drives and object storage.

vLLM's `TieringOffloadingSpec` loads it by name, as one of its `secondary_tiers`:
`{"type": "KVDepotTier", "module_path": "kvdepot.adapters.vllm_tier", "ssd": {…}}`. Everything but
`manager` works without vLLM.
"""

from typing import Any

__all__ = ["KVDepotTier"]


def __getattr__(name: str) -> Any:
    if name != "KVDepotTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvdepot.adapters.vllm_tier.manager import KVDepotTier

    return KVDepotTier
