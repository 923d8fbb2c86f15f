"""A transformers model with a depot behind it: `attach` and what it returns."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticCache

from kvdepot.adapters.audit import BlockAuditor, HitChooser
from kvdepot.adapters.hf.binding import Binding, Options, bind
from kvdepot.adapters.hf.calls import (
    PassedCall,
    ServableCall,
    ServableGeneration,
    mask_of,
    positions_of,
    read_forward,
    read_generate,
)
from kvdepot.adapters.hf.offloader import Offloader
from kvdepot.adapters.hf.onboarder import AuditedCalls, Onboarder
from kvdepot.adapters.hf.prefill_meter import PrefillMeter
from kvdepot.adapters.hf.served_call import ModelParts, ServedCall
from kvdepot.adapters.hf.stats import CallStats, ModelCounters
from kvdepot.adapters.tensors import open_mover
from kvdepot.config.settings import AuditConfig
from kvdepot.core.depot import Depot
from kvdepot.core.keys import TokenIds
from kvdepot.errors import ModelError, StoreClosedError

_logger: Final = logging.getLogger("transformers.kvdepot")
"""Printed where transformers' own warnings are."""
_FLUSH_TIMEOUT_S: Final = 30.0
_RETURN_MODEL: Final = frozenset(
    {"bfloat16", "cpu", "cuda", "double", "eval", "float", "half", "requires_grad_", "to", "train"}
)
"""Methods of a model that return the model."""


def attach(
    model: PreTrainedModel,
    store: Depot,
    *,
    name: str | None = None,
    revision: str | None = None,
    tenant: str = "",
    secret: bytes | None = None,
    block_tokens: int | None = None,
    timeout_s: float | None = None,
    audit: AuditConfig | None = None,
) -> "DepotModel":
    """Put a depot behind a model: prompts that it has seen are fetched instead of recomputed.

    The model's KV is kept under an identity derived from its config and weights, or from `name` and
    `revision` where the caller vouches for them. `block_tokens` None: 16 to 256, so that a block
    has about a MiB. `timeout_s` bounds how long a call waits for the depot (default: the store's
    read timeout). `audit`: which hits are computed again, see docs/audit.md. Raises ModelError for
    a model that cannot be served; it is left as it was.
    """
    options = Options(
        name=name,
        revision=revision,
        tenant=tenant,
        secret=secret,
        block_tokens=block_tokens,
        timeout_s=timeout_s,
        audit=audit or AuditConfig(),
    )
    return DepotModel(model, store, options)


class DepotModel:
    """Works as the model does, with `generate` and calls served from the depot.

    Everything else is the model's own. A call that the depot cannot serve is passed on to the model
    untouched, and counted. Calls from several threads are as safe as the model's own.
    """

    _OWN: Final = frozenset(
        {"wrapped", "counters", "last", "_store", "_options", "_mover", "_parts", "_chooser"}
    )

    def __init__(self, model: PreTrainedModel, store: Depot, options: Options) -> None:
        self.wrapped: Any = model
        """The model itself."""
        self.counters = ModelCounters()
        self.last = CallStats()
        """What the last finished call got."""
        self._store = store
        self._options = options
        self._chooser = HitChooser(options.audit)
        binding = bind(model, store, options)
        self._mover = open_mover(lambda: store.memory, binding.device)
        self._parts = self._new_parts(binding)

    @property
    def last_error(self) -> BaseException | None:
        """What the last offload that failed failed with."""
        return self._parts.offloader.last_error

    @property
    def block_tokens(self) -> int:
        return self._parts.binding.block_tokens

    @property
    def fingerprint(self) -> str:
        """The model's identity."""
        return self._parts.binding.groups[0].space.namespace.fingerprint

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`, with the known part of the prompts fetched."""
        plain = partial(self.wrapped.generate, *args, **kwargs)
        parts = self._current()
        read = read_generate(self.wrapped, parts.binding, args, kwargs)
        if isinstance(read, PassedCall):
            return self._pass(read.reason, plain)
        served = ServedCall(parts, read.call.prompts, read.expand, read.beams)
        return self._serve(served, partial(self._generate, read), plain)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward. Logits are those of the tokens that were computed: at least the
        last one's, without those of the tokens fetched."""
        plain = partial(self.wrapped, *args, **kwargs)
        parts = self._current()
        read = read_forward(self.wrapped, parts.binding, args, kwargs)
        if isinstance(read, PassedCall):
            return self._pass(read.reason, plain)
        return self._serve(ServedCall(parts, read.prompts), partial(self._forward, read), plain)

    __call__ = forward

    def session(self, name: str, token_ids: TokenIds, state: str = "alive") -> int:
        """Give a conversation, all its tokens so far, a name, by which `store.sessions` and
        `kvdepot session` know it; see Depot.session. Returns how many of its blocks are here.
        """
        groups = self._current().binding.groups
        return sum(self._store.session(name, group.keys(token_ids), state) for group in groups)

    def refresh_identity(self, revision: str | None = None) -> str:
        """Find out again who the model is; returns its identity. `revision` names the weights that
        it has now.

        Most changes of weights are noticed without it, see docs/transformers.md for those that are
        not. ModelError where the model was attached with a revision and none is given.
        """
        if revision is None and self._options.revision is not None:
            raise ModelError(
                "the model was attached with a revision, which no longer names its weights",
                hint="refresh_identity(revision) with what names them now",
            )
        self._options = replace(self._options, revision=revision)
        self._bind_again()
        return self.fingerprint

    def flush(self, timeout_s: float | None = _FLUSH_TIMEOUT_S) -> bool:
        """Wait until all that was computed so far is in the depot's memory; `store.flush` waits
        for the disk. False: time ran out."""
        return self._parts.offloader.flush(timeout_s)

    def close(self) -> None:
        """Finish what is under way and let go of the depot's memory, before the store is closed.

        The model itself can still be used, through `wrapped`.
        """
        self.flush()
        self._mover.close()

    def __enter__(self) -> "DepotModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name in DepotModel._OWN:
            raise AttributeError(name)
        value = getattr(self.wrapped, name)
        return partial(self._and_return_self, value) if name in _RETURN_MODEL else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in DepotModel._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.wrapped, name, value)

    def __repr__(self) -> str:
        groups = ", ".join(
            f"{len(group.layers)} layers" + (f" of window {group.window}" if group.window else "")
            for group in self._parts.binding.groups
        )
        return f"DepotModel({type(self.wrapped).__name__}, {groups}, {self.block_tokens} tokens)"

    def _and_return_self(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        method(*args, **kwargs)
        return self

    def _new_parts(self, binding: Binding) -> ModelParts:
        auditor = BlockAuditor(self._store, self._options.audit, binding.producer, _logger)
        audit = AuditedCalls(self._chooser, auditor)
        return ModelParts(
            self.wrapped,
            binding,
            Onboarder(self._store, binding, self._mover, self._options.timeout_s, audit),
            Offloader(self._store, binding.groups, self._mover, self.counters, auditor),
            self._new_meter(binding),
        )

    def _new_meter(self, binding: Binding) -> PrefillMeter:
        tags = [group.space.tag for group in binding.groups if group.window is None]
        return PrefillMeter(self._store, tags, len(binding.windows))

    def _current(self) -> ModelParts:
        """The parts, made anew where the model has become another."""
        if not self._parts.binding.still_holds(self.wrapped):
            if self._options.revision is not None:
                raise ModelError(
                    "the model's weights or adapters have changed since it was attached",
                    hint="name them: refresh_identity(revision), or attach it without a revision",
                )
            self._bind_again()
        return self._parts

    def _bind_again(self) -> None:
        self.flush()
        device = self._parts.binding.device
        binding = bind(self.wrapped, self._store, self._options)
        if binding.device != device:
            self._mover.close()
            self._mover = open_mover(lambda: self._store.memory, binding.device)
        self._parts = self._new_parts(binding)

    def _pass(self, reason: str, call: Callable[[], Any]) -> Any:
        self._finish(CallStats(passed=reason))
        return call()

    def _finish(self, stats: CallStats) -> None:
        self.counters.add_call(stats)
        self.last = stats

    @torch.no_grad()
    def _serve(
        self, served: ServedCall, serve: Callable[[ServedCall], Any], plain: Callable[[], Any]
    ) -> Any:
        with served.counted():
            try:
                served.open()
            except StoreClosedError:
                return self._pass("closed", plain)
            try:
                return serve(served)
            finally:
                served.close()
                self._finish(served.stats)

    def _generate(self, read: ServableGeneration, served: ServedCall) -> Any:
        call = read.call
        if read.chunk is not None:
            served.advance(call.ids.shape[1] - 1, read.chunk)
        cache = served.hand_over(call.cache, read.static_columns)
        arguments = {**call.arguments, "past_key_values": cache}
        if call.mask is not None:
            arguments["attention_mask"] = call.mask
        arguments.update(dict.fromkeys(read.settled))
        result = self.wrapped.generate(**arguments)
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        if isinstance(cache, StaticCache):
            served.save_static(cache, sequences, read.ends)
        else:
            served.save_generated(sequences, read.ends)
        return result

    def _forward(self, call: ServableCall, served: ServedCall) -> Any:
        cache: Cache = served.hand_over(call.cache)
        arguments = {**call.arguments, "past_key_values": cache, "use_cache": True}
        arguments["input_ids"] = call.ids[:, served.column :]
        if call.arguments.get("position_ids") is not None or any(p.pad for p in call.prompts):
            positions = positions_of(call.prompts, call.ids.device)
            arguments["position_ids"] = positions[:, served.column :]
        if call.mask is not None:
            arguments["attention_mask"] = mask_of(call.prompts, call.ids.device)
        result = self.wrapped(**arguments)
        if isinstance(cache, StaticCache):
            served.save_static(cache, call.ids, ())
        return result
