"""Hugging Face transformers: a model that fetches the KV of long prompts from a depot.

depot = kvdepot.open(dram="2GiB", ssd={"path": "/data/kv", "capacity": "20GiB"})
model = attach(model, depot)
ids = model.generate(**inputs, max_new_tokens=64)
"""

import importlib
from typing import TYPE_CHECKING, Any

from kvdepot.errors import ExtraMissingError

if TYPE_CHECKING:
    from kvdepot.adapters.hf.model import CallStats, DepotModel, ModelCounters, ServedRow, attach

__all__ = ["CallStats", "DepotModel", "ModelCounters", "ServedRow", "attach"]


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used. ExtraMissingError without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        model = importlib.import_module(f"{__name__}.model")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("torch", "transformers"):
            raise
        raise ExtraMissingError("hf", missing) from error
    return getattr(model, name)
