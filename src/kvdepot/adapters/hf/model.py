"""A transformers model with a depot: `attach` and the model that it returns."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import StaticCache

from kvdepot.adapters.audit import AuditedHits
from kvdepot.adapters.hf.binding import Binding, Options, bind
from kvdepot.adapters.hf.calls import (
    ServableCall,
    UnservedCall,
    mask_of,
    positions_of,
    read_forward,
    read_generate,
)
from kvdepot.adapters.hf.offloader import Offloader
from kvdepot.adapters.hf.served_call import LOG, ModelParts, ServedCall
from kvdepot.adapters.hf.stats import CallStats, ModelCounters, ServedRow
from kvdepot.adapters.prefill_report import PrefillReport
from kvdepot.adapters.tensors import open_mover
from kvdepot.config.settings import AuditConfig
from kvdepot.core.keys import TokenIds
from kvdepot.depot import Depot
from kvdepot.errors import ModelError

__all__ = ["CallStats", "DepotModel", "ModelCounters", "ServedRow", "attach"]
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
    """Connect a model to a depot: KV of known prompts is fetched instead of computed.

    A digest of the config and the weights identifies the model's KV. `name` and `revision` replace
    it if the caller passes them. `block_tokens` None: 16 to 256, so that a block has about a MiB.
    `timeout_s` limits how long a call waits for the depot (default: the depot's read timeout).
    `audit`: which hits are computed again, see docs/audit.md. Raises ModelError for a model that
    cannot be served; the model is unchanged then.
    """
    audit = audit or AuditConfig()
    options = Options(name, revision, tenant, secret, block_tokens, timeout_s, audit)
    return DepotModel(model, store, options)


class DepotModel:
    """The model, with `generate` and calls served from the depot.

    All other attributes are the model's. A call that the depot cannot serve is passed on to the
    model unchanged, and counted. Calls from several threads are as safe as the model's own.
    """

    _OWN: Final = frozenset(
        {"wrapped", "counters", "last", "_store", "_options", "_mover", "_parts"}
    )

    def __init__(self, model: PreTrainedModel, store: Depot, options: Options) -> None:
        self.wrapped: Any = model
        """The model itself."""
        self.counters = ModelCounters()
        self.last = CallStats()
        """The last finished call."""
        self._store = store
        self._options = options
        binding = bind(model, store, options)
        self._mover = open_mover(lambda: store.memory, binding.device)
        self._parts = self._new_parts(binding)

    @property
    def last_error(self) -> BaseException | None:
        """The error of the last offload that failed."""
        return self._parts.offloader.last_error

    @property
    def block_tokens(self) -> int:
        return self._parts.binding.block_tokens

    @property
    def fingerprint(self) -> str:
        """The model's identity."""
        return self._parts.binding.groups[0].space.namespace.fingerprint

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `generate`, with the known part of the prompts fetched."""
        return self._answer(read_generate, self._generate, self.wrapped.generate, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. It returns the logits of the tokens that were computed: of the last
        one at least, not of the tokens that were fetched."""
        return self._answer(read_forward, self._forward, self.wrapped, args, kwargs)

    __call__ = forward

    def session(self, name: str, token_ids: TokenIds, state: str = "alive") -> int:
        """Name a conversation, all its tokens so far, for `store.sessions` and `kvdepot session`;
        see Depot.session. Returns how many of its blocks the depot has."""
        groups = self._current().binding.groups
        return sum(
            self._store.sessions.name(name, group.keys(token_ids), state) for group in groups
        )

    def refresh_identity(self, revision: str | None = None) -> str:
        """Identify the model again; returns its identity. `revision` names the current weights.

        Most changes of weights are noticed without this call; docs/transformers.md lists the
        others. ModelError if the model was attached with a revision and none is given.
        """
        if revision is None and self._options.revision is not None:
            raise ModelError(
                "the model was attached with a revision, which no longer names its weights",
                hint="pass the name of the current weights: refresh_identity(revision)",
            )
        self._options = replace(self._options, revision=revision)
        self._bind_again()
        return self.fingerprint

    def flush(self, timeout_s: float | None = _FLUSH_TIMEOUT_S) -> bool:
        """Wait until the depot's memory has all that was computed so far; `store.flush` waits for
        the disk. False if the time ran out."""
        return self._parts.offloader.flush(timeout_s)

    def close(self) -> None:
        """Finish all copies and release the depot's memory. Call it before the store is closed.

        The model itself can still be used, as `wrapped`.
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
        store, options = self._store, self._options
        hits = AuditedHits(store, options.audit, binding.producer, LOG)
        tags = [group.space.tag for group in binding.groups if group.window is None]
        is_timed = bool(tags) and binding.device.type == "cpu"
        return ModelParts(
            self.wrapped,
            binding,
            store,
            self._mover,
            hits,
            Offloader(store, binding.groups, self._mover, self.counters, hits),
            options.timeout_s,
            PrefillReport(store, tags, LOG) if is_timed else None,
        )

    def _current(self) -> ModelParts:
        """The parts; new ones if the model has changed."""
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

    def _answer(
        self,
        read: Callable[..., ServableCall],
        serve: Callable[[ServableCall, ServedCall], Any],
        plain: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Serve a call, or pass it on to `plain`."""
        parts = self._current()
        try:
            call = read(self.wrapped, parts.binding, args, kwargs)
            with torch.no_grad():
                served = ServedCall(parts, call)
                served.open()
                try:
                    return serve(call, served)
                finally:
                    served.close()
                    self._finish(served.stats)
        except UnservedCall as unserved:
            self._finish(CallStats(passed=unserved.reason))
        return plain(*args, **kwargs)

    def _finish(self, stats: CallStats) -> None:
        self.counters.add_call(stats)
        self.last = stats

    def _generate(self, call: ServableCall, served: ServedCall) -> Any:
        cache = served.hand_over()
        arguments = {**call.arguments, "past_key_values": cache}
        if call.mask is not None:
            arguments["attention_mask"] = call.mask
        arguments.update(dict.fromkeys(call.settled))
        result = self.wrapped.generate(**arguments)
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        if isinstance(cache, StaticCache):
            served.save_static(cache, sequences)
        else:
            served.save(sequences)
        return result

    def _forward(self, call: ServableCall, served: ServedCall) -> Any:
        cache = served.hand_over()
        arguments = {**call.arguments, "past_key_values": cache, "use_cache": True}
        arguments["input_ids"] = call.ids[:, served.column :]
        if call.arguments.get("position_ids") is not None or any(p.pad for p in call.prompts):
            positions = positions_of(call.prompts, call.ids.device)
            arguments["position_ids"] = positions[:, served.column :]
        if call.mask is not None:
            arguments["attention_mask"] = mask_of(call.prompts, call.ids.device)
        result = self.wrapped(**arguments)
        if isinstance(cache, StaticCache):
            served.save_static(cache, call.ids)
        return result
