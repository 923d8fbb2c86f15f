"""A model with a depot behind it."""

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticCache

from kvdepot.adapters.hf.binding import Binding, Options, bind, check_revision
from kvdepot.adapters.hf.calls import Call, Generation, Passed, read_forward, read_generate
from kvdepot.adapters.hf.offloader import Offloader
from kvdepot.adapters.hf.onboarder import Onboarder
from kvdepot.adapters.hf.preparer import Preparer
from kvdepot.adapters.hf.prompts import mask_of, positions_of
from kvdepot.adapters.hf.served import Counters, Served
from kvdepot.adapters.hf.session import Engine, Session
from kvdepot.adapters.tensors import open_mover
from kvdepot.core.depot import Depot
from kvdepot.errors import StoreClosedError

_FLUSH_TIMEOUT_S: Final = 30.0
_RETURN_THEMSELVES: Final = frozenset(
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
) -> "DepotModel":
    """Put a depot behind a model: prompts that it has seen are fetched instead of recomputed.

    The model's KV is kept under an identity derived from its config and weights, or from `name` and
    `revision` where the caller vouches for them. `block_tokens` None: 16 to 256, so that a block
    has about a MiB. `timeout_s` bounds how long a call waits for the depot (default: the store's
    read timeout). Raises ModelError for a model that cannot be served; it is left as it was.
    """
    options = Options(
        name=name,
        revision=revision,
        tenant=tenant,
        secret=secret,
        block_tokens=block_tokens,
        timeout_s=timeout_s,
    )
    return DepotModel(model, store, options)


class DepotModel:
    """Works as the model does, with `generate` and calls served from the depot.

    Everything else is the model's own. A call that the depot cannot serve is passed on to the model
    untouched, and counted. Calls from several threads are as safe as the model's own.
    """

    _OWN: Final = frozenset(
        {"wrapped", "counters", "last", "_store", "_options", "_mover", "_engine"}
    )

    def __init__(self, model: PreTrainedModel, store: Depot, options: Options) -> None:
        self.wrapped: Any = model
        """The model itself."""
        self.counters = Counters()
        self.last = Served()
        """What the last finished call got."""
        self._store = store
        self._options = options
        binding = bind(model, store, options)
        self._mover = open_mover(store.memory, binding.device)
        self._engine = self._new_engine(binding)

    @property
    def last_error(self) -> BaseException | None:
        """What the last offload that failed failed with."""
        return self._engine.offloader.last_error

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""
        return self._engine.binding.block_tokens

    @property
    def fingerprint(self) -> str:
        """The model's identity."""
        return self._engine.binding.groups[0].space.namespace.fingerprint

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`, with the known part of the prompts fetched."""
        plain = partial(self.wrapped.generate, *args, **kwargs)
        engine = self._current()
        read = read_generate(self.wrapped, engine.binding, args, kwargs)
        if isinstance(read, Passed):
            return self._pass(read.reason, plain)
        session = Session(engine, read.call.prompts, read.expand)
        session.beams = read.beams
        return self._serve(session, partial(self._generate, read), plain)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward. Logits are those of the tokens that were computed: at least the
        last one's, without those of the tokens fetched."""
        plain = partial(self.wrapped, *args, **kwargs)
        engine = self._current()
        read = read_forward(self.wrapped, engine.binding, args, kwargs)
        if isinstance(read, Passed):
            return self._pass(read.reason, plain)
        session = Session(engine, read.prompts)
        return self._serve(session, partial(self._forward, read), plain)

    __call__ = forward

    def flush(self, timeout_s: float | None = _FLUSH_TIMEOUT_S) -> bool:
        """Wait until all that was computed so far is in the depot's memory; `store.flush` waits
        for the disk. False: time ran out."""
        return self._engine.offloader.flush(timeout_s)

    def close(self) -> None:
        """Finish what is under way and let go of the depot's memory, before the store is closed.

        The model itself can still be used, through `wrapped`.
        """
        self.flush()
        self._mover.close()

    def __enter__(self) -> "DepotModel":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name in DepotModel._OWN:
            raise AttributeError(name)
        value = getattr(self.wrapped, name)
        return partial(self._and_return_self, value) if name in _RETURN_THEMSELVES else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in DepotModel._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.wrapped, name, value)

    def __repr__(self) -> str:
        groups = ", ".join(
            f"{len(group.layers)} layers" + (f" of window {group.window}" if group.window else "")
            for group in self._engine.binding.groups
        )
        return f"DepotModel({type(self.wrapped).__name__}, {groups}, {self.block_tokens} tokens)"

    def _and_return_self(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        method(*args, **kwargs)
        return self

    def _new_engine(self, binding: Binding) -> Engine:
        groups = binding.groups
        onboarder = Onboarder(self._store, groups, self._mover)
        return Engine(
            self.wrapped,
            binding,
            Preparer(binding, onboarder, self._options.timeout_s),
            Offloader(self._store, groups, self._mover, self.counters),
        )

    def _current(self) -> Engine:
        """The engine, made anew where the model has become another."""
        before = self._engine.binding
        if not before.still_holds(self.wrapped):
            check_revision(self._options)
            self.flush()
            binding = bind(self.wrapped, self._store, self._options)
            if binding.device != before.device:
                self._mover.close()
                self._mover = open_mover(self._store.memory, binding.device)
            self._engine = self._new_engine(binding)
        return self._engine

    def _pass(self, reason: str, call: Callable[[], Any]) -> Any:
        """Leave a call to the model."""
        served = Served(passed=reason)
        self.counters.served(served)
        self.last = served
        return call()

    @torch.no_grad()
    def _serve(
        self, session: Session, serve: Callable[[Session], Any], plain: Callable[[], Any]
    ) -> Any:
        try:
            session.open()
        except StoreClosedError:
            return self._pass("closed", plain)
        try:
            return serve(session)
        finally:
            session.close()
            self.counters.served(session.served)
            self.last = session.served

    def _generate(self, read: Generation, session: Session) -> Any:
        call = read.call
        if read.chunk is not None:
            session.advance(call.ids.shape[1] - 1, read.chunk)
        cache = session.hand_over(call.cache, read.static_columns)
        arguments = {**call.arguments, "past_key_values": cache}
        if call.mask is not None:
            arguments["attention_mask"] = call.mask
        arguments.update(dict.fromkeys(read.settled))
        result = self.wrapped.generate(**arguments)
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        if isinstance(cache, StaticCache):
            session.save_static(cache, sequences, read.ends)
        else:
            session.save_generated(sequences, read.ends)
        return result

    def _forward(self, call: Call, session: Session) -> Any:
        cache: Cache = session.hand_over(call.cache)
        arguments = {**call.arguments, "past_key_values": cache, "use_cache": True}
        arguments["input_ids"] = call.ids[:, session.column :]
        if call.arguments.get("position_ids") is not None or any(p.pad for p in call.prompts):
            positions = positions_of(call.prompts, call.ids.device)
            arguments["position_ids"] = positions[:, session.column :]
        if call.mask is not None:
            arguments["attention_mask"] = mask_of(call.prompts, call.ids.device)
        result = self.wrapped(**arguments)
        if isinstance(cache, StaticCache):
            session.save_static(cache, call.ids, ())
        return result
