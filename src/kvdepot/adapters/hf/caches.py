"""Caches that the adapter gives to a model: transformers' own dynamic layers, with additions.

They start out filled, with room for the rest of the prompt, wait for copies that are still under
way when a layer is first used, and keep what sliding-window layers would forget until it is saved.
A static cache is filled from such a cache.
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
    """What all layers here have: a wait for copies under way, and a call after each update."""

    wait: Callable[[], None] | None = None
    """Called before the filled part is used for the first time."""
    on_update: Callable[[], None] | None = None
    """Called when a forward has updated the layer."""

    def wait_for_copies(self) -> None:
        """Make what follows on this thread's stream wait for the copies under way."""
        if self.wait is not None:
            self.wait()
            self.wait = None

    def _updated(self) -> None:
        if self.on_update is not None:
            self.on_update()

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
        self._room: KV | None = None

    def fill(self, tensors: KV, length: int) -> None:
        """Take the first `length` tokens of `tensors`; later ones go into the rest of them."""
        keys, values = tensors
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]
        self._room = tensors

    @property
    def in_place(self) -> bool:
        """Whether all tokens are in the tensors that `fill` was given."""
        return self._room is not None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> KV:
        self.wait_for_copies()
        if not self._append(key_states, value_states):
            super().update(key_states, value_states)
        self._updated()
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Use the room behind the filled part, if it suffices: saves a copy of the whole."""
        if self._room is None:
            return False
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        keys, values = self._room
        frozen = keys.is_inference() and not torch.is_inference_mode_enabled()
        if frozen or stop > keys.shape[-2] or key_states.shape[0] != keys.shape[0]:
            self._room = None
            return False
        keys[:, :, start:stop] = key_states
        values[:, :, start:stop] = value_states
        self.keys, self.values = keys[:, :, :stop], values[:, :, :stop]
        return True

    def _before_rearranging(self) -> None:
        """The tensors are about to be replaced, and what was written must stay as it is."""
        self.wait_for_copies()
        self._room = None


class DepotSlidingLayer(_Hooks, DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """A layer that sees a window. Remembers all K and V since `kept_from`, for the offloader."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self.recording = True
        self.kept_from = 0
        """The column of the first token that is remembered."""
        self.kept: list[KV] = []

    def fill(self, tensors: KV, length: int) -> None:
        """Go on after `length` tokens, the last ones of which are `tensors`."""
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
        self._updated()
        return result

    def remember(self, tensors: KV) -> None:
        """Remember the tokens just before `kept_from` as well."""
        self.kept.insert(0, tensors)
        self.kept_from -= tensors[0].shape[-2]

    def forget(self, column: int) -> None:
        """Stop remembering tokens before `column`."""
        while self.kept and self.kept_from < column:
            keys, values = self.kept.pop(0)
            count = min(keys.shape[-2], column - self.kept_from)
            self.kept_from += count
            if count < keys.shape[-2]:
                # A copy: a slice would keep the whole alive.
                rest = (keys[:, :, count:].clone(), values[:, :, count:].clone())
                self.kept.insert(0, rest)

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
        """What is remembered would no longer be what the cache holds."""
        self.wait_for_copies()
        self.stop_recording()


class DepotCache(DynamicCache):
    """A cache made of these layers."""

    def __init__(self, layers: Sequence[DepotLayer | DepotSlidingLayer]) -> None:
        super().__init__()
        self.layers = list(layers)
        self.layer_class_to_replicate = None

    @classmethod
    def of(cls, windows: Sequence[int | None]) -> "DepotCache":
        """An empty cache; for each layer its window, or None for full attention."""
        return cls(
            [DepotLayer() if window is None else DepotSlidingLayer(window) for window in windows]
        )

    @property
    def depot_layers(self) -> list[DepotLayer | DepotSlidingLayer]:
        return self.layers  # type: ignore[return-value]

    @property
    def sliding_layers(self) -> list[DepotSlidingLayer]:
        return [layer for layer in self.layers if isinstance(layer, DepotSlidingLayer)]

    def fill(self, tensors: Sequence[KV], length: int) -> None:
        """Start after `length` tokens, layer by layer; a window's tensors are its last ones."""
        for layer, pair in zip(self.depot_layers, tensors, strict=True):
            layer.fill(pair, length)

    def after_each_step(self, call: Callable[[], None] | None) -> None:
        """Run `call` whenever a forward has filled all layers."""
        self.depot_layers[-1].on_update = call

    def before_each_step(self, call: Callable[[], None] | None) -> None:
        """Run `call` whenever a forward has filled the first layer; there are others."""
        self.depot_layers[0].on_update = call

    def forget(self, column: int) -> None:
        for layer in self.sliding_layers:
            layer.forget(column)

    def end_call(self) -> None:
        """The call is over: remember no more than transformers would, call nothing."""
        self.after_each_step(None)
        self.before_each_step(None)
        for layer in self.sliding_layers:
            layer.stop_recording()

    def copy_to_static(self, target: StaticCache, columns: int) -> None:
        """Make an empty static cache hold the `columns` that this one holds."""
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
            # It has a place more than can be seen; that of the oldest token is never looked at.
            where = slice(static.max_cache_len - keys.shape[-2], static.max_cache_len)
    static.keys[:, :, where] = keys
    static.values[:, :, where] = values
    static.cumulative_length.fill_(columns)


def join(parts: Sequence[KV]) -> KV:
    """Keys and values that follow one another, in one piece."""
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, dim=-2), torch.cat(values, dim=-2)
