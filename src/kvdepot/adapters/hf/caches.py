"""The cache that a served model uses: transformers' dynamic layers with additions.

Its layers start out filled and with memory for the rest of the prompt, wait for copies in progress
when they are first used, and keep what sliding-window layers would drop until it is saved. A static
cache is filled from such a cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticSlidingWindowLayer,
)

KV = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a layer, [batch, head, token, dim] each."""


class _Hooks(DynamicLayer):  # type: ignore[no-untyped-call]
    """A wait for copies in progress, and a call after each update."""

    wait: Callable[[], None] | None = None
    """Called before the first use of the filled part."""
    on_update: Callable[[], None] | None = None
    """Called when a forward has updated the layer."""

    def wait_for_copies(self) -> None:
        """Make this thread's stream wait for the copies in progress."""
        if self.wait is not None:
            self.wait()
            self.wait = None

    def _before_rearranging(self) -> None:
        raise NotImplementedError

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._before_rearranging()
        super().reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        self._before_rearranging()
        super().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._before_rearranging()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._before_rearranging()
        super().batch_select_indices(indices)


class DepotLayer(_Hooks):
    """A layer of full attention."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory: KV | None = None

    def fill(self, tensors: KV, length: int) -> None:
        """Take the first `length` tokens of `tensors`; later tokens go into the rest of them."""
        keys, values = tensors
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]
        self._memory = tensors

    @property
    def in_place(self) -> bool:
        return self._memory is not None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> KV:
        self.wait_for_copies()
        if not self._append(key_states, value_states):
            super().update(key_states, value_states)
        if self.on_update is not None:
            self.on_update()
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Write behind the filled part if there is memory, which saves a copy of the whole."""
        if self._memory is None:
            return False
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        keys, values = self._memory
        frozen = keys.is_inference() and not torch.is_inference_mode_enabled()
        if frozen or stop > keys.shape[-2] or key_states.shape[0] != keys.shape[0]:
            self._memory = None
            return False
        keys[:, :, start:stop] = key_states
        values[:, :, start:stop] = value_states
        self.keys, self.values = keys[:, :, :stop], values[:, :, :stop]
        return True

    def _before_rearranging(self) -> None:
        """transformers replaces the tensors; those that were written must not change."""
        self.wait_for_copies()
        self._memory = None


class DepotSlidingLayer(_Hooks, DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """A layer that sees a window. Keeps all K and V since `kept_from` for the offloader."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self.recording = True
        self.kept_from = 0
        """The column of the first token that is kept."""
        self.kept: list[KV] = []

    def fill(self, tensors: KV, length: int) -> None:
        """Continue after `length` tokens, the last ones of which are `tensors`."""
        keys, values = tensors
        self.lazy_initialization(keys, values)
        start = keys.shape[-2] - min(keys.shape[-2], self.sliding_window - 1)
        self.keys, self.values = keys[:, :, start:], values[:, :, start:]
        self.cumulative_length = self.kept_from = length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> KV:
        self.wait_for_copies()
        if self.recording:
            self.kept.append((key_states, value_states))
        result = super().update(key_states, value_states)
        if self.on_update is not None:
            self.on_update()
        return result

    def keep_before(self, tensors: KV) -> None:
        """Keep the tokens just before `kept_from` as well."""
        self.kept.insert(0, tensors)
        self.kept_from -= tensors[0].shape[-2]

    def forget(self, column: int) -> None:
        """Drop kept tokens before `column`."""
        while self.kept and self.kept_from < column:
            keys, values = self.kept.pop(0)
            count = min(keys.shape[-2], column - self.kept_from)
            self.kept_from += count
            if count < keys.shape[-2]:
                # A copy: a slice would keep the whole alive.
                self.kept.insert(0, (keys[:, :, count:].clone(), values[:, :, count:].clone()))

    def stop_recording(self) -> None:
        self.recording = False
        self.kept = []

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.wait_for_copies()
        super(_Hooks, self).batch_repeat_interleave(repeats)
        self.kept = [
            (keys.repeat_interleave(repeats, dim=0), values.repeat_interleave(repeats, dim=0))
            for keys, values in self.kept
        ]

    def _before_rearranging(self) -> None:
        """Kept tokens would no longer be those of the cache."""
        self.wait_for_copies()
        self.stop_recording()


class DepotCache(DynamicCache):
    """A cache of these layers."""

    def __init__(self, windows: Sequence[int | None]) -> None:
        """`windows`: for each layer its window, or None for full attention."""
        super().__init__()
        self.depot_layers = [
            DepotLayer() if window is None else DepotSlidingLayer(window) for window in windows
        ]
        self.layers = list(self.depot_layers)
        self.layer_class_to_replicate = None

    @property
    def sliding_layers(self) -> list[DepotSlidingLayer]:
        return [layer for layer in self.layers if isinstance(layer, DepotSlidingLayer)]

    def is_in_place(self) -> bool:
        """Returns True if all tokens of full attention are in the tensors given to `fill`."""
        return all(layer.in_place for layer in self.layers if isinstance(layer, DepotLayer))

    def after_each_step(self, call: Callable[[], None] | None) -> None:
        """Run `call` whenever a forward has updated the last layer."""
        self.depot_layers[-1].on_update = call

    def end_call(self) -> None:
        """Keep no more than transformers would, and run no more calls."""
        self.after_each_step(None)
        for layer in self.sliding_layers:
            layer.stop_recording()

    def copy_to_static(self, target: StaticCache, columns: int) -> None:
        """Fill an empty static cache with the `columns` columns of this one."""
        if not columns:
            return
        for layer, static in zip(self.depot_layers, target.layers, strict=True):
            layer.wait_for_copies()
            _copy_layer(layer, static, columns)


def _copy_layer(layer: DepotLayer | DepotSlidingLayer, static: Any, columns: int) -> None:
    keys, values = layer.keys, layer.values
    assert keys is not None and values is not None
    if not static.is_initialized:
        static.lazy_initialization(keys, values)
    where = slice(0, columns)
    if isinstance(static, StaticSlidingWindowLayer):
        static.cumulative_length_int = columns
        if columns >= static.max_cache_len:
            # It has one place more than the window; the oldest token's place is never read.
            where = slice(static.max_cache_len - keys.shape[-2], static.max_cache_len)
    static.keys[:, :, where] = keys
    static.values[:, :, where] = values
    static.cumulative_length.fill_(columns)


def join(parts: Sequence[KV]) -> KV:
    """Consecutive keys and values as one tensor each."""
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, dim=-2), torch.cat(values, dim=-2)
