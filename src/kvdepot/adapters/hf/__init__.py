"""Hugging Face transformers: a model whose long prompts come from a depot.

depot = kvdepot.open(dram="2GiB", ssd={"path": "/data/kv", "capacity": "20GiB"})
model = attach(model, depot)
ids = model.generate(**inputs, max_new_tokens=64)
"""

from typing import TYPE_CHECKING, Any

from kvdepot.errors import ExtraMissingError

if TYPE_CHECKING:
    from kvdepot.adapters.hf.model import DepotModel, attach
    from kvdepot.adapters.hf.stats import CallStats, ModelCounters, ServedRow

__all__ = ["CallStats", "DepotModel", "ModelCounters", "ServedRow", "attach"]


def __getattr__(name: str) -> Any:
    """Names are imported when first used, and say what to install where that fails."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        home = "model" if name in ("DepotModel", "attach") else "stats"
        module = importlib.import_module(f"{__name__}.{home}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("torch", "transformers"):
            raise
        raise ExtraMissingError("hf", missing) from error
    return getattr(module, name)
