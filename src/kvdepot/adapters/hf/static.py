"""Static caches: filled in from a dynamic one."""

from typing import Any

from transformers.cache_utils import StaticCache, StaticSlidingWindowLayer

from kvdepot.adapters.hf.caches import DepotCache, DepotLayer, DepotSlidingLayer


def pour(source: DepotCache, target: StaticCache, columns: int) -> None:
    """Make an empty static cache hold the `columns` that a dynamic one holds."""
    if not columns:
        return
    for layer, static in zip(source.depot_layers, target.layers, strict=True):
        layer.arrived()
        _pour_layer(layer, static, columns)


def _pour_layer(layer: DepotLayer | DepotSlidingLayer, static: Any, columns: int) -> None:
    keys, values = layer.keys, layer.values
    assert keys is not None and values is not None
    if not static.is_initialized:
        static.lazy_initialization(keys, values)
    if not isinstance(static, StaticSlidingWindowLayer):
        where = slice(0, columns)
    elif columns < static.max_cache_len:
        where = slice(0, columns)
        static.cumulative_length_int = columns
    else:
        # It has a place more than can be seen; that of the oldest token is never looked at.
        where = slice(static.max_cache_len - keys.shape[-2], static.max_cache_len)
        static.cumulative_length_int = columns
    static.keys[:, :, where] = keys
    static.values[:, :, where] = values
    static.cumulative_length.fill_(columns)
